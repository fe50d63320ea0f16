"""A range of a tensor's row-major line as rectangles of whole rows, or within one row.

    rectangles(5, 23, columns=8)   row 0, columns 5 to 7; row 1, all of it; row 2, columns 0 to 6

What is decoded is asked for by ranges of a line, and scales belong to rows and columns: a recipe decodes rectangle by
rectangle. Cost: some us a range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.run.computed import Read

Array = np.ndarray[Any, np.dtype[Any]]


class Rectangle(NamedTuple):
    """Rows [low, high) and columns [left, right) of a tensor seen as (rows, columns)."""

    low: int
    high: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.high - self.low

    @property
    def columns(self) -> int:
        """How many columns it has."""
        return self.right - self.left

    def locate(self, columns: int) -> tuple[int, int]:
        """Its elements [first, last) on the line of a tensor of so many columns."""
        return self.low * columns + self.left, (self.high - 1) * columns + self.right


def rectangles(start: int, stop: int, columns: int) -> Iterator[Rectangle]:
    """Elements [start, stop) of a row-major line as at most three rectangles, each of whole rows or within one."""
    first = start // columns
    last = (stop - 1) // columns
    if first == last:
        yield Rectangle(first, first + 1, start - first * columns, stop - first * columns)
        return
    if start % columns:
        yield Rectangle(first, first + 1, start - first * columns, columns)
        first += 1
    last_row = stop // columns
    if last_row > first:
        yield Rectangle(first, last_row, 0, columns)
    if stop % columns:
        yield Rectangle(last_row, last_row + 1, 0, stop - last_row * columns)


def compute_line(compute: Callable[[Rectangle], Array], start: int, stop: int, columns: int) -> Array:
    """Elements [start, stop) of a line, 1-d, from what `compute` gives for each of their rectangles."""
    parts = [compute(rectangle).reshape(-1) for rectangle in rectangles(start, stop, columns)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_rectangle(read: Read, number: int, rectangle: Rectangle, columns: int) -> Array:
    """A rectangle of input `number`, which has so many columns, as (rows, columns of the rectangle).

    Of a single row only what is wanted is read; of several rows all columns.
    """
    if rectangle.rows == 1 or rectangle.columns == columns:
        return read(number, *rectangle.locate(columns)).reshape(rectangle.rows, -1)
    rows = read(number, rectangle.low * columns, rectangle.high * columns).reshape(rectangle.rows, columns)
    return rows[:, rectangle.left : rectangle.right]
