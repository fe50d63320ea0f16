"""Decides the values of a new torch_dist checkpoint that are no tensors: the inverse of `megatron.torch_dist.state`.

The extras become the common state. Values of ranks become objects under their keys again if the ranks are still the
same; if not, they are left out and a note names them: an RNG state is never given to another rank.

If EP > 1, Megatron has one optimizer for dense and one for expert parameters, else one for all. From one optimizer to
two, the experts' is a copy with groups of its own (`megatron.groups`); from two to one it is dropped, because the
groups are the same. Extra states are the source's, or None for every module in which Megatron looks for one: a run
without FP8 stores None.

Source: as in `megatron.torch_dist.state`; `no_save_rng` and `no_save_optim` keep a loading job from looking for states
that were not saved (training `checkpointing.py`). What it does not do: files (`megatron.torch_dist.target`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.attention_window import stated_windows
from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.target import Wanted
from ckpt_tool.core.tensor import EMA, MODEL, STEP
from ckpt_tool.formats.state_dict.tree import SLOT
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import NAMESPACE, updated
from ckpt_tool.systems.megatron.chains import SAYS_ADAM, say_adam
from ckpt_tool.systems.megatron.extra_states import EXTRA_STATES, LEFT
from ckpt_tool.systems.megatron.groups import groups_for, groups_of, is_expert_group, key_of_param
from ckpt_tool.systems.megatron.hints import DistHints
from ckpt_tool.systems.megatron.legacy.target import writable
from ckpt_tool.systems.megatron.rng import NO_STATES, OTHER_RANKS, by_rank, can_resume, note_of_missing
from ckpt_tool.systems.megatron.torch_dist.layout import DistLayout

FULLY = "fully_reshardable"
SHARDING = "param_state_sharding_type"  # only a distributed optimizer has this key
NO_EXPERTS_OF_CHAIN = (
    "the optimizers of the chain have no group of experts, which are parallel now: Megatron does not load their "
    "hyperparameters (write with --ep 1, or start with --no-load-optim)"
)
OURS = ("rng_state", "sharded_objects", EXTRA_STATES)  # extras that are objects here


class StoredState(NamedTuple):
    """The common state and the objects of a new checkpoint."""

    common: dict[Any, Any]
    objects: list[tuple[str, Any]]
    notes: tuple[str, ...]  # what was left out


def stored_state(wanted: Wanted, layout: DistLayout) -> StoredState:
    """Return everything that is no tensor. Objects: (key with its shard, value)."""
    notes = list(layout.notes)
    extras = wanted.extras
    rng = list(_rng(wanted, layout, notes))
    common: dict[Any, Any] = {}

    for key, value in extras.items():
        if key in OURS:
            continue
        if key == "args" or writable(value):
            common[key] = value
        else:
            notes.append(f"{key} is left out: it holds values of classes that are not written")

    states = {tensor.key.state for tensor in wanted.tensors} - {MODEL, STEP}
    args = updated(layout.args, layout.degrees, layout.job.stages, 0)
    args |= {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    if layout.apart and stated_windows(args) != layout.windows:  # who reads it must know
        args["window_attn_skip_freq"] = [int(windowed) for windowed in layout.windows]
    if not rng:
        args["no_save_rng"] = True
    if not states - {EMA}:
        args["no_save_optim"] = True

    distributed = layout.distributed
    if distributed and states:
        args["dist_ckpt_optim_fully_reshardable"] = True
    common["args"] = Opaque(NAMESPACE, (), args)
    common.setdefault("checkpoint_version", 3.0)
    common["content_metadata"] = _content(extras, layout)
    if "optimizer" in common:
        common["optimizer"] = _optimizers(common["optimizer"], layout, notes, distributed=distributed)

    objects = [*_extra_states(wanted, layout, notes), *rng, *_others(wanted, layout, notes)]
    return StoredState(common, objects, tuple(notes))


def _content(extras: Mapping[str, Any], layout: DistLayout) -> dict[str, Any]:
    stated = extras.get("content_metadata")
    kept = (
        {k: v for k, v in stated.items() if not str(k).startswith("distrib_optim")} if isinstance(stated, dict) else {}
    )
    ours: dict[str, Any] = {"singleton_local_shards": layout.singletons, "chained_optim_avoid_prefix": True}
    if layout.distributed:
        ours |= {"distrib_optim_sharding_type": FULLY, "distrib_optim_fully_reshardable_mem_efficient": False}
    return {**kept, **ours}


# -- the optimizers' hyperparameters -----------------------------------------------------------------------------------


def _optimizers(value: Any, layout: DistLayout, notes: list[str], *, distributed: bool) -> Any:
    """The optimizer entry of the common state, for as many optimizers as these degrees make: a chain's, such as Muon's
    and Adam's, stay, the experts' come and go."""
    several = [_bare(one) for one in _as_list(value)]
    if not several or not all(map(groups_of, several)):
        return value
    dense = [one for one in several if not all(map(is_expert_group, groups_of(one)))]
    if not (layout.degrees["ep"] > 1 and layout.experts):
        several = list(map(_without_experts, dense)) or several
    elif not any(map(is_expert_group, chain.from_iterable(map(groups_of, several)))):
        if len(several) == 1:
            several.append(_experts_of(several[0], layout))
        else:
            notes.append(NO_EXPERTS_OF_CHAIN)
    if say_adam([groups_of(one) for one in several]):
        notes.append(SAYS_ADAM)
    for one in several:
        if not distributed or (layout.facts.layer_wise and not one.get(SHARDING) and one is not several[-1]):
            one.pop(SHARDING, None)
        else:
            one[SHARDING] = FULLY
    return several[0] if len(several) == 1 else dict(enumerate(several))


def _without_experts(one: Mapping[Any, Any]) -> dict[Any, Any]:
    return _replace_groups(one, [group for group in groups_of(one) if not is_expert_group(group)])


def _as_list(value: Any) -> list[dict[Any, Any]]:
    if isinstance(value, dict) and value and all(map(numeral, value)):  # DCP makes text of numbers
        value = [value[key] for key in sorted(value, key=lambda key: int(str(key)))]
    several = value if isinstance(value, list) else [value]
    return [one for one in several if isinstance(one, dict)] if all(isinstance(one, dict) for one in several) else []


def _bare(one: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's values without the placeholders of tensors and without the numbers of parameters."""
    out: dict[Any, Any] = {}
    for key, item in one.items():
        if key in ("fp32_from_fp16_params", "param_state") or (key == "state" and _empty(item)):
            continue
        if key == "param_groups" and isinstance(item, list):
            out[key] = list(map(_without_params, item))
        else:
            out[key] = _bare(item) if key == "optimizer" and isinstance(item, dict) else item
    return out


def _without_params(group: Any) -> Any:
    if not isinstance(group, dict):
        return group
    return {key: item for key, item in group.items() if key != "params"}


def _empty(value: Any) -> bool:
    """Return whether the value has nothing but placeholders of tensors."""
    if isinstance(value, dict):
        return all(_empty(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_empty(item) for item in value)
    return value is None or value == SLOT


def _experts_of(one: Mapping[Any, Any], layout: DistLayout) -> dict[Any, Any]:
    """Return the experts' optimizer that Megatron would have made in addition to the dense one, `one`."""
    experts = [t.key.name for _, t in layout.tensors if t.key.state == MODEL and ".experts." in t.key.name]
    keys = {key_of_param(name, layout.shapes[name], layout.facts) for name in experts}
    return _replace_groups(one, groups_for(groups_of(one), keys, layout.facts, experts=True))


def _replace_groups(one: Mapping[Any, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return a copy of an optimizer's values with these groups."""
    inner = one.get("optimizer")
    if isinstance(inner, dict):
        return {**one, "optimizer": {**inner, "param_groups": groups}}
    return {**one, "param_groups": groups}


# -- objects -----------------------------------------------------------------------------------------------------------


def _same_ranks(wanted: Wanted, layout: DistLayout, dims: Iterable[str]) -> bool:
    before = wanted.hints.get(Degrees)
    return before is not None and all(before.at(dim) == layout.degrees[dim] for dim in dims)


def _rng(wanted: Wanted, layout: DistLayout, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """The RNG states, where tensor and pipeline ranks are still those that had them."""
    states = wanted.extras.get("rng_state")
    if states is None:
        if can_resume(wanted.tensors):
            notes.append(note_of_missing(NO_STATES))
        return
    shape, own = by_rank(states, layout.degrees)
    if len(own) != prod(shape) or set(own) != set(_grid(shape)) or not _same_ranks(wanted, layout, ("tp", "pp", "ep")):
        notes.append(note_of_missing(OTHER_RANKS))
        return
    text = ".".join(map(str, shape))
    for at, value in own.items():
        yield f"rng_state/shard_{'.'.join(map(str, at))}_{text}", value


def _others(wanted: Wanted, layout: DistLayout, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """Objects that no rule knows: carried where all degrees are the same."""
    objects = wanted.extras.get("sharded_objects")
    if not isinstance(objects, dict):
        return
    if _same_ranks(wanted, layout, layout.degrees):
        kept = {str(key): value for key, value in objects.items() if writable(value)}
        yield from kept.items()
        refused = [str(key) for key in objects if str(key) not in kept]
        if refused:
            notes.append(f"{len(refused)} objects of classes that are not written are left out, such as {refused[0]}")
    else:
        notes.append(f"{len(objects)} objects of single ranks are left out, such as {next(iter(objects), '')}")


def _extra_states(wanted: Wanted, layout: DistLayout, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """The extra states of the source, or those that Megatron's modules look for: with the FP8 scales that the source
    has under the same key, else None."""
    own = wanted.hints.get(DistHints) if layout.as_source else None
    bases = own.extra_states if own else dict(_modules(layout))
    stored = wanted.extras.get(EXTRA_STATES)
    left = {**stored} if isinstance(stored, dict) else {}
    for base, shape in bases.items():
        for at in _grid(shape):
            key = f"{base}/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, shape))}"
            yield key, left.pop(key) if key in left and writable(left[key]) else None
    if left:
        notes.append(f"{len(left)} {LEFT} {next(iter(left))}: no module that is written looks for them there")


def _grid(shape: Iterable[int]) -> Iterator[tuple[int, ...]]:
    return product(*(range(n) for n in shape))


def _modules(layout: DistLayout) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(key of the extra state, shape) of every linear module, and with Transformer Engine of norms and attention. A
    hybrid model (its last norm is `final_norm`) has one of its output layer, GPTModel takes that out."""
    for name in layout.examples:
        if names.stem(name).startswith("decoder.final_norm."):
            yield f"{names.root_of(name)}output_layer._extra_state", (1,)
    for name in layout.one_of_each_key():
        front, _, leaf = name.rpartition(".")
        module = front.rpartition(".")[2]
        if leaf != "weight" or names.stem(name).startswith(("embedding.", "output_layer.")) or names.is_foreign(name):
            continue
        key, shape = layout.object_key(name)
        base = key.rpartition(".")[0]
        if module in names.LINEARS:
            yield f"{base}._extra_state", shape
            if module == "linear_proj" and layout.facts.te:
                yield f"{base.rpartition('.')[0]}.core_attention._extra_state", shape
        elif module in names.PLAIN_NORMS:
            continue
        elif layout.facts.te and "norm" in module and "mixer.norm" not in front and ".layer_norm_" not in key:
            yield f"{base}._extra_state", shape
