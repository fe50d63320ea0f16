"""`FlatLine` against an oracle that goes element by element: which element of which tensor lies where on the line."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.flat_line import Boxes, FlatLine, LinePlace
from ckpt_tool.core.tensor import Chunk, StoredArray

Element = tuple[str, tuple[int, ...]]  # tensor, index
SEEDS = range(60)


def random_block(rng: np.random.Generator) -> tuple[tuple[int, ...], Boxes]:
    """A block's shape, and the boxes of its tensor that it consists of: itself, moved, or halves that swap places."""
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(0, 4)))
    kind = rng.integers(0, 3) if shape else 0
    zero = (0,) * len(shape)
    if kind == 0:
        return shape, ()
    corner = tuple(int(n) for n in rng.integers(0, 4, len(shape)))
    if kind == 1:
        return shape, ((Box(corner, shape), Box(zero, shape)),)
    dim = int(rng.integers(0, len(shape)))
    extent = shape[dim] + 1
    shape = (*shape[:dim], extent, *shape[dim + 1 :])
    cut = int(rng.integers(1, extent))
    first = Box(zero, (*shape[:dim], cut, *shape[dim + 1 :]))
    second = Box((*zero[:dim], cut, *zero[dim + 1 :]), (*shape[:dim], extent - cut, *shape[dim + 1 :]))
    away = (*corner[:dim], corner[dim] + extent + 2, *corner[dim + 1 :])
    return shape, ((Box(away, first.shape), first), (Box(corner, second.shape), second))


def random_line(rng: np.random.Generator) -> tuple[FlatLine[str], list[Element | None]]:
    """A line, and what the oracle says lies on each of its elements (None: padding)."""
    places: list[LinePlace] = []
    truth: list[Element | None] = []
    for number in range(int(rng.integers(0, 6))):
        shape, boxes = random_block(rng)
        numel = int(np.prod(shape, dtype=int))
        start = int(rng.integers(0, numel + 1))
        stop = int(rng.integers(start, numel + 1))
        truth += [None] * int(rng.integers(0, 3))
        places.append(LinePlace(f"t{number}", len(truth), start, stop, shape, boxes))
        truth += [(f"t{number}", index_of(shape, boxes, element)) for element in range(start, stop)]
    return FlatLine(tuple(places)), truth + [None] * int(rng.integers(0, 3))


def index_of(shape: tuple[int, ...], boxes: Boxes, element: int) -> tuple[int, ...]:
    """The index in the tensor of an element of the block's line."""
    at = tuple(int(i) for i in np.unravel_index(element, shape)) if shape else ()
    for there, here in boxes:
        inside = tuple(i - o for i, o in zip(at, here.offset, strict=True))
        if all(0 <= i < n for i, n in zip(inside, here.shape, strict=True)):
            return tuple(i + o for i, o in zip(inside, there.offset, strict=True))
    return at


def indexes(box: Box) -> list[tuple[int, ...]]:
    return [tuple(i + o for i, o in zip(at, box.offset, strict=True)) for at in np.ndindex(*box.shape)]


def held(chunk: Chunk) -> list[int]:
    """The elements of the file (of one byte each) that the chunk reads, in the order of its box."""
    array = chunk.array
    elements = np.arange(array.offset, array.offset + array.numel).reshape(array.shape)
    within = tuple(slice(o, o + n) for o, n in zip(chunk.within.offset, chunk.within.shape, strict=True))
    return [int(n) for n in elements[within].reshape(-1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_and_parts_of_an_interval_are_those_of_its_elements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    line, truth = random_line(rng)
    start = int(rng.integers(0, len(truth) + 1))
    stop = int(rng.integers(start, len(truth) + 3))
    want = {at: item for at, item in enumerate(truth[start:stop]) if item is not None}
    window = line.window(start, stop)
    array = StoredArray("f", 1000, DTYPES["U8"], (stop - start,))
    read = {
        element - 1000: (name, index)
        for name, chunk in window.chunks(array)
        for element, index in zip(held(chunk), indexes(chunk.box), strict=True)
    }
    assert read == want
    written = {}
    for name, box, at, strides in window.parts():
        steps = np.array(strides or [int(np.prod(box.shape[d + 1 :])) for d in range(len(box.shape))], dtype=int)
        for inside, index in zip(np.ndindex(*box.shape), indexes(box), strict=True):
            written[at + int((np.array(inside, dtype=int) * steps).sum())] = (name, index)
    assert written == want
    assert window.end == max(want, default=-1) + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_no_box_of_a_cut_line_crosses_a_border(seed: int) -> None:
    rng = np.random.default_rng(seed)
    line, truth = random_line(rng)
    borders = {place.of: [int(n) for n in rng.integers(0, 30, 2)] for place in line.places}
    cut = line.cut(borders)
    assert all(not place.start < border < place.stop for place in cut.places for border in borders[place.of])
    array = StoredArray("f", 0, DTYPES["U8"], (len(truth),))
    for one in (line, cut):
        read = {e: i for _, chunk in one.chunks(array) for e, i in zip(held(chunk), indexes(chunk.box), strict=True)}
        assert read == {at: item[1] for at, item in enumerate(truth) if item is not None}


def test_one_chunk_a_box_without_gaps() -> None:
    """The example of the module."""
    line = FlatLine.end_to_end([("w", (3, 4), 3), ("b", (5,), 0)])
    assert line.places == (LinePlace("w", 0, 0, 12, (3, 4)), LinePlace("b", 15, 0, 5, (5,)))
    boxes = [
        [(p.of, p.box.offset, p.box.shape, p.at) for p in line.window(*ends).parts()] for ends in ((0, 10), (10, 20))
    ]
    assert boxes == [
        [("w", (0, 0), (2, 4), 0), ("w", (2, 0), (1, 2), 8)],
        [("w", (2, 2), (1, 2), 0), ("b", (0,), (5,), 5)],
    ]
    array = StoredArray("rank_1", 64, DTYPES["F32"], (10,))
    assert [chunk.within for _, chunk in line.window(10, 20).chunks(array)] == [Box((0,), (2,)), Box((5,), (5,))]
