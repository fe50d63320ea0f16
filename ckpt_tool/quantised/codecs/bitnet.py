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
from ckpt_tool.quantised.codecs.code_bits import Floats
from ckpt_tool.quantised.codecs.codec import Codec, Dequantized, InputList, Step
from ckpt_tool.quantised.codecs.rectangles import Rectangle, read_rectangle
from ckpt_tool.quantised.codecs.scale_grid import OneNumber, RowBlocks
from ckpt_tool.run.computed import Input, Read
from ckpt_tool.weight_schemes.quantised_weights import TRIT_SCALES, Quantised

_DIVIDED, _ = TRIT_SCALES


@dataclass(frozen=True, slots=True)
class Trits:
    """Codes of two bits, four rows a byte."""

    rows: int
    columns: int

    def read_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """As `CodeReader.read_codes`."""
        quarter_rows = self.rows // 4
        codes = np.empty((rectangle.rows, rectangle.columns), np.float32)
        for quarter in range(rectangle.low // quarter_rows, ceil_div(rectangle.high, quarter_rows)):
            low = max(rectangle.low, quarter * quarter_rows)
            high = min(rectangle.high, (quarter + 1) * quarter_rows)
            place = rectangle._replace(low=low - quarter * quarter_rows, high=high - quarter * quarter_rows)
            stored = read_rectangle(read, 0, place, self.columns).view(np.uint8)
            codes[low - rectangle.low : high - rectangle.low] = stored >> np.uint8(2 * quarter) & np.uint8(3)
        return codes - np.float32(1)


def make_bitnet(weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input]) -> Dequantized:
    """The floats of a weight of TRITS codes."""
    inputs = InputList(weight, inputs_by_name)
    number, scale = inputs.add("scale")
    rows, columns = weight.shape
    operation = np.divide if weight.order == _DIVIDED else np.multiply
    step = Step(operation, OneNumber.of(number, scale.tensor))
    codec = Codec(columns, Trits(rows, columns), RowBlocks(rows, 1, rows), (step,))
    text = f"dequantised bitnet {weight.order} {weight.shape}"
    return Dequantized(key, weight.shape, tuple(inputs.inputs), text, codec)
