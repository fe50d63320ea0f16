"""A codec: how the floats of one weight come from its codes, in every layout that is read.

    w[r, c] = (code[r, c] - zero[order[r], c]) * scale[order[r], c]           all in fp32, each step rounded to nearest

    layout                    codes                     order          steps
    fp8, int8                 Bytes                     RowBlocks      [- zero] * scale
    int4 (pack-quantized)     PackedRows                RowBlocks      [- zero] * scale
    mxfp4, nvfp4              Halves                    RowBlocks      * scale [* or / global scale]
    GPTQ, AWQ                 PackedColumns, AwqWords   RowGroups      - zero, * scale
    MLX, affine               PackedRows                RowBlocks      * scale, + bias, each rounded to scales' dtype
    MLX, of floats            Halves, Bytes             RowBlocks      * scale
    bitsandbytes, 4 bits      Halves of a stored table  a row a block  * scale, itself a code in some files
    bitsandbytes, 8 bits      Bytes                     RowBlocks      * scale, * 1 / 127
    BitNet                    Trits                     none           * or / scale
    torchao's states          Halves, Bytes of a table  a row a block  * scale

A layout is a row of this table: its module (`fp8`, `int4`, `gptq`, ...) says which parts a weight has and makes a
`Codec` of them. What is read, cut into rectangles and rounded is stated once, here. The floats are rounded once more,
to the dtype that is written, by whoever writes them.

Where blocks are runs of the line (bitsandbytes, torchao's states), the tensor is seen as a matrix with a block in each
row; the last one may be short. Cost: 1 to 2 ns an element in blocks of whole rows, 20 for 3 bits;
a strip of 512 elements 50 us. Memory: a block of the executor and as much again.
GGUF's blocks have scales among the codes and are no such rows (`gguf_blocks`); Paddle's second moments are no product
(`paddle_moments`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.quantised.codecs.code_bits import Array, Floats, decode_halves, list_byte_values, unpack_rows
from ckpt_tool.quantised.codecs.rectangles import Rectangle, compute_line, read_rectangle
from ckpt_tool.quantised.codecs.scale_grid import Numbers, apply_rows
from ckpt_tool.run.compute import cast, looked_up, numpy_type
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.weight_schemes.quantised_weights import Quantised

_F32 = DTYPES["F32"]
Table = Callable[[Read], Floats]  # the floats that codes stand for, which may be stored in an input


class CodeReader(Protocol):
    """Reads the codes of a weight as the numbers they encode, before any scale is applied."""

    def read_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """The codes of a rectangle as floats, (rows, columns), in memory of their own."""


class RowOrder(Protocol):
    """Which rows share scales: `RowBlocks`, or GPTQ's `RowGroups`."""

    def find_rows(self, read: Read, rectangle: Rectangle) -> Numbers:
        """The row of the grids that each row of a rectangle takes."""


class OperandGrid(Protocol):
    """Numbers that codes are computed with: scales, zero points, biases."""

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """Rows [low, high) in the form that `scale_grid.apply_rows` expects."""


class Step(NamedTuple):
    """One operation on all codes."""

    operation: np.ufunc
    grid: OperandGrid
    rounds_to: DType = _F32  # its result is rounded to this dtype


@dataclass(frozen=True, slots=True)
class Codec:
    """A row of the module's table."""

    columns: int  # of the matrix that the tensor is seen as
    codes: CodeReader
    order: RowOrder
    steps: tuple[Step, ...]

    def decode(self, read: Read, rectangle: Rectangle) -> Floats:
        """The floats of a rectangle of that matrix."""
        values = self.codes.read_codes(read, rectangle)
        taken = self.order.find_rows(read, rectangle)
        low = int(taken.min())
        high = int(taken.max()) + 1
        with np.errstate(all="ignore"):  # what overflows is infinite, as it is for the libraries
            for operation, grid, rounds_to in self.steps:
                # Unnamed, so that its pages are free again before the next grid is read.
                apply_rows(operation, values, grid.read_rows(read, low, high, rectangle), taken - low)
                if rounds_to != _F32:
                    values = _round_floats(values, rounds_to)
        return values


@dataclass(frozen=True, eq=False)
class Dequantized(Recipe):
    """A tensor of floats that a codec decodes."""

    codec: Codec

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """As `Recipe.values`, rectangle by rectangle."""
        return compute_line(lambda rectangle: self.codec.decode(read, rectangle), start, stop, self.codec.columns)


class InputList:
    """The inputs of a weight's recipe, its codes first, as its parts are found."""

    def __init__(self, weight: Quantised, inputs_by_name: Mapping[str, Input]) -> None:
        self.inputs = [inputs_by_name[weight.lead]]
        self._weight = weight
        self._inputs_by_name = inputs_by_name

    def add(self, role: str) -> tuple[int, Input]:
        """(the number of the part that has this role, the part)."""
        self.inputs.append(self._inputs_by_name[self._weight.parts[role]])
        return len(self.inputs) - 1, self.inputs[-1]


def _round_floats(values: Floats, dtype: DType) -> Floats:
    """Floats that a dtype holds, the nearest to `values`, as fp32."""
    line = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    rounded, _ = cast(line.data, _F32, dtype)
    return np.frombuffer(rounded, numpy_type(dtype)).astype(np.float32).reshape(values.shape)


# -- readers of codes, all of input 0 ----------------------------------------------------------------------------------


def list_values(values: Floats) -> Table:
    """A table that is known."""
    return lambda read: values


@dataclass(frozen=True, slots=True)
class Bytes:
    """A code a byte."""

    columns: int
    table: Table  # 256 floats
    item: int = 1  # bytes of an element of the input: words hold four codes

    def read_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """As `CodeReader.read_codes`."""
        first, last = rectangle.locate(self.columns)
        line = _read_bytes(read, first, last, self.item)
        return looked_up(self.table(read), line).reshape(rectangle.rows, rectangle.columns)


@dataclass(frozen=True, slots=True)
class Halves:
    """Two codes a byte."""

    columns: int
    table: Table  # 16 floats
    item: int = 1  # bytes of an element of the input
    high_first: bool = False  # is the high half of a byte the first of the two?

    def read_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """As `CodeReader.read_codes`."""
        first, last = rectangle.locate(self.columns)
        first_byte = first // 2
        line = _read_bytes(read, first_byte, ceil_div(last, 2), self.item)
        pairs = decode_halves(self.table(read), line, high_first=self.high_first)
        skip = first - 2 * first_byte
        return pairs[skip : skip + last - first].reshape(rectangle.rows, rectangle.columns)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Integers in a stream of bits; each row begins with a word of 32 bits of its own."""

    columns: int
    bits: int
    lowest: int  # the number that the code 0 encodes

    def read_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """As `CodeReader.read_codes`."""
        first_word = rectangle.left * self.bits // 32
        last_word = ceil_div(rectangle.right * self.bits, 32)
        place = rectangle._replace(left=first_word, right=last_word)
        words = read_rectangle(read, 0, place, ceil_div(self.columns * self.bits, 32))
        stream = np.ascontiguousarray(words).view(np.uint8)
        skip = rectangle.left * self.bits - 32 * first_word
        return unpack_rows(stream, self.bits, skip, rectangle.columns, self.lowest)


def _read_bytes(read: Read, first: int, last: int, item: int) -> Array:
    """Bytes [first, last) of input 0, whose elements have `item` bytes."""
    low = first // item
    line = read(0, low, ceil_div(last, item)).view(np.uint8)
    return line if item == 1 else line[first - low * item : last - low * item]


def byte_table(dtype: DType) -> Table:
    """The floats of a one-byte dtype."""
    return list_values(list_byte_values(dtype))
