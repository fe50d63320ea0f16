"""Regions, clipping and intersection against NumPy index arithmetic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import TargetArray, WantedTensor
from ckpt_tool.core.tensor import Chunk, StoredArray, TensorKey
from ckpt_tool.errors import InputError
from ckpt_tool.plan.copy import (
    Region,
    box_region,
    byte_view,
    clip,
    collapse,
    common_order,
    hull,
    intersect,
    source_region,
)
from ckpt_tool.plan.moves import output_region


def elements(region):
    """(line element, byte) pairs of a region, the slow way."""
    for index in itertools.product(*(range(n) for n in region.extents)):
        yield (
            region.at + sum(i * s for i, s in zip(index, region.steps, strict=True)),
            region.offset + sum(i * s for i, s in zip(index, region.strides, strict=True)),
        )


@st.composite
def boxes(draw, most=4):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=most)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, Box(offset, extent)


@given(boxes(), st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_clipping_keeps_exactly_the_elements_inside(case, a, b):
    shape, box = case
    region = box_region(shape, box, 2, 0, 1000)
    parts = list(clip(region, a, b))
    got = [pair for part in parts for pair in elements(part)]
    assert sorted(got) == sorted(pair for pair in elements(region) if a <= pair[0] < b)
    assert len(set(got)) == len(got)


def test_the_order_that_all_arrays_have_in_common():
    turned = ((4, 3), (1, 4))
    wide = ((4, 3), (3, 1))
    assert common_order([turned, ((4, 2), (1, 9))]) == (1, 0)
    assert common_order([turned, wide]) == () == common_order([wide, wide])
    assert common_order([((4, 1), (1, 4)), wide]) == (), "a dim of one element lies in any order"
    assert common_order([((4, 1), (1, 4)), turned]) == (1, 0)
    assert common_order([((4, 3), (1, 0))] * 2) == () == common_order([((4, 3), (1, -4))] * 2)
    assert common_order([((2, 3, 4), (1, 8, 2)), ((2, 3, 4), (1, 9, 2))]) == (1, 2, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_region_along_a_line_of_another_order(order):
    """The same elements at the same bytes; the line is that of the transposed tensor."""
    shape = (4, 5, 6)
    box = Box((1, 0, 2), (3, 5, 3))
    strides = (7, 100, 30)
    region = box_region(shape, box, 2, 0, 10, strides=strides, order=order)
    line = np.arange(120).reshape([shape[d] for d in order]).transpose(np.argsort(order))
    want = {
        (int(line[tuple(np.add(box.offset, index))]), 10 + 2 * int(np.dot(index, strides)))
        for index in np.ndindex(*box.shape)
    }
    assert set(elements(region)) == want


@given(boxes())
@settings(max_examples=200, deadline=None)
def test_a_box_region_numbers_elements_as_numpy_does(case):
    shape, box = case
    line = np.arange(int(np.prod(shape))).reshape(shape)
    cut = line[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
    got = sorted(elements(box_region(shape, box, 4, 0, 64)), key=lambda pair: pair[1])
    assert [element for element, _ in got] == cut.ravel().tolist()
    assert [byte for _, byte in got] == list(range(64, 64 + 4 * box.numel, 4))


@given(boxes(3), st.data())
@settings(max_examples=200, deadline=None)
def test_intersections_are_the_shared_elements(case, data):
    shape, box = case
    other = (
        Box(
            *zip(
                *[(o, data.draw(st.integers(1, n - o))) for n in shape for o in [data.draw(st.integers(0, n - 1))]],
                strict=True,
            )
        )
        if shape
        else Box((), ())
    )
    source = box_region(shape, box, 2, 0, 0)
    output = box_region(shape, other, 2, 1, 500)
    by_line = dict(elements(output))
    want = sorted((byte, by_line[element]) for element, byte in elements(source) if element in by_line)
    got = []
    for copy in intersect(source, output):
        for index in itertools.product(*(range(n) for n in copy.extents)):
            a = copy.source_offset + sum(i * s for i, s in zip(index, copy.source_strides, strict=True))
            b = copy.output_offset + sum(i * s for i, s in zip(index, copy.output_strides, strict=True))
            got.append((a, b))
    assert sorted(got) == want


def test_collapse_merges_only_what_runs_on():
    assert collapse((2, 3, 4), (48, 16, 4), (12, 4, 1)) == ((24,), (4,), (1,))
    assert collapse((2, 1, 4), (48, 999, 4), (12, 7, 1)) == ((2, 4), (48, 4), (12, 1))
    assert collapse((1, 1), (8, 8), (1, 1)) == ((), (), ())


def test_hull_of_an_empty_region():
    assert hull(Region(0, 0, 5, (0, 3), (6, 2), (3, 1))) == (5, 5)


def test_strides_among_bits_are_refused():
    """Six F4 in three bytes: transposed, an element would lie in half a byte. Row-major strides say nothing new."""
    whole = Box((0, 0), (2, 6))
    for strides, bits in (((1, 2), "F4"), ((1, 2), "F6_E2M3"), ((12, 1), "F4")):
        array = StoredArray("w.pt", 64, DTYPES[bits], (2, 6), strides)
        with pytest.raises(InputError, match=r"w.pt.*not stored row by row") as e:
            source_region(Chunk(whole, array, whole), (2, 6), 0)
        assert e.value.code == "E1390" and "contiguous" in e.value.hint
        with pytest.raises(InputError, match="not stored row by row") as e:
            output_region(
                TargetArray(0, whole, 64, None, strides), WantedTensor(TensorKey("w"), (2, 6), DTYPES[bits]), 0
            )
        assert e.value.code == "E1390"
    plain = StoredArray("w.pt", 64, DTYPES["F4"], (2, 6), (6, 1))
    assert source_region(Chunk(whole, plain, whole), (2, 6), 0) == Region(0, 64, 0, (6,), (1,), (1,))


def test_sub_byte_types_move_as_bytes_and_refuse_half_bytes():
    assert byte_view((4, 6), Box((0, 0), (2, 6)), DTYPES["F4"]) == ((4, 3), Box((0, 0), (2, 3)), 1)
    assert byte_view((4, 4), Box((0, 0), (4, 4)), DTYPES["F6_E2M3"]) == ((12,), Box((0,), (12,)), 1)
    with pytest.raises(InputError, match="inside a byte"):
        byte_view((4, 6), Box((0, 1), (4, 5)), DTYPES["F4"])
