"""Flat optimizer buckets of a torch_dist checkpoint (in the making)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InputError
from ckpt_tool.formats.dcp_metadata import TensorEntry
from ckpt_tool.formats.megatron_dist_objects import Objects

MISFIT = "E0355"


def flat_states(
    flat: Sequence[tuple[TensorEntry, list[StoredArray]]],
    tensors: Mapping[TensorKey, LogicalTensor],
    objects: Objects,
    shown: str,
) -> dict[TensorKey, LogicalTensor]:
    """The states that lie in flat buckets."""
    raise InputError("flat optimizer buckets are not read yet", code=MISFIT, path=shown, hint="coming")
