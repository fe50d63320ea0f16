"""Recipes of `--repack`: the tensors of GPTQ and AWQ as compressed-tensors stores the same integers, made while they
are read.

                          GPTQ                                     AWQ                     compressed-tensors
    codes                 (in bits / 32, out), along in            (in, out / 8)           (out, in bits / 32), along in
    scales                (groups, out)                            the same                (out, groups)
    zero points           (groups, out bits / 32), along out       the same, reordered     (out bits / 32, groups)

Both store an integer q of n bits as itself where compressed-tensors stores value + 2^(n - 1), and take q - zero for
value - zero: the bits are the same. So the recipes give matrices with inputs or groups as rows, which are then
transposed (`choose_codec.transpose_view`): GPTQ's codes and all scales byte for byte; zero points with the one added
that GPTQ's first version subtracts (`gptq.restore_zeros`); AWQ's words with their nibbles in order, along the inputs.

Two tensors are not written, because compressed-tensors assumes what they usually contain. This is checked while the
scales are read: that each input belongs to the group in which it is stored (`g_idx`), and that the zero points of a
symmetric quantiser are the middle.

Cost: 3 ns a code of AWQ, GPTQ's are moved. Memory: a few blocks.
Sources: those of `gptq`, and compressed-tensors 0.20 `compressors/pack_quantized/`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.quantised.codecs.code_bits import (
    Array,
    Words,
    find_lowest_signed,
    pack_integers,
    pack_nibbles,
    unpack_awq,
)
from ckpt_tool.quantised.codecs.gptq import restore_zeros
from ckpt_tool.quantised.codecs.rectangles import Rectangle, compute_line, read_rectangle
from ckpt_tool.run.computed import ExactRecipe, Read
from ckpt_tool.weight_schemes.declared_scheme import INEXACT

ASYMMETRIC = "E1472"


@dataclass(frozen=True, eq=False)
class _ExactRectangles(ExactRecipe):
    """A matrix that is computed rectangle by rectangle."""

    bits: int
    order: str

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `ExactRecipe.line`, rectangle by rectangle."""
        item = self.dtype.bits // 8
        start = offset // item
        stop = ceil_div(offset + nbytes, item)
        items = compute_line(lambda rectangle: self._make_rectangle(read, rectangle), start, stop, self.shape[1])
        return np.ascontiguousarray(items).view(np.uint8)[offset - start * item :][:nbytes].data

    @abstractmethod
    def _make_rectangle(self, read: Read, rectangle: Rectangle) -> Array:
        """The items of a rectangle of one row, or of whole rows."""

    def _read_zeros(self, read: Read, number: int, rectangle: Rectangle, wide: int) -> Words:
        """Words of zero points in the order of the outputs, with GPTQ's offset undone. wide: words of a row."""
        words_at_once = 1 if 32 % self.bits == 0 else self.bits  # words that are whole codes
        left = rectangle.left // words_at_once * words_at_once
        right = ceil_div(rectangle.right, words_at_once) * words_at_once
        words = read_rectangle(read, number, rectangle._replace(left=left, right=right), wide).view(np.uint32)
        words = order_nibbles(words) if self.order == "awq" else restore_zeros(words, self.bits, self.order)
        return words[:, rectangle.left - left : rectangle.right - left]


@dataclass(frozen=True, eq=False)
class Packed(_ExactRectangles):
    """Codes, of shape (words of a column, outputs). Input: `qweight`."""

    @property
    def dtype(self) -> DType:
        """Words of 32 bits."""
        return DTYPES["I32"]

    def _make_rectangle(self, read: Read, rectangle: Rectangle) -> Array:
        if self.order != "awq":
            return read_rectangle(read, 0, rectangle, self.shape[1])
        first = rectangle.left // 8
        place = Rectangle(8 * rectangle.low, 8 * rectangle.high, first, ceil_div(rectangle.right, 8))
        words = read_rectangle(read, 0, place, self.shape[1] // 8).view(np.uint32)
        words = words.reshape(rectangle.rows, 8, place.columns)
        return pack_along_inputs(words)[:, rectangle.left - 8 * first : rectangle.right - 8 * first]


@dataclass(frozen=True, eq=False)
class ZeroPoints(_ExactRectangles):
    """Zero points, of shape (groups, words of a row). Input: `qzeros`."""

    @property
    def dtype(self) -> DType:
        """Words of 32 bits."""
        return DTYPES["I32"]

    def _make_rectangle(self, read: Read, rectangle: Rectangle) -> Array:
        return self._read_zeros(read, 0, rectangle, self.shape[1])


@dataclass(frozen=True, eq=False)
class RepackedScales(_ExactRectangles):
    """Scales, of shape (groups, outputs). Inputs: `scales`, then the tensors to check, if there are any."""

    group: int  # inputs of a group
    # Which of the recipe's inputs are the groups of the inputs (`g_idx`) and the zero points that are not written; None
    # without a check.
    g_idx: int | None
    zeros: int | None

    @property
    def dtype(self) -> DType:
        """The dtype of the scales, which stays as it is."""
        return self.inputs[0].tensor.dtype

    def _make_rectangle(self, read: Read, rectangle: Rectangle) -> Array:
        if self.g_idx is not None:
            self._check_groups(read, self.g_idx, rectangle)
        if self.zeros is not None:
            self._check_zeros(read, self.zeros, rectangle)
        return read_rectangle(read, 0, rectangle, self.shape[1])

    def _check_groups(self, read: Read, number: int, rectangle: Rectangle) -> None:
        """Raise UsageError E1471 for an input that is not stored within its group."""
        low = rectangle.low * self.group
        high = rectangle.high * self.group
        wrong = np.flatnonzero(read(number, low, high) != np.arange(low, high) // self.group)
        if wrong.size:
            raise activation_order_error(self.inputs[number].tensor.key.name, low + int(wrong[0]))

    def _check_zeros(self, read: Read, number: int, rectangle: Rectangle) -> None:
        """Raise InconsistentCheckpoint E1472 for a zero point that is not the middle."""
        columns_at_once = 32 // self.bits if 32 % self.bits == 0 else 32  # columns that are whole words
        step = columns_at_once * self.bits // 32
        part = rectangle._replace(
            left=rectangle.left // columns_at_once * step, right=ceil_div(rectangle.right, columns_at_once) * step
        )
        words = self._read_zeros(read, number, part, self.shape[1] * self.bits // 32)
        if (words.reshape(-1, step) != list_middle_words(self.bits)).any():
            raise InconsistentCheckpoint(
                f"a zero point is not {1 << (self.bits - 1)}, and the config says `sym: true`",
                code=ASYMMETRIC,
                key=self.inputs[number].tensor.key.name,
                hint="is the config the checkpoint's own? `sym: false` writes zero points; --dequantize takes them as "
                "they are",
            )


@dataclass(frozen=True, eq=False)
class Shape(ExactRecipe):
    """The shape of the weight, (outputs, inputs), as numbers."""

    stated: tuple[int, int]  # that shape

    @property
    def dtype(self) -> DType:
        """compressed-tensors stores shapes as I64."""
        return DTYPES["I64"]

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `ExactRecipe.line`: the two numbers."""
        return np.array(self.stated, "<i8").view(np.uint8)[offset : offset + nbytes].data


def order_nibbles(words: Words) -> Words:
    """AWQ's words with their nibbles in the order of the columns, the first one lowest."""
    codes = unpack_awq(words)
    return pack_nibbles(codes.reshape(*words.shape, 8).swapaxes(-1, -2))


def pack_along_inputs(words: Words) -> Words:
    """AWQ's codes as words along the inputs: (n, 8, w), eight inputs each, of which each word has eight outputs, as
    (n, 8 w) words of eight inputs of an output."""
    return pack_nibbles(unpack_awq(words))


def list_middle_words(bits: int) -> Words:
    """Words filled with the zero point of a symmetric quantiser: the fewest words that hold complete codes."""
    return pack_integers([-find_lowest_signed(bits)] * (32 // bits if 32 % bits == 0 else 32), bits)


def activation_order_error(name: str, at: int) -> UsageError:
    """The error E1471 for an input that is stored outside its group. name: of `g_idx`; at: the input."""
    return UsageError(
        f"{name}: input {at} is not in the group in which it is stored (`desc_act`), and compressed-tensors 0.20 has "
        "groups of neighbours alone",
        code=INEXACT,
        key=name,
        hint="--dequantize writes the weights as floats",
    )
