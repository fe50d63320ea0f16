"""Copies as descriptors: the packed list (kernels/ck.h, `ck_desc`) that every kernel walks.

A copy is a strided box on two sides (`plan.copy.Copy`). Its innermost dims that run on without a gap on both sides make
the run; up to three strided dims stay above it; what is above those is unrolled here. (4, 6) bf16 out of rows of 32
bytes into rows of 12:

    run 12 bytes, rows 4, strides 32 and 12: one tile, moved 4 bytes a thread

`pack` chooses one of three ways in which box_copy moves a box (see kernels/box_copy.cu) and cuts it into tiles of about
the same number of bytes. Copies that swap dims need another kernel (`transposes`); `launches` groups boxes by kernel.

Cost: some 10 us a copy. Copies of nothing make no descriptor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from math import gcd, prod
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import Copy

TILE = 16384  # bytes that a block moves at a time
ELEMENTS, SPANS, PIECES = range(3)  # the ways of box_copy.cu, `op`
SPANS_FROM = (64, 256, 256, 512)  # bytes of the shortest run that is a span, by log2 of the width both sides allow
LEVELS = 3
MOST_ROWS = (1 << 32) - 1
MOST = (1 << 64) - 1

DESC = np.dtype(
    {
        "names": [
            "src",
            "dst",
            "sstr",
            "dstr",
            "run",
            "tile0",
            "div1",
            "div2",
            "divr",
            "ext",
            "rows",
            "rows_per_tile",
            "tiles_per_row",
            "aux",
            "vlog",
            "op",
            "flags",
        ],
        "formats": [
            "<u8",
            "<u8",
            ("<i8", 3),
            ("<i8", 3),
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            ("<u4", 3),
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "u1",
            "u1",
            "<u2",
        ],
        "offsets": [0, 8, 16, 40, 64, 72, 80, 88, 96, 104, 116, 120, 124, 128, 132, 133, 134],
        "itemsize": 136,
    }
)


class Strided(NamedTuple):
    """A box on two sides in bytes: addresses, strides of at most three levels, and the contiguous run below them."""

    source: int
    target: int
    extents: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    run: int


class PackedDescriptors(NamedTuple):
    """A packed list, the number of its tiles, and the bytes that it moves."""

    packed: npt.NDArray[np.void]
    tiles: int
    nbytes: int


Dims = list[tuple[int, int, int]]  # extent, source stride, target stride; strides in bytes


def magic(divisor: int) -> int:
    """What `ck_div` multiplies by to divide 32-bit numbers by `divisor`."""
    return 0 if divisor <= 1 else MOST // divisor + 1


def magics(divisors: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.uint64]:
    """`magic` of each."""
    return np.uint64(MOST) // divisors.astype(np.uint64) + np.uint64(1)  # that of 1 wraps to 0


def merge_dims(copy: Copy, item: int, target_item: int | None = None) -> tuple[Dims, int]:
    """(strided dims, bytes of the contiguous run below them) of a copy that is not empty.

    Dims are in the order in which the target has them; neighbours that run on without a gap on both sides are one.
    target_item: bytes of an element of the target, where that is another; the run is that of the source.
    """
    pieces = (dim for dim in zip(copy.extents, copy.source_strides, copy.output_strides, strict=True) if dim[0] > 1)
    dims: Dims = []
    for extent, source, target in sorted(pieces, key=lambda dim: (-abs(dim[2]), -abs(dim[1]))):
        if dims and dims[-1][1] == extent * source and dims[-1][2] == extent * target:
            dims[-1] = (dims[-1][0] * extent, source, target)
        else:
            dims.append((extent, source, target))
    run = item
    if dims and dims[-1][1:] == (item, item if target_item is None else target_item):
        run = item * dims.pop()[0]
    return dims, run


def make_strided(copy: Copy, item: int, sources: Sequence[int], targets: Sequence[int]) -> Iterator[Strided]:
    """A copy as boxes of at most three levels and fewer than 2^32 rows. item: bytes of an element; sources, targets:
    the addresses of byte 0 of the files that the copy numbers."""
    if 0 not in copy.extents:
        dims, run = merge_dims(copy, item)
        source = sources[copy.source] + copy.source_offset
        target = targets[copy.output] + copy.output_offset
        yield from split_levels(source, target, dims, run)


def split_levels(source: int, target: int, dims: Dims, run: int) -> Iterator[Strided]:
    """A box of any number of dims as boxes of three at most and fewer than 2^32 rows: the first dim is unrolled or
    halved."""
    extent, by_source, by_target = dims[0] if dims else (1, 0, 0)
    if len(dims) > LEVELS:
        for i in range(extent):
            yield from split_levels(source + i * by_source, target + i * by_target, dims[1:], run)
    elif prod(dim[0] for dim in dims) > MOST_ROWS:
        half = extent // 2
        for begin, count in ((0, half), (half, extent - half)):
            remaining: Dims = [(count, by_source, by_target), *dims[1:]] if count > 1 else dims[1:]
            yield from split_levels(source + begin * by_source, target + begin * by_target, remaining, run)
    else:
        extents = tuple(dim[0] for dim in dims)
        source_strides = tuple(dim[1] for dim in dims)
        target_strides = tuple(dim[2] for dim in dims)
        yield Strided(source, target, extents, source_strides, target_strides, run)


def width_log(*numbers: int) -> int:
    """log2 of the widest access (1 to 16 bytes) that fits all these addresses, runs and strides."""
    common = gcd(16, *numbers)
    return common.bit_length() - 1


def pack(boxes: Iterable[Strided], *, tile: int = TILE, spans_from: Sequence[int] = SPANS_FROM) -> PackedDescriptors:
    """The list for `box_copy`: bytes from source to target. tile: bytes, a multiple of 128.

    Raises InternalError E1570 where a list has more boxes, or a box more tiles, than the kernel counts.
    """
    strided_boxes = list(boxes)
    packed = fill_list(strided_boxes)
    if not strided_boxes:
        return PackedDescriptors(packed, 0, 0)
    _choose_ways(packed, tile, spans_from)
    nbytes = sum(prod(box.extents) * box.run for box in strided_boxes)
    return PackedDescriptors(packed, number_tiles(packed, _cut(packed, tile)), nbytes)


def fill_list(listed: Sequence[Strided]) -> npt.NDArray[np.void]:
    """The list of these boxes, but for what depends on the kernel: tiles, ways and `divr`."""
    packed = np.zeros(len(listed), DESC)
    if not listed:
        return packed
    for name, column in (("src", 0), ("dst", 1), ("run", 5)):
        packed[name] = np.array([box[column] for box in listed], np.uint64)
    for name, column, missing in (("ext", 2, 1), ("sstr", 3, 0), ("dstr", 4, 0)):
        rows = [tuple(cast(tuple[int, ...], box[column])) for box in listed]
        packed[name] = np.array([(missing,) * (LEVELS - len(row)) + row for row in rows], packed.dtype[name].base)
    packed["rows"] = np.prod(packed["ext"], axis=1, dtype=np.uint64)
    packed["div1"] = magics(packed["ext"][:, 1])
    packed["div2"] = magics(packed["ext"][:, 2])
    return packed


def number_tiles(out: npt.NDArray[np.void], tiles: npt.NDArray[np.uint64]) -> int:
    """Set `tile0` by the tiles of each box. Returns their sum."""
    if len(out) > MOST_ROWS or int(tiles.max()) > MOST_ROWS:
        raise InternalError(f"{len(out)} boxes of up to {tiles.max()} tiles, want fewer than 2^32", code="E1570")
    ends = np.cumsum(tiles, dtype=np.uint64)
    out["tile0"] = ends - tiles
    return int(ends[-1])


def _choose_ways(out: npt.NDArray[np.void], tile: int, spans_from: Sequence[int]) -> None:
    """How each box is moved: `vlog`, `op` and `flags`."""
    run = out["run"]
    strides = np.concatenate([out["sstr"], out["dstr"]], axis=1).view(np.uint64)
    bits = out["src"] | out["dst"] | run | np.bitwise_or.reduce(strides, axis=1) | np.uint64(16)
    out["vlog"] = np.log2(bits & (~bits + np.uint64(1)))
    least = np.array([*spans_from, *[MOST] * (5 - len(spans_from))], np.uint64)[out["vlog"]]
    out["op"] = np.where(run > tile, PIECES, np.where(run >= least, SPANS, ELEMENTS))
    lanes = np.clip(np.ceil(np.log2(np.maximum(run, 16) / 16)), 1, 5)  # a thread a vector, as far as a warp goes
    out["flags"] = np.where(out["op"] == SPANS, lanes, 0)


def _cut(out: npt.NDArray[np.void], tile: int) -> npt.NDArray[np.uint64]:
    """Cut every box into tiles. Returns how many each has."""
    run = out["run"]
    rows = out["rows"].astype(np.uint64)
    pieces = out["op"] == PIECES
    piece = _up(_up(run, _up(run, tile)), 128) * np.uint64(128)  # of a row, in pieces of about the same size
    per_row = np.where(pieces, _up(run, piece), 1)
    per_tile = np.where(pieces, 1, np.clip(np.uint64(tile) // run, 1, rows))
    if int(per_row.max()) <= MOST_ROWS:  # else number_tiles raises
        out["tiles_per_row"], out["rows_per_tile"], out["aux"] = per_row, per_tile, np.where(pieces, piece, 0)
        out["divr"] = magics(
            np.where(pieces, per_row, np.where(out["op"] == ELEMENTS, run >> out["vlog"].astype("u8"), 1))
        )
    return np.where(pieces, rows * per_row, _up(rows, per_tile))


def _up(numbers: npt.NDArray[np.uint64], divisor: npt.NDArray[np.uint64] | int) -> npt.NDArray[np.uint64]:
    """numbers / divisor, rounded up."""
    by = np.asarray(divisor, np.uint64)
    return (numbers + (by - np.uint64(1))) // by


# ----------------------------------------------------------------------------------------------------
# Copies that swap dims, as descriptors for `box_transpose` (kernels/box_transpose.cu).
#
# box_copy would move such a copy item by item, one side of it scattered over as many sectors of memory as there are
# items. Here one dim of the copy runs on in the source (its stride is an item) and another in the target: rows and
# columns. What is left is the batch; dims beyond that are unrolled. (3, 5) fp32, row-major, to (5, 3), row-major:
#
#     item 4, rows 3, columns 5, source row stride 20, target column stride 12
#
# An item is the copy's innermost run, so (heads, positions, 8 bytes) to (positions, heads, 8 bytes) is a transpose of
# items of 8 bytes. Not a transpose: items of other sizes than 1, 2, 4, 8 and 16 bytes, or not on a multiple of their
# size; sides of less than a sector, where nothing would be won.


EDGES = {1: 128, 2: 64, 4: 64, 8: 32, 16: 16}  # items of a tile's side by bytes of an item, as in box_transpose.cu
SECTOR = 32  # bytes: the least that memory moves
MOST_EXTENT = 1 << 31


class Turned(NamedTuple):
    """A transpose in bytes. Item (b, i, j) goes from `source + b*s0 + i*s1 + j*item` to `target + b*t0 + i*item +
    j*t2`."""

    source: int
    target: int
    item: int
    extents: tuple[int, int, int]  # batch, rows, columns
    source_strides: tuple[int, int]  # s0, s1
    target_strides: tuple[int, int]  # t0, t2


def make_transposes(source: int, target: int, dims: Dims, run: int) -> Iterator[Turned]:
    """A copy of these dims (`descriptors.merge_dims`) as transposes; none if it is not a transpose."""
    strides = chain.from_iterable(dim[1:] for dim in dims)
    if run not in EDGES or any(nbytes % run for nbytes in (source, target, *strides)):
        return
    row = next((k for k, dim in enumerate(dims) if dim[2] == run != dim[1]), None)
    column = next((k for k, dim in enumerate(dims) if dim[1] == run != dim[2]), None)
    if row is None or column is None or min(dims[row][0], dims[column][0]) * run < SECTOR:
        return
    others = sorted(dim for k, dim in enumerate(dims) if k not in (row, column))
    yield from _unroll(source, target, [*others, dims[row], dims[column]], run)


def _unroll(source: int, target: int, dims: Dims, item: int) -> Iterator[Turned]:
    """dims: what else there is, smallest extent first, then rows, then columns."""
    if len(dims) > 3:
        extent, by_source, by_target = dims[0]
        for i in range(extent):
            yield from _unroll(source + i * by_source, target + i * by_target, dims[1:], item)
        return
    (batch, s0, t0), (rows, s1, _), (columns, _, t2) = dims if len(dims) == 3 else [(1, 0, 0), *dims]
    edge = EDGES[item]
    tiles = [batch, rows // edge + 2, columns // edge + 2]  # at most
    if max(rows, columns) <= MOST_EXTENT and prod(tiles) <= MOST_ROWS:
        yield Turned(source, target, item, (batch, rows, columns), (s0, s1), (t0, t2))
        return
    longest = tiles.index(max(tiles))
    all_dims: Dims = [(batch, s0, t0), (rows, s1, item), (columns, item, t2)]
    extent, by_source, by_target = all_dims[longest]
    for begin, count in ((0, extent // 2), (extent // 2, extent - extent // 2)):
        part = [*all_dims[:longest], (count, by_source, by_target), *all_dims[longest + 1 :]]
        yield from _unroll(source + begin * by_source, target + begin * by_target, part, item)


def pack_turned(boxes: Iterable[Turned]) -> PackedDescriptors:
    """The list for `box_transpose`. Raises InternalError E1570 where a list has more boxes than the kernel counts."""
    boxes_listed = list(boxes)
    packed = np.zeros(len(boxes_listed), DESC)
    if not boxes_listed:
        return PackedDescriptors(packed, 0, 0)

    tiles: list[int] = []
    for box, to in zip(boxes_listed, packed, strict=True):
        batch, rows, columns = box.extents
        log = width_log(box.item)
        edge = EDGES[box.item]
        # a side is moved 16 bytes at a time where its rows are all alike: the grid of tiles then begins on 16 bytes
        wide_source = not any(stride % 16 for stride in box.source_strides)
        wide_target = not any(stride % 16 for stride in box.target_strides)
        column_skew = box.source % 16 // box.item if wide_source else 0
        row_skew = box.target % 16 // box.item if wide_target else 0
        down = ceil_div(rows + row_skew, edge)
        across = ceil_div(columns + column_skew, edge)
        to["src"] = box.source
        to["dst"] = box.target
        to["run"] = box.item
        to["op"] = log
        to["sstr"] = (*box.source_strides, box.item)
        to["dstr"] = (box.target_strides[0], box.item, box.target_strides[1])
        to["ext"] = box.extents
        to["rows"] = batch
        to["rows_per_tile"] = down
        to["tiles_per_row"] = across
        to["div1"] = magic(down)
        to["div2"] = magic(across)
        to["aux"] = column_skew | row_skew << 16
        to["vlog"] = 4 if wide_source else log
        to["flags"] = 4 if wide_target else log
        tiles.append(batch * down * across)

    nbytes = sum(prod(box.extents) * box.item for box in boxes_listed)
    return PackedDescriptors(packed, number_tiles(packed, np.array(tiles, np.uint64)), nbytes)


# ----------------------------------------------------------------------------------------------------
# Do boxes meet? Kernels write in no order, so a byte that is written twice, or written and read, is a race: refused
# here.
#
# Two boxes meet if some byte of one is some byte of the other:
#
#     start + i0*s0 + i1*s1 + i2*s2 + x == start' + j0*t0 + j1*t1 + j2*t2 + y
#           all within their extents, x and y in the runs
#
# The search fixes the level of the largest stride first: only the indexes are tried for which what is left can still be
# made up by the smaller levels. Boxes of one tensor, whose strides are alike and nested, take two tries a level.
#
# Cost: a sort by first byte, then some 5 us for each pair whose ranges of bytes cross: k column slices of one tensor
# are k*k/2 of them.


MOST_TRIES = 100_000
Levels = Sequence[tuple[int, int, int]]  # lowest index, highest index, stride: of a sum of products


class BoxSide(NamedTuple):
    """The bytes that a box reads or writes."""

    start: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    run: int

    @property
    def hull(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        reach = [(n - 1) * stride for n, stride in zip(self.extents, self.strides, strict=True)]
        return self.start + sum(r for r in reach if r < 0), self.start + sum(r for r in reach if r > 0) + self.run


def sides(boxes: Iterable[Strided]) -> tuple[list[BoxSide], list[BoxSide]]:
    """(what is read, what is written)."""
    boxes_listed = list(boxes)
    read = [BoxSide(box.source, box.extents, box.source_strides, box.run) for box in boxes_listed]
    return read, [BoxSide(box.target, box.extents, box.target_strides, box.run) for box in boxes_listed]


def refuse_overlap(boxes: Iterable[Strided]) -> None:
    """Raise InternalError E1571 where a byte is written twice, or written and read, by one list; E1572 where that can't
    be found out."""
    read, written = sides(boxes)
    for side in written:
        if meets_itself(side):
            raise InternalError(f"a box writes a byte twice: {side}", code="E1571")
    for reading, writing in crossing(read, written):
        if meet(reading, writing):
            raise InternalError(
                f"two boxes of one list meet where one of them is written: {reading}, {writing}", code="E1571"
            )


def crossing(read: Sequence[BoxSide], written: Sequence[BoxSide]) -> Iterator[tuple[BoxSide, BoxSide]]:
    """The pairs whose hulls cross, at least one of which is written."""
    marked = sorted(((*side.hull, number >= len(read), number) for number, side in enumerate([*read, *written])))
    everything = [*read, *written]
    open_sides: list[tuple[int, bool, int]] = []  # by end
    for begin, end, writes, number in marked:
        while open_sides and open_sides[0][0] <= begin:
            heappop(open_sides)
        for _, other_writes, other_number in open_sides:
            if writes or other_writes:
                yield everything[other_number], everything[number]
        heappush(open_sides, (end, writes, number))


def meets_itself(side: BoxSide) -> bool:
    """Are two of its elements at one place? A stride that clears all that is below it is proof that they are not."""
    reach = side.run
    levels = [(n, abs(s)) for n, s in zip(side.extents, side.strides, strict=True) if n > 1]
    nested = True
    for extent, stride in sorted(levels, key=lambda level: level[1]):
        nested = nested and stride >= reach
        reach += (extent - 1) * stride
    if nested:
        return False
    # Some difference of indexes other than all zeros gives less than a run. Up to its sign, its first index that is not
    # 0
    # is positive.
    for k, (extent, stride) in enumerate(levels):
        inner_levels = [(1 - n, n - 1, s) for n, s in levels[k + 1 :]]
        if _reaches([(1, extent - 1, stride), *inner_levels], 1 - side.run, side.run - 1):
            return True
    return False


def meet(one: BoxSide, other: BoxSide) -> bool:
    """Have two boxes a byte in common?"""
    levels = [(0, n - 1, s) for n, s in zip(one.extents, one.strides, strict=True)]
    levels += [(1 - n, 0, s) for n, s in zip(other.extents, other.strides, strict=True)]
    distance = other.start - one.start
    return _reaches(levels, distance - (one.run - 1), distance + other.run - 1)


def _reaches(levels: Levels, low: int, high: int) -> bool:
    """Is there a sum of index * stride, each index in its range, in [low, high]?"""
    # equal strides are one level; signs are folded into the ranges
    by_stride: dict[int, tuple[int, int]] = {}
    for first, last, stride in levels:
        first, last = (first, last) if stride >= 0 else (-last, -first)
        before = by_stride.get(abs(stride), (0, 0))
        by_stride[abs(stride)] = before[0] + first, before[1] + last

    by_stride.pop(0, None)
    ordered = sorted(((stride, first, last) for stride, (first, last) in by_stride.items()), reverse=True)

    # what the levels from k on can make up
    least = [0]
    reach = [0]
    for stride, first, last in reversed(ordered):
        least.insert(0, least[0] + first * stride)
        reach.insert(0, reach[0] + last * stride)

    tries = 0
    todo = [(0, low, high)]
    while todo:
        level, below, above = todo.pop()
        tries += 1
        if tries > MOST_TRIES:
            raise InternalError(f"can't find out whether two boxes meet: {levels}", code="E1572")
        if level == len(ordered):
            if below <= 0 <= above:
                return True
            continue
        stride, first, last = ordered[level]
        start = max(first, ceil_div(below - reach[level + 1], stride))
        stop = min(last, (above - least[level + 1]) // stride)
        todo.extend(
            (level + 1, below - k * stride, above - k * stride) for k in range(stop, start - 1, -1)[:MOST_TRIES]
        )

    return False


# ----------------------------------------------------------------------------------------------------
# Copies as launches: which kernel moves which of them, one launch a kernel.
#
#     for launch in launches([(copy, 2), ...], sources=[address, ...], targets=[address, ...]):
#         kernels.launch(device, launch)
#
# A copy that swaps dims goes to box_transpose, every other to box_copy; both kernels may run at once, since no box of
# the whole list may meet another that is written (`overlap.py`).


class Launch(NamedTuple):
    """A kernel (`box_copy` or `box_transpose`) and its list."""

    kernel: str
    boxes: PackedDescriptors


def boxes_of(copy: Copy, item: int, sources: Sequence[int], targets: Sequence[int]) -> Sequence[Strided | Turned]:
    """A copy as boxes or transposes. item: bytes of an element; sources, targets: the addresses of byte 0 of the files
    that the copy numbers."""
    if 0 in copy.extents:
        return ()
    dims, run = merge_dims(copy, item)
    source = sources[copy.source] + copy.source_offset
    target = targets[copy.output] + copy.output_offset
    return list(make_transposes(source, target, dims, run)) or list(split_levels(source, target, dims, run))


def launches(
    copies: Iterable[tuple[Copy, int]], sources: Sequence[int], targets: Sequence[int], *, apart: bool = False
) -> tuple[Launch, ...]:
    """The launches that carry out copies, each with the bytes of its element. Copies of nothing make none.

    apart: the caller knows that no byte is written twice, nor written and read. Else that is looked at: InternalError
    E1571 or E1572.
    """
    boxes = [box for copy, item in copies for box in boxes_of(copy, item, sources, targets)]
    plain = [box for box in boxes if isinstance(box, Strided)]
    swapped = [box for box in boxes if isinstance(box, Turned)]
    if not apart:
        refuse_overlap([*plain, *(as_strided(box) for box in swapped)])
    groups = []
    if plain:
        groups.append(Launch("box_copy", pack(plain)))
    if swapped:
        groups.append(Launch("box_transpose", pack_turned(swapped)))
    return tuple(groups)


def as_strided(box: Turned) -> Strided:
    """The same bytes item by item: what box_copy would do."""
    s0, s1 = box.source_strides
    t0, t2 = box.target_strides
    return Strided(box.source, box.target, box.extents, (s0, s1, box.item), (t0, box.item, t2), box.item)
