"""Codes as bytes, and the numbers they encode before any scale: tables, and packing and unpacking of integers.

    list_byte_values(DTYPES["F8_E4M3"])[0x38]             == 1.0           256 floats, one for each byte
    decode_halves(FP4, np.array([0x42], np.uint8))        == [1.0, 2.0]    the low half of a byte first
    unpack_rows(words, bits=4, skip=0, count=8, lowest=0)                  codes of a row from a stream of bits

FP4 is E2M1: sign, two bits of exponent, one of mantissa. E8M0 is 2^(byte - 127), byte 255 is NaN (OCP Microscaling
formats 1.0). Packed integers are dense and little-endian: code k of a stream is in its bits [k n, (k + 1) n). A code of
n bits is a number from `lowest` on: compressed-tensors stores value + 2^(n - 1), so that its lowest is -2^(n - 1);
GPTQ, AWQ and MLX store numbers from 0 on (compressed-tensors 0.20 `compressors/pack_quantized/helpers.py`). Cost: 1 ns
a byte for tables; codes whose bits do not divide 32 cost 20 ns each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.run.compute import looked_up, numpy_type

Array = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint32]]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = np.array((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), np.float32)
# ModelOpt reads the negative zero as zero.
FP4_MODELOPT = np.where(FP4 == 0, np.float32(0), FP4)

# AWQ: the column of a word of eight that each of its nibbles belongs to, the lowest nibble first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_SHIFTS = np.array([4 * AWQ_ORDER.index(column) for column in range(8)], np.uint32)


# -- tables ------------------------------------------------------------------------------------------------------------


@cache
def list_byte_values(dtype: DType) -> Floats:
    """The 256 floats of a one-byte dtype; of U8 those of F8_E8M0."""
    all_bytes = np.arange(256, dtype=np.uint8)
    if dtype.name in ("U8", "F8_E8M0"):
        bits = all_bytes.astype(np.uint32) << 23
        bits[0] = 1 << 22  # 2^-127, below the normal floats
        bits[255] = 0x7FC00000  # NaN
        return bits.view(np.float32)
    return all_bytes.view(numpy_type(dtype)).astype(np.float32)


def decode_halves(values: Floats, line: Bytes, *, high_first: bool = False) -> Floats:
    """The floats of a line of bytes, two a byte.

    Args:
        values: the sixteen floats that half a byte can encode.
        high_first: is the high half of a byte the first of the two? bitsandbytes and torchao's states have it so.
    """
    return looked_up(_list_pairs(values.tobytes(), high_first), line).view(np.float32)


@lru_cache(maxsize=64)
def _list_pairs(values: bytes, high_first: bool) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """For every byte the floats of its two halves, as one 64-bit word. The cache's key is the bytes of the values,
    which differ for 0.0 and -0.0 while the numbers are equal."""
    of_half = np.frombuffer(values, np.float32)
    all_bytes = np.arange(256)
    low_half = of_half[all_bytes & 15]
    high_half = of_half[all_bytes >> 4]
    in_order = (high_half, low_half) if high_first else (low_half, high_half)
    return np.ascontiguousarray(np.stack(in_order, axis=1)).view(np.uint64).reshape(256)


# -- packed integers ---------------------------------------------------------------------------------------------------


def find_lowest_signed(bits: int) -> int:
    """The number that the code 0 encodes in compressed-tensors' packed integers.

    >>> find_lowest_signed(4)
    -8
    """
    return -(1 << (bits - 1))


@cache
def _list_nibble_values(lowest: int) -> Floats:
    return np.arange(lowest, lowest + 16).astype(np.float32)


def unpack_rows(stream: Bytes, bits: int, skip: int, count: int, lowest: int) -> Floats:
    """Codes that are packed along rows, as floats.

    Args:
        stream: (rows, bytes), each row a stream of bits.
        skip: bits of each row before the first code that is wanted; a multiple of `bits` where those are 4 or 8.
        count: codes of each row that are wanted.
        lowest: the number that the code 0 encodes.

    Returns: (rows, count), in memory of its own.
    """
    first_byte = skip // 8
    last_byte = ceil_div(skip + count * bits, 8)
    wanted_bytes = stream[:, first_byte:last_byte]
    if bits == 8:
        numbers: Floats = wanted_bytes.astype(np.float32)
        return numbers + np.float32(lowest) if lowest else numbers
    if bits == 4:
        pairs = decode_halves(_list_nibble_values(lowest), wanted_bytes.reshape(-1)).reshape(len(stream), -1)
        first_code = skip // 4 - 2 * first_byte
        return np.ascontiguousarray(pairs[:, first_code : first_code + count])

    first_bit = skip - 8 * first_byte
    all_bits: Array = np.unpackbits(wanted_bytes, axis=1, bitorder="little")
    code_bits = all_bits[:, first_bit : first_bit + count * bits]
    codes: Floats = code_bits.reshape(len(stream), count, bits) @ (1 << np.arange(bits)).astype(np.float32)
    return codes + np.float32(lowest)


def unpack_columns(words: Words, bits: int, skip: int, count: int, lowest: int) -> Floats:
    """Codes that are packed along columns: `words` (n, columns), each column a stream of bits. Else as `unpack_rows`.

    Returns: (count, columns).
    """
    if 32 % bits:
        stream = np.ascontiguousarray(words.T).view(np.uint8)
        return np.ascontiguousarray(unpack_rows(stream, bits, skip, count, lowest).T)

    # Codes do not cross words: one shift for each place in a word. Of a single word only the wanted places.
    first_place = skip // bits if len(words) == 1 else 0
    places = count if len(words) == 1 else 32 // bits
    shifts = np.arange(first_place, first_place + places, dtype=np.uint32) * np.uint32(bits)
    codes = (words[:, None, :] >> shifts[:, None]) & np.uint32((1 << bits) - 1)
    first_code = skip // bits - first_place
    columns: Floats = codes.reshape(-1, words.shape[1])[first_code : first_code + count].astype(np.float32)
    if lowest:
        columns += np.float32(lowest)
    return columns


def unpack_awq(words: Words) -> Words:
    """The codes of AWQ's words in the order of the columns: (..., n) words are (..., 8 n) codes."""
    codes: Words = (words[..., None] >> _AWQ_SHIFTS) & np.uint32(15)
    return codes.reshape(*words.shape[:-1], -1)


def pack_nibbles(codes: Words) -> Words:
    """Words of eight codes each, the first one lowest: (..., 8, n) codes are (..., n) words."""
    packed = np.zeros((*codes.shape[:-2], codes.shape[-1]), np.uint32)
    for place in range(8):
        packed |= codes[..., place, :] << np.uint32(4 * place)
    return packed


def pack_halves(codes: Bytes) -> Bytes:
    """A line of four-bit codes, a byte each, as two a byte, the first one in the low half."""
    return codes[0::2] | codes[1::2] << np.uint8(4)


def list_integers(words: Words, bits: int) -> Array:
    """All codes of a line of words, as integers from 0 on. words: whole codes, so a multiple of 3 of 3 bits."""
    stream = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
    code_bits = np.unpackbits(stream, bitorder="little").reshape(-1, bits)
    codes: Array = code_bits @ (1 << np.arange(bits))
    return codes


def pack_integers(codes: Array | Sequence[int], bits: int) -> Words:
    """The words that `list_integers` takes apart."""
    code_bits = np.asarray(codes)[:, None] >> np.arange(bits) & 1
    return np.packbits(code_bits.astype(np.uint8), bitorder="little").view(np.uint32)
