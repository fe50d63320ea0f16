"""Codes that are FP4 (E2M1), two a byte: MXFP4 and NVFP4 as floats.

    mxfp4    w = code * 2^(scale - 127)             compressed-tensors, torchao, DeepSeek V4; gpt-oss
    nvfp4    w = code * (scale / global_scale)      compressed-tensors
             w = code * (scale * scale_2)           ModelOpt, for which code 8 is 0, not -0
             w = code * (scale * per_tensor_scale)  torchao

gpt-oss' weights are computed as (..., rows, columns) and shown transposed, as transformers'
`convert_moe_packed_tensors` returns them. Sources: compressed-tensors 0.20 `compressors/`, NVIDIA's ModelOpt, torchao
0.18 `prototype/mx_formats/`, transformers 5.23 `integrations/mxfp4.py`. Cost: 2 ns an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.quantised.codecs.code_bits import FP4, FP4_MODELOPT, Floats
from ckpt_tool.quantised.codecs.codec import Codec, Dequantized, Halves, InputList, OperandGrid, Step, list_values
from ckpt_tool.quantised.codecs.rectangles import Rectangle
from ckpt_tool.quantised.codecs.scale_grid import (
    OneNumber,
    find_matrix,
    make_row_blocks,
    make_scale_grid,
    misfit_error,
)
from ckpt_tool.run.computed import Input, Read
from ckpt_tool.weight_schemes.quantised_weights import Quantised

# What the scales of each weight are computed with, by the role of the one number.
_GLOBAL = {"global_scale": np.divide, "scale_2": np.multiply, "per_tensor_scale": np.multiply}


@dataclass(frozen=True, slots=True)
class GlobalGrid:
    """Scales that are multiplied or divided by one number before they are applied."""

    grid: OperandGrid
    operation: np.ufunc
    factor: OneNumber

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """As the grid's."""
        scales = self.grid.read_rows(read, low, high, rectangle)
        factor = self.factor.read_rows(read, 0, 1, rectangle)
        combined: Floats = self.operation(scales, factor)
        return combined


def make_fp4(weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input]) -> Dequantized:
    """The floats of a weight of NIBBLES or TURNED codes. Raises InconsistentCheckpoint E1462 for parts that do not
    fit."""
    inputs = InputList(weight, inputs_by_name)
    shape = weight.shape
    number, scale = inputs.add("scale")
    scales: OperandGrid = make_scale_grid(number, scale.tensor, weight, shape, weight.block)
    for role, operation in _GLOBAL.items():
        if role in weight.parts:
            number, factor = inputs.add(role)
            if factor.tensor.numel != 1:
                raise misfit_error(weight.parts[role], f"{factor.tensor.numel} numbers where one serves all")
            scales = GlobalGrid(scales, operation, OneNumber.of(number, factor.tensor))

    columns = find_matrix(shape)[1]
    table = FP4_MODELOPT if "scale_2" in weight.parts else FP4
    order = make_row_blocks(shape, weight.block)
    codec = Codec(columns, Halves(columns, list_values(table)), order, (Step(np.multiply, scales),))
    dtype = inputs.inputs[0].tensor.dtype
    text = f"dequantised {weight.codes} {weight.bits} {weight.block} {dtype.name} {shape}"
    return Dequantized(key, shape, tuple(inputs.inputs), text, codec)
