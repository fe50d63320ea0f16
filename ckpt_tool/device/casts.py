"""Casts and dequantising as lists: copies whose two sides have different dtypes, and codes with the grid of their
scales.

A list for `box_cast` is one for `box_copy` that counts elements. (4, 6) fp32 out of rows of 32 bytes into rows of 12:

    run 6 elements, rows 4, strides 32 and 12; two elements a group if all of that is on their grid, here by element

Codes are boxes of (matrices, rows, columns): a run is never joined with the next one, as another row may have another
scale. F4 has two codes a byte: addresses and strides of its side count half bytes.

    256 x 512 E4M3 with scales of 128 x 128, rows 64.. and columns 32.. of it, wherever they are stored now:
    CodeBox(codes, out, (1, 192, 480), (0, 512), (0, 960), CastScales(address, F32, (128, 128), (0, 16)), row=64,
    column=32)

The bits are those of `run.compute.cast` and of `quantised`; what counts as lost too.
Cost: some 10 us a box. What it does not do: zero points, global scales and packed integers (`quantised` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.core.dtype import DType
from ckpt_tool.device.descriptors import (
    MOST_ROWS,
    PackedDescriptors,
    Strided,
    fill_list,
    magic,
    magics,
    merge_dims,
    number_tiles,
    split_levels,
)
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import Copy

CAST_TILE = 8192  # elements, as in box_cast.cu
# as `ck_kind` numbers them; U8 are E8M0 where they are scales
KINDS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "F4")
_SCALES = {
    "F32": (KINDS.index("F32"), 4),
    "BF16": (KINDS.index("BF16"), 2),
    "F8_E8M0": (KINDS.index("F8_E8M0"), 1),
    "U8": (KINDS.index("F8_E8M0"), 1),
}
_LONGEST = 1 << 31  # rows or columns of a box: with those before them in their block they fit 32 bits
UNFIT = "E1573"

SCALES = np.dtype(
    {
        "names": [
            "address",
            "matrix_stride",
            "row_stride",
            "div_height",
            "div_width",
            "row0",
            "column0",
            "width",
            "kind",
        ],
        "formats": ["<u8", "<i8", "<i8", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4"],
        "offsets": [0, 8, 16, 24, 32, 40, 44, 48, 52],
        "itemsize": 64,
    }
)


class Casts(NamedTuple):
    """A packed list from one kind of element to another."""

    boxes: PackedDescriptors
    source: int
    target: int
    records: int  # how many numbers its boxes have in `aux`


class CastScales(NamedTuple):
    """The scales of a tensor: that of row 0, column 0 of a box's first matrix is at `address`."""

    address: int
    dtype: DType
    block: tuple[int, int]  # (rows, columns) that share one
    # bytes from those of a matrix to those of the next, 0 where all share them, and from a row of scales to the next
    strides: tuple[int, int]


class CodeBox(NamedTuple):
    """A box of codes, (matrices, rows, columns), and where its floats go."""

    source: int  # address of the first code
    # target, target_strides: the same in bytes. row,
    target: int
    shape: tuple[int, int, int]
    # from a matrix, from a row to the next. Of F4 all three count half bytes: codes that begin with the byte at A have
    # source 2 * A.
    source_strides: tuple[int, int]
    target_strides: tuple[int, int]
    scales: CastScales
    row: int = 0
    column: int = 0  # where the box begins in its matrix


class CodeList(NamedTuple):
    """A packed list of codes and the scales of its boxes. Packed box k is part of box `records[k]` of the `given`
    ones."""

    boxes: PackedDescriptors
    scales: npt.NDArray[np.void]
    source: int
    target: int
    records: tuple[int, ...]
    given: int


class Counted(NamedTuple):
    """lost: finite values that became infinite or NaN. nan_scales: elements whose scale is NaN, which the CPU
    refuses."""

    lost: int
    nan_scales: int


def kind(dtype: DType) -> int:
    """The number of a dtype in the kernels. Raises InternalError E1573 for one that they don't know."""
    if dtype.name not in KINDS:
        raise InternalError(f"the kernels have no {dtype.name}", code=UNFIT)
    return KINDS.index(dtype.name)


def cast_boxes(
    copy: Copy, source: DType, target: DType, sources: Sequence[int], targets: Sequence[int]
) -> Iterator[Strided]:
    """The boxes of a copy between two dtypes, with `run` in elements. sources, targets: addresses of byte 0 of the
    files."""
    if 0 in copy.extents:
        return
    item = source.bits // 8
    dims, run = merge_dims(copy, item, target.bits // 8)
    begin = sources[copy.source] + copy.source_offset
    end = targets[copy.output] + copy.output_offset
    yield from split_levels(begin, end, dims, run // item)


def line(source: int, target: int, numel: int) -> list[Strided]:
    """`numel` elements that run on without a gap on both sides, by address."""
    return [Strided(source, target, (), (), (), numel)] if numel else []


def pack_casts(boxes: Iterable[Strided], source: DType, target: DType, records: Sequence[int] = ()) -> Casts:
    """The list for `box_cast`. boxes: as `cast_boxes` gives them. records: the number under which each box's lost
    values are counted; all under 0 where there are none."""
    strided_boxes = list(boxes)
    packed = fill_list(strided_boxes)
    item = target.bits // 8
    tiles = _cut(packed, source.bits // 8, item)
    if records:
        packed["aux"] = records
    nbytes = int((packed["rows"] * packed["run"]).sum()) * item
    return Casts(PackedDescriptors(packed, tiles, nbytes), kind(source), kind(target), max(records, default=0) + 1)


def pack_codes(boxes: Iterable[CodeBox], codes: DType, target: DType) -> CodeList:
    """The list for `box_dequantise`. Raises InternalError E1573 for scales off their own grid, or of a dtype
    other than F32, BF16, F8_E8M0 and U8: those are cast to F32 first."""
    strided_boxes: list[Strided] = []
    scales: list[tuple[int, ...]] = []
    records: list[int] = []
    number = -1
    # of F4 half a byte
    step = max(1, codes.bits // 8)
    item = target.bits // 8
    for number, box in enumerate(boxes):
        if 0 in box.shape:
            continue
        for piece, scale in _pieces(box, step, item):
            strided_boxes.append(piece)
            scales.append(scale)
            records.append(number)
    out = fill_list(strided_boxes)
    packed = np.array(scales, SCALES)
    tiles = _cut(out, step, item, packed)
    out["aux"] = np.arange(len(out))
    nbytes = int((out["rows"] * out["run"]).sum()) * item
    return CodeList(
        PackedDescriptors(out, tiles, nbytes), packed, kind(codes), kind(target), tuple(records), number + 1
    )


def _cut(out: npt.NDArray[np.void], step: int, item: int, scales: npt.NDArray[np.void] | None = None) -> int:
    """Cut every box into tiles. step: what an element adds to an address of the source. Returns their sum."""
    if not len(out):
        return 0
    run = out["run"]
    rows = out["rows"].astype(np.uint64)
    per_row = (run + np.uint64(CAST_TILE - 1)) // np.uint64(CAST_TILE)
    per_tile = np.clip(np.uint64(CAST_TILE) // run, 1, rows)  # 1 of rows that are cut
    tiles = np.where(per_row > 1, rows * per_row, (rows + per_tile - np.uint64(1)) // per_tile)
    total = number_tiles(out, tiles)
    out["tiles_per_row"], out["rows_per_tile"] = per_row, per_tile
    group = 16 // max(step, item)
    off = run % np.uint64(group)  # is anything off the grid of groups?
    for address, strides, size in (("src", "sstr", step), ("dst", "dstr", item)):
        off |= out[address] % np.uint64(group * size)
        off |= np.bitwise_or.reduce(out[strides] % (group * size), axis=1).view(np.uint64)
    if scales is not None:
        off |= scales["width"] % np.uint32(group) | scales["column0"] % np.uint32(group)
    out["vlog"] = np.where(off == 0, group.bit_length() - 1, 0)
    within = np.where(off == 0, run // np.uint64(group), run)  # what a row is shared out by
    out["divr"] = magics(np.where(per_row > 1, per_row, within))
    return total


def _pieces(box: CodeBox, step: int, item: int) -> Iterator[tuple[Strided, tuple[int, ...]]]:
    """A box as pieces whose rows and columns the kernel can count, and the scales of each."""
    matrices, rows, columns = box.shape
    scale_box = box.scales
    if scale_box.dtype.name not in _SCALES or any(
        n % _SCALES[scale_box.dtype.name][1] for n in (scale_box.address, *scale_box.strides)
    ):
        raise InternalError(
            f"scales of {scale_box.dtype.name} at {scale_box.address:#x}: cast them to F32 first", code=UNFIT
        )

    number, size = _SCALES[scale_box.dtype.name]
    for row, height, down, row0, tall in _stretches(box.row, rows, scale_box.block[0]):
        for column, width, across, column0, wide in _stretches(box.column, columns, scale_box.block[1]):
            row_limit = MOST_ROWS // height
            for matrix in range(0, matrices, row_limit):
                at = (matrix, row)
                source = box.source + sum(n * s for n, s in zip(at, box.source_strides, strict=True)) + column * step
                target = box.target + sum(n * s for n, s in zip(at, box.target_strides, strict=True)) + column * item
                address = (
                    scale_box.address + matrix * scale_box.strides[0] + down * scale_box.strides[1] + across * size
                )
                yield (
                    Strided(
                        source,
                        target,
                        (min(row_limit, matrices - matrix), height),
                        box.source_strides,
                        box.target_strides,
                        width,
                    ),
                    (address, *scale_box.strides, magic(tall), magic(wide), row0, column0, wide, number),
                )


def _stretches(first: int, count: int, block: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(offset, count, block that it begins in, where in it, size of a block) of the parts of `count` rows from row
    `first` on, such that what the kernel adds up fits 32 bits. Of a block too large for that no more than one is in a
    part."""
    position = 0
    while position < count:
        number, within = divmod(first + position, block)
        n = min(count - position, _LONGEST)
        if block > _LONGEST:
            n = min(n, block - within)
            yield position, n, number, 0, _LONGEST
        else:
            yield position, n, number, within, block
        position += n
