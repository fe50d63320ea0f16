"""BitNet: codes of -1, 0 and 1, four a byte, with one scale for all, as floats.

    w[r, c] = (bits 2 q, 2 q + 1 of byte[r mod n, c] - 1) / scale        q = r div n, n rows of bytes: `bitlinear`
    w[r, c] = the same * scale                                          `autobitlinear`

One operation in fp32, rounded to nearest, then once more to the dtype that is written. A byte holds four rows that are
a quarter of all rows apart.
Source: transformers 5.24 `integrations/bitnet.py` (`pack_weights`, `BitLinear.post_quant_process`,
`AutoBitLinear.forward`). Cost: 3 ns an element. What it does not do: rows that are no multiple of four.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.quantised.codes import Floats, Rectangle, as_floats, rectangles
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.weight_schemes.quantised_weights import TRIT_SCALES, Quantised

_DIVIDED, _ = TRIT_SCALES


@dataclass(frozen=True, eq=False)
class Trits(Recipe):
    """One weight. Inputs: bytes, the scale."""

    divides: bool  # is the code divided by it?

    def values(self, read: Read, start: int, stop: int) -> Floats:
        scale = self.inputs[1].tensor
        factor = as_floats(read(1, 0, 1), scale.dtype, scale.key.name)[0]
        parts = [self._codes(read, where).reshape(-1) for where in rectangles(start, stop, self.shape[1])]
        codes = parts[0] if len(parts) == 1 else np.concatenate(parts)

        with np.errstate(all="ignore"):  # a scale of 0 gives what it gives in PyTorch
            found: Floats = codes / factor if self.divides else codes * factor
        return found

    def _codes(self, read: Read, where: Rectangle) -> Floats:
        """The codes of a rectangle, quarter by quarter of the rows."""
        columns = self.shape[1]
        quarter = self.shape[0] // 4
        found = np.empty((where.high - where.low, where.right - where.left), np.float32)

        for number in range(where.low // quarter, ceil_div(where.high, quarter)):
            low = max(where.low, number * quarter)
            high = min(where.high, (number + 1) * quarter)
            first = low - number * quarter
            last = high - number * quarter
            begin = first * columns + where.left
            end = (last - 1) * columns + where.right
            stored = np.zeros((high - low) * columns, np.uint8)
            stored[where.left : where.left + end - begin] = read(0, begin, end)
            rows = stored.reshape(high - low, columns)[:, where.left : where.right]
            found[low - where.low : high - where.low] = (rows >> (2 * number) & 3).astype(np.float32)
        return found - np.float32(1)


def trits(weight: Quantised, key: TensorKey, of: Mapping[str, Input]) -> Trits:
    """How a weight of TRITS is made."""
    inputs = (of[weight.lead], of[weight.parts["scale"]])
    text = f"dequantised bitnet {weight.order} {weight.shape}"
    return Trits(key, weight.shape, inputs, text, weight.order == _DIVIDED)
