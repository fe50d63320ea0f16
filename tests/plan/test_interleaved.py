"""Arrays of an output that lie in each other's gaps: the columns of one matrix, from several tensors or bands."""

from __future__ import annotations

import pytest

from ckpt_tool.core.box import Box, contiguous_strides, whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import Target, TargetArray, TargetFile, Wanted, WantedTensor
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.moves import Stored
from ckpt_tool.plan.schedule import build_moves

F32 = DTYPES["F32"]


def plan(shape: tuple[int, ...], arrays: list[TargetArray], size: int) -> object:
    key = TensorKey("w")
    stored = Stored(0, simple_tensor(key, StoredArray("f", 0, F32, shape)))
    wanted = Wanted((WantedTensor(key, shape, F32),))
    return build_moves([stored], wanted, Target("t", (TargetFile("out", size, (), tuple(arrays)),)), lambda s, p: 0)


def bands(shape: tuple[int, ...], width: int, pitch: tuple[int, ...], offsets: list[int]) -> list[TargetArray]:
    """Bands of `width` columns of a (.., n) tensor, each at one of `offsets` (elements) with row pitch `pitch`."""
    size = (*shape[:-1], width)
    zeros = (0,) * (len(shape) - 1)
    return [TargetArray(0, Box((*zeros, i * width), size), 4 * at, strides=pitch) for i, at in enumerate(offsets)]


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 8)])
def test_columns_in_each_other_s_gaps_are_disjoint(shape: tuple[int, ...]) -> None:
    steps = contiguous_strides(shape)
    plan(shape, bands(shape, 4, steps, [0, 4]), 4 * whole(shape).numel)
    plan(shape, bands(shape, 2, steps, [6, 0, 2, 4]), 4 * whole(shape).numel)  # in another order


@pytest.mark.parametrize(
    ("offsets", "pitch"), [([0, 3], (8, 1)), ([0, 8], (8, 1)), ([0, 5], (8, 1)), ([0, 4], (7, 1)), ([0, 0], (8, 1))]
)
def test_columns_that_meet_are_written_twice(offsets: list[int], pitch: tuple[int, ...]) -> None:
    with pytest.raises(InternalError):
        plan((3, 8), bands((3, 8), 4, pitch, offsets), 4 * 24)


def test_bands_of_unlike_pitch_that_reach_into_each_other_are_refused() -> None:
    first, second = bands((3, 8), 4, (8, 1), [0, 4])
    with pytest.raises(InternalError):
        plan((3, 8), [first, second._replace(strides=(16, 1))], 4 * 48)


def test_a_transposed_matrix_has_no_gaps() -> None:
    plan((3, 8), [TargetArray(0, whole((3, 8)), 0, strides=(1, 3))], 96)
    with pytest.raises(InternalError):
        plan((3, 8), [TargetArray(0, whole((3, 8)), 0, strides=(1, 3))], 95)
