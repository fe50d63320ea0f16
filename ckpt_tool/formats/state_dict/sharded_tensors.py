"""Reads which box of a ShardedTensor a rank holds, for FSDP1's sharded state dicts saved by `torch.save`.

    0.weight (10, 6):  rank 0 has the shard [0, 0] (5, 6), rank 1 the shard [5, 0] (5, 6)

Each rank's pickle contains its own shard and the metadata of all shards, so a box need not be computed. All ranks must
state the same metadata, and a shard that is stated but is in no file is missing.

Source: torch 2.13 `distributed/_shard/metadata.py`, `distributed/_shard/sharded_tensor/{api,metadata,shard}.py`
(`ShardedTensor.__getstate__`), `distributed/fsdp/_shard_utils.py`. FSDP1's flat parameters (`LOCAL_STATE_DICT`) are
ShardedTensors too, and say nothing of the tensors inside: they are refused. Cost: a few tuples a shard. What it does
not do: several shards of one tensor on one rank, which FSDP does not make.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.errors import InputError
from ckpt_tool.formats.state_dict.dtensor_spec import UNPLACED
from ckpt_tool.storage.pickles.pickle_globals import SHARDED_TENSOR
from ckpt_tool.storage.pickles.pickle_values import PickledRecord, WrapperRef

SHARDS_LIMIT = 1 << 17
_FLAT = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?$")


class ShardOfRank(NamedTuple):
    """A rank's part of a ShardedTensor."""

    box: Box | None  # what this file has of it, None where it has nothing
    every: tuple[Box, ...]  # the boxes of all ranks
    rank: int | None  # the one that saved it, None where the file does not say


def is_sharded(wrapper: WrapperRef) -> bool:
    """Is it a ShardedTensor, and no DTensor?"""
    return wrapper.name == SHARDED_TENSOR


def read_shards(wrapper: WrapperRef, name: str) -> ShardOfRank:
    """What the metadata of a ShardedTensor states. name: its name in the state. Raises InputError E0399."""
    if _FLAT.search(name):
        raise _unplaced(
            "it is FSDP1's flat parameter, a line of many tensors that says nothing of them",
            "save FSDP's sharded or full state dict (StateDictType.SHARDED_STATE_DICT), not the local one",
        )
    metadata = wrapper.spec
    state = wrapper.state if isinstance(wrapper.state, dict) else {}
    listed = metadata.get("shards_metadata", list) if metadata is not None else []
    if len(listed) > SHARDS_LIMIT:
        raise _unplaced(f"it states {len(listed)} shards")
    every = tuple(_box(each, wrapper.shape) for each in listed)
    own = [shard.get("metadata", PickledRecord) for shard in state.get("shards", ())]
    if len(own) > 1:
        raise _unplaced("it has several shards on one rank")
    box = _box(own[0], wrapper.shape) if own else None
    if box is not None and box not in every:
        raise _unplaced("the shard in the file is not one of those that its metadata states")
    local = wrapper.local
    if box is not None and getattr(local, "shape", None) != box.shape:
        raise _unplaced(f"the shard in the file is not of the shape {list(box.shape)} that its metadata states")
    group = state.get("group")
    stated = (group.state or {}).get("global_rank") if isinstance(group, PickledRecord) else None
    return ShardOfRank(box, every, stated if type(stated) is int else None)


def _box(shard: Any, shape: tuple[int, ...]) -> Box:
    """The box of a ShardMetadata, inside the whole tensor."""
    if not isinstance(shard, PickledRecord):
        raise _unplaced("its metadata is not that of a ShardedTensor")
    offsets = tuple(shard.get("shard_offsets", (list, tuple)))
    sizes = tuple(shard.get("shard_sizes", (list, tuple)))
    numbers = all(type(n) is int and n >= 0 for n in (*offsets, *sizes))
    inside = len(offsets) == len(sizes) == len(shape) and numbers
    if not inside or any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise _unplaced(f"a shard at {list(offsets)[:8]} of {list(sizes)[:8]} leaves the whole, {list(shape)}")
    return Box(offsets, sizes)


def _unplaced(
    what: str, hint: str = "the file is damaged, or of a version that cuts otherwise: save it as dcp"
) -> InputError:
    return InputError(f"a ShardedTensor that can't be placed: {what}", code=UNPLACED, hint=hint)
