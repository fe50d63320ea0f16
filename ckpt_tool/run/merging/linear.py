"""Weighted sums of models: `linear`, averages of checkpoints, `ema`, a scaled `passthrough`.

    sum_i w_i x_i / sum_i w_i,   without the division where the weights are taken as they are

Each step is one fused multiply-add of fp32, in the order of the sources, then one division: what `addcmul_` and `div_` of
torch do on processors with FMA, so it is equal to mergekit 0.1.5 `merge_methods/linear.py` bit for bit. The fused step is
made of fp64: the product of two fp32 is exact there, and the second rounding changes one result in some 2^29.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckpt_tool.run.computed import Floats, Read
from ckpt_tool.run.merging.line import TILE, Span, Tiled, rooms


@dataclass(frozen=True, eq=False)
class Linear(Tiled):
    """inputs: the models. weights: one for each. normalize: divide by the sum of the weights, which is not 0."""

    weights: tuple[float, ...]
    normalize: bool = True

    def tile(self, read: Read) -> Span:
        weights = [np.float64(np.float32(weight)) for weight in self.weights]
        total = np.float32(0)
        for weight in self.weights:
            total = total + np.float32(weight)

        room, place = rooms(TILE)

        def made(low: int, high: int) -> Floats:
            wide, sums = room[: high - low], place[: high - low]
            sums[...] = 0
            for number, weight in enumerate(weights):
                np.copyto(wide, read(number, low, high))
                np.multiply(wide, weight, out=wide)
                np.add(wide, sums, out=wide)
                np.copyto(sums, wide, casting="unsafe")
            return np.divide(sums, total, out=sums) if self.normalize else sums

        return made
