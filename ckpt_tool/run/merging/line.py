"""A tensor's row-major line in tiles: what every merge reads and computes at a time.

    for low, high in tiles(70_000, 200_000): ...          # (70000, 135536), (135536, 200000)
    for low, high in tiles(5, 9, row=4): ...              # (4, 12): whole rows

A tile (64 Ki elements, 256 KiB of fp32) and its neighbours fit a core's cache, so a dozen passes over it cost one pass over
memory; a thread holds a few tiles a source, whatever the tensor's size. What a tile gives depends on its elements and on
numbers of the whole tensor, never on where the tile begins.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ckpt_tool.run.computed import Array, Floats, Read, Recipe

TILE = 1 << 16  # elements
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Span = Callable[[int, int], Floats]  # elements [low, high) of a line, fp32


def tiles(start: int, stop: int, row: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of whole rows of `row` elements that cover [start, stop), each of about TILE elements, at least one row."""
    row = max(row, 1)
    step = max(TILE // row, 1) * row
    low, end = start - start % row, stop + -stop % row
    while low < end:
        yield low, min(low + step, end)
        low += step


class _Rooms(threading.local):
    """Working memory of a thread, kept: the pages of fresh arrays cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self.wide: Doubles = np.empty(0, np.float64)
        self.narrow: Floats = np.empty(0, np.float32)


_ROOMS = _Rooms()


def rooms(numel: int) -> tuple[Doubles, Floats]:
    """This thread's working memory, fp64 and fp32, of `numel` elements; good until it asks again."""
    if _ROOMS.wide.size < numel:
        _ROOMS.wide, _ROOMS.narrow = np.empty(numel, np.float64), np.empty(numel, np.float32)
    return _ROOMS.wide[:numel], _ROOMS.narrow[:numel]


def floats(values: Array) -> Floats:
    """The values as fp32; the array itself where it is."""
    return values.astype(np.float32, copy=False)


class Tiled(Recipe):
    """A recipe that is made tile by tile."""

    row = 1  # elements that must be made together: a row of the last axis where a method looks at whole rows

    def values(self, read: Read, start: int, stop: int) -> Floats:
        out: Floats = np.empty(stop - start, np.float32)
        make = self.tile(read)
        for low, high in tiles(start, stop, self.row):
            a, b = max(low, start), min(high, stop)
            part = make(low, high)
            out[a - start : b - start] = part if (a, b) == (low, high) else part[a - low : b - low]
        return out

    @abstractmethod
    def tile(self, read: Read) -> Span:
        """What makes elements [low, high), one tile; numbers of the whole tensor are found here, before the first. What it
        gives is good until the next."""
