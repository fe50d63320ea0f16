"""FlatLine: tensors laid end to end in one flat buffer, of which files hold intervals. Readers and writers both use it.

    w (3 x 4) and b (5) on one line, which two ranks share:         element 0 ........ 10 ........ 20
    FlatLine.end_to_end([("w", (3, 4), 3), ("b", (5,), 0)])         w 0..12, three elements of padding, b at 15
        .window(0, 10)   rank 0's interval: w 0..10                 boxes w[0:2, :] at 0 and w[2, 0:2] at 8
        .window(10, 20)  rank 1's: w 10..12 and b                   boxes w[2, 2:4] at 0 and b[0:5] at 5

The one idea: an interval of a line is a line, and an element's place in a file is its place in the interval. Which
element is at which place is the format's rule (padding, alignment, order); the step from places to boxes is written
once, here: `chunks` says which box of which tensor a part of a stored array holds, `parts` where the boxes of wanted
tensors go.

Cost: a microsecond or two a box; at most 2n - 1 boxes for an interval of a tensor of rank n, times the boxes of its
block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

from ckpt_tool.core.box import Box, contiguous_strides, flat_boxes
from ckpt_tool.core.tensor import Chunk, StoredArray

T = TypeVar("T")
Boxes = Sequence[tuple[Box, Box]]  # (box of the tensor, box of the block), tiling the block


class LinePlace(NamedTuple):
    """Elements [start, stop) of a block, flattened row-major, are at element `at` of the flat line."""

    # the tensor that the block belongs to, in the caller's terms (a name, a number)
    of: Any  # Python 3.10 has no generic NamedTuple, so `FlatLine[T]` alone states the type
    at: int
    start: int
    stop: int
    shape: tuple[int, ...]  # the block's
    # the block's boxes in its tensor (a fused matrix has two); (): the block is the whole tensor
    boxes: Boxes = ()

    @property
    def end(self) -> int:
        """The element of the line after the block's last one."""
        return self.at + self.stop - self.start


class LinePart(NamedTuple):
    """`box` of tensor `of` is stored at element `at` of the line, row-major."""

    of: Any
    box: Box
    at: int
    strides: tuple[int, ...] | None  # in elements, where it has gaps


@dataclass(frozen=True, slots=True)
class FlatLine(Generic[T]):
    """See the module."""

    # ordered by `at`, without overlaps; between them there is padding
    places: tuple[LinePlace, ...]

    @staticmethod
    def of_block(of: T, shape: tuple[int, ...], boxes: Boxes = ()) -> FlatLine[T]:
        """The line of one block."""
        return FlatLine((LinePlace(of, 0, 0, prod(shape), shape, boxes),))

    @staticmethod
    def end_to_end(blocks: Iterable[tuple[T, tuple[int, ...], int]]) -> FlatLine[T]:
        """The line of consecutive tensors: (of, shape, elements of padding after it)."""
        places = []
        position = 0
        for owner, shape, gap in blocks:
            places.append(LinePlace(owner, position, 0, prod(shape), shape))
            position += prod(shape) + gap
        return FlatLine(tuple(places))

    @property
    def end(self) -> int:
        """The element behind the last that is no padding."""
        return self.places[-1].end if self.places else 0

    def window(self, start: int, stop: int) -> FlatLine[T]:
        """The elements [start, stop), as a line that begins at `start`."""
        places = []
        for number in range(max(bisect_right(self.places, start, key=lambda p: p.at) - 1, 0), len(self.places)):
            place = self.places[number]
            if place.at >= stop:
                break
            low = max(place.at, start)
            high = min(place.end, stop)
            if start == 0 and low < high == place.end:
                places.append(place)
            elif low < high:
                begin = place.start + low - place.at
                places.append(place._replace(at=low - start, start=begin, stop=begin + high - low))
        return FlatLine(tuple(places))

    def cut(self, borders: Mapping[T, Iterable[int]]) -> FlatLine[T]:
        """The same line, its places cut at these elements of their blocks, so that boxes of several lines agree."""
        places: list[LinePlace] = []
        for place in self.places:
            inner = sorted(c for c in borders.get(place.of, ()) if place.start < c < place.stop)
            for start, stop in zip((place.start, *inner), (*inner, place.stop), strict=True):
                places.append(place._replace(at=place.at + start - place.start, start=start, stop=stop))
        return FlatLine(tuple(places))

    def chunks(self, array: StoredArray, start: int = 0) -> Iterator[tuple[T, Chunk]]:
        """(tensor, chunk) of everything stored in `array`, a 1-d one that holds the line from element `start` on."""
        for place in self.window(start, start + array.numel).places:
            for run, position in _runs(place):
                for box, inner in _locate_in_tensor(place, run):
                    if inner.shape == run.shape:
                        yield place.of, Chunk(box, array, Box((position,), (box.numel,)))
                    else:  # a part of a view: plans reckon with less memory for it than for a view with strides
                        yield place.of, Chunk(box, array.view(position, run.shape), inner)

    def parts(self) -> Iterator[LinePart]:
        """The places of the tensors' boxes on the line, in its order."""
        for place in self.places:
            for run, position in _runs(place):
                for box, inner in _locate_in_tensor(place, run):
                    if inner.shape == run.shape:
                        yield LinePart(place.of, box, position, None)
                        continue
                    steps = contiguous_strides(run.shape)
                    begin = position + sum(o * s for o, s in zip(inner.offset, steps, strict=True))
                    reach = sum((n - 1) * s for n, s in zip(inner.shape, steps, strict=True)) + 1
                    yield LinePart(place.of, box, begin, None if reach == box.numel else steps)


def _runs(place: LinePlace) -> Iterator[tuple[Box, int]]:
    """(box of the block, element of the line): boxes without gaps on the line."""
    position = place.at
    for run in flat_boxes(place.shape, place.start, place.stop):
        yield run, position
        position += run.numel


def _locate_in_tensor(place: LinePlace, run: Box) -> Iterator[tuple[Box, Box]]:
    """(box of the tensor, the same inside the run) of a run of the block."""
    if not place.boxes:
        yield run, Box((0,) * len(run.shape), run.shape)
    for in_tensor, in_run in place.boxes:
        shared = run & in_run if run.shape else run
        if shared is not None:
            shifted = shared.translate(in_run.offset, sign=-1)
            yield shifted.translate(in_tensor.offset), shared.translate(run.offset, sign=-1)
