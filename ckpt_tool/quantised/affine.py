"""MLX: groups of a row with a scale and a bias, as floats.

    w[r, c] = dtype(dtype(scale[r, c // group] * code[r, c]) + bias[r, c // group])

Product and sum are rounded to the dtype of the scales each, to nearest: with bf16, rounding once is off by one in the
last place for a tenth of the values and more. Codes of a row are a little-endian stream of 2, 3, 4, 5, 6 or 8 bits over
its 32-bit words. How many bits and how large a group is stands in the config alone, for some modules apart.
Sources: mlx 0.32.4 `backend/cpu/quantized.cpp` (`mx.dequantize`, bit for bit on a CPU), mlx-lm 0.32.2 `utils.py`
(`quantize_model`). Cost: 8 ns an element of 4 bits. What it does not do: the modes mxfp4, mxfp8 and nvfp4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.quantised.codes import Floats, Grid, Rectangle, rectangles, scale, unpacked
from ckpt_tool.quantised.weights import Quantised
from ckpt_tool.run.compute import cast, numpy_type
from ckpt_tool.run.computed import Input, Read, Recipe


@dataclass(frozen=True, eq=False)
class Affine(Recipe):
    """One weight. Inputs: codes, scales, biases."""

    bits: int
    scales: Grid
    biases: Grid

    def values(self, read: Read, start: int, stop: int) -> Floats:
        parts = [self._within(read, where).reshape(-1) for where in rectangles(start, stop, self.shape[-1])]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _within(self, read: Read, where: Rectangle) -> Floats:
        bits, rows = self.bits, where.high - where.low
        wide = self.shape[-1] * bits // 32
        low, high = (where.left * bits // 32, -(-where.right * bits // 32)) if rows == 1 else (0, wide)
        words = read(0, where.low * wide + low, (where.high - 1) * wide + high).view(np.uint8).reshape(rows, -1)
        codes = unpacked(words, bits, where.left * bits - 32 * low, where.right - where.left)
        values = codes + np.float32(1 << (bits - 1))
        with np.errstate(all="ignore"):  # what overflows is infinite, as it is for MLX
            scale(values, *self.scales.over(read, where))
            values = self._rounded(values)
            scale(values, *self.biases.over(read, where), np.add)
        return self._rounded(values)

    def _rounded(self, values: Floats) -> Floats:
        dtype = self.scales.dtype
        if dtype.name == "F32":
            return values
        line, _ = cast(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, DTYPES["F32"], dtype)
        return np.frombuffer(line, numpy_type(dtype)).astype(np.float32).reshape(values.shape)


def affine(weight: Quantised, key: TensorKey, of: Mapping[str, Input]) -> Affine:
    """How the floats of a weight of STREAM codes are made. Raises InconsistentCheckpoint E1462 for scales that are no
    floats."""
    inputs = tuple(of[name] for name in weight.names)
    tensor = inputs[1].tensor
    if tensor.dtype.name not in ("F32", "BF16", "F16"):
        name = tensor.key.name
        raise InconsistentCheckpoint(
            f"{name}: scales of {tensor.dtype.name}",
            code="E1462",
            key=name,
            hint="do all files belong to one checkpoint? fetch it again",
        )
    rows, groups = weight.shape[-2], tensor.shape[-1]
    grids = [
        Grid(number, tensor.dtype, rows, rows, groups, weight.block, inputs[number].tensor.key.name)
        for number in (1, 2)
    ]
    text = f"dequantised mlx {weight.bits} {weight.block} {tensor.dtype.name} {weight.shape}"
    return Affine(key, weight.shape, inputs, text, weight.bits, *grids)
