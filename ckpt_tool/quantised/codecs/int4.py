"""Integers of 1 to 8 bits that compressed-tensors packs (`pack-quantized`), as floats.

    m.weight_packed I32 [64, 16], m.weight_scale [64, 1], m.weight_shape I64 [2]      w = code * scale
    the same and m.weight_zero_point                                                  w = (code - zero point) * scale

Codes are packed along the columns, each row from a word of its own; zero points along the rows, each column from a word
of its own, or not at all. How many codes a row has is the value of `weight_shape`; how many bits follows from it.
Source: compressed-tensors 0.20 `compressors/pack_quantized/`. Cost: 2 ns an element of 4 bits, 20 of 3 bits.
What it does not do: groups in the order of activations (`weight_g_idx`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.quantised.codecs.code_bits import find_lowest_signed
from ckpt_tool.quantised.codecs.codec import Codec, Dequantized, InputList, OperandGrid, PackedRows, Step
from ckpt_tool.quantised.codecs.scale_grid import (
    PackedZeros,
    ZeroGrid,
    find_matrix,
    make_row_blocks,
    make_scale_grid,
    misfit_error,
)
from ckpt_tool.run.computed import Input
from ckpt_tool.weight_schemes.quantised_weights import Quantised


def make_int4(
    weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input], stated: Sequence[int]
) -> Dequantized:
    """The floats of a weight of WORDS codes. stated: the value of its `weight_shape`.

    Raises InconsistentCheckpoint E1462 for parts that do not fit.
    """
    inputs = InputList(weight, inputs_by_name)
    words = inputs.inputs[0].tensor
    number, scale = inputs.add("scale")
    shape, bits, block = _read_stated_shape(weight, words.shape, scale.tensor.shape, stated)

    steps = [Step(np.multiply, make_scale_grid(number, scale.tensor, weight, shape, block))]
    if "zero_point" in weight.parts:
        number, zero = inputs.add("zero_point")
        steps.insert(0, Step(np.subtract, _make_zeros(number, zero.tensor, weight, shape, bits, block)))

    columns = find_matrix(shape)[1]
    codes = PackedRows(columns, bits, find_lowest_signed(bits))
    codec = Codec(columns, codes, make_row_blocks(shape, block), tuple(steps))
    text = f"dequantised {weight.codes} {bits} {block} {words.dtype.name} {shape}"
    return Dequantized(key, shape, tuple(inputs.inputs), text, codec)


def _read_stated_shape(
    weight: Quantised, words: tuple[int, ...], grid: tuple[int, ...], stated: Sequence[int]
) -> tuple[tuple[int, ...], int, tuple[int, int]]:
    """(shape, bits, block): `weight_shape` gives the codes of a row, and the bits are those that fill the row's words.

    words, grid: the shapes of the packed words and of the scales.
    """
    rows = words[:-1]
    if len(stated) < 2 or stated[-1] < 1 or prod(stated[:-1]) != prod(rows):
        raise misfit_error(weight.parts["shape"], f"it says {list(stated)}, the packed words are {list(words)}")
    if "g_idx" in weight.parts:
        raise misfit_error(weight.lead, "codes in the order of activations (g_idx)")

    # Several numbers of bits may fill the words: then those that the config names have to be among them.
    columns = stated[-1]
    possible_bits = [bits for bits in range(1, 9) if ceil_div(columns * bits, 32) == words[-1]]
    bits = 0
    if weight.bits in possible_bits:
        bits = weight.bits
    elif len(possible_bits) == 1:
        bits = possible_bits[0]
    if not bits or columns % grid[-1]:
        raise misfit_error(weight.lead, f"{list(words)} words and {list(grid)} scales for {columns} codes a row")
    return (*rows, columns), bits, (1, columns // grid[-1])


def _make_zeros(
    number: int,
    tensor: LogicalTensor,
    weight: Quantised,
    shape: tuple[int, ...],
    bits: int,
    block: tuple[int, int],
) -> OperandGrid:
    """Zero points, packed along the rows or stored as the scales are."""
    rows, columns = find_matrix(shape)
    words = ceil_div(rows * bits, 32)
    across = ceil_div(columns, block[1])
    if tensor.dtype.name == "I32" and tensor.shape == (*shape[:-2], words, across):
        return PackedZeros(number, bits, rows, words, across, block[1], find_lowest_signed(bits))
    if tensor.dtype.bits < 8:
        raise misfit_error(tensor.key.name, f"zero points of {tensor.dtype.name}")
    return make_scale_grid(number, tensor, weight, shape, block, ZeroGrid)
