"""Copies as descriptors: the packed list (kernels/ck.h, `ck_desc`) that every kernel walks.

A copy is a strided box on two sides (`plan.copy.Copy`). Its innermost dims that run on without a gap on both sides make the
run; up to three strided dims stay above it; what lies above those is unrolled here. (4, 6) bf16 out of rows of 32 bytes into
rows of 12:

    run 12 bytes, rows 4, strides 32 and 12: one tile, moved 4 bytes a thread

`pack` chooses the way in which box_copy moves each box (kernels/box_copy.cu tells the three) and cuts it into tiles of about
the same number of bytes. Copies that swap dims are the work of another kernel: transposes.py; launches.py parts a list.

Cost: some 10 us a copy. Copies of nothing make no descriptor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import Copy

TILE = 16384  # bytes that a block moves at a time
ELEMENTS, SPANS, PIECES = range(3)  # the ways of box_copy.cu, `op`
SPANS_FROM = (64, 64, 256)  # bytes of the shortest run that is moved as a span, by log2 of the width both sides allow
LEVELS = 3
MOST_ROWS = (1 << 32) - 1
MOST = (1 << 64) - 1

DESC = np.dtype(
    {
        "names": ["src", "dst", "sstr", "dstr", "run", "tile0", "div1", "div2", "divr", "ext", "rows",
                  "rows_per_tile", "tiles_per_row", "aux", "vlog", "op", "flags"],
        "formats": ["<u8", "<u8", ("<i8", 3), ("<i8", 3), "<u8", "<u8", "<u8", "<u8", "<u8", ("<u4", 3), "<u4",
                    "<u4", "<u4", "<u4", "u1", "u1", "<u2"],
        "offsets": [0, 8, 16, 40, 64, 72, 80, 88, 96, 104, 116, 120, 124, 128, 132, 133, 134],
        "itemsize": 136,
    }
)  # fmt: skip


class Strided(NamedTuple):
    """A box on two sides in bytes: addresses, strides of at most three levels, and the contiguous run below them."""

    source: int
    target: int
    extents: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    run: int


class Descriptors(NamedTuple):
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


def merged(copy: Copy, item: int, target_item: int | None = None) -> tuple[Dims, int]:
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


def strided(copy: Copy, item: int, sources: Sequence[int], targets: Sequence[int]) -> Iterator[Strided]:
    """The boxes of at most three levels and fewer than 2^32 rows that a copy comes to. item: bytes of an element;
    sources, targets: the addresses of byte 0 of the files that the copy numbers."""
    if 0 not in copy.extents:
        dims, run = merged(copy, item)
        source, target = sources[copy.source] + copy.source_offset, targets[copy.output] + copy.output_offset
        yield from levelled(source, target, dims, run)


def levelled(source: int, target: int, dims: Dims, run: int) -> Iterator[Strided]:
    """A box of any number of dims as boxes of three at most and fewer than 2^32 rows: the first dim is unrolled or halved."""
    extent, by_source, by_target = dims[0] if dims else (1, 0, 0)
    if len(dims) > LEVELS:
        for i in range(extent):
            yield from levelled(source + i * by_source, target + i * by_target, dims[1:], run)
    elif prod(dim[0] for dim in dims) > MOST_ROWS:
        half = extent // 2
        for first, count in ((0, half), (half, extent - half)):
            rest: Dims = [(count, by_source, by_target), *dims[1:]] if count > 1 else dims[1:]
            yield from levelled(source + first * by_source, target + first * by_target, rest, run)
    else:
        columns = [tuple(dim[k] for dim in dims) for k in range(3)]
        yield Strided(source, target, columns[0], columns[1], columns[2], run)


def width_log(*numbers: int) -> int:
    """log2 of the widest access (1 to 16 bytes) that fits all these addresses, runs and strides."""
    common = gcd(16, *numbers)
    return common.bit_length() - 1


def pack(boxes: Iterable[Strided], *, tile: int = TILE, spans_from: Sequence[int] = SPANS_FROM) -> Descriptors:
    """The list for `box_copy`: bytes from source to target. tile: bytes, a multiple of 128.

    Raises InternalError E1570 where a list has more boxes, or a box more tiles, than the kernel counts.
    """
    listed = list(boxes)
    out = filled(listed)
    if not listed:
        return Descriptors(out, 0, 0)
    _choose_ways(out, tile, spans_from)
    nbytes = sum(prod(box.extents) * box.run for box in listed)
    return Descriptors(out, number_tiles(out, _cut(out, tile)), nbytes)


def filled(listed: Sequence[Strided]) -> npt.NDArray[np.void]:
    """The list of these boxes, but for what depends on the kernel: tiles, ways and `divr`."""
    out = np.zeros(len(listed), DESC)
    if not listed:
        return out
    for name, column in (("src", 0), ("dst", 1), ("run", 5)):
        out[name] = np.array([box[column] for box in listed], np.uint64)
    for name, column, missing in (("ext", 2, 1), ("sstr", 3, 0), ("dstr", 4, 0)):
        rows = [tuple(cast(tuple[int, ...], box[column])) for box in listed]
        out[name] = np.array([(missing,) * (LEVELS - len(row)) + row for row in rows], out.dtype[name].base)
    out["rows"] = np.prod(out["ext"], axis=1, dtype=np.uint64)
    out["div1"], out["div2"] = magics(out["ext"][:, 1]), magics(out["ext"][:, 2])
    return out


def number_tiles(out: npt.NDArray[np.void], tiles: npt.NDArray[np.uint64]) -> int:
    """Set `tile0` by the tiles of each box. Returns their sum."""
    if len(out) > MOST_ROWS or int(tiles.max()) > MOST_ROWS:
        raise InternalError(f"{len(out)} boxes of up to {tiles.max()} tiles, want fewer than 2^32", code="E1570")
    ends = np.cumsum(tiles, dtype=np.uint64)
    out["tile0"] = ends - tiles
    return int(ends[-1])


def _choose_ways(out: npt.NDArray[np.void], tile: int, spans_from: Sequence[int]) -> None:
    """How each box is moved: `vlog`, `op` and `flags`."""
    run, strides = out["run"], np.concatenate([out["sstr"], out["dstr"]], axis=1).view(np.uint64)
    bits = out["src"] | out["dst"] | run | np.bitwise_or.reduce(strides, axis=1) | np.uint64(16)
    out["vlog"] = np.log2(bits & (~bits + np.uint64(1)))
    least = np.array([*spans_from, *[MOST] * (5 - len(spans_from))], np.uint64)[out["vlog"]]
    out["op"] = np.where(run > tile, PIECES, np.where(run >= least, SPANS, ELEMENTS))
    lanes = np.clip(np.ceil(np.log2(np.maximum(run, 16) / 16)), 1, 5)  # a thread a vector, as far as a warp goes
    out["flags"] = np.where(out["op"] == SPANS, lanes, 0)


def _cut(out: npt.NDArray[np.void], tile: int) -> npt.NDArray[np.uint64]:
    """Cut every box into tiles. Returns how many each has."""
    run, rows = out["run"], out["rows"].astype(np.uint64)
    pieces = out["op"] == PIECES
    each = _up(_up(run, _up(run, tile)), 128) * np.uint64(128)  # of a row, in pieces of about the same size
    per_row = np.where(pieces, _up(run, each), 1)
    per_tile = np.where(pieces, 1, np.clip(np.uint64(tile) // run, 1, rows))
    if int(per_row.max()) <= MOST_ROWS:  # else number_tiles raises
        out["tiles_per_row"], out["rows_per_tile"], out["aux"] = per_row, per_tile, np.where(pieces, each, 0)
        out["divr"] = magics(
            np.where(pieces, per_row, np.where(out["op"] == ELEMENTS, run >> out["vlog"].astype("u8"), 1))
        )
    return np.where(pieces, rows * per_row, _up(rows, per_tile))


def _up(numbers: npt.NDArray[np.uint64], divisor: npt.NDArray[np.uint64] | int) -> npt.NDArray[np.uint64]:
    """numbers / divisor, rounded up."""
    by = np.asarray(divisor, np.uint64)
    return (numbers + (by - np.uint64(1))) // by
