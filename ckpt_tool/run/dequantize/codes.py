"""Codes: bytes as the floats that they stand for, before any scale. Everything here is a table look-up or a shift.

    of_bytes(DTYPES["F8_E4M3"])[0x38]  == 1.0             # 256 floats
    two_a_byte(FP4)[0x42].view("f4")   == [1.0, 2.0]      # 256 pairs, the low half of the byte first

FP4 is E2M1: sign, two bits of exponent, one of mantissa. E8M0 is 2^(byte - 127), byte 255 is NaN (OCP Microscaling
formats 1.0). Integers of n bits are stored as value + 2^(n - 1), dense and little-endian: code k of a row lies in its bits
[k n, (k + 1) n) (compressed-tensors 0.20 `compressors/pack_quantized/helpers.py`).
Cost: 1 ns a byte for tables; codes that are neither 4 nor 8 bits wide cost 20 ns each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.run.compute import looked_up, numpy_type

Array = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = tuple(range(-8, 8))


@cache
def of_bytes(dtype: DType) -> Floats:
    """The 256 floats of a one-byte dtype; of U8 those of F8_E8M0."""
    every = np.arange(256, dtype=np.uint8)
    if dtype.name in ("U8", "F8_E8M0"):
        bits = every.astype(np.uint32) << 23
        bits[0], bits[255] = 1 << 22, 0x7FC00000  # 2^-127 is below the normal floats; NaN
        return bits.view(np.float32)
    return every.view(numpy_type(dtype)).astype(np.float32)


@cache
def two_a_byte(values: tuple[float, ...]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """For every byte the floats of its low and its high half, as one 64-bit word."""
    half = np.array(values, np.float32)
    every = np.arange(256)
    return np.ascontiguousarray(np.stack([half[every & 15], half[every >> 4]], axis=1)).view(np.uint64).reshape(256)


def halves(values: tuple[float, ...], line: np.ndarray[Any, np.dtype[np.uint8]]) -> Floats:
    """The floats of a line of bytes, two a byte. values: the sixteen that half a byte stands for."""
    return looked_up(two_a_byte(values), line).view(np.float32)


def unpacked(words: np.ndarray[Any, np.dtype[np.uint8]], bits: int, skip: int, count: int) -> Floats:
    """`count` codes of each row of packed words, the first one `skip` bits behind its start, less their offset.

    words: (rows, bytes), little-endian. skip: a multiple of `bits` where that is 4 or 8. Returns (rows, count).
    """
    if bits == 8:
        return words[:, skip // 8 : skip // 8 + count].astype(np.float32) - np.float32(128)
    low, high = skip // 8, -(-(skip + count * bits) // 8)
    if bits == 4:
        pairs = halves(INT4, words[:, low:high].reshape(-1)).reshape(len(words), -1)
        first = skip // 4 - 2 * low
        return np.ascontiguousarray(pairs[:, first : first + count])
    each = np.unpackbits(words[:, low:high], axis=1, bitorder="little")
    each = each[:, skip - 8 * low : skip - 8 * low + count * bits].reshape(len(words), count, bits)
    found: Floats = each @ (1 << np.arange(bits)).astype(np.float32) - np.float32(1 << (bits - 1))
    return found
