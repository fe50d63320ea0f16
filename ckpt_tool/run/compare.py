"""Compare pairs of tensors block by block, wherever and however each of them lies.

Reports, for a pair that differs, the first index (row-major), the greatest distance in units in the last place, and the
greatest absolute difference. Two bit patterns of the same float type are `ulp` apart as ordered integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.compute import Bytes, numpy_type
from ckpt_tool.run.records import Checked
from ckpt_tool.run.scan import Visit, readable, walk
from ckpt_tool.run.walk import STRIDED_BLOCK
from ckpt_tool.storage.source import Tree

Difference = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]


class Worst:
    """The differences of one pair, gathered over its blocks of at most 1 MiB."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.first, self.ulp, self.gap, self.count = shape, -1, 0, 0.0, 0

    def add(self, at: int, where: Array, ulp: int, gap: float) -> None:
        hits = np.flatnonzero(where)
        if self.first < 0:
            self.first = at + int(hits[0])
        self.count += len(hits)
        self.ulp, self.gap = max(self.ulp, ulp), max(self.gap, gap)

    def merge(self, other: Worst) -> None:
        """Take up the differences of a later block of the same pair."""
        if self.first < 0:
            self.first = other.first
        self.count += other.count
        self.ulp, self.gap = max(self.ulp, other.ulp), max(self.gap, other.gap)

    def report(self) -> Difference | None:
        if self.first < 0:
            return None
        index = [int(i) for i in np.unravel_index(self.first, self.shape)] if self.shape else []
        return {"first_index": index, "max_ulp": self.ulp, "max_abs": self.gap, "elements": self.count}


def compare(
    pairs: Sequence[tuple[LogicalTensor, LogicalTensor]],
    left: Tree,
    right: Tree,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Progress | None = None,
) -> list[Difference | None]:
    """For every pair of equal shape: None when equal, else what differs. dtypes may differ when tolerances are
    given."""
    mine = readable([pair[0] for pair in pairs], left)
    theirs = readable([pair[1] for pair in pairs], right)
    other, beside = (
        {id(a): b for a, b in zip(mine.moves, theirs.moves, strict=True)},
        Checked(theirs.files, theirs.records),
    )
    found: dict[int, Worst] = {}

    def visit(move: Move) -> Visit:
        twin = other[id(move)]
        reader = beside.reader(16)
        worst = found[id(move)] = Worst(move.shape)
        buffer: Bytes = np.empty(STRIDED_BLOCK * max(1, twin.item // move.item + 1), np.uint8)
        if right is not left:  # a tree's thread expects one thing at a time
            reader.expect([(twin, 0, twin.numel)])

        def see(move: Move, at: int, data: Bytes) -> None:
            n = len(data) // move.item
            part = buffer[: n * twin.item]
            reader.fill(twin, part.data, at, at + n)
            if move.dtype != twin.dtype or not np.array_equal(data, part):
                differ(worst, at, data, part, move.dtype, twin.dtype, rtol, atol)
            if progress is not None:
                progress.advance(len(part))
            if at + n >= move.numel:
                beside.done(reader)

        return see

    walk(mine, visit, progress=progress, beside=beside)
    return [found[id(move)].report() if id(move) in found else None for move in mine.moves]


def differ(worst: Worst, at: int, a: Bytes, b: Bytes, kind: DType, other: DType, rtol: float, atol: float) -> None:
    """Add to `worst` what differs between two blocks of values, whose first element is `at`. kind, other: their dtypes.

    Values are equal where their bits are; with tolerances where |a - b| <= atol + rtol |b|."""
    if kind.bits < 8:
        where = a != b
        worst.add(at, where, 0, 0.0)
        return
    if kind.coded or other.coded:  # bytes of which nobody knows the values
        items = len(a) // (kind.bits // 8)
        where = (a.reshape(items, -1) != b.reshape(items, -1)).any(axis=1) if len(a) == len(b) else np.ones(items, bool)
        worst.add(at, where, 0, 0.0)
        return
    x, y = a.view(numpy_type(kind)), b.view(numpy_type(other))
    wide = np.complex128 if "C" in (kind.name[0], other.name[0]) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        u, v = x.astype(wide), y.astype(wide)  # signalling NaNs are no news
        gaps = np.abs(u - v)
        if rtol or atol:
            near = (gaps <= atol + rtol * np.abs(v)) | (u == v) | (np.isnan(u) & np.isnan(v))
            where = ~near
        else:
            where = (a.reshape(-1, kind.bits // 8) != b.reshape(-1, kind.bits // 8)).any(axis=1)
    if not where.any():
        return
    finite = gaps[where & np.isfinite(gaps)]
    gap = float(finite.max()) if finite.size else float("inf")
    worst.add(at, where, _ulps(a, b, kind) if kind == other else 0, gap)


def _ulps(a: Bytes, b: Bytes, kind: DType) -> int:
    """The greatest distance between two bit patterns taken as ordered integers; complex by parts, 0 for booleans."""
    size = {"C64": 4, "C128": 8}.get(kind.name, kind.bits // 8)
    x, y = a.view(f"u{size}"), b.view(f"u{size}")
    if kind.is_float or kind.name.startswith("C"):
        sign = x.dtype.type(1 << (size * 8 - 1))
        x = np.where(x & sign, ~x, x | sign)
        y = np.where(y & sign, ~y, y | sign)
    elif kind.name.startswith("I"):
        flip = x.dtype.type(1 << (size * 8 - 1))
        x, y = x ^ flip, y ^ flip
    return int(np.max(np.where(x > y, x - y, y - x)))
