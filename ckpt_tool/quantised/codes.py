"""Codes and scales.

Codes: bytes as the floats that they stand for, before any scale. Everything here is a table look-up or a shift.

    list_byte_values(DTYPES["F8_E4M3"])[0x38]  == 1.0     # 256 floats
    two_a_byte(FP4)[0x42].view("f4")   == [1.0, 2.0]      # 256 pairs, the low half of the byte first

FP4 is E2M1: sign, two bits of exponent, one of mantissa. E8M0 is 2^(byte - 127), byte 255 is NaN (OCP Microscaling
formats 1.0). Integers of n bits are stored as value + 2^(n - 1), dense and little-endian: code k of a row is in its
bits [k n, (k + 1) n) (compressed-tensors 0.20 `compressors/pack_quantized/helpers.py`). Cost: 1 ns a byte for tables;
codes that are neither 4 nor 8 bits wide cost 20 ns each.

Scales: which of them each element of a rectangle takes, and the rectangles that a range of a line is.

A weight of experts (2, 300, 256) with scales (2, 3, 2) over blocks of 128 x 128 is 600 rows of 256: rows 0..127 take
row 0 of the scales, 256..299 row 2, 300..427 row 3: blocks start again with every matrix.

"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.run.compute import looked_up, numpy_type
from ckpt_tool.run.computed import Read
from ckpt_tool.weight_schemes.quantised_weights import TILE

Array = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_MODELOPT = (*FP4[:8], 0.0, *FP4[9:])  # it reads the negative zero as zero
INT4 = tuple(range(-8, 8))


@cache
def list_byte_values(dtype: DType) -> Floats:
    """The 256 floats of a one-byte dtype; of U8 those of F8_E8M0."""
    all_bytes = np.arange(256, dtype=np.uint8)
    if dtype.name in ("U8", "F8_E8M0"):
        bits = all_bytes.astype(np.uint32) << 23
        bits[0], bits[255] = 1 << 22, 0x7FC00000  # 2^-127 is below the normal floats; NaN
        return bits.view(np.float32)
    return all_bytes.view(numpy_type(dtype)).astype(np.float32)


def two_a_byte(values: tuple[float, ...]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """For every byte the floats of its low and its high half, as one 64-bit word."""
    return _pairs(np.array(values, np.float32).tobytes())


@cache
def _pairs(values: bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The same by the bits of the values: tuples that differ in the sign of a zero are equal."""
    half = np.frombuffer(values, np.float32)
    all_bytes = np.arange(256)
    return (
        np.ascontiguousarray(np.stack([half[all_bytes & 15], half[all_bytes >> 4]], axis=1))
        .view(np.uint64)
        .reshape(256)
    )


def halves(values: tuple[float, ...], line: np.ndarray[Any, np.dtype[np.uint8]]) -> Floats:
    """The floats of a line of bytes, two a byte. values: the sixteen that half a byte stands for."""
    return looked_up(two_a_byte(values), line).view(np.float32)


def unpack_codes(words: np.ndarray[Any, np.dtype[np.uint8]], bits: int, skip: int, count: int) -> Floats:
    """`count` codes of each row of packed words, the first one `skip` bits behind its start, less their offset.

    words: (rows, bytes), little-endian. skip: a multiple of `bits` where that is 4 or 8. Returns (rows, count).
    """
    if bits == 8:
        return words[:, skip // 8 : skip // 8 + count].astype(np.float32) - np.float32(128)
    low = skip // 8
    high = ceil_div(skip + count * bits, 8)
    if bits == 4:
        pairs = halves(INT4, words[:, low:high].reshape(-1)).reshape(len(words), -1)
        first = skip // 4 - 2 * low
        return np.ascontiguousarray(pairs[:, first : first + count])
    code_bits = np.unpackbits(words[:, low:high], axis=1, bitorder="little")
    code_bits = code_bits[:, skip - 8 * low : skip - 8 * low + count * bits].reshape(len(words), count, bits)
    codes: Floats = code_bits @ (1 << np.arange(bits)).astype(np.float32) - np.float32(1 << (bits - 1))
    return codes


# -- scales ------------------------------------------------------------------------------------------------------------


NAN = "E1463"
NOT_FINITE = "E2720"
Numbers = np.ndarray[Any, np.dtype[np.intp]]


class Rectangle(NamedTuple):
    """Rows [low, high) and columns [left, right) of a tensor seen as (rows, columns)."""

    low: int
    high: int
    left: int
    right: int


def rectangles(start: int, stop: int, columns: int) -> Iterator[Rectangle]:
    """Elements [start, stop) of a row-major line as at most three rectangles, each of whole rows or within one."""
    first = start // columns
    last = (stop - 1) // columns
    if first == last:
        yield Rectangle(first, first + 1, start - first * columns, stop - first * columns)
        return
    if start % columns:
        yield Rectangle(first, first + 1, start - first * columns, columns)
        first += 1
    last_row = stop // columns
    if last_row > first:
        yield Rectangle(first, last_row, 0, columns)
    if stop % columns:
        yield Rectangle(last_row, last_row + 1, 0, stop - last_row * columns)


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The scales of a tensor seen as (rows, columns), in input number `input` of a recipe."""

    input: int
    dtype: DType  # of the scales; U8 are powers of two
    rows: int  # of each matrix of the tensor
    step: int  # rows of scales of each matrix, 0 where all matrices share them
    columns: int  # of the scales
    block: tuple[int, int]  # (rows, columns) of the tensor that share one
    name: str
    tiles: bool = False  # they lie tile by tile (`quantised_weights.TILE`), not row by row

    def read_scales(self, read: Read, rectangle: Rectangle) -> tuple[Floats, Numbers]:
        """(scales of rows of blocks, one a column of the rectangle; which of those rows each row of it takes).

        Raises InconsistentCheckpoint E1463 for a scale that is no number."""
        height, width = self.block
        rows = np.arange(rectangle.low, rectangle.high)
        scale_rows = rows // self.rows * self.step + rows % self.rows // height
        low = int(scale_rows[0])
        high = int(scale_rows[-1]) + 1
        first = rectangle.left // width
        last = ceil_div(rectangle.right, width)
        if self.tiles:
            stored = self._read_tiles(read, low, high)[:, first:last]
        elif high - low == 1:
            stored = read(self.input, low * self.columns + first, low * self.columns + last).reshape(1, -1)
        else:
            stored = read(self.input, low * self.columns, high * self.columns).reshape(high - low, self.columns)
            stored = stored[:, first:last]
        scales = as_floats(stored, self.dtype, self.name)
        if scales.shape[1] > 1 and width > 1:
            scales = np.repeat(scales, width, axis=1)[
                :, rectangle.left - first * width : rectangle.right - first * width
            ]
        elif scales.shape[1] > 1:
            scales = scales[:, : rectangle.right - rectangle.left]
        return scales, scale_rows - low

    def _read_tiles(self, read: Read, low: int, high: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Rows [low, high) of scales that lie in tiles: (32, 4, 4) of row mod 32, row div 32, column."""
        (height, width), across = TILE, ceil_div(self.columns, TILE[1])
        first = low // height
        last = ceil_div(high, height)
        size = across * height * width
        tiles = read(self.input, first * size, last * size).reshape(last - first, across, 32, height // 32, width)
        rows = tiles.transpose(0, 3, 2, 1, 4).reshape((last - first) * height, across * width)
        return rows[low - first * height : high - first * height, : self.columns]


def widen_to_f32(stored: np.ndarray[Any, np.dtype[Any]], dtype: DType) -> Floats:
    """Floats of a dtype as fp32."""
    return list_byte_values(dtype)[stored.view(np.uint8)] if dtype.bits == 8 else stored.astype(np.float32)


def as_floats(stored: np.ndarray[Any, np.dtype[Any]], dtype: DType, name: str) -> Floats:
    """Scales as fp32. Raises InconsistentCheckpoint E1463 for a scale that is NaN."""
    floats = widen_to_f32(stored, dtype)
    if np.isnan(floats).any():
        raise InconsistentCheckpoint(
            "a scale is NaN" + (" (byte 255 of F8_E8M0)" if dtype.name in ("U8", "F8_E8M0") else ""),
            code=NAN,
            key=name,
            hint="the quantiser failed on this weight: fetch the checkpoint again, or quantise it again",
        )
    return floats


def not_finite(key: str, index: Sequence[int], hint: str) -> InconsistentCheckpoint:
    """E2720: a value that is to be quantised is NaN or infinite. index: of the element in its tensor."""
    return InconsistentCheckpoint(
        f"element {list(index)} is no finite number, and a block with it has no scale",
        code=NOT_FINITE,
        key=key,
        hint=f"ckpt verify lists such tensors; {hint}",
    )


def scale(values: Floats, scales: Floats, taken: Numbers, operation: np.ufunc = np.multiply) -> None:
    """values[r, c] *= scales[taken[r], c], in place; scales of one column serve all."""
    if len(scales) == len(values):
        operation(values, scales, out=values)
        return
    ends = [0, *(np.flatnonzero(np.diff(taken)) + 1).tolist(), len(taken)]
    for low, high in zip(ends, ends[1:], strict=False):
        operation(values[low:high], scales[taken[low]], out=values[low:high])
