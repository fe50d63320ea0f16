"""GPTQ and AWQ: matrices (inputs, outputs) of integer codes, zero points that are codes themselves, as floats.

    w[i, o] = scale[g(i), o] * (code[i, o] - zero[g(i), o])      in fp32, each operation rounded to nearest

                 codes, packed                 zero points                       g(i)
    gptq         along i, a stream a column    along o; one less than meant      g_idx[i], any order (`desc_act`)
    gptq_v2      the same                      along o, as meant                 the same
    awq          along o, eight a word,        as its codes                      i // group
                 in the order 0 2 4 6 1 3 5 7

A stream is little-endian: code k is in bits [k n, (k + 1) n), so 32 codes of 3 bits are in 3 words. Zero points that
are one less than meant are so by words (2, 4, 8 bits): a 0 borrows of the next one in its word, and GPTQModel adds by
words too; those of 3 bits are so each, modulo 8. The floats are the matrix turned, (outputs, inputs), as
`torch.nn.Linear` has it; the product is rounded once more, to the dtype that is written: what the libraries' fp16
kernels come to.

Sources: GPTQModel 7.7.0 `nn_modules/qlinear/` (`PackableQuantLinear.pack`, `dequantize_weight`), `utils/model.py`
(`convert_gptq_v1_to_v2_format`); AutoAWQ 0.2.9 `utils/packing_utils.py` (`AWQ_ORDER`), `modules/linear/gemm.py`.
Cost: 6 ns an element of 4 bits. What it does not do: AWQ's `gemv`, `marlin`, codes that are cut over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.quantised.codes import Array, Floats, Rectangle, as_floats, rectangles, unpack_codes
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.weight_schemes.quantised_weights import Quantised

Words = np.ndarray[Any, np.dtype[np.uint32]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of a word that each of its nibbles is
GROUP = "E1468"


@dataclass(frozen=True, eq=False)
class Matrix(Recipe):
    """One matrix, of shape (inputs, outputs). Inputs: codes, scales, zero points, and group numbers where there are
    such."""

    bits: int
    order: str
    groups: int  # rows of scales

    def values(self, read: Read, start: int, stop: int) -> Floats:
        parts = [
            self._decode_rectangle(read, rectangle).reshape(-1) for rectangle in rectangles(start, stop, self.shape[1])
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decode_rectangle(self, read: Read, rectangle: Rectangle) -> Floats:
        groups = self._read_groups(read, rectangle)
        low = int(groups.min())
        high = int(groups.max()) + 1
        scales = as_floats(
            read(1, low * self.shape[1], high * self.shape[1]),
            self.inputs[1].tensor.dtype,
            self.inputs[1].tensor.key.name,
        ).reshape(high - low, -1)[:, rectangle.left : rectangle.right]
        zeros = self._decode_zeros(read, low, high)[:, rectangle.left : rectangle.right]
        values = self._decode_codes(read, rectangle)
        values -= zeros[groups - low]
        values *= scales[groups - low]
        return values

    def _read_groups(self, read: Read, rectangle: Rectangle) -> Array:
        """The row of scales that each input takes. Raises InconsistentCheckpoint E1468 for one that is not there."""
        if len(self.inputs) < 4:
            return np.arange(rectangle.low, rectangle.high) // ceil_div(self.shape[0], self.groups)
        groups = read(3, rectangle.low, rectangle.high).astype(np.int64)
        groups = np.where(groups < 0, groups + self.groups, groups)  # GPTQModel counts from the end, as Python does
        if ((groups < 0) | (groups >= self.groups)).any():
            raise InconsistentCheckpoint(
                f"an input belongs to group {int(groups.max())}, there are {self.groups}",
                code=GROUP,
                key=self.inputs[3].tensor.key.name,
                hint="do all files belong to one checkpoint? fetch it again",
            )
        return groups

    def _decode_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """The codes of a rectangle, as floats from 0 on."""
        if self.order == "awq":
            return self._decode_nibbles(read, 0, rectangle.low, rectangle.high)[
                :, rectangle.left : rectangle.right
            ].copy()
        bits = self.bits
        columns = self.shape[1]
        low = rectangle.low * bits // 32
        high = ceil_div(rectangle.high * bits, 32)
        words = read(0, low * columns, high * columns).reshape(high - low, columns)[:, rectangle.left : rectangle.right]
        stream = np.ascontiguousarray(words.T).view(np.uint8)
        codes = unpack_codes(stream, bits, rectangle.low * bits - 32 * low, rectangle.high - rectangle.low)
        return np.ascontiguousarray(codes.T) + np.float32(1 << (bits - 1))

    def _decode_zeros(self, read: Read, low: int, high: int) -> Floats:
        """Zero points of rows [low, high) of the scales."""
        if self.order == "awq":
            return self._decode_nibbles(read, 2, low, high)
        bits = self.bits
        columns = self.shape[1]
        words_per_row = columns * bits // 32
        words = as_meant(read(2, low * words_per_row, high * words_per_row).view(np.uint32), bits, self.order).reshape(
            high - low, words_per_row
        )
        return unpack_codes(np.ascontiguousarray(words).view(np.uint8), bits, 0, columns) + np.float32(1 << (bits - 1))

    def _decode_nibbles(self, read: Read, number: int, low: int, high: int) -> Floats:
        """AWQ's words of rows [low, high) of an input."""
        words_per_row = self.shape[1] // 8
        words = (
            np.ascontiguousarray(read(number, low * words_per_row, high * words_per_row))
            .view(np.uint8)
            .reshape(high - low, -1)
        )
        nibbles = unpack_codes(words, 4, 0, self.shape[1]).reshape(high - low, words_per_row, 8) + np.float32(8)
        ordered = np.empty_like(nibbles)
        ordered[:, :, AWQ_ORDER] = nibbles
        return ordered.reshape(high - low, self.shape[1])


def as_meant(words: Words, bits: int, order: str) -> Words:
    """GPTQ's words of zero points, with what its first version takes off each put back. words: a multiple of 3 of
    codes of 3 bits."""
    if order != "gptq":
        return words
    if 32 % bits == 0:
        return words + np.uint32(0xFFFFFFFF // ((1 << bits) - 1))  # a 1 in every code; what is carried over is lost
    return _pack_codes((_list_codes(words, bits) + 1) % (1 << bits), bits).reshape(words.shape)


def middle(bits: int) -> Words:
    """Words full of the zero point of a symmetric quantiser."""
    return _pack_codes(np.full(32 // bits if 32 % bits == 0 else 32, 1 << (bits - 1)), bits)


def _list_codes(words: Words, bits: int) -> Array:
    code_bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8).reshape(-1), bitorder="little").reshape(
        -1, bits
    )
    codes: Array = code_bits @ (1 << np.arange(bits))
    return codes


def _pack_codes(codes: Array, bits: int) -> Words:
    return np.packbits((codes[:, None] >> np.arange(bits) & 1).astype(np.uint8), bitorder="little").view(np.uint32)


def matrix(weight: Quantised, key: TensorKey, of: Mapping[str, Input]) -> Matrix:
    """How the floats of a weight of MATRIX codes are made, of shape `weight.shape`. of: name -> the tensor."""
    inputs = (
        of[weight.lead],
        *(of[weight.parts[role]] for role in ("scale", "zero_point", "g_idx") if role in weight.parts),
    )
    groups = of[weight.parts["scale"]].tensor.shape[0]
    text = f"dequantised {weight.order} {weight.bits} {groups} {weight.shape}"
    return Matrix(key, weight.shape, inputs, text, weight.bits, weight.order, groups)
