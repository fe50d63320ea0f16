"""Scales: which of them each element of a rectangle takes, and the rectangles that a range of a line is.

A weight of experts (2, 300, 256) with scales (2, 3, 2) over blocks of 128 x 128 is 600 rows of 256: rows 0..127 take row 0
of the scales, 256..299 row 2, 300..427 row 3: blocks start anew with every matrix.

    rectangles(10, 600, columns=256)  ->  (0, 1, 10, 256), (1, 2, 0, 256), (2, 3, 0, 88)    # rows, columns
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.run.computed import Read
from ckpt_tool.run.dequantize.codes import Floats, of_bytes

NAN = "E1463"
Numbers = np.ndarray[Any, np.dtype[np.intp]]


class Rectangle(NamedTuple):
    """Rows [low, high) and columns [left, right) of a tensor seen as (rows, columns)."""

    low: int
    high: int
    left: int
    right: int


def rectangles(start: int, stop: int, columns: int) -> Iterator[Rectangle]:
    """Elements [start, stop) of a row-major line as at most three rectangles, each of whole rows or within one."""
    first, last = start // columns, (stop - 1) // columns
    if first == last:
        yield Rectangle(first, first + 1, start - first * columns, stop - first * columns)
        return
    if start % columns:
        yield Rectangle(first, first + 1, start - first * columns, columns)
        first += 1
    whole = stop // columns
    if whole > first:
        yield Rectangle(first, whole, 0, columns)
    if stop % columns:
        yield Rectangle(whole, whole + 1, 0, stop - whole * columns)


@dataclass(frozen=True, slots=True)
class Grid:
    """The scales of a tensor seen as (rows, columns), in input number `input` of a recipe.

    rows: of each matrix of the tensor. step: rows of scales of each matrix, 0 where all matrices share them. columns: of
    the scales. block: (rows, columns) of the tensor that share one. dtype: of the scales; U8 are powers of two.
    """

    input: int
    dtype: DType
    rows: int
    step: int
    columns: int
    block: tuple[int, int]
    name: str

    def over(self, read: Read, where: Rectangle) -> tuple[Floats, Numbers]:
        """(scales of rows of blocks, one a column of the rectangle; which of those rows each row of it takes).

        Raises InconsistentCheckpoint E1463 for a scale that is no number."""
        height, width = self.block
        rows = np.arange(where.low, where.high)
        taken = rows // self.rows * self.step + rows % self.rows // height
        low, high = int(taken[0]), int(taken[-1]) + 1
        first, last = where.left // width, -(-where.right // width)
        if high - low == 1:
            stored = read(self.input, low * self.columns + first, low * self.columns + last).reshape(1, -1)
        else:
            stored = read(self.input, low * self.columns, high * self.columns).reshape(high - low, self.columns)
            stored = stored[:, first:last]
        scales = as_floats(stored, self.dtype, self.name)
        if scales.shape[1] > 1 and width > 1:
            scales = np.repeat(scales, width, axis=1)[:, where.left - first * width : where.right - first * width]
        elif scales.shape[1] > 1:
            scales = scales[:, : where.right - where.left]
        return scales, taken - low


def as_floats(stored: np.ndarray[Any, np.dtype[Any]], dtype: DType, name: str) -> Floats:
    """Scales as fp32. Raises InconsistentCheckpoint E1463 for a scale that is NaN."""
    floats = of_bytes(dtype)[stored.view(np.uint8)] if dtype.bits == 8 else stored.astype(np.float32)
    if np.isnan(floats).any():
        raise InconsistentCheckpoint(
            "a scale is NaN" + (" (byte 255 of F8_E8M0)" if dtype.name in ("U8", "F8_E8M0") else ""), code=NAN, key=name,
            hint="the quantiser failed on this weight: fetch the checkpoint again, or quantise it anew",
        )  # fmt: skip
    return floats


def scale(values: Floats, scales: Floats, taken: Numbers, operation: np.ufunc = np.multiply) -> None:
    """values[r, c] *= scales[taken[r], c], in place; scales of one column serve all."""
    if len(scales) == len(values):
        operation(values, scales, out=values)
        return
    ends = [0, *(np.flatnonzero(np.diff(taken)) + 1).tolist(), len(taken)]
    for low, high in zip(ends, ends[1:], strict=False):
        operation(values[low:high], scales[taken[low]], out=values[low:high])
