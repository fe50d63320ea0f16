"""Rounds floats to the nearest codes: the arithmetic of `--quantize`, all in fp32, each operation rounded to nearest.

    scale = largest magnitude of a block / R        R: 448 (F8_E4M3), 127.5 (8 bits), 7.5 (4 bits)
    code  = nearest(value / scale)                  ties to the even code, what is beyond the range becomes its end

    mxfp8, mxfp4    scale = 2^(e - 8), 2^(e - 2), e the exponent of the largest magnitude, from 1.75 * 2^e on e + 1
    nvfp4           whole = 2688 / largest of the tensor; scale = whole * (largest of the block / 6), as F8_E4M3;
                    code = nearest(value / (scale / whole))

The scale is rounded to the dtype that it is stored in first: values are divided by what they will be multiplied by. A
scale that would be zero (a block of zeros, or of values too small for it) is 1 in fp8-block, as transformers has it,
and elsewhere the epsilon of its dtype, as compressed-tensors has it. Integers are rounded to even after they are cut to
the range; four-bit floats have no code for a zero that is negative before it is rounded. `whole` is at most the largest
fp32: for a tensor of zeros compressed-tensors makes it infinite, and NaN of every scale; e is at most 127, where it
makes 2^128 of the largest numbers, which is infinite.

Bit for bit what compressed-tensors' `calculate_qparams` and `quantize` give for the weights as fp32 and the scales as
stored, which is how its kernels for GPUs divide; on a CPU it divides bf16 weights in bf16, which rounds a quotient
twice. fp8-block is DeepSeek's `act_quant`, over blocks of 128 x 128.
Sources: compressed-tensors 0.20 (`quantization/utils/`, `quantization/lifecycle/forward_helpers.py`), DeepSeek-V3
`inference/kernel.py`, transformers 5.23 `integrations/finegrained_fp8.py`.
Cost: 0.8 ns an element in compiled code (`compiled/blocks.c`, the same bits), 7 in NumPy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ckpt_tool.compiled.library import KINDS, ready
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.quantised.codecs.code_bits import (
    FP4,
    Array,
    Bytes,
    Floats,
    find_lowest_signed,
    list_byte_values,
    pack_halves,
)
from ckpt_tool.quantised.codecs.scale_grid import as_floats
from ckpt_tool.run.compute import cast, looked_up, numpy_type
from ckpt_tool.weight_schemes.written_schemes import Scheme

_F32 = DTYPES["F32"]
_LARGEST = {"F8_E4M3": 448.0, "I8": 127.5, "I32": 7.5, "U8": 6.0}  # by the dtype that holds the codes
_RANGE = {"I8": (-128.0, 127.0), "I32": (-8.0, 7.0)}
_EXPONENT = {"F8_E4M3": 8, "U8": 2}  # of the largest code that is a power of two
_LEAST = {"F32": 2.0**-23, "BF16": 2.0**-7, "F16": 2.0**-10, "F8_E4M3": 0.125}  # in place of a scale that is zero
_WHOLE = 448.0 * 6.0  # what the largest value of a tensor is in nvfp4, in units of its scales' scale


class Error(NamedTuple):
    """How far dequantised values are from the originals; errors of two ranges can be added."""

    most: float = 0.0  # the largest distance
    squares: float = 0.0  # the sum of the squared distances
    of: float = 0.0  # the sum of the squared values

    def __add__(self, other: Error) -> Error:  # type: ignore[override]
        return Error(max(self.most, other.most), self.squares + other.squares, self.of + other.of)


class Values(NamedTuple):
    """Consecutive floats of a flattened tensor, as they were read."""

    line: Array  # 1-d, of its dtype's NumPy type
    dtype: DType

    @property
    def wide(self) -> Floats:
        """The values as fp32."""
        return self.line.astype(np.float32)

    def part(self, start: int, stop: int) -> Values:
        """The values [start, stop)."""
        return Values(self.line[start:stop], self.dtype)


def largest(values: Values, columns: int, width: int, *, of_all: bool = False) -> Floats:
    """The largest magnitude in each block of `width` columns, for rows of `columns` values: (rows, blocks); over all
    rows together if `of_all`: (1, blocks). It is NaN or infinite if a value of the block is."""
    rows = len(values.line) // columns
    blocks = ceil_div(columns, width)
    library = ready(values.line.nbytes) if values.dtype.name in KINDS else None
    if library is not None:
        out = np.zeros((1 if of_all else rows, blocks), np.float32)
        library.largest((values.line, values.dtype.name), columns, width, out)
        return out
    sizes = np.abs(values.wide).reshape(rows, columns)
    if of_all:  # whole columns first: NumPy is quick along them
        sizes = sizes.max(axis=0, keepdims=True)
    if columns % width:
        ragged: Floats = np.maximum.reduceat(sizes, range(0, columns, width), axis=1)
        return ragged
    maxima: Floats = sizes.reshape(len(sizes), -1, width).max(axis=2)
    return maxima


def whole_of(size: Floats) -> Floats:
    """nvfp4: the factor of all scales of a tensor, one fp32. size: the tensor's largest magnitude."""
    with np.errstate(over="ignore", divide="ignore"):
        factor: Floats = np.minimum(np.float32(_WHOLE) / size, np.finfo(np.float32).max)
    return factor


def scales_of(sizes: Floats, scheme: Scheme, dtype: DType, whole: Floats | None = None) -> Array:
    """The scales of blocks whose largest magnitudes are `sizes`, as they are stored."""
    if dtype.name == "U8":
        exponents = (sizes.view(np.uint32) + np.uint32(1 << 21) >> np.uint32(23)).astype(np.int16)
        exponents = (
            np.minimum(exponents, 254) - _EXPONENT[scheme.dtype]
        )  # 255 is no fp32's: its codes would be infinite
        return np.maximum(exponents, 0).astype(np.uint8)
    wide = sizes / np.float32(_LARGEST[scheme.dtype])
    if whole is not None:
        wide = whole * wide
    scales = wide
    if dtype != _F32:
        rounded, _ = cast(np.ascontiguousarray(wide).view(np.uint8).data, _F32, dtype)
        scales = np.frombuffer(rounded, numpy_type(dtype)).reshape(sizes.shape)
    least = 1.0 if scheme.block[0] > 1 else _LEAST[dtype.name]
    return np.where(scales == 0, numpy_type(dtype).type(least), scales)


def divisors_of(scales: Array, dtype: DType, name: str, whole: Floats | None = None) -> Floats:
    """The numbers that values are divided by, and codes multiplied with: the scales as they are stored."""
    divisors = as_floats(scales, dtype, name)
    return divisors / whole if whole is not None else divisors


class ValuePlace(NamedTuple):
    """Where rows of values are located with respect to blocks."""

    columns: int  # values in a row
    skip: int  # columns of the first block that are left of the values
    width: int  # columns of a block


def codes_of(values: Values, place: ValuePlace, divisors: Floats, scheme: Scheme, out: Bytes) -> Error:
    """Write the codes to `out`, a byte each, and return their error. divisors: (rows, blocks), or one row for all."""
    library = ready(values.line.nbytes) if values.dtype.name in KINDS else None
    if library is not None:
        row_divisors = np.ascontiguousarray(divisors)
        error = library.codes((values.line, values.dtype.name), place, row_divisors, scheme.dtype, out)
        if error is not None:
            return Error(*error)
    wide = values.wide.reshape(-1, place.columns)
    if divisors.shape[1] > 1:
        divisors = np.repeat(divisors, place.width, axis=1)[:, place.skip : place.skip + place.columns]
    codes, decoded = _codes(wide, divisors, scheme)
    out[...] = codes.reshape(-1)
    return _error(wide, decoded * divisors)


def _codes(values: Floats, divisors: Floats, scheme: Scheme) -> tuple[Bytes, Floats]:
    """The NumPy implementation: codes, and the floats that they encode before the scale. divisors: broadcastable."""
    with np.errstate(over="ignore"):  # a scale rounded to fp16 may be too small: quotients out of range are clipped
        ratio = values / divisors
    if scheme.dtype in _RANGE:
        low, high = _RANGE[scheme.dtype]
        np.rint(np.clip(ratio, low, high, out=ratio), out=ratio)
        return ratio.astype(np.int8).view(np.uint8), ratio
    if scheme.bits == 4:
        codes = _four_bits(ratio)
        return codes, looked_up(FP4, codes.reshape(-1)).reshape(values.shape)
    codes = np.frombuffer(cast(ratio.reshape(-1).view(np.uint8).data, _F32, DTYPES[scheme.dtype])[0], np.uint8)
    return codes.reshape(values.shape), looked_up(list_byte_values(DTYPES[scheme.dtype]), codes).reshape(values.shape)


def _four_bits(ratio: Floats) -> Bytes:
    """E2M1 codes. From 1 on, the fraction is rounded to one bit. Below 1 the steps are 0.5, the same as those of fp32
    around 2^22, so that adding 2^22 rounds."""
    ratio = ratio + np.float32(0)  # a negative zero is none
    size = np.minimum(np.abs(ratio), np.float32(6))
    bits = size.view(np.uint32)
    upper = (bits + np.uint32((1 << 21) - 1) + (bits >> np.uint32(22) & np.uint32(1)) >> np.uint32(22)) - np.uint32(252)
    lower = (size + np.float32(1 << 22)).view(np.uint32) - np.float32(1 << 22).view(np.uint32)
    codes = np.where(size < 1, lower, upper).astype(np.uint8)
    return codes | np.signbit(ratio).view(np.uint8) << np.uint8(3)


def _error(values: Floats, decoded: Floats) -> Error:
    """The error between values and what they become when dequantised."""
    distances = values - decoded
    largest_distance = np.abs(distances).max(initial=0.0)
    exact = distances.astype(np.float64).ravel()
    wide = values.astype(np.float64).ravel()
    return Error(float(largest_distance), float(exact @ exact), float(wide @ wide))


def pack_codes(codes: Bytes, scheme: Scheme) -> Bytes:
    """The codes of a flattened weight as the bytes of the tensor that holds them."""
    if scheme.bits == 8:
        return codes
    if scheme.dtype == "I32":  # integers, of which the lowest is the code 0
        codes = codes - np.int8(find_lowest_signed(scheme.bits)).astype(np.uint8)
    return pack_halves(codes & np.uint8(15))
