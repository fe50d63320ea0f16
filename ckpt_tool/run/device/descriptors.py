"""Copies as descriptors: the packed list (kernels/ck.h, `ck_desc`) that every kernel walks.

A copy is a strided box on two sides (`plan.copy.Copy`). Its innermost dims that run on without a gap on both sides make the
run; up to three strided dims stay above it; what lies above those is unrolled here. (4, 6) bf16 out of rows of 32 bytes into
rows of 12:

    run 12 bytes, rows 4, strides 32 and 12: one tile

Cost: some 10 us a copy. Copies of nothing make no descriptor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import Copy

TILE = 32768  # bytes, as in box_copy.cu
LEVELS = 3
MOST_ROWS = (1 << 32) - 1

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


def magic(divisor: int) -> int:
    """What `ck_div` multiplies by to divide 32-bit numbers by `divisor`."""
    return 0 if divisor <= 1 else (1 << 64) // divisor + (1 if (1 << 64) % divisor else 0)


def strided(copy: Copy, item: int, sources: Sequence[int], targets: Sequence[int]) -> Iterator[Strided]:
    """The boxes of at most three levels and fewer than 2^32 rows that a copy comes to. item: bytes of an element;
    sources, targets: the addresses of byte 0 of the files that the copy numbers."""
    if 0 in copy.extents:
        return
    dims: list[list[int]] = []
    for extent, source, target in zip(copy.extents, copy.source_strides, copy.output_strides, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == extent * source and dims[-1][2] == extent * target:
            dims[-1] = [dims[-1][0] * extent, source, target]
        else:
            dims.append([extent, source, target])
    run = item
    if dims and dims[-1][1] == dims[-1][2] == item:
        run = item * dims.pop()[0]
    yield from _unrolled(
        sources[copy.source] + copy.source_offset, targets[copy.output] + copy.output_offset, dims, run
    )


def _unrolled(source: int, target: int, dims: list[list[int]], run: int) -> Iterator[Strided]:
    if len(dims) > LEVELS:
        extent, by_source, by_target = dims[0]
        for i in range(extent):
            yield from _unrolled(source + i * by_source, target + i * by_target, dims[1:], run)
        return
    rows = prod(dim[0] for dim in dims)
    if rows > MOST_ROWS:
        extent, by_source, by_target = dims[0]
        half = extent // 2
        yield from _unrolled(source, target, [[half, by_source, by_target], *dims[1:]], run)
        rest = [[extent - half, by_source, by_target], *dims[1:]]
        yield from _unrolled(source + half * by_source, target + half * by_target, rest, run)
        return
    columns = [tuple(dim[k] for dim in dims) for k in range(3)]
    yield Strided(source, target, columns[0], columns[1], columns[2], run)


def width_log(*numbers: int) -> int:
    """log2 of the widest access (1 to 16 bytes) that fits all these addresses, runs and strides."""
    common = gcd(16, *numbers)
    return common.bit_length() - 1


def pack(boxes: Iterable[Strided]) -> Descriptors:
    """The list for `box_copy`: bytes from source to target. InternalError where a list is too long for its number."""
    rows: list[tuple[object, ...]] = []
    tile, nbytes = 0, 0
    for box in boxes:
        count = prod(box.extents)
        extents = (1,) * (LEVELS - len(box.extents)) + box.extents
        by_source = (0,) * (LEVELS - len(box.extents)) + box.source_strides
        by_target = (0,) * (LEVELS - len(box.extents)) + box.target_strides
        per_row = -(-box.run // TILE)
        per_tile = 1 if per_row > 1 else min(count, max(1, TILE // box.run))
        log = width_log(box.source, box.target, box.run, *box.source_strides, *box.target_strides)
        rows.append((box.source, box.target, by_source, by_target, box.run, tile, magic(extents[1]), magic(extents[2]),
                     magic(box.run >> log if box.run < TILE else 1), extents, count, per_tile, per_row, 0, log, 0, 0))  # fmt: skip
        tile += count * per_row if per_row > 1 else -(-count // per_tile)
        nbytes += count * box.run
    if len(rows) > MOST_ROWS:
        raise InternalError(f"{len(rows)} boxes in one list, want fewer than 2^32", code="E1570")
    return Descriptors(np.array(rows, DESC), tile, nbytes)
