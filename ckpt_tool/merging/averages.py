"""Weighted sums of models: `linear`, averages of checkpoints, `ema`, a scaled `passthrough`.

    sum_i w_i x_i / sum_i w_i,   without the division where the weights are taken as they are

Each step is one fused multiply-add of fp32, in the order of the sources, then one division: what `addcmul_` and `div_`
of torch do on processors with FMA, so it is equal to mergekit 0.1.5 `merge_methods/linear.py` bit for bit. The fused
step is made of fp64: the product of two fp32 is exact there, and the second rounding changes one result in some 2^29.
Compiled code does the same in one pass where it is there, 0.7 ns an element of two models where NumPy takes 3.5.

Interpolation along the arc between two models: `slerp` and `nuslerp`.

    slerp:    sin((1-t) a) / sin a * x  +  sin(t a) / sin a * y          a: the angle between x and y

Norms and dot products are sums in fp64 over fixed segments of the line (`WalkOutcome`), the coefficients are rounded to
fp32 and the sum is fp32, as mergekit 0.1.5 `merge_methods/slerp.py`, `nuslerp.py` have it; those sum in fp32, so
coefficients differ by a few units in the last place. Angles and sines are taken in fp64 and rounded: NumPy's own of
fp32 differ between processors. Vectors that are nearly parallel (slerp: |cos| > 0.9995, nuslerp: sin^2 <= 1e-16) are
interpolated in a straight line.

`model-stock`: between the base and the average of models trained from it, as far as their angle says.

    t = n cos / (1 + (n - 1) cos),   t * average + (1 - t) * base          cos: the mean over the pairs of task vectors

Products are sums in fp64 over fixed segments; the coefficient is rounded to fp32 and the rest is fp32, as in mergekit
0.1.5 `merge_methods/model_stock.py`, which sums in fp32. With `by_row` each row of the last axis has an angle of its
own. Source: Jang, Yun and Han, "Model Stock" (arXiv 2403.19522).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.compiled.library import KINDS, ready
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.merging.tiles import TILE, Doubles, Span, Tiled, WalkOutcome, floats, rooms, same, tiles
from ckpt_tool.run.computed import Array, Floats, Lend, Read


@dataclass(frozen=True, eq=False)
class Linear(Tiled):
    """inputs: the models."""

    weights: tuple[float, ...]  # one for each
    normalize: bool = True  # divide by the sum of the weights, which is not 0

    @cached_property
    def numbers(self) -> tuple[list[np.float64], np.float32]:
        """(the weights as fp32 has them, what the sum is divided by)."""
        total = np.float32(0)
        for weight in self.weights:
            total = total + np.float32(weight)
        return [np.float64(np.float32(weight)) for weight in self.weights], total if self.normalize else np.float32(1)

    def tile(self, read: Read) -> Span:
        weights, total = self.numbers
        room, place = rooms(TILE)

        def compute_tile(low: int, high: int) -> Floats:
            wide = room[: high - low]
            sums = place[: high - low]
            for number, weight in enumerate(weights):
                values = floats(read(number, low, high))
                if number == 0:  # onto 0: the product alone is rounded, which fp32 does as well
                    np.add(np.multiply(values, np.float32(weight), out=sums), np.float32(0), out=sums)
                    continue
                np.copyto(wide, values)
                np.multiply(wide, weight, out=wide)
                np.add(wide, sums, out=wide)
                np.copyto(sums, wide, casting="unsafe")
            return sums if total == 1 else np.divide(sums, total, out=sums)

        return compute_tile

    def compute_rounded(self, read: Read, lend: Lend, start: int, stop: int, out: tuple[Array, str]) -> bool:
        library = ready(4 * (stop - start) * len(self.inputs)) if self._is_compiled and out[1] in KINDS else None
        if library is None:
            return False
        weights, total = self.numbers
        return library.linear([lend(k, start, stop) for k in range(len(weights))], weights, float(total), *out)

    @cached_property
    def _is_compiled(self) -> bool:
        return all(entry.tensor.dtype.name in KINDS for entry in self.inputs)


# -- along the arc -----------------------------------------------------------------------------------------------------


PARALLEL = 0.9995  # |cos| above which slerp is a straight line
TINY = 1e-8  # norms that slerp takes for 1
TINY_ROW = 1e-7  # the least norm that nuslerp divides by


class Products(NamedTuple):
    """Sums over a line, or over each row or column of it: x x, y y, x y. fp64."""

    xx: Any
    yy: Any
    xy: Any


def _add_products(a: Products, b: Products) -> Products:
    return Products(a.xx + b.xx, a.yy + b.yy, a.xy + b.xy)


def _products(x: Array, y: Array, axis: int | None) -> Products:
    """Sums of the products along `axis` of fp32 arrays, in fp64, where products of fp32 are exact."""
    a = x.astype(np.float64)
    b = y.astype(np.float64)
    return Products((a * a).sum(axis=axis), (b * b).sum(axis=axis), (a * b).sum(axis=axis))


def _arccos(cosine: Any) -> Any:
    return np.float32(np.arccos(np.float64(cosine)))


def _sin(angle: Any) -> Any:
    return np.float32(np.sin(np.float64(angle)))


def _line_products(numel: int) -> WalkOutcome[Products, Products, Products]:
    return WalkOutcome(numel, Products(0.0, 0.0, 0.0), _add_products)


def _make_segment_sums(x: Span, y: Span) -> Callable[[int, int], Products]:
    def look(start: int, stop: int) -> Products:
        sums = Products(0.0, 0.0, 0.0)
        for low, high in tiles(start, stop):
            sums = _add_products(sums, _products(x(low, high), y(low, high), None))
        return sums

    return look


@dataclass(frozen=True, eq=False)
class Slerp(Tiled):
    """inputs: the base, at t = 0, and the other, at t = 1."""

    t: float
    whole: WalkOutcome[Products, Products, Products] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", _line_products(self.numel))

    def tile(self, read: Read) -> Span:
        def x(low: int, high: int) -> Floats:
            return floats(read(0, low, high))

        def y(low: int, high: int) -> Floats:
            return floats(read(1, low, high))

        of_x, of_y = self._coefficients(self.whole.get(_make_segment_sums(x, y), same))

        def compute_tile(low: int, high: int) -> Floats:
            return of_x * x(low, high) + of_y * y(low, high)

        return compute_tile

    def _coefficients(self, found: Products) -> tuple[np.float32, np.float32]:
        x, y = (np.sqrt(square) if np.sqrt(square) > TINY else 1.0 for square in (found.xx, found.yy))
        t = np.float32(self.t)
        cosine = np.float32(min(max(found.xy / (x * y), -1.0), 1.0))
        if abs(cosine) > PARALLEL:
            return np.float32(1) - t, t
        angle = _arccos(cosine)
        sine = _sin(angle)
        return _sin((np.float32(1) - t) * angle) / sine, _sin(t * angle) / sine


@dataclass(frozen=True, eq=False)
class NuSlerp(Tiled):
    """inputs: two models and, where `of_base`, the base that both are taken relative to."""

    t: float
    of_base: bool
    # the axis of the vectors: the last (-1), the first (0), or the whole line (None), as for tensors of one axis
    along: int | None = None
    whole: WalkOutcome[Products, Products, Products] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row", self.columns if self.along is not None else 1)
        cache = _line_products(self.numel)
        if self.along == 0:
            empty: Doubles = np.zeros(self.columns, np.float64)
            cache = WalkOutcome(self.numel, Products(empty, empty, empty), _add_products)
        object.__setattr__(self, "whole", cache)

    @property
    def columns(self) -> int:
        return prod(self.shape[1:]) if self.along == 0 else self.shape[-1]

    def tile(self, read: Read) -> Span:
        def model(number: int) -> Span:
            def part(low: int, high: int) -> Floats:
                values = floats(read(number, low, high))
                return values - floats(read(2, low, high)) if self.of_base else values

            return part

        x = model(0)
        y = model(1)
        if self.along is None:
            found = self.whole.get(_make_segment_sums(x, y), same)
        elif self.along == 0:
            found = self.whole.get(self._make_column_sums(x, y), same)

        def compute_tile(low: int, high: int) -> Floats:
            a = x(low, high)
            b = y(low, high)
            if self.along is None:
                mixed = self._mix(found, a, b)
            else:
                a = a.reshape(-1, self.columns)
                b = b.reshape(-1, self.columns)
                sums = found if self.along == 0 else Products(*(s[:, None] for s in _products(a, b, -1)))
                mixed = self._mix(sums, a, b).reshape(-1)
            return floats(read(2, low, high)) + mixed if self.of_base else mixed

        return compute_tile

    def _make_column_sums(self, x: Span, y: Span) -> Callable[[int, int], Products]:
        """The sums of the rows that begin in a segment, column by column."""

        def look(start: int, stop: int) -> Products:
            zero: Doubles = np.zeros(self.columns, np.float64)
            found = Products(zero, zero, zero)
            first, last = (ceil_div(at, self.row) * self.row for at in (start, stop))
            for low, high in tiles(first, last, self.row) if first < last else ():
                a, b = (each(low, high).reshape(-1, self.columns) for each in (x, y))
                found = _add_products(found, _products(a, b, 0))
            return found

        return look

    def _mix(self, sums: Products, x: Floats, y: Floats) -> Floats:
        norm_x, norm_y = (np.maximum(np.sqrt(square), TINY_ROW) for square in (sums.xx, sums.yy))
        cosine = np.clip(sums.xy / (norm_x * norm_y), -1, 1).astype(np.float32)
        parallel = 1 - cosine * cosine <= TINY**2
        t = np.float32(self.t)
        angle = _arccos(np.where(parallel, np.float32(0), cosine))
        remainder = np.float32(1) - t
        arc: Floats = (_sin(remainder * angle) * x + _sin(t * angle) * y) / _sin(angle)
        if not np.any(parallel):
            return arc.astype(np.float32, copy=False)
        straight = remainder * x + t * y
        return np.where(parallel, straight, arc).astype(np.float32, copy=False)


# -- model stock -------------------------------------------------------------------------------------------------------


LEAST = np.float32(1e-6)  # of products of norms, and of the denominator


@dataclass(frozen=True, eq=False)
class ModelStock(Tiled):
    """inputs: the base, then two models or more."""

    by_row: bool = False
    whole: WalkOutcome[Any, Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.inputs) - 1
        object.__setattr__(self, "whole", WalkOutcome(self.numel, np.zeros((count, count), np.float64), np.add))
        if self.by_row and self.shape:
            object.__setattr__(self, "row", self.shape[-1])

    def tile(self, read: Read) -> Span:
        count = len(self.inputs) - 1

        def look(start: int, stop: int) -> Doubles:
            sums: Doubles = np.zeros((count, count), np.float64)
            for low, high in tiles(start, stop):
                base = floats(read(0, low, high))
                sums += self._products([floats(read(k + 1, low, high)) - base for k in range(count)])
            return sums

        ratio = None if self.by_row else self._ratio(self.whole.get(look, same))

        def compute_tile(low: int, high: int) -> Floats:
            base = floats(read(0, low, high))
            models = [floats(read(k + 1, low, high)) for k in range(count)]
            total: Floats = np.zeros(base.shape, np.float32)
            for model in models:
                total += model
            total /= np.float32(count)
            t: Any = ratio
            if t is None:
                rows = [(model - base).reshape(-1, self.row) for model in models]
                t = np.repeat(self._ratio(self._products(rows)), self.row)
            merged: Floats = t * total + (np.float32(1) - t) * base
            return merged

        return compute_tile

    def _products(self, offsets: list[Floats]) -> Doubles:
        """The products of all pairs, (models, models) and, of rows, their number."""
        wide = [offset.astype(np.float64) for offset in offsets]
        count = len(wide)
        products: Doubles = np.zeros((count, count, *wide[0].shape[:-1]), np.float64)
        for a in range(count):
            for b in range(a, count):
                products[a, b] = (wide[a] * wide[b]).sum(axis=-1)
        return products

    def _ratio(self, products: Doubles) -> Any:
        """t, fp32, one or one a row."""
        count = len(products)
        norms = [np.sqrt(products[k, k]).astype(np.float32) for k in range(count)]
        cosines = [
            np.clip(products[a, b].astype(np.float32) / np.maximum(norms[a] * norms[b], LEAST), -1, 1)
            for a, b in combinations(range(count), 2)
        ]
        cosine = np.stack(cosines).mean(axis=0, dtype=np.float32)
        below = np.float32(1) + np.float32(count - 1) * cosine
        singular = np.abs(below) < LEAST
        t = np.float32(count) * cosine / np.where(singular, np.float32(1), below)
        return np.where(singular, np.float32(0), t).astype(np.float32)
