"""Numbers of a whole tensor that a merge needs before its first element: norms, thresholds, sums.

One walk over the line, in segments of 1 Mi elements, shared by all threads that wait for its outcome: each takes the next
segment with its own descriptors, and what the segments gave is joined in their order. So the outcome has the same bits with
any number of threads, whoever asks first, and a large tensor keeps all of them busy:

    total = Whole(numel, 0.0, lambda so_far, part: so_far + part)
    total.get(lambda start, stop: float(read(0, start, stop).sum(dtype=np.float64)), same)     # on every thread

Cost: one read of the inputs. Memory: one part for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

SEGMENT = 1 << 20  # elements
P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R")


class Whole(Generic[T, P, R]):
    """The outcome of one walk, found once. join(so far, part of the next segment) gives the new sum of parts, from `empty`
    on; `finish` makes of the last one what is kept, so that a table of counts lives as long as its walk."""

    def __init__(self, numel: int, empty: T, join: Callable[[T, P], T]) -> None:
        self._numel, self._sum, self._join = numel, empty, join
        self._count = -(-numel // SEGMENT)
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
