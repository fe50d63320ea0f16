"""Statistics of values, block by block: what `inspect --stats` and `verify` say about the numbers themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.compute import Bytes, numpy_type
from ckpt_tool.run.scan import Visit, readable, walk
from ckpt_tool.storage.source import Tree


@dataclass(slots=True)
class _Sums:
    """Running sums of one tensor."""

    # Of finite values only.
    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    zeros: int = 0  # -0.0 included
    nans: int = 0
    infs: int = 0


def _floats(move: Move, data: Bytes) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = data.view(numpy_type(move.dtype))
    if move.dtype.name.startswith("C"):
        values = values.view(np.float32 if move.dtype.name == "C64" else np.float64)
    return values.astype(np.float64)


class Statistics:
    """min, max, mean, std, zeros, NaN and Inf of each tensor that is walked (finite values only in the first four).
    Sub-byte types are left out: they are only moved."""

    def __init__(self) -> None:
        self._sums: dict[TensorKey, _Sums] = {}

    def visit(self, move: Move) -> Visit:
        """The function that sees the blocks of one tensor, for `scan.walk` and `scan.digests_of`."""
        if move.dtype.bits < 8:
            return lambda move, at, data: None
        mine = self._sums[move.key] = _Sums()

        def see(move: Move, at: int, data: Bytes) -> None:
            """Add a block to the sums."""
            values = _floats(move, data)
            finite = values[np.isfinite(values)]
            mine.nans += int(np.count_nonzero(np.isnan(values)))
            mine.infs += int(np.count_nonzero(np.isinf(values)))
            mine.zeros += int(np.count_nonzero(values == 0))
            if finite.size:
                mine.count += finite.size
                mine.low = min(mine.low, float(finite.min()))
                mine.high = max(mine.high, float(finite.max()))
                mine.total += float(finite.sum())
                mine.squares += float(np.square(finite).sum())

        return see

    def found(self) -> dict[TensorKey, dict[str, Any]]:
        """The statistics of all tensors that were walked."""
        return {key: _summary(mine) for key, mine in self._sums.items()}


def statistics(catalog: Catalog, tree: Tree, keys: Sequence[TensorKey]) -> dict[TensorKey, dict[str, Any]]:
    """The statistics of these tensors: one read of their values."""
    seen = Statistics()
    tensors = (catalog.tensors[key] for key in keys)
    walk(readable([tensor for tensor in tensors if tensor.dtype.bits >= 8], tree), seen.visit)
    return seen.found()


def _summary(mine: _Sums) -> dict[str, Any]:
    mean = mine.total / mine.count if mine.count else None
    spread = math.sqrt(max(0.0, mine.squares / mine.count - mean * mean)) if mean is not None else None
    return {
        "min": mine.low if mine.count else None,
        "max": mine.high if mine.count else None,
        "mean": mean,
        "std": spread,
        "zeros": mine.zeros,
        "nan": mine.nans,
        "inf": mine.infs,
    }


class NonFinite:
    """How many values of each tensor that is walked are NaN or Inf. counts: tensor -> that, and `bool:TENSOR` -> BOOL
    bytes other than 0 and 1; only what is not 0."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def visit(self, move: Move) -> Visit:
        """The function that sees the blocks of one tensor, for `scan.digests_of`."""
        name = f"bool:{move.key}" if move.dtype.name == "BOOL" else str(move.key)

        def see(move: Move, at: int, data: Bytes) -> None:
            """Add the NaN and Inf of a block to the counts."""
            bad = bad_values(move, data)
            if bad:
                self.counts[name] = self.counts.get(name, 0) + bad

        return see


def count_nonfinite(catalog: Catalog, tree: Tree, keys: Sequence[TensorKey]) -> dict[str, int]:
    """The counts of these tensors: one read of their values, as far as they can be read."""
    seen = NonFinite()
    tensors = (catalog.tensors[key] for key in keys)
    chosen = [tensor for tensor in tensors if may_be_bad(tensor.dtype)]
    walk(readable(chosen, tree), seen.visit, on_fault=lambda fault: None)
    return seen.counts


def may_be_bad(dtype: DType) -> bool:
    """Has the type values that are counted: NaN, Inf, BOOL bytes other than 0 and 1?"""
    return dtype.bits >= 8 and (dtype.is_float or dtype.name == "BOOL")


def bad_values(move: Move, data: Bytes) -> int:
    """How many of a block's values are NaN or Inf, or BOOL bytes other than 0 and 1; 0 for other types."""
    if move.dtype.name == "BOOL":
        return int(np.count_nonzero(data > 1))
    return _nonfinite(move, data) if may_be_bad(move.dtype) else 0


_EXPONENTS = {"F16": (0x7C00, "u2"), "BF16": (0x7F80, "u2"), "F32": (0x7F800000, "u4"), "F64": (0x7FF << 52, "u8")}


def _nonfinite(move: Move, data: Bytes) -> int:
    """The number of NaN and Inf values: those whose exponent bits are all set."""
    known = _EXPONENTS.get(move.dtype.name)
    if known is None:
        return int(np.count_nonzero(~np.isfinite(_floats(move, data))))
    # On the bits: no values need to be widened, and signalling NaNs raise no warnings.
    mask, kind = known
    bits = data.view(kind)
    return int(np.count_nonzero((bits & bits.dtype.type(mask)) == mask))
