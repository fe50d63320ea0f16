"""Writes transposed outputs: the line is collected in a panel, and strips of the stored rows are written from it.

The counterpart of `run/transposed.py`: an output that is stored transposed takes, from each block of the line, a few
bytes for each of its stored rows. So blocks are kept until a panel of some MiB is full; then groups of strips, one of
each stored row and as long as the panel is high, are transposed while they are in L2 and written with one call a strip:

    the line is (8, 3), stored (3, 8)      a panel of 4 rows of the line      strips written, 4 elements each
    a0 b0 c0 a1 b1 c1 a2 b2 c2 ...         a0 b0 c0                           a0 a1 a2 a3 into row a
                                           a1 b1 c1                           b0 b1 b2 b3 into row b
                                           a2 b2 c2   a3 b3 c3                c0 c1 c2 c3 into row c

Every region goes through `plan.copy.clip`, so fused matrices whose halves are transposed separately, shards and stacked
experts are one case; plain regions of the same move are written block by block. Copies of one box are transposed once.
If the source is transposed too, and nothing is cast, sources and outputs share one panel, and blocks are hashed as
slices of it. With a cast there are two panels of half the size.

A strip holds its region's bytes alone: gaps can be read and thrown away, but not written. Bytes that checksums need are
read again at the end (`run/finish.py`), since a record's strips are not written in the order of the file.

Tiles are mirrored too: 64 rows of the panel by all strips of the group. Multiples of a copy of the same bytes, strips
of 8 KiB, items of 1, 2, 4, 8 bytes, one core of a busy Xeon:

    all rows at once          75    61    17    14
    64 strips, 256 rows       12   7.9   7.2    11
    128 x 128                 13   7.4   3.2   6.3
    64 rows (this module)     10   6.7   3.4   2.6

Strided 1-d outputs and negative strides are not handled here but by `Writer`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.plan.copy import Region, clip, hull, is_transposed
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.transposed import (
    _TYPES,
    GROUP,
    STRIP,
    Dim,
    Strips,
    Transposed,
    cut_group,
    cut_strip,
    even_rows,
    group_of,
    lay,
    offsets_of,
    panels_of,
    rows_of,
)

if TYPE_CHECKING:
    from ckpt_tool.run.compute import Array


class Descriptors(Protocol):
    """File number -> open descriptor."""

    def __getitem__(self, file: int, /) -> int: ...


class Sink(Protocol):
    """What is used of a `Writer`. Files are given by number."""

    @property
    def fds(self) -> Descriptors:
        """Open descriptors, by file number."""
        ...

    def pwrite(self, file: int, offset: int, view: memoryview, *, count: bool = True) -> None:
        """Write all of `view`, or raise an error that names the file and the byte."""
        ...


class TransposedOutputs:
    """The transposed outputs of one item of a unit, elements [start, stop) of a move. Other outputs are ignored.

    Args:
        share: (start, stop, until); until: the element up to which the sources are read.
        strips: the buffers of this thread, shared with the sources.
        source: the panels of the sources if those are transposed too.
    """

    def __init__(
        self, move: Move, share: tuple[int, int, int], strips: Strips, sink: Sink, source: Transposed | None
    ) -> None:
        self._item = move.item_out
        self._strips = strips
        self._sink = sink
        self._at, self._stop, self._until = share  # elements before `_at` are written

        # Outputs that store the same box with the same strides differ in file and offset alone: one transposition.
        copies: dict[tuple[object, ...], tuple[int, int, Region, list[tuple[int, int]]]] = {}
        for region in filter(is_transposed, move.outputs):
            same = (region.at, region.extents, region.strides, region.steps)
            places = copies.setdefault(same, (*hull(region), region, []))[3]
            places.append((region.file, region.offset - copies[same][2].offset))
        self._regions = list(copies.values())
        self._shared = source if move.dtype == move.dtype_out else None
        self._panel = memoryview(b"") if self._shared else strips.panels(panels_of(move))[-1]
        self._row, self._height = rows_of(move.outputs)
        self._low = self._high = 0  # the panel is for elements [_low, _high)

    def begin(self, at: int, end: int) -> int:
        """Prepare for a block of elements from `at` on. Returns its end: `end`, or earlier where the panel ends."""
        if at >= self._high:
            if self._shared:
                self._high = min(self._shared.reach(at, self._until), self._stop)
            else:
                self._high = self._end(at)
            self._low = at
        return min(end, self._high)

    def _end(self, at: int) -> int:
        """The end (exclusive) of a panel that begins with element `at`: a row's end if a row fits."""
        row = self._row
        room = len(self._panel) // self._item
        rows = (room + at % row) // row  # the first may be a part of one
        if not rows:
            return min(at + room, self._stop)
        first = at // row
        last = ceil_div(self._stop, row)
        return min((first + even_rows(last - first, rows, self._height, self._item)) * row, self._stop)

    def room(self, at: int, end: int) -> memoryview:
        """The part of the panel for elements [at, end). A caller that fills it directly saves `take` the copy."""
        return self._panel[(at - self._low) * self._item : (end - self._low) * self._item]

    def take(self, data: memoryview, at: int, end: int) -> None:
        """Add elements [at, end) to the panel, and write the panel to the files when it is full."""
        if not self._shared:
            room = self.room(at, end)
            if room.obj is not data.obj:
                room[:] = data
        if end == self._high:
            panel, base = self._shared.held() if self._shared else (self._panel, self._low)
            for low, high, region, places in self._regions:
                if low < end and high > self._low:
                    for part in clip(region, self._low, end):
                        self._put(part, panel, base, places)

    def _put(self, part: Region, panel: memoryview, base: int, places: Sequence[tuple[int, int]]) -> None:
        """Write a region that is completely in the panel, whose first element is `base`, to each of its places."""
        item = self._item
        at = (part.at - base) * self._item
        dims = [
            Dim(n, stride, step * item) for n, stride, step in zip(part.extents, part.strides, part.steps, strict=True)
        ]
        inner, outer = run_of(dims, item)
        for offset, to, few in cut_strip(inner, STRIP if outer else GROUP) if inner else ((0, 0, inner),):
            span = item + sum((n - 1) * stride for n, stride, _ in few)
            pitch = ceil_div(span, 64) * 64
            pitch += 64 * (pitch % 1024 == 0)  # as with sources
            for shift, source, many in cut_group(outer, group_of(pitch)) if outer else ((0, 0, outer),):
                order = sorted(many, key=lambda dim: -dim.stride)  # the file's
                offsets, packed = offsets_of(order, part.offset + offset + shift, pitch)
                strips, slots = self._strips.slots(pitch, span, len(offsets))
                strides = (*packed, *(dim.stride for dim in few))
                self._turn(panel, at + to + source, strips, [*order, *few], strides)
                for file, by in places:
                    write(self._sink, file, [offset + by for offset in offsets] if by else offsets, slots)

    def _turn(
        self, panel: memoryview, at: int, strips: memoryview, dims: Sequence[Dim], strides: tuple[int, ...]
    ) -> None:
        import numpy as np

        kind = _TYPES[self._item]
        extents = tuple(dim.extent for dim in dims)
        source: Array = np.ndarray(extents, kind, panel, at, tuple(dim.step for dim in dims))
        target: Array = np.ndarray(extents, kind, strips, 0, strides)
        if not dims:
            target[...] = source
            return
        lay(source, target, min(range(len(dims)), key=strides.__getitem__))


def run_of(dims: Sequence[Dim], item: int) -> tuple[list[Dim], list[Dim]]:
    """(the dims that make up a strip without gaps, smallest stride first; the others, largest step first)."""
    inner = list[Dim]()
    span = item
    left = sorted(dims, key=lambda dim: dim.stride)
    while left and left[0].stride == span:
        inner.append(left.pop(0))
        span *= inner[-1].extent
    return inner, sorted(left, key=lambda dim: -dim.step)


def write(sink: Sink, file: int, offsets: Sequence[int], slots: Sequence[memoryview]) -> None:
    """Write each slot at its offset; all slots have the same length."""
    fd = sink.fds[file]
    try:
        done = sum(map(os.pwrite, repeat(fd), slots, offsets))
    except OSError:
        done = -1
    # A short write or an error: written again, which is harmless.
    if done != len(slots[0]) * len(offsets):  # one at a time: that names the byte
        for offset, slot in zip(offsets, slots, strict=True):
            sink.pwrite(file, offset, slot, count=False)
