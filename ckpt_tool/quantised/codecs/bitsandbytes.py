"""bitsandbytes: codes that are numbers of a table, and bytes whose largest is 127, as floats.

    4 bits    w[k] = quant_map[code k] * absmax[k // blocksize]          of the line, the high half of a byte first
    twice     absmax[b] = nested_quant_map[code b] * nested_absmax[b // nested_blocksize] + nested_offset
    8 bits    w[r, c] = (code[r, c] * SCB[r]) * fp32(1 / 127)            two products: a division rounds otherwise

all in fp32, each operation rounded to nearest, then once more to the dtype that is written. What shape a weight of 4
bits has and how large its blocks are is said by a JSON in a tensor of bytes, `quant_state.bitsandbytes__nf4` or
`__fp4`; the codes may be declared as another dtype (`bnb_4bit_quant_storage`): their bytes are the same. FP4's
code 8 is a zero whose sign bitsandbytes gives in two ways (`has_negative_zero`).
Sources: bitsandbytes 0.50.2 `functional.py` (`QuantState.from_dict`, `dequantize_4bit`), `_ops.py`
(`int8_vectorwise_dequant`), `nn/modules.py` (`weight_format`). Bit for bit what they give on a CPU.
Cost: 1.5 ns an element. What it does not do: int8 in the orders of old GPUs (`col32`, `col_turing`, `col_ampere`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.quantised.codecs.code_bits import Floats
from ckpt_tool.quantised.codecs.codec import (
    Bytes,
    Codec,
    Dequantized,
    Halves,
    InputList,
    OperandGrid,
    Step,
    Table,
    byte_table,
)
from ckpt_tool.quantised.codecs.rectangles import Rectangle
from ckpt_tool.quantised.codecs.scale_grid import FixedNumber, RowBlocks, ScaleGrid, misfit_error
from ckpt_tool.run.computed import Input, Read
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.weight_schemes.quantised_weights import Quantised

UNKNOWN = "E1464"
_ONE_127TH = np.float32(7.874015718698502e-3)
_LANES = 16  # values that bitsandbytes' loop for AVX-512 takes at once
_TORCH_BLOCK = 2048  # values of a block from which on it leaves that loop to PyTorch
ReadNumbers = Callable[[Input], Sequence[int]]


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Scales that are codes of a table themselves, times scales of blocks of them."""

    codes: int  # the inputs that hold the codes, their scales and the table
    scales: ScaleGrid  # one a block of codes
    table: int
    offset: np.float32  # what is added to every product

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """Scales [low, high), one a row."""
        block = self.scales.width
        first = low // block
        stored = read(self.codes, low, high)
        nested = self.scales.widen(read(self.scales.input, first, ceil_div(high, block)))
        scales = read(self.table, 0, 256)[stored] * np.repeat(nested, block)[low - first * block :][: high - low]
        offset_scales: Floats = scales + self.offset
        return offset_scales.reshape(-1, 1)


def read_table(number: int, *, has_negative_zero: bool) -> Table:
    """The sixteen floats that input `number` holds. has_negative_zero: is that of code 8 -0, whatever the table
    says?"""

    def read_values(read: Read) -> Floats:
        values: Floats = read(number, 0, 16)
        if has_negative_zero:
            values[8] = -abs(values[8])
        return values

    return read_values


def make_int8(
    weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input], read_numbers: ReadNumbers
) -> Dequantized:
    """The floats of a weight of 8 bits. Raises UsageError E1464 for codes in an order of a GPU's own."""
    order = weight.parts.get("weight_format")
    if order is not None and [*read_numbers(inputs_by_name[order])] != [0]:
        raise UsageError(
            "the codes are in an order of some GPU's own (weight_format is not 0)",
            code=UNKNOWN,
            key=weight.lead,
            hint="load the model with bitsandbytes and save it again: it writes rows",
        )

    inputs = InputList(weight, inputs_by_name)
    rows, columns = weight.shape
    number, scale = inputs.add("scale")
    scales = ScaleGrid(number, scale.tensor.dtype, 1, columns, scale.tensor.key.name)
    steps = (Step(np.multiply, scales), Step(np.multiply, FixedNumber(_ONE_127TH)))
    codes = Bytes(columns, byte_table(inputs.inputs[0].tensor.dtype))
    codec = Codec(columns, codes, RowBlocks(rows, rows), steps)
    return Dequantized(key, weight.shape, tuple(inputs.inputs), f"dequantised bitsandbytes int8 {weight.shape}", codec)


def make_4bit(
    weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input], read_numbers: ReadNumbers
) -> Dequantized:
    """The floats of a weight of 4 bits, of the shape that its state says.

    Raises InconsistentCheckpoint E1462 for a state that does not say what it has to, or says what does not fit.
    """
    name = weight.parts["state"]
    state = _parse_state(name, bytes(read_numbers(inputs_by_name[name])))
    shape = _check_sizes(name, state.get("shape"))
    (block,) = _check_sizes(name, [state.get("blocksize")])
    numel = prod(shape)

    inputs = InputList(weight, inputs_by_name)
    number, scale = inputs.add("scale")
    if not 0 <= weight.shape[0] - numel < 2:
        raise misfit_error(name, f"a weight of {list(shape)} is not {weight.shape[0]} codes")
    if ceil_div(numel, block) != scale.tensor.numel:
        raise misfit_error(
            weight.parts["scale"], f"{scale.tensor.numel} scales for {numel} values in blocks of {block}"
        )

    table, _ = inputs.add("quant_map")
    scales: OperandGrid = ScaleGrid(number, scale.tensor.dtype, 1, block, scale.tensor.key.name)
    nested = (0, 0.0)
    if "nested_absmax" in weight.parts:
        nested = _read_nesting(name, state, scale, inputs_by_name[weight.parts["nested_absmax"]])
        nested_number, nested_scale = inputs.add("nested_absmax")
        nested_table, _ = inputs.add("nested_quant_map")
        nested_grid = ScaleGrid(nested_number, nested_scale.tensor.dtype, 1, nested[0], nested_scale.tensor.key.name)
        scales = NestedScales(number, nested_grid, nested_table, np.float32(nested[1]))

    # The line is seen as a matrix with a block in each row.
    signed = name.endswith("fp4") and has_negative_zero(shape, block)
    item = inputs.inputs[0].tensor.dtype.bits // 8
    codes = Halves(block, read_table(table, has_negative_zero=signed), item, high_first=True)
    rows = ceil_div(numel, block)
    codec = Codec(block, codes, RowBlocks(rows, rows), (Step(np.multiply, scales),))
    text = f"dequantised bitsandbytes 4 {block} {signed} {nested} {shape}"
    return Dequantized(key, shape, tuple(inputs.inputs), text, codec)


def _read_nesting(name: str, state: Mapping[str, Any], scale: Input, nested_scale: Input) -> tuple[int, float]:
    """(scales that share a scale, what is added to each) as a state says it of scales that are codes."""
    (block,) = _check_sizes(name, [state.get("nested_blocksize")])
    count = scale.tensor.numel
    nested_count = nested_scale.tensor.numel
    if ceil_div(count, block) != nested_count:
        raise misfit_error(name, f"{nested_count} scales of {count} scales in blocks of {block}")
    offset = state.get("nested_offset")
    if not isinstance(offset, float):
        raise misfit_error(name, f"nested_offset is {offset}")
    return block, offset


def has_negative_zero(shape: Sequence[int], block: int) -> bool:
    """Is FP4's code 8 a negative zero in a weight of this shape, as bitsandbytes 0.50.2 computes it on a CPU?

    Its table has +0 there, and so have rows that its loop of 16 values (AVX-512) takes whole, and what PyTorch computes
    for it: rows of an odd length, blocks of 2,048 and more. The loop that takes one value after another multiplies by
    the sign and gives -0. The kernels for GPUs do that too, for all shapes; the two zeros are equal as numbers.

    >>> [has_negative_zero((64, width), 64) for width in (64, 24, 33)]
    [False, True, False]
    """
    width = shape[-1] if shape else 1
    by_vectors = width % _LANES == 0
    by_torch = width % 2 == 1 or block >= _TORCH_BLOCK

    return not by_vectors and not by_torch


def shape_in_state(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """The shape that a state says, of its bytes. Raises InconsistentCheckpoint E1462 where it says none."""
    return _check_sizes(name, _parse_state(name, bytes(numbers)).get("shape"))


def _parse_state(name: str, raw: bytes) -> dict[str, Any]:
    try:
        state = parse(raw, path=name)
    except CkptError as e:
        raise misfit_error(name, e.message) from e
    if not isinstance(state, dict):
        raise misfit_error(name, "it is no JSON object")
    return state


def _check_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(n) is int and 0 < n < 1 << 48 for n in sizes):
        raise misfit_error(name, f"{sizes} are no sizes")
    return tuple(sizes)
