"""Element-wise work on blocks: casts between dtypes, bit-exact and counted.

The one idea: what has 8 or 16 bits is looked up in a table, fp32 goes by NumPy and ml_dtypes, and what is lost is only
counted where the largest bits of a block say that anything can be.

Rounding is to nearest, ties to even, equal to torch 2.13 bit for bit (whatever the payload of a NaN). A finite value
beyond the target's range is counted as lost, and becomes what torch makes of it: infinity, or the largest value in
F8_E4M3, which has no infinity (there infinities become it too, and count as lost); NaN in the FNUZ types.

fp32 -> FP8 goes through 16 bits: the lower half of an fp32 leaves one bit that says whether there was anything
(rounding to odd), which no later rounding to fewer bits can mistake for a tie.

    block of 4 MiB, ns an element  NumPy, ml_dtypes   torch 2.13   here  (a shared machine of two cores; the copy of an
    F32 -> BF16               0.6                0.3          0.8         fp32 takes 0.3; tests/bench/casts.py measures)
    BF16 -> F32                    0.2                0.3          0.2
    F32 -> F16                     2.0                0.3          2.2
    F16 -> F32                     1.0                0.3          1.0
    BF16 -> F16                    2.7                0.6          0.9
    F16 -> BF16                    3.5                1.0          0.9
    F32 -> F8_E4M3                 6.5                0.7          1.9
    F8_E4M3 -> F32                 11                 5.4          1.4
What torch does faster is less than a disk takes for a byte, and it costs 3 s and 200 MB to import: it is not used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.installation import install_command
from ckpt_tool.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_ML = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_BF16 = DTYPES["BF16"]
_F32 = DTYPES["F32"]
_STRETCH = 1 << 14  # elements of a look-up: its indexes stay in L2
_SATURATES = {"F8_E4M3": 448.0}  # types without infinities, and the largest value, which replaces values beyond it
_HALF_STEP = 16.0  # 464, halfway between 448 and the missing 480, is a tie and rounds to the even 448
# Bits of +infinity: any larger pattern (sign aside) is infinite or NaN.
_FIRST_INFINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """The NumPy type whose arithmetic is right for `dtype`; ml_dtypes for bf16 and fp8. UsageError for F4 and F6."""
    if dtype.bits < 8:
        raise UsageError(
            f"{dtype.name} values can be moved but not computed with", code="E0250", hint="leave --dtype off"
        )
    if dtype.name in _ML:
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML[dtype.name]))
        return kind
    return np.dtype(dtype.numpy)


def can_cast(source: DType, target: DType) -> bool:
    """Casts go between real floats, and from integers or booleans to wider integers or floats."""
    return source.is_float and target.is_float and min(source.bits, target.bits) >= 8


def cast(block: memoryview, source: DType, target: DType) -> tuple[memoryview, int]:
    """The block's values as `target`, and how many values were beyond its range.

    block: the bytes of n elements of `source`. Returns n * target.bits / 8 bytes.
    """
    if source.name == "F64" and target.is_float and target.bits <= 16:  # by way of fp32, as torch does
        narrow, first = cast(block, source, _F32)
        found, lost = cast(narrow, _F32, target)
        return found, lost if target.name in _SATURATES else lost + first
    by_table = source.bits == 8 or (source.bits == 16 and target.bits <= 16)
    with np.errstate(over="ignore", invalid="ignore"):
        if by_table and source.is_float and target.is_float:
            out, lost = _looked_up(np.frombuffer(block, f"u{source.bits // 8}"), source, target)
        elif source.name == "F32" and target.bits == 8:
            # Rounded to odd first, so that fp8 rounding of 16 bits equals that of all 32.
            out, lost = _looked_up(_odd_halves(np.frombuffer(block, np.uint16).reshape(-1, 2)), _BF16, target)
        else:
            values = np.frombuffer(block, numpy_type(source))
            out = values.astype(numpy_type(target))
            # Only narrowing casts of floats can lose a finite value.
            narrower = source.is_float and target.is_float and target.bits < source.bits
            lost = _beyond(values, out, target) if narrower else 0
    return out.view(np.uint8).data, lost


class _Table(NamedTuple):
    """out: by the bits of a value. lost: is it beyond the target's range? limit: bits up to which, sign aside, none
    is."""

    out: Array
    lost: np.ndarray[Any, np.dtype[np.bool_]]
    limit: int


def looked_up(table: Array, bits: np.ndarray[Any, np.dtype[Any]]) -> Array:
    """table[bits] of a line of unsigned integers that are all inside the table: 0.7 ns each, a third of what indexing
    costs."""
    out = np.empty(len(bits), table.dtype)
    for start in range(0, len(bits), _STRETCH):
        end = start + _STRETCH
        table.take(bits[start:end], out=out[start:end], mode="clip")
    return out


def _looked_up(bits: Array, source: DType, target: DType) -> tuple[Array, int]:
    table = _table(source.name, target.name)
    out = looked_up(table.out, bits)
    most = int(bits.max()) if bits.size else 0
    if source.name == "F8_E8M0":  # has no sign
        beyond = most > table.limit
    else:
        positive = int(bits.view(f"i{bits.itemsize}").max()) if bits.size else 0
        beyond = positive > table.limit or most > (1 << (source.bits - 1)) + table.limit
    return out, int(np.count_nonzero(looked_up(table.lost, bits))) if beyond else 0


@lru_cache(maxsize=64)
def _table(source: str, target: str) -> _Table:
    """Every value of a type of 8 or 16 bits as another."""
    wide = np.arange(1 << DTYPES[source].bits).astype(f"u{DTYPES[source].bits // 8}")
    values = wide.view(numpy_type(DTYPES[source])).astype(np.float32)
    kind = numpy_type(DTYPES[target])
    with np.errstate(over="ignore", invalid="ignore"):
        if target in _SATURATES:
            out = np.clip(values, -_SATURATES[target], _SATURATES[target]).astype(kind)
            lost = np.abs(values) > _SATURATES[target] + _HALF_STEP
        else:
            out = values.astype(kind)
            lost = np.isfinite(values) & ~np.isfinite(out.astype(np.float32))
    positive = len(wide) // (1 if source == "F8_E8M0" else 2)
    first = np.flatnonzero(lost[:positive])
    return _Table(out, lost, int(first[0]) - 1 if first.size else positive)


def _odd_halves(halves: Array) -> Array:
    """fp32 as (n, 2) halves, the lower first: the upper ones, the last bit set where the lower one is not zero."""
    out = np.empty(len(halves), np.uint16)
    for start in range(0, len(halves), _STRETCH):
        lower = halves[start : start + _STRETCH, 0]
        upper = halves[start : start + _STRETCH, 1]
        np.bitwise_or(upper, lower != 0, out=out[start : start + _STRETCH])
    return out


def _beyond(values: Array, out: Array, target: DType) -> int:
    """How many finite values became infinite (or NaN)."""
    first = _FIRST_INFINITE.get(target.name)
    if first is not None and out.size:
        bits = out.view(f"u{out.itemsize}")
        sign = 1 << (target.bits - 1)
        if int(bits.view(f"i{out.itemsize}").max()) < first and int(bits.max()) < sign + first:
            return 0
    wide = out.astype(np.float32) if target.bits < 32 else out
    return int(np.count_nonzero(~np.isfinite(wide) & np.isfinite(values)))


def as_torch(values: np.ndarray[Any, np.dtype[Any]], dtype: DType) -> Any:
    """A torch tensor over the same memory, of torch's own dtype. Raises UsageError when torch is not installed."""
    try:
        import torch
    except ImportError as e:
        raise UsageError("torch is not installed", code="E0270", hint=install_command("torch")) from e
    if dtype.torch is None:
        raise UsageError(f"torch has no {dtype.name}", code="E0242", hint="use .numpy()")
    raw = torch.from_numpy(values.reshape(-1).view(np.uint8).copy())
    return raw.view(getattr(torch, dtype.torch)).reshape(values.shape)
