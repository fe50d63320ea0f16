"""GPTQ and AWQ: matrices (inputs, outputs) of integer codes, zero points that are codes themselves, as floats.

    w[i, o] = scale[g(i), o] * (code[i, o] - zero[g(i), o])      in fp32, each operation rounded to nearest

                 codes, packed                 zero points                       g(i)
    gptq         along i, a stream a column    along o; one less than meant      g_idx[i], any order (`desc_act`)
    gptq_v2      the same                      along o, as meant                 the same
    awq          along o, eight a word,        as its codes                      i // group
                 in the order 0 2 4 6 1 3 5 7

A stream is little-endian: code k is in bits [k n, (k + 1) n), so 32 codes of 3 bits are in 3 words. Zero points that
are one less than meant are so by words (2, 4, 8 bits): a 0 borrows of the next one in its word, and GPTQModel adds by
words too; those of 3 bits are so each, modulo 8. The floats are the matrix transposed, (outputs, inputs), as
`torch.nn.Linear` has it; the product is rounded once more, to the dtype that is written, as the libraries' fp16 kernels
do.

Sources: GPTQModel 7.7.0 `nn_modules/qlinear/` (`PackableQuantLinear.pack`, `dequantize_weight`), `utils/model.py`
(`convert_gptq_v1_to_v2_format`); AutoAWQ 0.2.9 `utils/packing_utils.py` (`AWQ_ORDER`), `modules/linear/gemm.py`.
Cost: 2 ns an element of 4 bits in whole rows, 100 in strips of 512. What it does not do: AWQ's `gemv`, `marlin`, codes
that are cut over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.quantised.codecs.code_bits import (
    Floats,
    Words,
    list_integers,
    pack_integers,
    unpack_awq,
    unpack_columns,
    unpack_rows,
)
from ckpt_tool.quantised.codecs.codec import Codec, CodeReader, Dequantized, InputList, OperandGrid, RowOrder, Step
from ckpt_tool.quantised.codecs.rectangles import Rectangle, read_rectangle
from ckpt_tool.quantised.codecs.scale_grid import Numbers, RowBlocks, ScaleGrid
from ckpt_tool.run.computed import Input, Read
from ckpt_tool.weight_schemes.quantised_weights import Quantised

GROUP = "E1468"


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Inputs in groups of any order, whose numbers are stored."""

    input: int  # the input that holds the group of each row
    groups: int
    name: str

    def find_rows(self, read: Read, rectangle: Rectangle) -> Numbers:
        """The group of each row. Raises InconsistentCheckpoint E1468 for one that is not there."""
        groups = read(self.input, rectangle.low, rectangle.high).astype(np.int64)
        groups = np.where(groups < 0, groups + self.groups, groups)  # GPTQModel counts from the end, as Python does
        if ((groups < 0) | (groups >= self.groups)).any():
            raise InconsistentCheckpoint(
                f"an input belongs to group {int(groups.max())}, there are {self.groups}",
                code=GROUP,
                key=self.name,
                hint="do all files belong to one checkpoint? fetch it again",
            )
        return groups


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """GPTQ's codes, packed along the inputs."""

    outputs: int
    bits: int

    def read_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """As `CodeReader.read_codes`."""
        first_word = rectangle.low * self.bits // 32
        last_word = ceil_div(rectangle.high * self.bits, 32)
        place = rectangle._replace(low=first_word, high=last_word)
        words = read_rectangle(read, 0, place, self.outputs).view(np.uint32)
        skip = rectangle.low * self.bits - 32 * first_word
        return unpack_columns(words, self.bits, skip, rectangle.rows, lowest=0)


@dataclass(frozen=True, slots=True)
class AwqWords:
    """AWQ's codes or zero points, eight outputs a word."""

    input: int
    outputs: int

    def read_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """As `CodeReader.read_codes`."""
        first_word = rectangle.left // 8
        place = rectangle._replace(left=first_word, right=ceil_div(rectangle.right, 8))
        words = read_rectangle(read, self.input, place, self.outputs // 8).view(np.uint32)
        codes = unpack_awq(words)[:, rectangle.left - 8 * first_word : rectangle.right - 8 * first_word]
        return codes.astype(np.float32)

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """Zero points of groups [low, high)."""
        return self.read_codes(read, rectangle._replace(low=low, high=high))


@dataclass(frozen=True, slots=True)
class GptqZeros:
    """GPTQ's zero points, packed along the outputs."""

    input: int
    outputs: int
    bits: int
    order: str

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """Zero points of groups [low, high)."""
        # What is read begins and ends with a code and a word: every word, or every 3 words of 3 bits.
        codes_at_once = 32 // self.bits if 32 % self.bits == 0 else 32
        words_at_once = codes_at_once * self.bits // 32
        first = rectangle.left // codes_at_once
        last = ceil_div(rectangle.right, codes_at_once)
        place = Rectangle(low, high, first * words_at_once, last * words_at_once)
        words = read_rectangle(read, self.input, place, self.outputs * self.bits // 32).view(np.uint32)
        stream = np.ascontiguousarray(restore_zeros(words, self.bits, self.order)).view(np.uint8)
        skip = (rectangle.left - first * codes_at_once) * self.bits
        return unpack_rows(stream, self.bits, skip, rectangle.columns, lowest=0)


def restore_zeros(words: Words, bits: int, order: str) -> Words:
    """GPTQ's words of zero points, with what its first version takes off each put back. words: a multiple of 3 of
    codes of 3 bits."""
    if order != "gptq":
        return words
    if 32 % bits == 0:
        return words + np.uint32(0xFFFFFFFF // ((1 << bits) - 1))  # a 1 in every code; what is carried over is lost
    return pack_integers((list_integers(words, bits) + 1) % (1 << bits), bits).reshape(words.shape)


def make_gptq(weight: Quantised, key: TensorKey, inputs_by_name: Mapping[str, Input]) -> Dequantized:
    """The floats of a weight of MATRIX codes, of shape (inputs, outputs)."""
    inputs = InputList(weight, inputs_by_name)
    rows, outputs = weight.shape
    number, scale = inputs.add("scale")
    groups = scale.tensor.shape[0]
    scales = ScaleGrid(number, scale.tensor.dtype, outputs, 1, scale.tensor.key.name)

    number, _ = inputs.add("zero_point")
    is_awq = weight.order == "awq"
    codes: CodeReader = AwqWords(0, outputs) if is_awq else PackedColumns(outputs, weight.bits)
    zeros: OperandGrid = AwqWords(number, outputs) if is_awq else GptqZeros(number, outputs, weight.bits, weight.order)

    order: RowOrder = RowBlocks(rows, groups, ceil_div(rows, groups))
    if "g_idx" in weight.parts:
        number, group_numbers = inputs.add("g_idx")
        order = RowGroups(number, groups, group_numbers.tensor.key.name)

    codec = Codec(outputs, codes, order, (Step(np.subtract, zeros), Step(np.multiply, scales)))
    text = f"dequantised {weight.order} {weight.bits} {groups} {weight.shape}"
    return Dequantized(key, weight.shape, tuple(inputs.inputs), text, codec)
