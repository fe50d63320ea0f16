"""Lanes: fast paths for the two shapes that nearly every side of a move has, with a handful of system calls a block.

`BlockReader.fill` and `Writer.drain` accept any region and examine it again for each block. Nearly all sides are
simpler: runs that follow each other along the line (whole tensors, shards of dim 0, flat shards), or bands, that is
columns of rows (shards of dim 1). A lane knows the geometry of its side before the first block, so that a block costs
one call per run, and for bands one call and one NumPy assignment between views that are made once:

    two ranks' columns of a (rows, 8) tensor      line:  aaaabbbb aaaabbbb aaaabbbb ...
    rank 0's file: aaaaaaaaaaaa...                block: rows [0, 64): pread 64 * 4 from a, spread; the same from b

A lane saves 6 to 14 % of a thread's time on a job of plain runs or shards of dim 1, hashing and system calls included
(400 MB in memory, one thread, best of nine, with and without lanes: Hugging Face files 0.162 s and 0.179 s, 8 tensor
ranks to 2 0.181 and 0.204, 2 to 8 0.200 and 0.228, to Hugging Face 0.175 and 0.202).

Any other side (replicas to compare, three strided dims, gaps) has no lane and uses the general functions. So do blocks
that cut a row: the first and the last of an item whose bounds are inside a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tool.plan.copy import Region, clip, hull
from ckpt_tool.run.blocks import is_in_runs, view_strided

if TYPE_CHECKING:
    import numpy as np

Transfer = Callable[[int, int, memoryview], None]  # (file, offset, bytes): `Reader.pread` or `Writer.pwrite`


class LineRun(NamedTuple):
    """Bytes [start, stop) of the line are stored in `file` from byte start + shift on."""

    start: int
    stop: int
    file: int
    shift: int  # byte in the file minus byte in the line


class LineBand(NamedTuple):
    """Bytes [column, column + width) of rows [low, high) of the line, stored one after the other in `file` from byte
    `offset` on."""

    low: int
    high: int
    column: int
    width: int
    file: int
    offset: int


def runs_of(regions: Sequence[Region], item: int, start: int, stop: int) -> list[LineRun] | None:
    """Elements [start, stop) as plain runs, in line order; None if a region is neither a run nor rows of long runs."""
    found: list[LineRun] = []
    for region in regions:
        low, high = hull(region)
        if low >= stop or high <= start:
            continue
        if not is_in_runs(region, item):
            return None
        for part in clip(region, start, stop):
            found += _runs(part, item)
    found.sort()
    return found


def _runs(part: Region, item: int) -> Iterator[LineRun]:
    if len(part.extents) > 1:
        for index in range(part.extents[0]):
            yield from _runs(part.row(index), item)
    else:
        start = part.at * item
        yield LineRun(start, start + part.numel * item, part.file, part.offset - start)


def bands_of(regions: Sequence[Region], item: int) -> tuple[int, list[LineBand]] | None:
    """Returns (elements of a row, the regions as bands of such rows), None if one of the regions is no band."""
    widths = {
        region.steps[0] for region in regions if len(region.extents) == 2 or len(region.extents) == 1 != region.steps[0]
    }
    # Rows of different lengths have no common row to which a block could be aligned.
    if len(widths) != 1:
        return None
    (row,) = widths
    bands = []
    for region in regions:
        low, column = divmod(region.at, row)
        shape = _rows(region, row, column, item)
        if shape is None:
            return None
        height, width = shape
        bands.append(LineBand(low, low + height, column * item, width * item, region.file, region.offset))
    return row, bands


def _rows(region: Region, row: int, column: int, item: int) -> tuple[int, int] | None:
    """(rows, elements of each row) of a region if it is a band without gaps in the file, else None."""
    extents = region.extents
    strides = region.strides
    steps = region.steps
    if len(extents) == 2:
        height, width = extents
        dense = strides == (width * item, item) and steps[1] == 1
        return (height, width) if dense and column + width <= row else None
    if len(extents) == 1 and steps[0] == row != 1:
        return (extents[0], 1) if strides[0] == item else None
    length = extents[0] if extents else 1
    if len(extents) > 1 or (extents and strides[0] != item):
        return None
    if column + length <= row:
        return 1, length
    return (length // row, row) if column == 0 and length % row == 0 else None


class Runs:
    """A side of plain runs. Blocks must come in line order."""

    def __init__(self, runs: list[LineRun], transfer: Transfer) -> None:
        self._runs = runs
        self._transfer = transfer
        self._next = 0  # the first run that does not end before the block

    def one(self, start: int, stop: int) -> tuple[int, int] | None:
        """(file, offset) of bytes [start, stop) of the line if they are in one run, else None."""
        for low, high, file, shift in self._runs:
            if low <= start and stop <= high:
                return file, start + shift
        return None

    def pass_by(self, data: memoryview, start: int, stop: int) -> None:
        """Transfer bytes [start, stop) of the line between `data` and the files."""
        runs = self._runs
        at = self._next
        while at < len(runs) and runs[at].stop <= start:
            at += 1
        self._next = at
        while at < len(runs):
            low, high, file, shift = runs[at]
            if low >= stop:
                break
            if low <= start and stop <= high:
                self._transfer(file, start + shift, data)
            elif high > start:
                low = max(low, start)
                high = min(high, stop)
                self._transfer(file, low + shift, data[low - start : high - start])
            at += 1


class _Views(NamedTuple):
    """A band's part of a block, as views of the block and of the scratch."""

    spread: np.ndarray[tuple[int, ...], np.dtype[np.generic]]  # in the block: a column of the rows
    packed: np.ndarray[tuple[int, ...], np.dtype[np.generic]]  # in the scratch: without gaps, as in the file
    flat: memoryview  # the bytes of `packed`


class Bands:
    """A side of bands, for blocks of whole rows.

    Args:
        row: elements of a row of the line.
        block: the buffer of the blocks.
        scratch: a buffer of at least the size of a block.
        reads: True fills the block from the files, False writes it to them.
    """

    def __init__(
        self,
        bands: Sequence[LineBand],
        row: int,
        item: int,
        block: memoryview,
        scratch: memoryview,
        transfer: Transfer,
        *,
        reads: bool,
    ) -> None:
        self._bands = bands
        self._row = row
        self._item = item
        self._block = block
        self._scratch = scratch
        self._transfer = transfer
        self._reads = reads
        self._views: dict[tuple[int, int, int, int], _Views] = {}

    def whole(self, start: int, stop: int) -> bool:
        """Are elements [start, stop) whole rows?"""
        return start % self._row == 0 == stop % self._row

    def pass_by(self, data: memoryview, start: int, stop: int) -> None:
        """Transfer elements [start, stop) of the line, whole rows, between `data` and the files. `data` must be the
        start of the block, because the views that are kept point into it."""
        first = start // self._row
        last = stop // self._row
        length = self._row * self._item
        for low, high, column, width, file, offset in self._bands:
            if low >= last or high <= first:
                continue
            top = max(low, first)
            end = min(high, last)
            at = offset + (top - low) * width
            if width == length:  # whole rows need no rearranging
                self._transfer(file, at, data[(top - first) * length : (end - first) * length])
                continue
            where = (top - first, end - top, column, width)
            spread, packed, flat = self._views.get(where) or self._view(where)
            if self._reads:
                self._transfer(file, at, flat)
                spread[...] = packed
            else:
                packed[...] = spread
                self._transfer(file, at, flat)

    def _view(self, where: tuple[int, int, int, int]) -> _Views:
        top, height, column, width = where
        item = self._item
        length = self._row * self._item
        extents = (height, width // item)
        views = self._views[where] = _Views(
            view_strided(self._block, top * length + column, extents, (length, item), item),
            view_strided(self._scratch, 0, extents, (width, item), item),
            self._scratch[: height * width],
        )
        return views
