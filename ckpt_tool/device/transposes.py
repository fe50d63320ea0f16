"""Copies that swap dims, as descriptors for `box_transpose` (kernels/box_transpose.cu).

box_copy would move such a copy item by item, one side of it scattered over as many sectors of memory as there are items.
Here one dim of the copy runs on in the source (its stride is an item) and another in the target: rows and columns. What is
left is the batch; dims beyond that are unrolled. (3, 5) fp32, row-major, to (5, 3), row-major:

    item 4, rows 3, columns 5, source row stride 20, target column stride 12

An item is the copy's innermost run, so (heads, positions, 8 bytes) to (positions, heads, 8 bytes) is a transpose of items of
8 bytes. Not a transpose: items of other sizes than 1, 2, 4, 8 and 16 bytes, or not on a multiple of their size; sides of less
than a sector, where nothing would be won.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from ckpt_tool.device.descriptors import DESC, MOST_ROWS, Descriptors, Dims, magic, number_tiles, width_log

EDGES = {1: 128, 2: 64, 4: 64, 8: 32, 16: 16}  # items of a tile's side by bytes of an item, as in box_transpose.cu
SECTOR = 32  # bytes: the least that memory moves
MOST_EXTENT = 1 << 31


class Turned(NamedTuple):
    """A transpose in bytes. Item (b, i, j) goes from `source + b*s0 + i*s1 + j*item` to `target + b*t0 + i*item + j*t2`.

    extents: batch, rows, columns. source_strides: s0, s1. target_strides: t0, t2.
    """

    source: int
    target: int
    item: int
    extents: tuple[int, int, int]
    source_strides: tuple[int, int]
    target_strides: tuple[int, int]


def turned(source: int, target: int, dims: Dims, run: int) -> Iterator[Turned]:
    """The transposes that a copy of these dims (`descriptors.merged`) comes to; none where it is not one."""
    if run not in EDGES or any(n % run for n in (source, target, *(stride for dim in dims for stride in dim[1:]))):
        return
    row = next((k for k, dim in enumerate(dims) if dim[2] == run != dim[1]), None)
    column = next((k for k, dim in enumerate(dims) if dim[1] == run != dim[2]), None)
    if row is None or column is None or min(dims[row][0], dims[column][0]) * run < SECTOR:
        return
    others = sorted(dim for k, dim in enumerate(dims) if k not in (row, column))
    yield from _unrolled(source, target, [*others, dims[row], dims[column]], run)


def _unrolled(source: int, target: int, dims: Dims, item: int) -> Iterator[Turned]:
    """dims: what else there is, smallest extent first, then rows, then columns."""
    if len(dims) > 3:
        extent, by_source, by_target = dims[0]
        for i in range(extent):
            yield from _unrolled(source + i * by_source, target + i * by_target, dims[1:], item)
        return
    (batch, s0, t0), (rows, s1, _), (columns, _, t2) = dims if len(dims) == 3 else [(1, 0, 0), *dims]
    edge = EDGES[item]
    tiles = [batch, rows // edge + 2, columns // edge + 2]  # at most
    if max(rows, columns) <= MOST_EXTENT and prod(tiles) <= MOST_ROWS:
        yield Turned(source, target, item, (batch, rows, columns), (s0, s1), (t0, t2))
        return
    longest = tiles.index(max(tiles))
    whole: Dims = [(batch, s0, t0), (rows, s1, item), (columns, item, t2)]
    extent, by_source, by_target = whole[longest]
    for first, count in ((0, extent // 2), (extent // 2, extent - extent // 2)):
        part = [*whole[:longest], (count, by_source, by_target), *whole[longest + 1 :]]
        yield from _unrolled(source + first * by_source, target + first * by_target, part, item)


def pack_turned(boxes: Iterable[Turned]) -> Descriptors:
    """The list for `box_transpose`. Raises InternalError E1570 where a list has more boxes than the kernel counts."""
    listed = list(boxes)
    out = np.zeros(len(listed), DESC)
    if not listed:
        return Descriptors(out, 0, 0)
    tiles: list[int] = []
    for box, to in zip(listed, out, strict=True):
        batch, rows, columns = box.extents
        log, edge = width_log(box.item), EDGES[box.item]
        # a side is moved 16 bytes at a time where its rows all lie alike: the grid of tiles then begins on 16 bytes
        wide_source, wide_target = (not any(n % 16 for n in side) for side in (box.source_strides, box.target_strides))
        column_skew = box.source % 16 // box.item if wide_source else 0
        row_skew = box.target % 16 // box.item if wide_target else 0
        down, across = -(-(rows + row_skew) // edge), -(-(columns + column_skew) // edge)
        to["src"], to["dst"], to["run"], to["op"] = box.source, box.target, box.item, log
        to["sstr"], to["dstr"] = (
            (*box.source_strides, box.item),
            (box.target_strides[0], box.item, box.target_strides[1]),
        )
        to["ext"], to["rows"], to["rows_per_tile"], to["tiles_per_row"] = box.extents, batch, down, across
        to["div1"], to["div2"], to["aux"] = magic(down), magic(across), column_skew | row_skew << 16
        to["vlog"], to["flags"] = 4 if wide_source else log, 4 if wide_target else log
        tiles.append(batch * down * across)
    nbytes = sum(prod(box.extents) * box.item for box in listed)
    return Descriptors(out, number_tiles(out, np.array(tiles, np.uint64)), nbytes)
