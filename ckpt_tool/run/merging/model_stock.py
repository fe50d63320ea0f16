"""`model-stock`: between the base and the average of models trained from it, as far as their angle says.

    t = n cos / (1 + (n - 1) cos),   t * average + (1 - t) * base          cos: the mean over the pairs of task vectors

Products are sums in fp64 over fixed segments; the coefficient is rounded to fp32 and the rest is fp32, as in mergekit 0.1.5
`merge_methods/model_stock.py`, which sums in fp32. With `by_row` each row of the last axis has an angle of its own.
Source: Jang, Yun and Han, "Model Stock" (arXiv 2403.19522).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from ckpt_tool.run.computed import Floats, Read
from ckpt_tool.run.merging.line import Doubles, Span, Tiled, floats, tiles
from ckpt_tool.run.merging.whole import Whole, same

LEAST = np.float32(1e-6)  # of products of norms, and of the denominator


@dataclass(frozen=True, eq=False)
class ModelStock(Tiled):
    """inputs: the base, then two models or more."""

    by_row: bool = False
    whole: Whole[Any, Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.inputs) - 1
        object.__setattr__(self, "whole", Whole(self.numel, np.zeros((count, count), np.float64), np.add))
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

        def made(low: int, high: int) -> Floats:
            base, models = floats(read(0, low, high)), [floats(read(k + 1, low, high)) for k in range(count)]
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

        return made

    def _products(self, offsets: list[Floats]) -> Doubles:
        """The products of all pairs, (models, models) and, of rows, their number."""
        wide = [offset.astype(np.float64) for offset in offsets]
        count = len(wide)
        out: Doubles = np.zeros((count, count, *wide[0].shape[:-1]), np.float64)
        for a in range(count):
            for b in range(a, count):
                out[a, b] = (wide[a] * wide[b]).sum(axis=-1)
        return out

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
