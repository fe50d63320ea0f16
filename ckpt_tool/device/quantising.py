"""Quantising as lists: boxes of floats, and where their codes and scales go.

    4096 x 7168 BF16 as fp8-block, its codes and scales contiguous:
    FloatBox(floats, codes, (1, 4096, 7168), (0, 14336), (0, 7168), scales, (0, 224))

Boxes are whole blocks: they begin where one does, and what they leave out of their last ones is not there. Where rows
of groups run on without a gap on all three sides they are one row. The bits are those of `quantised.nearest_codes`.
Cost: some 10 us a box. What it does not do: turned matrices (gpt-oss), errors of what is made, the largest of a tensor
(nvfp4's `whole` is given).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.casts import CAST_TILE, UNFIT, kind
from ckpt_tool.device.descriptors import MOST_ROWS, PackedDescriptors, Strided, fill_list, magic, magics, number_tiles
from ckpt_tool.errors import InternalError
from ckpt_tool.weight_schemes.written_schemes import SCHEMES, Scheme

# as in box_quantise.cu: of a block, and values of a row that a thread has in registers
MOST_THREADS = 256
HELD = 64
FLOATS = ("F32", "BF16", "F16")
TABLE = np.dtype(
    {
        "names": ["scales", "matrix_stride", "row_stride", "div_down", "down", "kind", "whole"],
        "formats": ["<u8", "<i8", "<i8", "<u8", "<u4", "<u4", "<f4"],
        "offsets": [0, 8, 16, 24, 32, 36, 40],
        "itemsize": 48,
    }
)


class FloatBox(NamedTuple):
    """A box of floats, (matrices, rows, columns), and where its codes and scales go. All strides are in bytes, from a
    matrix and from a row (of scales: of blocks) to the next."""

    source: int
    target: int
    shape: tuple[int, int, int]
    source_strides: tuple[int, int]
    target_strides: tuple[int, int]
    scales: int
    scale_strides: tuple[int, int]
    whole: float = 1.0  # nvfp4's factor of the scales (`nearest_codes.whole_of`)


class FloatList(NamedTuple):
    """A packed list of floats and the table of its boxes. Packed box k is part of box `records[k]` of the `given`
    ones."""

    boxes: PackedDescriptors
    table: npt.NDArray[np.void]
    source: int
    scheme: int
    records: tuple[int, ...]
    given: int
    # of a block, as few as hold the longest row, so that many rows are in flight; 0 for the kernel's own choice
    threads: int


def pack_floats(boxes: Iterable[FloatBox], source: DType, scheme: Scheme, scales: DType | None = None) -> FloatList:
    """The list for `box_quantise`. scales: their dtype where the scheme leaves it open, else that of the floats. Raises
    InternalError E1573 for what the kernel does not make, and for groups that do not divide a row."""
    scale_dtype = DTYPES[scheme.scales] if scheme.scales else scales or source
    if scheme != SCHEMES.get(scheme.name) or not {source.name, scale_dtype.name if not scheme.scales else "F32"} <= {
        *FLOATS
    }:
        raise InternalError(f"no kernel makes {scheme.name} of {source.name}, scales {scale_dtype.name}", code=UNFIT)

    strided_boxes: list[Strided] = []
    table: list[tuple[float, ...]] = []
    records: list[int] = []
    number = -1
    item = source.bits // 8
    size = scale_dtype.bits // 8

    for number, box in enumerate(boxes):
        if 0 in box.shape:
            continue
        if not scheme.fits(box.shape) or any(n % size for n in (box.scales, *box.scale_strides)):
            raise InternalError(f"{scheme.name} of {box.shape}, scales at {box.scales:#x}", code=UNFIT)
        for piece in _pieces(box, scheme, item, size):
            matrices, rows, columns = piece.shape
            down = ceil_div(rows, scheme.block[0])
            strides = (piece.source_strides, piece.target_strides)
            strided_boxes.append(Strided(piece.source, piece.target, (matrices, rows), *strides, columns))
            about = kind(scale_dtype) if scale_dtype.name in FLOATS else 0
            table.append((piece.scales, *piece.scale_strides, magic(down), down, about, piece.whole))
            records.append(number)

    packed = fill_list(strided_boxes)
    tiles = _cut(packed, item, scheme)
    packed["aux"] = np.arange(len(packed))
    nbytes = int((packed["rows"] * packed["run"]).sum()) * item
    of_scheme = list(SCHEMES).index(scheme.codes_of)
    threads = 0
    if scheme.block[1] == 0:
        threads = min(ceil_div(int(packed["run"].max(initial=1)), 32 * HELD) * 32, MOST_THREADS)

    boxes_ = PackedDescriptors(packed, tiles, nbytes)
    return FloatList(boxes_, np.array(table, TABLE), kind(source), of_scheme, tuple(records), number + 1, threads)


def _pieces(box: FloatBox, scheme: Scheme, item: int, size: int) -> Iterator[FloatBox]:
    """A box as the kernel counts it: rows of groups in one where they run on, matrices as far as 32 bits number their
    rows."""
    matrices, rows, columns = box.shape
    if scheme.block[0] == 1 and scheme.block[1]:
        row = (columns * item, columns * scheme.bits // 8, columns // scheme.block[1] * size)
        sides = (box.source_strides, box.target_strides, box.scale_strides)
        if all(rows == 1 or side[1] == extent for side, extent in zip(sides, row, strict=True)):
            if all(matrices == 1 or side[0] == rows * extent for side, extent in zip(sides, row, strict=True)):
                matrices, rows, columns = 1, 1, matrices * rows * columns
            else:
                rows, columns = 1, rows * columns
    matrix_limit = MOST_ROWS // rows
    for matrix in range(0, matrices, matrix_limit):
        yield box._replace(
            source=box.source + matrix * box.source_strides[0],
            target=box.target + matrix * box.target_strides[0],
            scales=box.scales + matrix * box.scale_strides[0],
            shape=(min(matrix_limit, matrices - matrix), rows, columns),
        )


def _cut(out: npt.NDArray[np.void], item: int, scheme: Scheme) -> int:
    """Cut every box into tiles: of blocks one each. item: bytes of a float. Returns their sum."""
    if not len(out):
        return 0

    run = out["run"]
    rows = out["rows"].astype(np.uint64)
    chunk = np.uint64(16 // item)
    codes = int(chunk) * scheme.bits // 8  # bytes of a chunk of them
    off = run % chunk  # is anything off the grid of chunks?
    for address, strides, grid in (("src", "sstr", 16), ("dst", "dstr", codes)):
        off |= out[address] % np.uint64(grid)
        off |= np.bitwise_or.reduce(out[strides] % grid, axis=1).view(np.uint64)

    out["vlog"] = off == 0
    high, wide = scheme.block
    if high == 1 and wide:
        tile = np.uint64(CAST_TILE)
        per_row = (run + tile - np.uint64(1)) // tile
        per_tile = np.clip(tile // run, 1, rows)  # 1 of rows that are cut
        tiles = np.where(per_row > 1, rows * per_row, (rows + per_tile - np.uint64(1)) // per_tile)
        out["divr"] = magics(np.where(per_row > 1, per_row, run // chunk))
    else:
        down = (out["ext"][:, 2] + np.uint64(high - 1)) // np.uint64(high)
        per_row = (run + np.uint64(wide - 1)) // np.uint64(wide) if wide else np.ones(len(out), np.uint64)
        per_tile = np.ones(len(out), np.uint64)
        tiles = out["ext"][:, 1] * down * per_row
        out["divr"] = magics(per_row)

    total = number_tiles(out, tiles)
    out["tiles_per_row"], out["rows_per_tile"] = per_row, per_tile
    return total
