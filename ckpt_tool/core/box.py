"""Box: a half-open n-d box, in elements. The only geometry there is.

>>> Box((0, 4), (2, 3)) & Box((1, 0), (5, 6))
Box(offset=(1, 4), shape=(1, 2))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Half-open n-d box, in elements. `Box((0, 4), (2, 3))` holds rows 0..1, columns 4..6."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside; 1 for rank 0."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The offset of the first element after the box, in each dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def __and__(self, other: Box) -> Box | None:
        """The shared box, None when nothing is shared (an empty box shares nothing)."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        size = tuple(h - low for low, h in zip(lo, hi, strict=True))
        return Box(lo, size) if all(n > 0 for n in size) else None

    def translate(self, by: Sequence[int], *, sign: int = 1) -> Box:
        """The box moved by `by` (or back, with `sign=-1`)."""
        return Box(tuple(o + sign * d for o, d in zip(self.offset, by, strict=True)), self.shape)

    def inside(self, shape: Sequence[int]) -> bool:
        """Is the box inside a tensor of `shape`? False for another number of dims or a negative number."""
        return len(shape) == len(self.shape) == len(self.offset) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.shape, shape, strict=True)
        )

    def minus(self, other: Box) -> list[Box]:
        """What is left of the box, as disjoint boxes, at most two a dim."""
        shared = self & other
        if shared is None:
            return [self] if self.numel else []
        remaining = list[Box]()
        offset = list(self.offset)
        shape = list(self.shape)
        for d, (start, extent) in enumerate(zip(shared.offset, shared.shape, strict=True)):
            for low, high in ((offset[d], start), (start + extent, offset[d] + shape[d])):
                if low < high:
                    remaining.append(
                        Box((*offset[:d], low, *offset[d + 1 :]), (*shape[:d], high - low, *shape[d + 1 :]))
                    )
            offset[d], shape[d] = start, extent
        return remaining


def first_hole(shape: Sequence[int], boxes: Iterable[Box], *, most: int = 4096) -> Box | None:
    """The first box (by its offset) of a tensor of `shape` that none of `boxes` covers. None if there is none, or if
    the search needs more than `most` pieces."""
    holes = [whole(shape)] if 0 not in shape else []
    for box in boxes:
        holes = [piece for part in holes for piece in part.minus(box)]
        if len(holes) > most:
            return None
    return min(holes, key=lambda box: box.offset, default=None)


def whole(shape: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    size = tuple(shape)
    return Box((0,) * len(size), size)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements; dims of extent 0 count as 1.  (2, 3, 4) -> (12, 4, 1)"""
    return _strides(tuple(shape))


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements `start` to `stop` of a tensor's row-major line as boxes, in the line's order, each without gaps in
    it.

    At most 2n - 1 for rank n: a flat ZeRO slice begins and ends inside rows.
    >>> [(b.offset, b.shape) for b in flat_boxes((4, 5), 3, 17)]
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"{start} to {stop} leaves a tensor of shape {tuple(shape)}")
    if stop == start:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    if row == 1:
        return [Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))]
    first_row = start // row
    last_row = stop // row
    if first_row == last_row:
        return _rows(shape, first_row, flat_boxes(shape[1:], start - first_row * row, stop - first_row * row))
    boxes: list[Box] = []
    if start % row:
        boxes += _rows(shape, first_row, flat_boxes(shape[1:], start - first_row * row, row))
        first_row += 1
    if last_row > first_row:
        boxes.append(Box((first_row, *(0,) * (len(shape) - 1)), (last_row - first_row, *shape[1:])))
    if stop % row:
        boxes += _rows(shape, last_row, flat_boxes(shape[1:], 0, stop - last_row * row))
    return boxes


def _rows(shape: Sequence[int], row: int, inner: Sequence[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in inner]


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indexes of two boxes that share an element, None when all are disjoint.

    Boxes that a plane parts are never compared: the set is split where no box crosses, dim by dim, down to single
    boxes, so the grids of thousands of ranks cost n log n. A set that no plane parts is swept along one dim.
    """
    groups = [[i for i, box in enumerate(boxes) if box.numel]]
    while groups:
        group = groups.pop()
        if len(group) > 1:
            parts = _split_by_planes(boxes, group)
            overlap = None if parts else _sweep(boxes, group)
            if overlap is not None:
                return overlap
            groups += parts
    return None


def _split_by_planes(boxes: Sequence[Box], group: Sequence[int]) -> list[list[int]]:
    """`group` in the parts that planes across one dim leave whole; [] when no dim has such a plane."""
    for dim in range(len(boxes[group[0]].shape)):
        parts: list[list[int]] = []
        stop = 0
        for i in sorted(group, key=lambda i: boxes[i].offset[dim]):
            start = boxes[i].offset[dim]
            if not parts or start >= stop:
                parts.append([])
                stop = start
            parts[-1].append(i)
            stop = max(stop, start + boxes[i].shape[dim])
        if len(parts) > 1:
            return parts
    return []


def _sweep(boxes: Sequence[Box], group: Sequence[int]) -> tuple[int, int] | None:
    """Along the dim with most starts, each box meets those whose interval still runs."""
    rank = len(boxes[group[0]].shape)
    if rank == 0:
        return group[0], group[1]
    dim = max(range(rank), key=lambda d: len({boxes[i].offset[d] for i in group}))
    running: list[int] = []
    for i in sorted(group, key=lambda i: boxes[i].offset[dim]):
        start = boxes[i].offset[dim]
        running = [j for j in running if boxes[j].offset[dim] + boxes[j].shape[dim] > start]
        for j in running:
            if boxes[i] & boxes[j] is not None:
                return j, i
        running.append(i)
    return None
