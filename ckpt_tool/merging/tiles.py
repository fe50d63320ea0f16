"""A tensor's row-major line in tiles: what every merge reads and computes at a time.

    for low, high in tiles(70_000, 200_000): ...          # (70000, 135536), (135536, 200000)
    for low, high in tiles(5, 9, row=4): ...              # (4, 12): whole rows

A tile (64 Ki elements, 256 KiB of fp32) and its neighbours fit a core's cache, so a dozen passes over it cost one pass
over memory; a thread holds a few tiles a source, whatever the tensor's size. What a tile gives depends on its elements
and on numbers of the whole tensor, never on where the tile begins.

Numbers of a whole tensor that a merge needs before its first element (norms, thresholds, sums) come from a
`WalkOutcome`: one
walk over the line, in segments of 1 Mi elements, shared by all threads that wait for its outcome: each takes the
next segment with its own descriptors, and what the segments gave is joined in their order. So the outcome has the same
bits with any number of threads, whoever asks first, and a large tensor keeps all of them busy:

    total = WalkOutcome(numel, 0.0, lambda so_far, part: so_far + part)
    total.get(lambda start, stop: float(read(0, start, stop).sum(dtype=np.float64)), same)     # on every thread

Cost: one read of the inputs. Memory: one part for each thread.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.run.computed import Array, Floats, Read, Recipe

TILE = 1 << 16  # elements
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Span = Callable[[int, int], Floats]  # elements [low, high) of a line, fp32


def tiles(start: int, stop: int, row: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of whole rows of `row` elements that cover [start, stop), each of about TILE elements, at least one
    row."""
    row = max(row, 1)
    step = max(TILE // row, 1) * row
    low = start - start % row
    end = stop + -stop % row
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
        _ROOMS.wide = np.empty(numel, np.float64)
        _ROOMS.narrow = np.empty(numel, np.float32)
    return _ROOMS.wide[:numel], _ROOMS.narrow[:numel]


def floats(values: Array) -> Floats:
    """The values as fp32; the array itself where it is."""
    return values.astype(np.float32, copy=False)


class Tiled(Recipe):
    """A recipe that is made tile by tile."""

    row = 1  # elements that must be made together: a row of the last axis where a method looks at whole rows

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """As `Recipe.values`, tile by tile."""
        values: Floats = np.empty(stop - start, np.float32)
        make = self.tile(read)
        for low, high in tiles(start, stop, self.row):
            a = max(low, start)
            b = min(high, stop)
            part = make(low, high)
            values[a - start : b - start] = part if (a, b) == (low, high) else part[a - low : b - low]
        return values

    @abstractmethod
    def tile(self, read: Read) -> Span:
        """What makes elements [low, high), one tile; numbers of the whole tensor are found here, before the first. What
        it gives is good until the next."""


# -- numbers of a whole tensor -----------------------------------------------------------------------------------------


SEGMENT = 1 << 20  # elements
P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R")


class WalkOutcome(Generic[T, P, R]):
    """The outcome of one walk, found once. join(so far, part of the next segment) gives the new sum of parts, from
    `empty` on; `finish` makes of the last one what is kept, so that a table of counts lives as long as its walk."""

    def __init__(self, numel: int, empty: T, join: Callable[[T, P], T]) -> None:
        self._numel = numel
        self._sum = empty
        self._join = join
        self._count = ceil_div(numel, SEGMENT)
        self._next = self._joined = 0
        self._parts: dict[int, P] = {}
        self._found: list[R] = []
        self._error: BaseException | None = None
        self._turn = threading.Condition()

    def get(self, look: Callable[[int, int], P], finish: Callable[[T], R]) -> R:
        """The outcome; the calling thread looks at segments until all are done. look(start, stop): a part, not empty.

        Raises what `look` and `finish` raise, in the threads that wait too.
        """
        while not self._found:
            try:
                number = self._take(finish)
                if number is not None:
                    self._put(number, look(number * SEGMENT, min((number + 1) * SEGMENT, self._numel)))
            except BaseException as e:
                with self._turn:
                    self._error = e
                    self._turn.notify_all()
                raise
        return self._found[0]

    def _take(self, finish: Callable[[T], R]) -> int | None:
        """The next segment; None when there is none left and the outcome is found."""
        with self._turn:
            while self._next == self._count and self._joined < self._count and self._error is None:
                self._turn.wait()
            if self._error is not None:
                raise self._error
            if self._next < self._count:
                self._next += 1
                return self._next - 1
            if not self._found:
                self._found.append(finish(self._sum))
                del self._sum
            return None

    def _put(self, number: int, part: P) -> None:
        with self._turn:
            self._parts[number] = part
            while self._joined in self._parts:
                self._sum = self._join(self._sum, self._parts.pop(self._joined))
                self._joined += 1
            if self._joined == self._count:
                self._turn.notify_all()


def same(value: T) -> T:
    """The sum of parts itself, as the outcome."""
    return value
