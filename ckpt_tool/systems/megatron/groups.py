"""The hyperparameter groups of Megatron's optimizers: the group of each parameter, and the groups of a new layout.

The one idea: a parameter's group follows from its name and shape. 1-d tensors have no weight decay (`wd_mult` 0); q and
k norms do with `apply_wd_to_qk_layernorm`; embeddings and the output layer have groups of their own with
`decoupled_lr`; experts' groups (`is_expert_parallel`) form an optimizer of their own if experts are parallel, and then
the optimizer's state is a list [dense, experts]. A group that the source lacks (experts', when they become parallel) is
made from the most similar one that it has: the group that differs only in the experts, or else the first.

    dense [{wd_mult 1, lr 3e-4}, {wd_mult 0, lr 3e-4}], experts without biases -> [{wd_mult 1, lr 3e-4, expert}]

Source (NVIDIA/Megatron-LM core 0.16.1): `core/optimizer/__init__.py` (`_get_param_groups`,
`get_standard_config_overrides`), `core/optimizer/optimizer.py` (`ChainedOptimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.systems.megatron.stored_names import EMBEDDING, TIED_HEAD, stem

if TYPE_CHECKING:  # readers of states need neither
    from ckpt_tool.systems.megatron.args import MegatronFacts
    from ckpt_tool.systems.megatron.job import RankArray


class GroupKey(NamedTuple):
    """What decides the group of a parameter inside one optimizer."""

    decay: bool  # has weight decay
    decoupled: bool  # has the learning rate `decoupled_lr`


def key_of_param(local: str, shape: Sequence[int], facts: MegatronFacts) -> GroupKey:
    """Return the key of a parameter from its name (the rank's or the logical one) and shape."""
    words = local.split(".")
    qk = facts.qk_decay and words[-2:-1] and words[-2] in ("q_layernorm", "k_layernorm")
    decay = (len(shape) != 1 and words[-1] != "bias") or bool(qk)
    return GroupKey(decay, facts.decoupled_lr is not None and stem(local) in (EMBEDDING, TIED_HEAD))


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates the parameter of that logical name.

    It leaves the embedding, the output layer and everything that is not a matrix to another optimizer of its chain
    (core 0.16.1 `core/optimizer/muon.py`, core 0.19 `layer_wise_optimizer.py` `is_managed_by_layer_wise_optimizer`).
    """
    return len(shape) == 2 and stem(name) not in (EMBEDDING, TIED_HEAD)


def key_of_group(group: Mapping[str, Any], facts: MegatronFacts) -> GroupKey:
    """Return the key of a stored group from its hyperparameters."""
    decoupled = bool(group.get("is_decoupled_lr"))
    if facts.decoupled_lr is not None and group.get("max_lr") == facts.decoupled_lr:
        decoupled = True
    # A group without `wd_mult` still shows by its `weight_decay` whether it decays.
    multiple = group.get("wd_mult", 1.0 if group.get("weight_decay", 1.0) else 0.0)
    return GroupKey(multiple != 0.0, decoupled and facts.decoupled_lr is not None)


def members_of(
    groups: Sequence[Mapping[str, Any]], arrays: Sequence[RankArray], facts: MegatronFacts
) -> list[list[RankArray]] | None:
    """Return the parameters of each stored group, in order; None if these rules did not make the groups (a parameter
    fits none, or two groups have the same key)."""
    keys = [key_of_group(group, facts) for group in groups]
    if len(set(keys)) != len(keys):  # then a parameter's key does not determine its group
        return None
    out: list[list[RankArray]] = [[] for _ in groups]
    for array in arrays:
        key = key_of_param(array.local, array.shape, facts)
        if key not in keys:
            return None
        out[keys.index(key)].append(array)
    return out


def is_expert_group(group: Any) -> bool:
    """Return whether a stored group is one of parallel experts' parameters."""
    return isinstance(group, Mapping) and bool(group.get("is_expert_parallel"))


VALUES = "parameter_values"  # extras: {parameter: {state: number}}, an optimizer's states that are no tensors


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers of a stored state: a list's elements, the values of a dict with integer keys, or the only
    one."""
    if isinstance(optimizer, list):
        return list(optimizer)
    if isinstance(optimizer, dict) and optimizer and all(isinstance(key, int) for key in optimizer):
        return [optimizer[key] for key in sorted(optimizer)]
    return [optimizer]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the `param_groups` of one stored optimizer, [] if it has none.

    A mixed-precision optimizer wraps the real one under `optimizer`; both forms are accepted.
    """
    if not isinstance(optimizer, dict):
        return []
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def groups_for(
    stored: Sequence[Mapping[str, Any]], keys: Set[GroupKey], facts: MegatronFacts, *, experts: bool
) -> list[dict[str, Any]]:
    """Return the groups of a new optimizer, one for each of `keys`: copies of stored groups, then new ones.

    Args:
        stored: the source's groups.
        keys: of the parameters that the optimizer has.
        facts: of the job.
        experts: whether the optimizer is that of parallel experts.
    """
    # `twins` are the models for new groups: those of the same kind first.
    own = [group for group in stored if is_expert_group(group) is experts]
    twins = own + [group for group in stored if group not in own]
    out: dict[GroupKey, dict[str, Any]] = {}
    for group in own:
        key = key_of_group(group, facts)
        if key in keys:
            out.setdefault(key, dict(group))
    for key in sorted(keys, key=lambda key: (not key.decay, key.decoupled)):
        if key not in out:
            out[key] = _make_group(key, twins, facts, experts=experts)
    return list(out.values())


def _make_group(
    key: GroupKey, twins: Sequence[Mapping[str, Any]], facts: MegatronFacts, *, experts: bool
) -> dict[str, Any]:
    """Return a group that the source lacks, made from its most similar one."""
    same = next((dict(twin) for twin in twins if key_of_group(twin, facts) == key), None)
    group = same or dict(twins[0]) if twins else {"lr_mult": 1.0, "is_decoupled_lr": key.decoupled}
    group["is_expert_parallel"] = experts
    if same is None:
        group["wd_mult"] = 1.0 if key.decay else 0.0
        if not key.decay and "weight_decay" in group:
            group["weight_decay"] = 0.0
    return group
