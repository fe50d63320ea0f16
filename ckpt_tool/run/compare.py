"""Compare pairs of tensors block by block, wherever and however each of them is stored.

Reports, for a pair that differs: the first index (row-major), the greatest distance in units in the last place, the
greatest absolute difference, the relative L2 norm of the difference, and the cosine. Two bit patterns of the same float
type are `ulp` apart as ordered integers.

Norms are those of whole tensors. The blocks of a pair that are equal up to its first difference are therefore read once
more, on one side: a pair without any difference costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.compute import Bytes, numpy_type
from ckpt_tool.run.records import CheckedRecords
from ckpt_tool.run.scan import Readable, Visit, readable, walk
from ckpt_tool.run.walk import STRIDED_BLOCK
from ckpt_tool.storage.source import Tree

Difference = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]
NORMS = "norms"  # key of a report for the sums themselves, which no document shows


@dataclass(slots=True)
class Norms:
    """Sums of squares, in fp64, over the elements of a pair (or of several) that are finite on both sides."""

    left: float = 0.0
    right: float = 0.0
    gap: float = 0.0  # of left - right
    product: float = 0.0  # of left * right
    nonfinite: int = 0  # elements that are NaN or infinite on either side

    def add(self, other: Norms) -> None:
        """Add the sums of `other` to these."""
        self.left += other.left
        self.right += other.right
        self.gap += other.gap
        self.product += other.product
        self.nonfinite += other.nonfinite

    def plus(self, other: Norms) -> Norms:
        """The sums over both."""
        both = Norms(self.left, self.right, self.gap, self.product, self.nonfinite)
        both.add(other)
        return both

    def relative(self) -> float | None:
        """The L2 norm of the difference, as a share of the first tensor's; None where that one is all zeros."""
        if not self.left or not isfinite(self.left) or not isfinite(self.gap):
            return None
        return sqrt(self.gap / self.left)

    def cosine(self) -> float | None:
        """The cosine of the angle between the two, -1 to 1; None where one is all zeros."""
        scale = sqrt(self.left) * sqrt(self.right)
        if not scale or not isfinite(scale) or not isfinite(self.product):
            return None
        return max(-1.0, min(1.0, self.product / scale))


def norms_of(left: Array, right: Array) -> Norms:
    """The sums over two arrays of one length. Complex numbers count with both of their parts."""
    if np.iscomplexobj(left) or np.iscomplexobj(right):
        left = left.astype(np.complex128).view(np.float64)
        right = right.astype(np.complex128).view(np.float64)

    finite = np.isfinite(left) & np.isfinite(right)
    nonfinite = len(finite) - int(np.count_nonzero(finite))
    if nonfinite:
        left = left[finite]
        right = right[finite]

    gap = left - right
    with np.errstate(over="ignore"):
        return Norms(
            left=float(left @ left),
            right=float(right @ right),
            gap=float(gap @ gap),
            product=float(left @ right),
            nonfinite=nonfinite,
        )


class Worst:
    """The differences of one pair, gathered over its blocks of at most 1 MiB.

    equal: (first element, elements) of the blocks that were equal before the first difference was met.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape
        self.first = -1
        self.ulp = 0
        self.gap = 0.0
        self.count = 0
        self.norms = Norms()
        self.equal: list[tuple[int, int]] = []

    def add(self, at: int, where: Array, ulp: int, gap: float) -> None:
        """Add the differences of a block. at: its first element; where: which elements differ; ulp, gap: the
        greatest."""
        hits = np.flatnonzero(where)
        if self.first < 0:
            self.first = at + int(hits[0])
        self.count += len(hits)
        self.ulp = max(self.ulp, ulp)
        self.gap = max(self.gap, gap)

    def merge(self, other: Worst) -> None:
        """Take up the differences of a later block of the same pair."""
        if self.first < 0:
            self.first = other.first
        self.count += other.count
        self.ulp = max(self.ulp, other.ulp)
        self.gap = max(self.gap, other.gap)

    def report(self) -> Difference | None:
        """What differs, as `--json` has it, with `norms` for whoever adds up several tensors; None if nothing does."""
        if self.first < 0:
            return None
        index = [int(i) for i in np.unravel_index(self.first, self.shape)] if self.shape else []
        return {
            "first_index": index,
            "max_ulp": self.ulp,
            "max_abs": self.gap,
            "elements": self.count,
            "rel_l2": self.norms.relative(),
            "cosine": self.norms.cosine(),
            NORMS: self.norms,
        }


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
    other = {id(a): b for a, b in zip(mine.moves, theirs.moves, strict=True)}
    beside = CheckedRecords(theirs.files, theirs.records)
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
            elif worst.first < 0:
                worst.equal.append((at, n))
            else:
                worst.norms.add(_norms_of_equal(data, move.dtype))
            if progress is not None:
                progress.advance(len(part))
            if at + n >= move.numel:
                beside.done(reader)

        return see

    walk(mine, visit, progress=progress, beside=beside)
    _measure_equal_blocks(mine, found)
    return [found[id(move)].report() if id(move) in found else None for move in mine.moves]


def _measure_equal_blocks(source: Readable, found: dict[int, Worst]) -> None:
    """Add to the norms of pairs that differ what their equal blocks hold."""
    partly_equal = [move for move in source.moves if id(move) in found and found[id(move)].first >= 0]
    partly_equal = [move for move in partly_equal if found[id(move)].equal]
    if not partly_equal:
        return

    def visit(move: Move) -> Visit:
        worst = found[id(move)]

        def see(move: Move, at: int, data: Bytes) -> None:
            end = at + len(data) // move.item
            for first, elements in worst.equal:
                low = max(first, at)
                high = min(first + elements, end)
                if low < high:
                    part = data[(low - at) * move.item : (high - at) * move.item]
                    worst.norms.add(_norms_of_equal(part, move.dtype))

        return see

    walk(source._replace(moves=tuple(partly_equal), records=()), visit)


def _norms_of_equal(data: Bytes, kind: DType) -> Norms:
    """The sums of a block that is equal on both sides."""
    if kind.bits < 8 or kind.coded:
        return Norms()
    wide = np.complex128 if kind.name.startswith("C") else np.float64
    with np.errstate(invalid="ignore"):  # signalling NaNs are no news
        values = data.view(numpy_type(kind)).astype(wide)
    return norms_of(values, values)


def differ(worst: Worst, at: int, a: Bytes, b: Bytes, kind: DType, other: DType, rtol: float, atol: float) -> None:
    """Add to `worst` what differs between two blocks of values, whose first element is `at`. kind, other: their dtypes.

    Values are equal where their bits are; with tolerances, or in two dtypes, where |a - b| <= atol + rtol |b|."""
    if kind.bits < 8:
        where = a != b
        worst.add(at, where, 0, 0.0)
        return

    if kind.coded or other.coded:  # encoded bytes whose values are not known: compared bit by bit
        items = len(a) // (kind.bits // 8)
        where = (a.reshape(items, -1) != b.reshape(items, -1)).any(axis=1) if len(a) == len(b) else np.ones(items, bool)
        worst.add(at, where, 0, 0.0)
        return

    x = a.view(numpy_type(kind))
    y = b.view(numpy_type(other))
    wide = np.complex128 if "C" in (kind.name[0], other.name[0]) else np.float64

    with np.errstate(invalid="ignore", over="ignore"):
        # signalling NaNs are no news
        u = x.astype(wide)
        v = y.astype(wide)
        gaps = np.abs(u - v)
        if rtol or atol or kind != other:  # bits of two dtypes say nothing of each other: the values do
            near = (gaps <= atol + rtol * np.abs(v)) | (u == v) | (np.isnan(u) & np.isnan(v))
            where = ~near
        else:
            where = (a.reshape(-1, kind.bits // 8) != b.reshape(-1, kind.bits // 8)).any(axis=1)

    if not where.any():
        worst.norms.add(norms_of(u, v))
        return

    worst.norms.add(norms_of(u, v))
    finite = gaps[where & np.isfinite(gaps)]
    gap = float(finite.max()) if finite.size else float("inf")
    worst.add(at, where, _ulps(a, b, kind) if kind == other else 0, gap)


def _ulps(a: Bytes, b: Bytes, kind: DType) -> int:
    """The greatest distance between two bit patterns taken as ordered integers; complex by parts, 0 for booleans."""
    size = {"C64": 4, "C128": 8}.get(kind.name, kind.bits // 8)
    x = a.view(f"u{size}")
    y = b.view(f"u{size}")
    if kind.is_float or kind.name.startswith("C"):
        sign = x.dtype.type(1 << (size * 8 - 1))
        x = np.where(x & sign, ~x, x | sign)
        y = np.where(y & sign, ~y, y | sign)
    elif kind.name.startswith("I"):
        flip = x.dtype.type(1 << (size * 8 - 1))
        x = x ^ flip
        y = y ^ flip
    return int(np.max(np.where(x > y, x - y, y - x)))
