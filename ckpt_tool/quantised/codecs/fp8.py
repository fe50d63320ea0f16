"""Codes of a byte, FP8 or int8, of DeepSeek, compressed-tensors, FBGEMM, ModelOpt, torchao and quanto, as floats.

    m.weight F8_E4M3 [300, 256], m.weight_scale_inv F32 [3, 2]     w = code * scale
    m.weight I8, m.weight_scale, m.weight_zero_point               w = (code - zero point) * scale

The scales are over the whole weight, a row, a group of a row or a block of rows and columns. compressed-tensors
computes in the dtype of the scales, which gives the same wherever that is bf16 or fp32: a code of 8 bits times a bf16
is exact in fp32. (With fp16 scales of a bf16 model it rounds twice, and this once.) Sources: transformers 5.23
`Fp8Dequantize`, DeepSeek-V3 `weight_dequant`, compressed-tensors 0.20 `dequantize`, torchao 0.18
`quantization/quantize_/workflows/`. Cost: 2 ns an element.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.quantised.codecs.codec import Bytes, Codec, Dequantized, InputList, Step, byte_table
from ckpt_tool.quantised.codecs.scale_grid import (
    ZeroGrid,
    find_matrix,
    make_row_blocks,
    make_scale_grid,
    misfit_error,
)
from ckpt_tool.run.computed import Input
from ckpt_tool.weight_schemes.quantised_weights import Quantised


def make_fp8(weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input]) -> Dequantized:
    """The floats of a weight of BYTES codes. Raises InconsistentCheckpoint E1462 for parts that do not fit."""
    inputs = InputList(weight, inputs_by_name)
    shape = weight.shape
    block = weight.block
    dtype = inputs.inputs[0].tensor.dtype

    number, scale = inputs.add("scale")
    steps = [Step(np.multiply, make_scale_grid(number, scale.tensor, weight, shape, block))]
    if "zero_point" in weight.parts:
        number, zero = inputs.add("zero_point")
        if zero.tensor.dtype.bits < 8:
            raise misfit_error(zero.tensor.key.name, f"zero points of {zero.tensor.dtype.name}")
        steps.insert(0, Step(np.subtract, make_scale_grid(number, zero.tensor, weight, shape, block, ZeroGrid)))

    columns = find_matrix(shape)[1]
    codec = Codec(columns, Bytes(columns, byte_table(dtype)), make_row_blocks(shape, block), tuple(steps))
    text = f"dequantised {weight.codes} {weight.bits} {block} {dtype.name} {shape}"
    return Dequantized(key, shape, tuple(inputs.inputs), text, codec)
