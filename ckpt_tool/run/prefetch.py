"""What one thread reads, item by item: the next is taken, and its bytes are expected, before the present one is over.

    for move in Prefetch(take, expect, size):      # `expect(move, True)` when little of the one before it is left
        ...
        ahead.passed(len(block))

Without it a store's connections would be idle at the end of each tensor or unit, for as long as it takes to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
SOON = 16 << 20  # bytes of an item that are left when the next is asked for


class Prefetch(Iterator[T], Generic[T]):
    """Items for one thread.

    Args:
        take: the next item, None where there is none; another thread gets what this one has not taken.
        expect: has its bytes fetched, at once or, where True, after those of the item before it.
        size: how many they are.
        early: False takes an item when the one before it is over, for sources that have no way to go.
    """

    def __init__(
        self,
        take: Callable[[], T | None],
        expect: Callable[[T, bool], None],
        size: Callable[[T], int],
        *,
        early: bool = True,
    ) -> None:
        self._take = take
        self._expect = expect
        self._size = size
        self._early = early
        self._next: T | None = None
        self._left = 0

    def __next__(self) -> T:
        item = self._next
        self._next = None
        if item is None:
            item = self._take()
            if item is None:
                raise StopIteration
            self._expect(item, False)
        self._left = self._size(item)
        self.passed(0)
        return item

    def passed(self, nbytes: int) -> None:
        """So many bytes more of the present item have been read."""
        self._left -= nbytes
        if self._early and self._next is None and self._left <= SOON:
            item = self._take()
            if item is not None:
                self._next = item
                self._expect(item, True)

    def again(self) -> None:
        """What was left of the present item will not be read."""
        if self._next is not None:
            self._expect(self._next, False)
