"""Interpolation along the arc between two models: `slerp` and `nuslerp`.

    slerp:    sin((1-t) a) / sin a * x  +  sin(t a) / sin a * y          a: the angle between x and y

Norms and dot products are sums in fp64 over fixed segments of the line (`whole`), the coefficients are rounded to fp32 and
the sum is fp32, as mergekit 0.1.5 `merge_methods/slerp.py`, `nuslerp.py` have it; those sum in fp32, so coefficients differ
by a few units in the last place. Angles and sines are taken in fp64 and rounded: NumPy's own of fp32 differ between
processors. Vectors that are nearly parallel (slerp: |cos| > 0.9995, nuslerp: sin^2 <= 1e-16) are
interpolated in a straight line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.run.computed import Array, Floats, Read
from ckpt_tool.run.merging.line import Doubles, Span, Tiled, floats, tiles
from ckpt_tool.run.merging.whole import Whole, same

PARALLEL = 0.9995  # |cos| above which slerp is a straight line
TINY = 1e-8  # norms that slerp takes for 1
TINY_ROW = 1e-7  # the least norm that nuslerp divides by


class Products(NamedTuple):
    """Sums over a line, or over each row or column of it: x x, y y, x y. fp64."""

    xx: Any
    yy: Any
    xy: Any


def _added(a: Products, b: Products) -> Products:
    return Products(a.xx + b.xx, a.yy + b.yy, a.xy + b.xy)


def _products(x: Array, y: Array, axis: int | None) -> Products:
    """Sums of the products along `axis` of fp32 arrays, in fp64, where products of fp32 are exact."""
    a, b = x.astype(np.float64), y.astype(np.float64)
    return Products((a * a).sum(axis=axis), (b * b).sum(axis=axis), (a * b).sum(axis=axis))


def _arccos(cosine: Any) -> Any:
    return np.float32(np.arccos(np.float64(cosine)))


def _sin(angle: Any) -> Any:
    return np.float32(np.sin(np.float64(angle)))


def _line_products(numel: int) -> Whole[Products, Products, Products]:
    return Whole(numel, Products(0.0, 0.0, 0.0), _added)


def _of_segment(x: Span, y: Span) -> Callable[[int, int], Products]:
    def look(start: int, stop: int) -> Products:
        found = Products(0.0, 0.0, 0.0)
        for low, high in tiles(start, stop):
            found = _added(found, _products(x(low, high), y(low, high), None))
        return found

    return look


@dataclass(frozen=True, eq=False)
class Slerp(Tiled):
    """inputs: the base, at t = 0, and the other, at t = 1."""

    t: float
    whole: Whole[Products, Products, Products] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", _line_products(self.numel))

    def tile(self, read: Read) -> Span:
        def x(low: int, high: int) -> Floats:
            return floats(read(0, low, high))

        def y(low: int, high: int) -> Floats:
            return floats(read(1, low, high))

        of_x, of_y = self._coefficients(self.whole.get(_of_segment(x, y), same))

        def made(low: int, high: int) -> Floats:
            return of_x * x(low, high) + of_y * y(low, high)

        return made

    def _coefficients(self, found: Products) -> tuple[np.float32, np.float32]:
        x, y = (np.sqrt(each) if np.sqrt(each) > TINY else 1.0 for each in (found.xx, found.yy))
        t, cosine = np.float32(self.t), np.float32(min(max(found.xy / (x * y), -1.0), 1.0))
        if abs(cosine) > PARALLEL:
            return np.float32(1) - t, t
        angle = _arccos(cosine)
        sine = _sin(angle)
        return _sin((np.float32(1) - t) * angle) / sine, _sin(t * angle) / sine


@dataclass(frozen=True, eq=False)
class NuSlerp(Tiled):
    """inputs: two models and, where `of_base`, the base that both are taken relative to.

    along: the axis of the vectors: the last (-1), the first (0), or the whole line (None), as for tensors of one axis.
    """

    t: float
    of_base: bool
    along: int | None = None
    whole: Whole[Products, Products, Products] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row", self.columns if self.along is not None else 1)
        whole = _line_products(self.numel)
        if self.along == 0:
            empty: Doubles = np.zeros(self.columns, np.float64)
            whole = Whole(self.numel, Products(empty, empty, empty), _added)
        object.__setattr__(self, "whole", whole)

    @property
    def columns(self) -> int:
        return prod(self.shape[1:]) if self.along == 0 else self.shape[-1]

    def tile(self, read: Read) -> Span:
        def model(number: int) -> Span:
            def part(low: int, high: int) -> Floats:
                values = floats(read(number, low, high))
                return values - floats(read(2, low, high)) if self.of_base else values

            return part

        x, y = model(0), model(1)
        if self.along is None:
            found = self.whole.get(_of_segment(x, y), same)
        elif self.along == 0:
            found = self.whole.get(self._of_columns(x, y), same)

        def made(low: int, high: int) -> Floats:
            a, b = x(low, high), y(low, high)
            if self.along is None:
                mixed = self._mixed(found, a, b)
            else:
                a, b = a.reshape(-1, self.columns), b.reshape(-1, self.columns)
                sums = found if self.along == 0 else Products(*(s[:, None] for s in _products(a, b, -1)))
                mixed = self._mixed(sums, a, b).reshape(-1)
            return floats(read(2, low, high)) + mixed if self.of_base else mixed

        return made

    def _of_columns(self, x: Span, y: Span) -> Callable[[int, int], Products]:
        """The sums of the rows that begin in a segment, column by column."""

        def look(start: int, stop: int) -> Products:
            zero: Doubles = np.zeros(self.columns, np.float64)
            found = Products(zero, zero, zero)
            first, last = (-(-at // self.row) * self.row for at in (start, stop))
            for low, high in tiles(first, last, self.row) if first < last else ():
                a, b = (each(low, high).reshape(-1, self.columns) for each in (x, y))
                found = _added(found, _products(a, b, 0))
            return found

        return look

    def _mixed(self, sums: Products, x: Floats, y: Floats) -> Floats:
        norm_x, norm_y = (np.maximum(np.sqrt(each), TINY_ROW) for each in (sums.xx, sums.yy))
        cosine = np.clip(sums.xy / (norm_x * norm_y), -1, 1).astype(np.float32)
        parallel = 1 - cosine * cosine <= TINY**2
        t, angle = np.float32(self.t), _arccos(np.where(parallel, np.float32(0), cosine))
        rest = np.float32(1) - t
        arc: Floats = (_sin(rest * angle) * x + _sin(t * angle) * y) / _sin(angle)
        if not np.any(parallel):
            return arc.astype(np.float32, copy=False)
        straight = rest * x + t * y
        return np.where(parallel, straight, arc).astype(np.float32, copy=False)
