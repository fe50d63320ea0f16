"""MLX: codes of a row in groups with a scale, as floats.

    affine           w[r, c] = dtype(dtype(scale[r, c // group] * code[r, c]) + bias[r, c // group])
    mxfp4, mxfp8     w[r, c] = 2^(scale[r, c // 32] - 127) * code[r, c]      codes E2M1 or E4M3
    nvfp4            w[r, c] = scale[r, c // 16] * code[r, c]                codes E2M1, scales E4M3

Product and sum of affine codes are rounded to the dtype of the scales each, to nearest: with bf16, rounding once is off
by one in the last place for a tenth of the values and more. The other products are what fp32 holds of them, and MLX
rounds them to bf16. Codes of a row are a little-endian stream of 2, 3, 4, 5, 6 or 8 bits over its 32-bit words. How
many bits a code has and how large a group is says the config alone, for some modules by name. A scale that is NaN is an
error here; MLX takes byte 255 of E8M0 for 2^128.
Sources: mlx 0.32.4 `backend/cpu/quantized.cpp` (`mx.dequantize`, bit for bit on a CPU), mlx-lm 0.32.2 `utils.py`
(`quantize_model`). Cost: 8 ns an element of 4 affine bits. What it does not do: nvfp4 with a `global_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.quantised.codecs.code_bits import FP4
from ckpt_tool.quantised.codecs.codec import (
    Bytes,
    Codec,
    CodeReader,
    Dequantized,
    Halves,
    InputList,
    PackedRows,
    Step,
    byte_table,
    list_values,
)
from ckpt_tool.quantised.codecs.scale_grid import ScaleGrid, make_row_blocks, misfit_error
from ckpt_tool.run.computed import Input
from ckpt_tool.weight_schemes.quantised_weights import AFFINE, Quantised

_WORD = 4  # bytes of an element of the codes


def make_mlx(weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input]) -> Dequantized:
    """The floats of a weight of STREAM codes.

    Raises InconsistentCheckpoint E1462 for scales of affine codes that are no floats.
    """
    inputs = InputList(weight, inputs_by_name)
    columns = weight.shape[-1]
    number, scale = inputs.add("scale")
    # The scales of nvfp4 are stored as U8, and are no powers of two.
    dtype = DTYPES["F8_E4M3"] if weight.order == "nvfp4" else scale.tensor.dtype
    across = scale.tensor.shape[-1]
    scales = ScaleGrid(number, dtype, across, weight.block[1], scale.tensor.key.name)

    codes: CodeReader
    steps: tuple[Step, ...]
    if weight.order == AFFINE:
        if dtype.name not in ("F32", "BF16", "F16"):
            raise misfit_error(scale.tensor.key.name, f"scales of {dtype.name}")
        codes = PackedRows(columns, weight.bits, lowest=0)
        number, bias = inputs.add("bias")
        biases = ScaleGrid(number, dtype, across, weight.block[1], bias.tensor.key.name)
        steps = (Step(np.multiply, scales, dtype), Step(np.add, biases, dtype))
    else:
        is_fp8 = weight.bits == 8
        codes = (
            Bytes(columns, byte_table(DTYPES["F8_E4M3"]), _WORD) if is_fp8 else Halves(columns, list_values(FP4), _WORD)
        )
        steps = (Step(np.multiply, scales),)

    codec = Codec(columns, codes, make_row_blocks(weight.shape, weight.block), steps)
    text = f"dequantised mlx {weight.order} {weight.bits} {weight.block} {dtype.name} {weight.shape}"
    return Dequantized(key, weight.shape, tuple(inputs.inputs), text, codec)
