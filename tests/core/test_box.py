"""Boxes against NumPy: a box is a mask of ones."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.box import Box, contiguous_strides, first_hole, first_overlap, flat_boxes, whole


@st.composite
def boxes_in_a_shape(draw: st.DrawFn, count: int = 2) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = []
    for _ in range(count):
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        boxes.append(Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))))
    return shape, boxes


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    out = np.zeros(shape, bool)
    out[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] = True
    return out


@given(boxes_in_a_shape())
def test_meeting_is_the_and_of_masks(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    shared = a & b
    want = mask(shape, a) & mask(shape, b)
    if shared is None:
        assert not want.any()
    else:
        np.testing.assert_array_equal(mask(shape, shared), want)
        assert shared.numel == want.sum() > 0
    assert shared == b & a
    assert a & whole(shape) == (a if a.numel else None)
    assert a.inside(shape)
    assert a.end == tuple(o + n for o, n in zip(a.offset, a.shape, strict=True))


@given(boxes_in_a_shape(count=4))
def test_first_overlap_finds_one_exactly_when_there_is_one(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    total = sum(mask(shape, box).astype(int) for box in boxes)
    found = first_overlap(boxes)
    if found is None:
        assert (total <= 1).all()
    else:
        i, j = found
        assert i != j
        assert (mask(shape, boxes[i]) & mask(shape, boxes[j])).any()


def test_first_overlap_of_many_disjoint_boxes_is_quick() -> None:
    """A grid of 90 x 90 ranks, shuffled: comparing all pairs would be 33 million meetings."""
    grid = [Box((8 * i, 4 * j), (8, 4)) for i in range(90) for j in range(90)]
    random.Random(0).shuffle(grid)
    assert first_overlap(grid) is None
    assert first_overlap([*grid, Box((7, 3), (2, 2))]) is not None


def test_scalars_and_empty_boxes() -> None:
    scalar = Box((), ())
    assert scalar.numel == 1
    assert scalar & scalar == scalar
    assert first_overlap([scalar, scalar]) == (0, 1)
    assert first_overlap([scalar]) is None
    assert first_overlap([]) is None
    empty = Box((0, 2), (3, 0))
    assert empty.numel == 0
    assert empty & whole((3, 4)) is None
    assert first_overlap([empty, whole((3, 4)), empty]) is None


@pytest.mark.parametrize(
    ("box", "shape", "inside"),
    [
        (Box((0, 4), (2, 3)), (2, 7), True),
        (Box((0, 4), (2, 3)), (2, 6), False),
        (Box((0,), (2,)), (2, 1), False),
        (Box((-1,), (2,)), (2,), False),
        (Box((1,), (-1,)), (2,), False),
        (Box((2,), (0,)), (2,), True),
        (Box((3,), (0,)), (2,), False),
        (Box((), ()), (), True),
        (Box((0, 0), (1,)), (1,), False),
    ],
)
def test_inside(box: Box, shape: tuple[int, ...], inside: bool) -> None:
    assert box.inside(shape) is inside


@given(boxes_in_a_shape(count=1), st.integers(-3, 3))
def test_translate_there_and_back(case: tuple[tuple[int, ...], list[Box]], by: int) -> None:
    shape, (box,) = case
    step = [by + d for d in range(len(shape))]
    assert box.translate(step).translate(step, sign=-1) == box
    assert box.translate(step).shape == box.shape
    assert box.translate(step).offset == tuple(o + d for o, d in zip(box.offset, step, strict=True))


@given(st.lists(st.integers(1, 5), max_size=4))
def test_strides_are_numpys(shape: list[int]) -> None:
    array = np.zeros(shape, np.int8)
    assert contiguous_strides(shape) == array.strides


def test_strides_count_empty_dims_as_one() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((2, 0, 4)) == (4, 4, 1)
    assert contiguous_strides(()) == ()


@given(shape=st.lists(st.integers(0, 5), max_size=4), data=st.data())
def test_flat_boxes_are_the_line_in_order(shape: list[int], data: st.DataObject) -> None:
    """The oracle numbers the elements and cuts the line itself."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [numbers[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True))].reshape(-1) for b in boxes]
    assert np.array_equal(np.concatenate([np.empty(0, int), *found]), np.arange(start, stop))


@given(shape=st.lists(st.integers(0, 5), max_size=3), data=st.data())
def test_what_is_left_of_boxes_is_found(shape: list[int], data: st.DataObject) -> None:
    """The oracle marks elements one by one."""
    taken = np.zeros(shape, bool)
    boxes = []
    for _ in range(data.draw(st.integers(0, 5))):
        offset = tuple(data.draw(st.integers(0, n)) for n in shape)
        boxes.append(Box(offset, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))))
        taken[tuple(slice(o, o + n) for o, n in zip(offset, boxes[-1].shape, strict=True))] = True
    hole = first_hole(shape, boxes)
    if taken.all():
        assert hole is None
    else:
        assert hole is not None and hole.numel and hole.inside(shape)
        assert not taken[tuple(slice(o, e) for o, e in zip(hole.offset, hole.end, strict=True))].any()
