"""MLX: codes of a row in groups with a scale, as floats.

    affine           w[r, c] = dtype(dtype(scale[r, c // group] * code[r, c]) + bias[r, c // group])
    mxfp4, mxfp8     w[r, c] = 2^(scale[r, c // 32] - 127) * code[r, c]      codes E2M1 or E4M3
    nvfp4            w[r, c] = scale[r, c // 16] * code[r, c]                codes E2M1, scales E4M3

Product and sum of affine codes are rounded to the dtype of the scales each, to nearest: with bf16, rounding once is off
by one in the last place for a tenth of the values and more. The other products are what fp32 holds of them, and MLX
rounds them to bf16. Codes of a row are a little-endian stream of 2, 3, 4, 5, 6 or 8 bits over its 32-bit words. How
many bits and how large a group is stands in the config alone, for some modules apart. A scale that is NaN is an error
here; MLX takes byte 255 of E8M0 for 2^128.
Sources: mlx 0.32.4 `backend/cpu/quantized.cpp` (`mx.dequantize`, bit for bit on a CPU), mlx-lm 0.32.2 `utils.py`
(`quantize_model`). Cost: 8 ns an element of 4 affine bits. What it does not do: nvfp4 with a `global_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.quantised.codes import (
    FP4,
    Floats,
    Rectangle,
    ScaleGrid,
    halves,
    list_byte_values,
    rectangles,
    scale,
    unpack_codes,
)
from ckpt_tool.run.compute import cast, looked_up, numpy_type
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.weight_schemes.quantised_weights import AFFINE, Quantised


@dataclass(frozen=True, eq=False)
class _Groups(Recipe):
    """One weight. Inputs: codes, scales, of affine codes biases too."""

    bits: int
    scales: ScaleGrid

    def values(self, read: Read, start: int, stop: int) -> Floats:
        parts = [
            self._decode_rectangle(read, rectangle).reshape(-1) for rectangle in rectangles(start, stop, self.shape[-1])
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decode_rectangle(self, read: Read, rectangle: Rectangle) -> Floats:
        """The floats of a rectangle."""
        raise NotImplementedError

    def _words(self, read: Read, rectangle: Rectangle) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
        """(the words of a rectangle's rows as bytes, the bits of a row that lie before its codes)."""
        bits = self.bits
        rows = rectangle.high - rectangle.low
        words_per_row = self.shape[-1] * bits // 32
        low = 0
        high = words_per_row
        if rows == 1:  # of a single row only the words of the rectangle are read
            low = rectangle.left * bits // 32
            high = ceil_div(rectangle.right * bits, 32)
        words = (
            read(0, rectangle.low * words_per_row + low, (rectangle.high - 1) * words_per_row + high)
            .view(np.uint8)
            .reshape(rows, -1)
        )
        return words, rectangle.left * bits - 32 * low


@dataclass(frozen=True, eq=False)
class Floating(_Groups):
    """Codes that are floats."""

    def _decode_rectangle(self, read: Read, rectangle: Rectangle) -> Floats:
        words, skip = self._words(read, rectangle)
        is_fp8 = self.bits == 8
        first = skip // self.bits
        count = rectangle.right - rectangle.left
        line = np.ascontiguousarray(words).reshape(-1)
        codes = looked_up(list_byte_values(DTYPES["F8_E4M3"]), line) if is_fp8 else halves(FP4, line)
        values = np.ascontiguousarray(codes.reshape(len(words), -1)[:, first : first + count])
        with np.errstate(all="ignore"):
            scale(values, *self.scales.read_scales(read, rectangle))
        return values


@dataclass(frozen=True, eq=False)
class Affine(_Groups):
    """Codes that are integers."""

    biases: ScaleGrid

    def _decode_rectangle(self, read: Read, rectangle: Rectangle) -> Floats:
        words, skip = self._words(read, rectangle)
        codes = unpack_codes(words, self.bits, skip, rectangle.right - rectangle.left)
        values = codes + np.float32(1 << (self.bits - 1))
        with np.errstate(all="ignore"):  # what overflows is infinite, as it is for MLX
            scale(values, *self.scales.read_scales(read, rectangle))
            values = self._round_to_scales(values)
            scale(values, *self.biases.read_scales(read, rectangle), np.add)
        return self._round_to_scales(values)

    def _round_to_scales(self, values: Floats) -> Floats:
        dtype = self.scales.dtype
        if dtype.name == "F32":
            return values
        line, _ = cast(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, DTYPES["F32"], dtype)
        return np.frombuffer(line, numpy_type(dtype)).astype(np.float32).reshape(values.shape)


def make_group_recipe(weight: Quantised, key: TensorKey, of: Mapping[str, Input]) -> Affine | Floating:
    """How the floats of a weight of STREAM codes are made. Raises InconsistentCheckpoint E1462 for scales of affine
    codes that are no floats."""
    inputs = tuple(of[name] for name in weight.names)
    tensor = inputs[1].tensor
    rows = weight.shape[-2]
    dtype = DTYPES["F8_E4M3"] if weight.order == "nvfp4" else tensor.dtype
    if weight.order == AFFINE and dtype.name not in ("F32", "BF16", "F16"):
        name = tensor.key.name
        raise InconsistentCheckpoint(
            f"{name}: scales of {dtype.name}",
            code="E1462",
            key=name,
            hint="do all files belong to one checkpoint? fetch it again",
        )
    grids = [
        ScaleGrid(number, dtype, rows, rows, tensor.shape[-1], weight.block, inputs[number].tensor.key.name)
        for number in range(1, len(inputs))
    ]
    text = f"dequantised mlx {weight.order} {weight.bits} {weight.block} {dtype.name} {weight.shape}"
    make = Affine if weight.order == AFFINE else Floating
    return make(key, weight.shape, inputs, text, weight.bits, *grids)
