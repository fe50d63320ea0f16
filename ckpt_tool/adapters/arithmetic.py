"""Adapters folded into their base while it is read: the arithmetic of LoRA, DoRA, embeddings, biases and stacked
experts.

A folded tensor is a recipe of `run.computed`: the base tensor plus, for each adapter, a product of two thin matrices,

    W' = W + s B A              LoRA: W (out, in), A (r, in), B (out, r), s = alpha / r
    W' = m / |W + s B A| (W + s B A)      DoRA: m (out,), the norm of each output's row
    W' = W + s (B A)^T          Conv1D and embeddings, whose weight is (in, out)
    W'[e] = W[e] + s B_e A_e    stacked experts: A_e rows [e r, (e + 1) r) of A (e r, in), B_e = B (out, r, e)[:, :, e]

seen as E matrices of R rows and C columns whatever the tensor's rank (a convolution has the columns in x kernel).
Arithmetic is fp32 in PEFT's order: the product, times s, rounded, added, rounded; several adapters one after another;
rounding to the output's dtype comes last, once. Every product is made in blocks of up to 4 rows by up to 512 columns on
a grid fixed by the tensor and the machine, each element one chain of fused multiply-adds along r (`chain`), so it has
the same bits whatever range it is asked for in, and on whatever processor. A block is at most 2^18 multiply-adds:
OpenBLAS takes larger ones to threads of its own, which fight the executor's (measured: 0.3 ns an element at r = 16 and
1.2 at r = 64 in such blocks with AVX-512, 1.6 to 2.8 and 7 to 11 with AVX2; 1 to 15 ns in one piece). DoRA's norms are
summed in torch's order (eight lanes along a row, one row after another where the weight is transposed), so all of them
equal PEFT's merge bit for bit as long as torch makes one chain too (tests/commands/test_adapters.py): up to r = 320
with AVX-512, some 192 with AVX2.

Plain products are added and rounded by compiled code where it is there (`Folded.compute_rounded`): the same chains in
registers, 0.9 ns an element at r = 16 and 2.5 at r = 64 with AVX2, widening the base and rounding the sum included.

Cost: else 2 to 4 ns an element at r = 16 with AVX-512; A and B of the tensors at work, at most `RunCache.ROOM` bytes.
DoRA reads its base twice. Source: PEFT 0.21.2 `tuners/lora/layer.py` (get_delta_weight, merge), `variants.py` and
`dora.py`, `utils/save_and_load.py`, `tuners/trainable_tokens/layer.py`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from math import frexp, prod
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.adapters import chain
from ckpt_tool.compiled.library import KINDS, CompiledLibrary, ready
from ckpt_tool.compiled.library import CTerm as Product
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.run.computed import Array, Floats, Lend, Read, Recipe

COLUMNS = 512  # of a block; few rows, so that little is made twice where a range ends within them
PRODUCTS = 1 << 18  # multiply-adds of a block at most: OpenBLAS's own threads begin above
LANES = 8  # of torch's vectors of fp32, whatever the machine
_TILE = 1 << 20  # elements of one step of a pass over a tensor


class RunCache:
    """What recipes of one run share: factors as they are used, the last ones; DoRA's norms; the last strip of each
    thread."""

    ROOM = 128 << 20  # bytes of factors

    def __init__(self) -> None:
        self._held: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._guard = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}
        self._norms: dict[Hashable, Floats] = {}
        self.strips = threading.local()

    def factors(self, key: Hashable, make: Callable[[], tuple[Floats, ...]]) -> tuple[Floats, ...]:
        """What `make` gives for `key`, kept while there is room. Two threads may make the same."""
        with self._guard:
            if key in self._held:
                self._held.move_to_end(key)
                cached: tuple[Floats, ...] = self._held[key][1]
                return cached
        factors = make()
        with self._guard:
            self._held[key] = (sum(factor.nbytes for factor in factors), factors)
            while len(self._held) > 1 and sum(size for size, _ in self._held.values()) > self.ROOM:
                self._held.popitem(last=False)
        return factors

    def norms(self, key: Hashable, make: Callable[[], Floats]) -> Floats:
        """A pass over a whole tensor is made once: others wait for it."""
        with self._guard:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            if key not in self._norms:
                self._norms[key] = make()
            return self._norms[key]


class ProductTerm(NamedTuple):
    """One adapter's share in a tensor."""

    # a, b, magnitude: numbers of the recipe's inputs
    a: int
    b: int
    rank: int  # of one expert's
    scaling: float
    turned: bool  # the product is added transposed
    magnitude: int | None = None


@dataclass(frozen=True, eq=False)
class Folded(Recipe):
    """The base (input 0) and low-rank terms."""

    terms: tuple[ProductTerm, ...]
    experts: int  # matrices stacked along the first dim, 1 for a plain weight
    kept: RunCache

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """As `Recipe.values`: the base's values with each term's product added, expert by expert."""
        values = _floats(read(0, start, stop))
        size = self.numel // self.experts
        for e in range(start // size, ceil_div(stop, size)):
            low = max(start, e * size)
            high = min(stop, (e + 1) * size)
            part = values[low - start : high - start]
            for number in range(len(self.terms)):
                self._add(read, number, e, part, low - e * size, high - e * size)
        return values

    def compute_rounded(self, read: Read, lend: Lend, start: int, stop: int, out: tuple[Array, str]) -> bool:
        """As `Recipe.compute_rounded`, for base and terms in one pass; False if NumPy has to do it."""
        library = ready(4 * (stop - start)) if out[1] in KINDS and self._is_compiled else None
        if library is None or not library.pair:  # products want a fused multiply-add, which not every processor has
            return False
        values, kind = lend(0, start, stop)
        size = self.numel // self.experts
        item = values.nbytes // (stop - start)
        made = out[0]
        for e in range(start // size, ceil_div(stop, size)):
            low = max(start, e * size)
            high = min(stop, (e + 1) * size)
            base = values[(low - start) * item : (high - start) * item]
            terms = [self._term(library, read, number, e) for number in range(len(self.terms))]
            where = (low - e * size, high - e * size, self.matrix[1])
            if not library.folded((base, kind), (made[low - start : high - start], out[1]), where, terms):
                return False
        return True

    @cached_property
    def _is_compiled(self) -> bool:
        """Are all terms plain products?"""
        plain = all(not term.magnitude for term in self.terms)
        return plain and self.inputs[0].tensor.dtype.name in KINDS

    def _term(self, library: CompiledLibrary, read: Read, number: int, e: int) -> Product:
        term = self.terms[number]

        def made() -> tuple[Floats, Floats]:
            tall, flat = self._factors_of(read, term, e)
            return np.ascontiguousarray(tall), library.panels(flat)

        left, right = self.kept.factors((self.key, number, e, "panels"), made)
        return Product(left, right, term.scaling)

    @property
    def matrix(self) -> tuple[int, int]:
        """(R, C) of one expert."""
        shape = self.shape if self.experts == 1 else self.shape[1:]
        return shape[0], prod(shape[1:])

    def _add(self, read: Read, number: int, e: int, part: Floats, low: int, high: int) -> None:
        """Fold term `number` into `part`, elements [low, high) of expert `e`, in place."""
        term = self.terms[number]
        _, width = self.matrix
        first = low // width
        last = (high - 1) // width
        strip = first == last  # within one row: its own columns are enough
        left, right = (low - first * width, high - first * width) if strip else (0, width)
        delta = self._product(read, number, e, (first, last + 1), (left, right), strip=strip)
        line = delta.reshape(-1)[0 if strip else low - first * width :][: high - low]
        if not term.magnitude:
            part += line
            return
        factor = self._factors(read, number)
        part += line
        if term.turned:
            columns = np.arange(low, high) % width if not strip else slice(left, right)
            part *= factor[columns]
        else:
            rows = np.repeat(factor[first : last + 1], right - left)
            part *= rows[0 if strip else low - first * width :][: high - low]

    def _product(
        self, read: Read, number: int, e: int, rows: tuple[int, int], columns: tuple[int, int], *, strip: bool = False
    ) -> Floats:
        """s B A (or its transpose) of expert `e` in [rows) x [columns), C-contiguous."""
        term = self.terms[number]
        left, right = self.kept.factors((self.key, number, e), lambda: self._thin(read, term, e))
        tall = left.shape[1]
        wide = right.shape[-1]
        low = rows[0] // tall
        high = ceil_div(rows[1], tall)
        first_block = columns[0] // wide
        last_block = ceil_div(columns[1], wide)
        cache_key = (self.key, number, e, low, first_block, last_block)
        if strip and getattr(self.kept.strips, "at", None) == cache_key:
            block: Floats = self.kept.strips.block
        else:
            block = np.empty(((high - low) * tall, (last_block - first_block) * wide), np.float32)
            by_block = block.reshape(high - low, tall, last_block - first_block, wide).transpose(2, 0, 1, 3)
            chain.product(left[low:high], right[first_block:last_block, None], by_block)
            if not _exact(term.scaling):
                block *= np.float32(term.scaling)
            if strip:  # the next rows of a panel are most often asked for the same columns
                self.kept.strips.at, self.kept.strips.block = cache_key, block

        return np.ascontiguousarray(
            block[
                rows[0] - low * tall : rows[1] - low * tall,
                columns[0] - first_block * wide : columns[1] - first_block * wide,
            ]
        )

    def _factors_of(self, read: Read, term: ProductTerm, e: int) -> tuple[Floats, Floats]:
        """(R, r) and (r, C) of expert `e`, views."""
        inner = prod(self.inputs[term.a].tensor.shape[1:])
        step = term.rank * inner
        a = _floats(read(term.a, e * step, (e + 1) * step)).reshape(term.rank, inner)
        (outputs,) = self.kept.factors((self.key, term.b), lambda: (self._split_by_expert(read, term),))
        b = outputs[e]
        return (a.T, b.T) if term.turned else (b, a)

    def _thin(self, read: Read, term: ProductTerm, e: int) -> tuple[Floats, Floats]:
        """The factors on the grid: (blocks of rows, rows of a block, r) and (blocks of columns, r, columns of a block),
        padded by zeros."""
        tall, flat = self._factors_of(read, term, e)
        wide = max(16, min(COLUMNS, PRODUCTS // (chain.MOST_ROWS * term.rank) // 16 * 16))
        rows = chain.rows_of(term.rank, wide)
        left = np.zeros((ceil_div(tall.shape[0], rows) * rows, term.rank), np.float32)
        left[: tall.shape[0]] = tall * np.float32(term.scaling) if _exact(term.scaling) else tall
        right = np.zeros((term.rank, ceil_div(flat.shape[1], wide) * wide), np.float32)
        right[:, : flat.shape[1]] = flat
        blocks = np.ascontiguousarray(right.reshape(term.rank, -1, wide).transpose(1, 0, 2))
        return left.reshape(-1, rows, term.rank), blocks

    def _split_by_expert(self, read: Read, term: ProductTerm) -> Floats:
        """B (out, e r), whose experts alternate, as (e, out, r)."""
        shape = self.inputs[term.b].tensor.shape
        b = _floats(read(term.b, 0, prod(shape))).reshape(shape[0], term.rank, self.experts)
        return np.ascontiguousarray(b.transpose(2, 0, 1))

    def _factors(self, read: Read, number: int) -> Floats:
        """DoRA's magnitude over norm, one for each output: of a row, or of a column where the weight is (in, out)."""
        return self.kept.norms((self.key, number), lambda: self._norm(read, number))

    def _norm(self, read: Read, number: int) -> Floats:
        term = self.terms[number]
        height, width = self.matrix
        squares = np.zeros(width if term.turned else height, np.float32)
        step = max(1, _TILE // max(width, 1) // chain.EVEN_ROWS) * chain.EVEN_ROWS
        for low in range(0, height, step):
            high = min(height, low + step)
            tile = _floats(read(0, low * width, high * width)).reshape(high - low, width)
            tile += self._product(read, number, 0, (low, high), (0, width))
            tile *= tile
            if term.turned:
                tall = np.vstack((squares, tile))  # (one column alone NumPy would sum pairwise)
                squares = np.add.accumulate(tall, axis=0)[-1] if width == 1 else np.add.reduce(tall, axis=0)
            else:
                squares[low:high] = _sum_by_lanes(tile)
        magnitude = _floats(read(term.magnitude or 0, 0, len(squares)))
        with np.errstate(divide="ignore", invalid="ignore"):
            magnitude /= np.sqrt(squares)
        return magnitude


def _sum_by_lanes(tile: Floats) -> Floats:
    """The sum of each row in the order of torch's norm of a contiguous last dim (2.13 ReduceOpsKernel.cpp): eight
    lanes, one after the other, then what is left of the row."""
    rows, width = tile.shape
    full_lanes = width // LANES * LANES
    lanes = np.add.reduce(tile[:, :full_lanes].reshape(rows, -1, LANES), axis=1)
    sums: Floats = lanes[:, 0].copy()
    for lane in range(1, LANES):
        sums += lanes[:, lane]
    for column in range(full_lanes, width):
        sums += tile[:, column]
    return sums


@dataclass(frozen=True, eq=False)
class Biased(Recipe):
    """A bias (input 0) and, for each adapter, `lora_B.bias` times its scaling (inputs 1, 2, ...)."""

    scalings: tuple[float, ...]

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """As `Recipe.values`: the base's values plus the scaled biases."""
        values = _floats(read(0, start, stop))
        for number, scaling in enumerate(self.scalings, 1):
            values += _floats(read(number, start, stop)) * np.float32(scaling)
        return values


@dataclass(frozen=True, eq=False)
class MatrixRows(Recipe):
    """An embedding (input 0) in which row `rows[k]` is row k of input 1."""

    rows: tuple[tuple[int, int], ...]  # ascending, with their k

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """As `Recipe.values`: the base's values with some rows replaced."""
        values = _floats(read(0, start, stop))
        width = prod(self.shape[1:])
        for row, k in self.rows:
            low = max(start, row * width)
            high = min(stop, (row + 1) * width)
            if low < high:
                begin = (k - row) * width
                values[low - start : high - start] = _floats(read(1, low + begin, high + begin))
        return values


def _exact(scaling: float) -> bool:
    """May a factor be scaled in place of the product, with the same bits? By powers of two that come near no end of
    fp32."""
    mantissa, exponent = frexp(scaling)
    return abs(mantissa) == 0.5 and abs(exponent) < 16


def _floats(values: np.ndarray[Any, np.dtype[Any]]) -> Floats:
    """fp32 values that may be changed: `read` gives a copy."""
    converted: Floats = values.astype(np.float32, copy=False)
    return converted
