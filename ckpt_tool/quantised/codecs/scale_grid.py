"""Scales and zero points: which of them each element of a rectangle takes, and what they are as fp32.

A weight of experts (2, 300, 256) with scales (2, 3, 2) over blocks of 128 x 128 is 600 rows of 256: rows 0..127 take
row 0 of the scales, 256..299 row 2, 300..427 row 3: blocks start again with every matrix.

    RowBlocks(rows=300, per_matrix=3, height=128)    which row of the scales each row of the weight takes
    ScaleGrid(1, dtype, columns=2, width=128, ...)   those rows, one number for each column of a rectangle

A scale that is NaN is an error: its weight is lost, and nothing else would say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.quantised.codecs.code_bits import Floats, Words, list_byte_values, unpack_columns
from ckpt_tool.quantised.codecs.rectangles import Array, Rectangle, read_rectangle
from ckpt_tool.run.computed import Read
from ckpt_tool.weight_schemes.quantised_weights import TILE, TILED, Quantised

SHAPE = "E1462"
NAN = "E1463"
NOT_FINITE = "E2720"
Numbers = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Rows in blocks of one height that share a row of scales."""

    rows: int  # of each matrix of the tensor
    per_matrix: int  # rows of scales of each matrix
    height: int = 1  # rows of a block

    def find_rows(self, read: Read, rectangle: Rectangle) -> Numbers:
        """The row of scales that each row of a rectangle takes; never falling."""
        rows = np.arange(rectangle.low, rectangle.high)
        return rows // self.rows * self.per_matrix + rows % self.rows // self.height


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """Scales in rows and columns, in input number `input` of a recipe."""

    input: int
    dtype: DType  # of the scales; U8 are powers of two
    columns: int  # of the scales
    width: int  # columns of the tensor that share one
    name: str
    tiles: bool = False  # stored tile by tile (`quantised_weights.TILE`), not row by row

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """Rows [low, high) of the scales, as `apply_rows` takes them.

        Raises InconsistentCheckpoint E1463 for a scale that is NaN.
        """
        first = rectangle.left // self.width
        last = ceil_div(rectangle.right, self.width)
        if self.tiles:
            stored = self._read_tiles(read, low, high)[:, first:last]
        else:
            stored = read_rectangle(read, self.input, Rectangle(low, high, first, last), self.columns)
        return spread_columns(self.widen(stored), rectangle, self.width)

    def widen(self, stored: Array) -> Floats:
        """Scales as fp32. Raises InconsistentCheckpoint E1463 for a scale that is NaN."""
        return as_floats(stored, self.dtype, self.name)

    def _read_tiles(self, read: Read, low: int, high: int) -> Array:
        """Rows [low, high) of scales that are stored in tiles: (32, 4, 4) of row mod 32, row div 32, column."""
        height, width = TILE
        across = ceil_div(self.columns, width)
        first = low // height
        last = ceil_div(high, height)
        size = across * height * width
        tiles = read(self.input, first * size, last * size).reshape(last - first, across, 32, height // 32, width)
        rows = tiles.transpose(0, 3, 2, 1, 4).reshape((last - first) * height, across * width)
        return rows[low - first * height : high - first * height, : self.columns]


@dataclass(frozen=True, slots=True)
class ZeroGrid(ScaleGrid):
    """Zero points in rows and columns: integers, whatever dtype they are stored as."""

    def widen(self, stored: Array) -> Floats:
        """Zero points as fp32. Raises InconsistentCheckpoint E1462 for floats that are no integers, E1463 for NaN."""
        if not self.dtype.is_float:
            return stored.astype(np.float32)
        zeros = as_floats(stored, self.dtype, self.name)
        if (zeros != np.rint(zeros)).any():
            raise misfit_error(self.name, "zero points that are no integers")
        return zeros


@dataclass(frozen=True, slots=True)
class PackedZeros:
    """Zero points of compressed-tensors that are packed along the rows: each column of words is a stream of bits."""

    input: int
    bits: int
    rows: int  # of each matrix of the tensor
    words: int  # words of a column of each matrix
    columns: int
    width: int  # columns of the tensor that share a zero point
    lowest: int  # the number that the code 0 encodes

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """As `ScaleGrid.read_rows`; every row of the tensor has a row of zero points."""
        first_column = rectangle.left // self.width
        last_column = ceil_div(rectangle.right, self.width)
        parts: list[Floats] = []
        for matrix in range(low // self.rows, ceil_div(high, self.rows)):
            first_row = max(low - matrix * self.rows, 0)
            last_row = min(high - matrix * self.rows, self.rows)
            first_word = matrix * self.words + first_row * self.bits // 32
            last_word = matrix * self.words + ceil_div(last_row * self.bits, 32)
            place = Rectangle(first_word, last_word, first_column, last_column)
            words: Words = read_rectangle(read, self.input, place, self.columns).view(np.uint32)
            skip = first_row * self.bits % 32
            parts.append(unpack_columns(words, self.bits, skip, last_row - first_row, self.lowest))
        return spread_columns(np.concatenate(parts), rectangle, self.width)


@dataclass(frozen=True, slots=True)
class OneNumber:
    """One number for the whole tensor, the only one of its grid."""

    grid: ScaleGrid

    @classmethod
    def of(cls, number: int, tensor: LogicalTensor) -> OneNumber:
        """The scale `tensor`, input `number`."""
        return cls(ScaleGrid(number, tensor.dtype, 1, 1, tensor.key.name))

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """(1, 1). Raises as its grid."""
        return self.grid.widen(read(self.grid.input, 0, 1)).reshape(1, 1)


@dataclass(frozen=True, slots=True)
class FixedNumber:
    """A number that no tensor holds."""

    value: np.float32

    def read_rows(self, read: Read, low: int, high: int, rectangle: Rectangle) -> Floats:
        """(1, 1)."""
        return np.full((1, 1), self.value)


def spread_columns(grid_rows: Floats, rectangle: Rectangle, width: int) -> Floats:
    """Numbers of blocks of `width` columns, as `apply_rows` takes them. rectangle: it begins in the first block."""
    if grid_rows.shape[1] == 1 or width == 1:
        return grid_rows
    # Repeating the numbers costs as much as the product, so where every row has its own, whole blocks go without.
    is_of_whole_blocks = rectangle.left % width == 0 and rectangle.columns == width * grid_rows.shape[1]
    if is_of_whole_blocks and len(grid_rows) == rectangle.rows:
        return grid_rows[:, :, None]
    skip = rectangle.left % width
    return np.repeat(grid_rows, width, axis=1)[:, skip : skip + rectangle.columns]


def apply_rows(operation: np.ufunc, values: Floats, grid_rows: Floats, taken: Numbers) -> None:
    """values[r, c] = operation(values[r, c], grid_rows[taken[r], c]), in place.

    grid_rows: of one row where that serves all; (rows, columns), (rows, 1) where one column serves all, or
    (rows, blocks, 1) where each serves a block of columns. values: one after the other in memory.
    """
    if grid_rows.ndim == 3:
        values = values.reshape(len(values), grid_rows.shape[1], -1)
    if len(grid_rows) == 1:
        operation(values, grid_rows, out=values)
        return

    steps = np.diff(taken)
    if (steps == 1).all():  # a row of the grid for each row
        operation(values, grid_rows, out=values)
        return

    run_starts = [0, *(np.flatnonzero(steps) + 1).tolist()]
    if 2 * len(run_starts) > len(taken):  # in no order (GPTQ's desc_act)
        operation(values, grid_rows[taken], out=values)
        return
    for low, high in zip(run_starts, [*run_starts[1:], len(taken)], strict=True):
        operation(values[low:high], grid_rows[taken[low]], out=values[low:high])


def widen_to_f32(stored: Array, dtype: DType) -> Floats:
    """Floats of a dtype as fp32; of U8 the powers of two that F8_E8M0 has."""
    return list_byte_values(dtype)[stored.view(np.uint8)] if dtype.bits == 8 else stored.astype(np.float32)


def as_floats(stored: Array, dtype: DType, name: str) -> Floats:
    """Scales as fp32. Raises InconsistentCheckpoint E1463 for a scale that is NaN."""
    floats = widen_to_f32(stored, dtype)
    if np.isnan(floats).any():
        raise InconsistentCheckpoint(
            "a scale is NaN" + (" (byte 255 of F8_E8M0)" if dtype.name in ("U8", "F8_E8M0") else ""),
            code=NAN,
            key=name,
            hint="the quantiser failed on this weight: fetch the checkpoint again, or quantise it again",
        )
    return floats


def make_scale_grid(
    number: int,
    tensor: LogicalTensor,
    weight: Quantised,
    shape: tuple[int, ...],
    block: tuple[int, int],
    kind: type[ScaleGrid] = ScaleGrid,
) -> ScaleGrid | OneNumber:
    """The scales (or zero points, by `kind`) `tensor`, input `number`, over a weight of `shape` in blocks.

    Raises InconsistentCheckpoint E1462 where their number fits neither the blocks of each matrix nor the whole weight.
    """
    rows, columns = find_matrix(shape)
    name = tensor.key.name
    if len(shape) == 1 and tensor.numel > 1:
        raise misfit_error(name, f"{tensor.numel} scales for a vector")
    across = ceil_div(columns, block[1])
    down = ceil_div(rows, block[0])
    if weight.order == TILED:
        return ScaleGrid(number, tensor.dtype, across, block[1], name, tiles=True)
    grid = kind(number, tensor.dtype, across, block[1], name)
    if tensor.numel == prod(shape[:-2]) * down * across:
        return grid
    if tensor.numel == down * across == 1:
        return OneNumber(grid)
    raise misfit_error(name, f"scales of shape {list(tensor.shape)} for {weight.lead} of {list(shape)}")


def find_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of each matrix of a tensor; a vector is one row."""
    return (shape[-2], shape[-1]) if len(shape) > 1 else (1, prod(shape))


def make_row_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> RowBlocks:
    """The blocks of rows of a weight of `shape`."""
    rows, _ = find_matrix(shape)
    return RowBlocks(rows, ceil_div(rows, block[0]), block[0])


def misfit_error(name: str, what: str) -> InconsistentCheckpoint:
    """E1462: parts of a weight that contradict one another. name: of the tensor in which it shows."""
    return InconsistentCheckpoint(
        f"{name}: {what}", code=SHAPE, key=name, hint="do all files belong to one checkpoint? fetch it again"
    )


def not_finite_error(key: str, index: Sequence[int], hint: str) -> InconsistentCheckpoint:
    """E2720: a value that is to be quantised is NaN or infinite. index: of the element in its tensor."""
    return InconsistentCheckpoint(
        f"element {list(index)} is no finite number, and a block with it has no scale",
        code=NOT_FINITE,
        key=key,
        hint=f"ckpt verify lists such tensors; {hint}",
    )
