"""Recipes of `--repack`: the tensors of GPTQ and AWQ as compressed-tensors stores the same integers, made while they
are read.

                          GPTQ                                     AWQ                     compressed-tensors
    codes                 (in bits / 32, out), along in            (in, out / 8)           (out, in bits / 32), along in
    scales                (groups, out)                            the same                (out, groups)
    zero points           (groups, out bits / 32), along out       the same, reordered     (out bits / 32, groups)

Both store an integer q of n bits as itself where compressed-tensors stores value + 2^(n - 1), and take q - zero for
value - zero: the bits are the same. So what is made here are matrices with inputs or groups as rows, which are shown
turned (`floats.turned`): GPTQ's codes and all scales byte for byte, zero points with what GPTQ's first version takes
off put back (`matrix.as_meant`), AWQ's words with their nibbles in order, and along the inputs.

What the tensors that are left out would say is looked at where the scales are read: that each input is of the group in
which it lies (`g_idx`), and that zero points of a symmetric quantiser are the middle.

Cost: 3 ns a code of AWQ, GPTQ's are moved. Memory: a few blocks.
Sources: those of `matrix`, and compressed-tensors 0.20 `compressors/pack_quantized/`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.quantised.codes import Array, Rectangle, rectangles
from ckpt_tool.quantised.matrix import AWQ_ORDER, Words, as_meant, middle
from ckpt_tool.run.computed import ExactRecipe, Read
from ckpt_tool.weight_schemes.scheme import INEXACT

ASYMMETRIC = "E1472"


@dataclass(frozen=True, eq=False)
class _ExactRectangles(ExactRecipe):
    """A matrix whose items are made rectangle by rectangle."""

    bits: int
    order: str

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        item = self.dtype.bits // 8
        start = offset // item
        stop = ceil_div(offset + nbytes, item)
        parts = [self._within(read, where).reshape(-1) for where in rectangles(start, stop, self.shape[1])]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.ascontiguousarray(found).view(np.uint8)[offset - start * item :][:nbytes].data

    @abstractmethod
    def _within(self, read: Read, where: Rectangle) -> Array:
        """The items of a rectangle of one row, or of whole rows."""

    def _zeros(self, read: Read, number: int, where: Rectangle, wide: int) -> Words:
        """Words of zero points, in the order of the outputs and as they are meant. wide: words of a row."""
        each = 1 if 32 % self.bits == 0 else self.bits  # words that are whole codes
        left = where.left // each * each
        right = ceil_div(where.right, each) * each
        words = _rectangle(read, number, where._replace(left=left, right=right), wide).view(np.uint32)
        words = in_order(words) if self.order == "awq" else as_meant(words, self.bits, self.order)
        return words[:, where.left - left : where.right - left]


@dataclass(frozen=True, eq=False)
class Packed(_ExactRectangles):
    """Codes, of shape (words of a column, outputs). Input: `qweight`."""

    @property
    def dtype(self) -> DType:
        return DTYPES["I32"]

    def _within(self, read: Read, where: Rectangle) -> Array:
        if self.order != "awq":
            return _rectangle(read, 0, where, self.shape[1])
        wide = self.shape[1] // 8
        first = where.left // 8
        last = ceil_div(where.right, 8)
        rows = [(row * wide + first, row * wide + last) for row in range(8 * where.low, 8 * where.high)]
        if last - first == wide:
            rows = [(rows[0][0], rows[-1][1])]
        words = np.concatenate([read(0, *row) for row in rows]).view(np.uint32).reshape(-1, 8, last - first)
        return along_the_inputs(words)[:, where.left - 8 * first : where.right - 8 * first]


@dataclass(frozen=True, eq=False)
class ZeroPoints(_ExactRectangles):
    """Zero points, of shape (groups, words of a row). Input: `qzeros`."""

    @property
    def dtype(self) -> DType:
        return DTYPES["I32"]

    def _within(self, read: Read, where: Rectangle) -> Array:
        return self._zeros(read, 0, where, self.shape[1])


@dataclass(frozen=True, eq=False)
class RepackedScales(_ExactRectangles):
    """Scales, of shape (groups, outputs). Inputs: `scales`; then what is held against them, where it is there."""

    group: int  # inputs of a group
    # g_idx, zeros: the numbers of the inputs that say which group an input is of, and the zero points that are not
    # written
    g_idx: int | None
    zeros: int | None

    @property
    def dtype(self) -> DType:
        return self.inputs[0].tensor.dtype

    def _within(self, read: Read, where: Rectangle) -> Array:
        if self.g_idx is not None:
            self._check_groups(read, self.g_idx, where)
        if self.zeros is not None:
            self._check_zeros(read, self.zeros, where)
        return _rectangle(read, 0, where, self.shape[1])

    def _check_groups(self, read: Read, number: int, where: Rectangle) -> None:
        """Raise UsageError E1471 for an input that is of another group than the one in which it lies."""
        low = where.low * self.group
        high = where.high * self.group
        wrong = np.flatnonzero(read(number, low, high) != np.arange(low, high) // self.group)
        if wrong.size:
            raise in_the_order_of_activations(self.inputs[number].tensor.key.name, low + int(wrong[0]))

    def _check_zeros(self, read: Read, number: int, where: Rectangle) -> None:
        """Raise InconsistentCheckpoint E1472 for a zero point that is not the middle."""
        each = 32 // self.bits if 32 % self.bits == 0 else 32  # columns that are whole words
        step = each * self.bits // 32
        part = where._replace(left=where.left // each * step, right=ceil_div(where.right, each) * step)
        words = self._zeros(read, number, part, self.shape[1] * self.bits // 32)
        if (words.reshape(-1, step) != middle(self.bits)).any():
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
        return DTYPES["I64"]

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        return np.array(self.stated, "<i8").view(np.uint8)[offset : offset + nbytes].data


def _rectangle(read: Read, number: int, where: Rectangle, columns: int) -> Array:
    """A rectangle of an input, of one row or of whole ones."""
    first = where.low * columns + where.left
    last = (where.high - 1) * columns + where.right
    return read(number, first, last).reshape(where.high - where.low, -1)


def in_order(words: Words) -> Words:
    """AWQ's words with their nibbles in the order of the columns, the first one lowest."""
    found = np.zeros_like(words)
    for place, column in enumerate(AWQ_ORDER):
        found |= (words >> np.uint32(4 * place) & np.uint32(15)) << np.uint32(4 * column)
    return found


def along_the_inputs(words: Words) -> Words:
    """AWQ's codes as words along the inputs: (n, 8, w), eight inputs each, of which each word has eight outputs, as
    (n, 8 w) words of eight inputs of an output."""
    found = np.zeros((len(words), words.shape[2], 8), np.uint32)
    for place, column in enumerate(AWQ_ORDER):
        for each in range(8):
            found[:, :, column] |= (words[:, each] >> np.uint32(4 * place) & np.uint32(15)) << np.uint32(4 * each)
    return found.reshape(len(words), -1)


def in_the_order_of_activations(name: str, at: int) -> UsageError:
    return UsageError(
        f"{name}: input {at} is not in the group in which it is stored (`desc_act`), and compressed-tensors 0.20 has "
        "groups of neighbours alone",
        code=INEXACT,
        key=name,
        hint="--dequantize writes the weights as floats",
    )
