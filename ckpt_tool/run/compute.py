"""Element-wise work on blocks: casts between dtypes, bit-exact and counted.

fp32 -> bf16 and the FP8 types round to nearest, ties to even (ml_dtypes, equal to torch bit for bit); a finite value
that becomes infinite, or leaves the target's range, is counted as an overflow. NumPy does the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.errors import UsageError

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_ML = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """The NumPy type whose arithmetic is right for `dtype`; ml_dtypes for bf16 and fp8. UsageError for F4 and F6."""
    if dtype.bits < 8:
        raise UsageError(
            f"{dtype.name} values are only moved, not computed with", code="E0250", hint="leave --dtype off"
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
    """The block's values as `target`, and how many finite values overflowed.

    block: the bytes of n elements of `source`. Returns n * target.bits / 8 bytes.
    """
    values = np.frombuffer(block, numpy_type(source))
    kind = numpy_type(target)
    with np.errstate(over="ignore", invalid="ignore"):
        if source.name in _ML and target.name in _ML:
            values = values.astype(np.float32)
        out = values.astype(kind)
        lost = 0
        if target.bits < source.bits or target.name == "F16":
            wide = out.astype(np.float64) if source.name == "F64" else out.astype(np.float32)
            ends = ~np.isfinite(wide)
            if ends.any():
                lost = int(np.count_nonzero(ends & np.isfinite(values.astype(wide.dtype))))
    return out.view(np.uint8).data, lost


def as_torch(values: np.ndarray[Any, np.dtype[Any]], dtype: DType) -> Any:
    """A torch tensor over the same memory, of torch's own dtype. Raises UsageError when torch is not installed."""
    try:
        import torch
    except ImportError as e:
        raise UsageError("torch is not installed", code="E0270", hint="pip install 'ckpt-tool[torch]'") from e
    if dtype.torch is None:
        raise UsageError(f"torch has no {dtype.name}", code="E0270", hint="use .numpy()")
    raw = torch.from_numpy(values.reshape(-1).view(np.uint8).copy())
    return raw.view(getattr(torch, dtype.torch)).reshape(values.shape)
