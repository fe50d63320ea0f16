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
Cost: 3 ns an element. What it does not do: int8 in the orders of old GPUs (`col32`, `col_turing`, `col_ampere`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, InconsistentCheckpoint, UsageError
from ckpt_tool.quantised.codes import Floats, as_floats, list_byte_values, rectangles
from ckpt_tool.run.compute import looked_up
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.weight_schemes.quantised_weights import Quantised

SHAPE = "E1462"
UNKNOWN = "E1464"
_OF_127 = np.float32(7.874015718698502e-3)
_LANES = 16  # values that bitsandbytes' loop for AVX-512 takes at once
_TORCH_BLOCK = 2048  # values of a block from which on it leaves that loop to PyTorch
Numbers = Callable[[Input], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Tabled(Recipe):
    """A weight of 4 bits. Inputs: codes, absmax, quant_map, and nested_absmax and nested_quant_map where there are
    such."""

    block: int  # values that share a scale
    signed: bool  # is code 8 a negative zero, whatever the table says?
    nested: tuple[int, float]  # scales that share one, and what is added to them

    def values(self, read: Read, start: int, stop: int) -> Floats:
        item = self.inputs[0].tensor.dtype.bits // 8
        first = start // 2 // item
        stored = read(0, first, ceil_div(ceil_div(stop, 2), item)).view(np.uint8)
        codes = np.stack([stored >> 4, stored & 15], axis=1).reshape(-1)[start - 2 * first * item :][: stop - start]
        low = start // self.block
        high = ceil_div(stop, self.block)
        scales = np.repeat(self._read_scales(read, low, high), self.block)[start - low * self.block :][: stop - start]
        table = read(2, 0, 16).copy()
        if self.signed:
            table[8] = -abs(table[8])
        with np.errstate(all="ignore"):  # what overflows is infinite, as it is for bitsandbytes
            values: Floats = table[codes] * scales
            return values

    def _read_scales(self, read: Read, low: int, high: int) -> Floats:
        stored = read(1, low, high)
        if not self.nested[0]:
            return as_floats(stored, self.inputs[1].tensor.dtype, self.inputs[1].tensor.key.name)
        first = low // self.nested[0]
        last = ceil_div(high, self.nested[0])
        nested_absmax = self.inputs[3].tensor
        upper = np.repeat(as_floats(read(3, first, last), nested_absmax.dtype, nested_absmax.key.name), self.nested[0])
        with np.errstate(all="ignore"):
            scales: Floats = read(4, 0, 256)[stored] * upper[low - first * self.nested[0] :][: high - low]
            return scales + np.float32(self.nested[1])


@dataclass(frozen=True, eq=False)
class Bytes127(Recipe):
    """A weight of 8 bits. Inputs: codes, the largest magnitude of each row."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        codes = self.inputs[0].tensor
        scales = self.inputs[1].tensor
        values = looked_up(list_byte_values(codes.dtype), read(0, start, stop).view(np.uint8))
        for rectangle in rectangles(start, stop, self.shape[1]):
            first = rectangle.low * self.shape[1] + rectangle.left
            last = (rectangle.high - 1) * self.shape[1] + rectangle.right
            rows = values[first - start : last - start].reshape(rectangle.high - rectangle.low, -1)
            rows *= as_floats(read(1, rectangle.low, rectangle.high), scales.dtype, scales.key.name)[:, None]
        values *= _OF_127
        return values


def make_bytes_127_recipe(weight: Quantised, key: TensorKey, of: Mapping[str, Input], numbers: Numbers) -> Bytes127:
    """How a weight of 8 bits is made. Raises UsageError E1464 for one in an order of its own."""
    order = weight.parts.get("weight_format")
    if order is not None and [*numbers(of[order])] != [0]:
        raise UsageError(
            "the codes are in an order of some GPU's own (weight_format is not 0)",
            code=UNKNOWN,
            key=weight.lead,
            hint="load the model with bitsandbytes and save it again: it writes rows",
        )
    inputs = (of[weight.lead], of[weight.parts["scale"]])
    return Bytes127(key, weight.shape, inputs, f"dequantised bitsandbytes int8 {weight.shape}")


def make_tabled_recipe(weight: Quantised, key: TensorKey, of: Mapping[str, Input], numbers: Numbers) -> Tabled:
    """How a weight of 4 bits is made, of the shape that its state says. Raises InconsistentCheckpoint E1462 for a state
    that does not say what it has to, or says what does not fit."""
    name = weight.parts["state"]
    state = _state(name, bytes(numbers(of[name])))
    scales = of[weight.parts["scale"]].tensor
    shape, (block,) = _sizes(name, state.get("shape")), _sizes(name, [state.get("blocksize")])
    if not 0 <= weight.shape[0] - prod(shape) < 2:
        raise _fault(name, f"a weight of {list(shape)} is not {weight.shape[0]} codes")
    if ceil_div(prod(shape), block) != scales.numel:
        raise _fault(weight.parts["scale"], f"{scales.numel} scales for {prod(shape)} values in blocks of {block}")

    inputs = [of[weight.lead], of[weight.parts["scale"]], of[weight.parts["quant_map"]]]
    nested = (0, 0.0)
    if "nested_absmax" in weight.parts:
        nested_absmax = of[weight.parts["nested_absmax"]]
        offset = state.get("nested_offset")
        (nested_block,) = _sizes(name, [state.get("nested_blocksize")])
        if ceil_div(scales.numel, nested_block) != nested_absmax.tensor.numel:
            raise _fault(
                name, f"{nested_absmax.tensor.numel} scales of {scales.numel} scales in blocks of {nested_block}"
            )
        if not isinstance(offset, float):
            raise _fault(name, f"nested_offset is {offset}")
        inputs += [nested_absmax, of[weight.parts["nested_quant_map"]]]
        nested = nested_block, offset

    signed = name.endswith("fp4") and has_negative_zero(shape, block)
    text = f"dequantised bitsandbytes 4 {block} {signed} {nested} {shape}"
    return Tabled(key, shape, tuple(inputs), text, block, signed, nested)


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
    return _sizes(name, _state(name, bytes(numbers)).get("shape"))


def _state(name: str, raw: bytes) -> dict[str, Any]:
    try:
        state = parse(raw, path=name)
    except CkptError as e:
        raise _fault(name, e.message) from e
    if not isinstance(state, dict):
        raise _fault(name, "it is no JSON object")
    return state


def _sizes(name: str, stated: Any) -> tuple[int, ...]:
    if not isinstance(stated, list) or not all(type(n) is int and 0 < n < 1 << 48 for n in stated):
        raise _fault(name, f"{stated} are no sizes")
    return tuple(stated)


def _fault(name: str, what: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        f"{name}: {what}", code=SHAPE, key=name, hint="do all files belong to one checkpoint? fetch it again"
    )
