"""Which parameter stands where in Megatron's optimizer: flat buffers, numbered parameters, groups. Reader and writer
ask here.

The one idea: the optimizer's files hold no names. Three orders give them back, all made from the model's own
(registration)
order: buffers (chunk by chunk, by dtype, experts apart), groups (weight decay or none, experts apart) and the number of
a parameter (group by group, inside a group in the model's order).

    a stage with  w (2-d), w.bias, norm (1-d), v (2-d):   group 0 (decay): w, v -> 0, 1    group 1: w.bias, norm -> 2, 3

Groups: 1-d tensors have no weight decay (`wd_mult` 0); q and k norms do with `apply_wd_to_qk_layernorm`; embeddings and
the output layer stand apart with `decoupled_lr`; experts' (`is_expert_parallel`) are an optimizer of their own where
experts are parallel, and then the optimizer's state is a list [dense, experts].

Sources (NVIDIA/Megatron-LM core 0.16.1): `core/optimizer/__init__.py` (`_get_param_groups`,
`get_standard_config_overrides`), `core/optimizer/optimizer.py` (`Float16OptimizerWithFloat16Params`,
`ChainedOptimizer`), `core/optimizer/distrib_optimizer.py`, `core/distributed/distributed_data_parallel.py`; buckets:
`megatron.flat`.

Cost: linear. What it does not do: read or write files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.formats.megatron.args import Facts
from ckpt_tool.formats.megatron.flat import FlatBuffer, default_bucket_size, lay_flat
from ckpt_tool.formats.megatron.model import EMBEDDING, TIED_HEAD
from ckpt_tool.formats.megatron.stages import Stages

DENSE, EXPERTS = 0, 1  # elements of a chained optimizer


class Param(NamedTuple):
    """A trainable parameter of a rank, in the rank's own spelling and shape. chunk: of the virtual pipeline."""

    local: str
    chunk: int
    shape: tuple[int, ...]
    dtype: DType
    numel: int

    @property
    def expert(self) -> bool:
        return ".experts." in self.local


class Buffer(NamedTuple):
    """A flat buffer. members: numbers of its parameters, in registration order. grads: dtype of its gradients."""

    chunk: int
    dtype: DType
    grads: DType
    members: tuple[int, ...]
    flat: FlatBuffer


class Bucketing(NamedTuple):
    """What decides buckets. size: elements, None for one bucket a buffer."""

    size: int | None
    data_ranks: int
    busbw: bool
    alone: bool  # do shared embeddings get a bucket of their own?


def bucketing_of(facts: Facts, *, experts: bool, degrees: Mapping[str, int]) -> Bucketing:
    """The buckets of the dense or the experts' buffers."""
    ranks = degrees["dp"] * degrees["cp"]
    size = (facts.bucket_size or default_bucket_size(ranks)) if facts.overlap else None
    if experts:
        ranks = max(1, degrees["tp"] * ranks // (degrees["etp"] * degrees["ep"]))
    return Bucketing(size, ranks, facts.busbw, True)


def shared_embedding(param: Param, params: Sequence[Param], facts: Facts, stages: Stages, pp: int) -> bool:
    """Is it an embedding that two pipeline stages share, so that it has a bucket of its own?"""
    if stages.pp == 1 or not (facts.tied or facts.mtp) or param.local not in (EMBEDDING, TIED_HEAD):
        return False
    stage = stages.of(pp, param.chunk)
    if stage.embedding:
        return param.local == EMBEDDING
    if param.local == EMBEDDING:
        return True  # the copy that MTP layers use
    copy = any(p.local == EMBEDDING and p.chunk == param.chunk for p in params)
    return facts.tied and not copy


def lay_buffers(
    params: Sequence[Param],
    facts: Facts,
    stages: Stages,
    pp: int,
    bucketing: Bucketing,
    which: Sequence[int],
    grads: DType,
) -> list[Buffer]:
    """The buffers of an optimizer, in the order of their numbers (`gbuf_idx`). which: numbers of its parameters. grads:
    dtype of gradients where they are reduced in fp32."""
    out = []
    for chunk in sorted({params[i].chunk for i in which}):
        by_dtype: dict[str, list[int]] = {}
        for i in which:
            if params[i].chunk == chunk:
                by_dtype.setdefault(params[i].dtype.name, []).append(i)
        for members in by_dtype.values():
            alone = [bucketing.alone and shared_embedding(params[i], params, facts, stages, pp) for i in members]
            dtype = params[members[0]].dtype
            flat = lay_flat(
                [params[i].numel for i in members],
                shared=alone,
                bucket_size=bucketing.size if pp == 0 and chunk == 0 else None,
                data_ranks=bucketing.data_ranks,
                busbw=bucketing.busbw,
            )
            out.append(Buffer(chunk, dtype, grads if facts.grad_fp32 else dtype, tuple(members), flat))
    return out


# -- groups ------------------------------------------------------------------------------------------------------------


class GroupKey(NamedTuple):
    """What parts parameters into groups of one optimizer."""

    decay: bool
    decoupled: bool


def key_of_param(param: Param, facts: Facts) -> GroupKey:
    words = param.local.split(".")
    qk = facts.qk_decay and words[-2:-1] and words[-2] in ("q_layernorm", "k_layernorm")
    decay = len(param.shape) != 1 and words[-1] != "bias" or bool(qk)
    return GroupKey(decay, facts.decoupled_lr is not None and param.local in (EMBEDDING, TIED_HEAD))


def key_of_group(group: Mapping[str, Any], facts: Facts) -> GroupKey:
    """A stored group's key, from its hyperparameters."""
    decoupled = bool(group.get("is_decoupled_lr"))
    if facts.decoupled_lr is not None and group.get("max_lr") == facts.decoupled_lr:
        decoupled = True
    multiple = group.get("wd_mult", 1.0 if group.get("weight_decay", 1.0) else 0.0)
    return GroupKey(multiple != 0.0, decoupled and facts.decoupled_lr is not None)


def members_of(
    groups: Sequence[Mapping[str, Any]], params: Sequence[Param], which: Sequence[int], facts: Facts
) -> list[list[int]] | None:
    """The parameters of each stored group, in order; None when the groups are of another kind (a parameter fits none,
    or two groups have one key)."""
    keys = [key_of_group(group, facts) for group in groups]
    if len(set(keys)) != len(keys):
        return None
    out: list[list[int]] = [[] for _ in groups]
    for i in which:
        key = key_of_param(params[i], facts)
        if key not in keys:
            return None
        out[keys.index(key)].append(i)
    return out


def is_expert_group(group: Any) -> bool:
    return isinstance(group, Mapping) and bool(group.get("is_expert_parallel"))


def chained(optimizer: Any) -> list[Any]:
    """The optimizers of a stored state: a list's elements, a dict of numbers' values, or the one that there is."""
    if isinstance(optimizer, list):
        return list(optimizer)
    if isinstance(optimizer, dict) and optimizer and all(isinstance(key, int) for key in optimizer):
        return [optimizer[key] for key in sorted(optimizer)]
    return [optimizer]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The `param_groups` of one stored optimizer, wrapped or not; [] when it has none."""
    if not isinstance(optimizer, dict):
        return []
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
