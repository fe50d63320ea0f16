"""Which elements of a task vector are the largest: exact k-th magnitudes in bounded memory.

The magnitude of an fp32 is in the order of its lower 31 bits, so two counts find any rank exactly: how many elements have
each upper half of those bits, then, in the half that holds the rank, how many have each lower half. All models are counted
on one walk over their line. Of elements equal at the threshold those that come first are taken (mergekit 0.1.5 leaves that
to `torch.argsort`, which is not stable on processors with AVX2); only where not all of them are, a third walk finds the
place up to which they are.

    [3, -1, 4, 1, -5], the largest 2: magnitudes from 4 on;   [1, 1, 1, 1], the largest 2: 1 on, before element 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.run.computed import Floats
from ckpt_tool.run.merging.line import TILE, tiles
from ckpt_tool.run.merging.whole import Whole, same

Bits = np.ndarray[Any, np.dtype[np.uint32]]
Counts = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Deltas = Callable[[int, int], Iterator[Floats]]  # elements [low, high) of each model's task vector
_HALF, _LOW = 16, 1 << 16
_TOP = 1 << 15  # upper halves of 31 bits


class Ask(NamedTuple):
    """The `taken` largest elements of model number `model`, or its smallest. 0 < taken < numel."""

    model: int
    taken: int
    largest: bool


class Cut(NamedTuple):
    """What an Ask found: magnitudes beyond `bits`, and those that are it before element `until` of the line."""

    bits: int
    until: int
    largest: bool

    def flags(self, magnitudes: Bits, low: int) -> Flags:
        """Which elements are taken. magnitudes: of elements [low, ...)."""
        bits = np.uint32(self.bits)
        beyond: Flags = magnitudes > bits if self.largest else magnitudes < bits
        if self.until <= low:
            return beyond
        if self.until >= low + magnitudes.size:
            beyond |= magnitudes == bits
            return beyond
        beyond[: self.until - low] |= magnitudes[: self.until - low] == bits
        return beyond


def magnitudes_of(values: Floats) -> Bits:
    """Unsigned integers in the order of the magnitudes; NaN is beyond all."""
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


class Threshold(NamedTuple):
    """Magnitude bits; how many elements of them are taken, and how many there are."""

    bits: int
    taken: int
    equal: int


class Selection:
    """What some Asks about one tensor find, found once."""

    def __init__(self, numel: int, asks: Sequence[Ask]) -> None:
        self._numel, self._asks = numel, tuple(asks)
        self._models = tuple(dict.fromkeys(ask.model for ask in asks))
        none: Counts = np.zeros((1, 1), np.int64)  # counts are added to it whatever their number
        nowhere: Counts = np.zeros((0, len(self._asks)), np.int64)
        self._upper: Whole[Counts, Counts, list[tuple[int, int]]] = Whole(numel, none, np.add)
        self._lower: Whole[Counts, Counts, list[Threshold]] = Whole(numel, none, np.add)
        self._ties: Whole[Counts, Counts, Counts] = Whole(numel, nowhere, _stacked)
        self._cuts: tuple[Cut, ...] | None = None

    def cuts(self, deltas: Deltas) -> tuple[Cut, ...]:
        """A Cut for each Ask. deltas: of this thread; gives the task vectors of all models that are asked about, in the
        order in which they are first asked about."""
        if self._cuts is None:  # threads that find them at once find the same
            self._cuts = self._found(deltas) if self._asks else ()
        return self._cuts

    def _found(self, deltas: Deltas) -> tuple[Cut, ...]:
        halves = self._upper.get(lambda start, stop: self._count_upper(deltas, start, stop), self._halves)
        found = self._lower.get(
            lambda start, stop: self._count_lower(deltas, halves, start, stop),
            lambda counts: self._thresholds(counts, halves),
        )
        ends = self._ends(deltas, found)
        return tuple(Cut(each.bits, end, ask.largest) for each, end, ask in zip(found, ends, self._asks, strict=True))

    def _halves(self, counts: Counts) -> list[tuple[int, int]]:
        """The upper half of each Ask's threshold, and how many elements have smaller ones."""
        return [self._place(counts[self._models.index(ask.model)], self._rank(ask)) for ask in self._asks]

    def _thresholds(self, lower: Counts, halves: Sequence[tuple[int, int]]) -> list[Threshold]:
        found = []
        for (half, below), counts, ask in zip(halves, lower, self._asks, strict=True):
            rest, under = self._place(counts, self._rank(ask) - below)
            equal, smaller = int(counts[rest]), below + under
            taken = ask.taken - (self._numel - smaller - equal if ask.largest else smaller)
            found.append(Threshold(half << _HALF | rest, taken, equal))
        return found

    def _rank(self, ask: Ask) -> int:
        """Of the element at the threshold, from the smallest on."""
        return self._numel - ask.taken if ask.largest else ask.taken - 1

    @staticmethod
    def _place(counts: Counts, rank: int) -> tuple[int, int]:
        """(the bucket that holds the rank, how many elements lie in the buckets before it)."""
        ends = np.cumsum(counts)
        bucket = int(np.searchsorted(ends, rank, side="right"))
        return bucket, int(ends[bucket] - counts[bucket])

    def _count_upper(self, deltas: Deltas, start: int, stop: int) -> Counts:
        counts: Counts = np.zeros((len(self._models), _TOP), np.int64)
        for low, high in tiles(start, stop):
            for number, delta in enumerate(deltas(low, high)):
                upper = (magnitudes_of(delta) >> np.uint32(_HALF)).astype(np.int64)
                counts[number] += np.bincount(upper, minlength=_TOP)
        return counts

    def _count_lower(self, deltas: Deltas, halves: Sequence[tuple[int, int]], start: int, stop: int) -> Counts:
        counts: Counts = np.zeros((len(self._asks), _LOW), np.int64)
        for low, high in tiles(start, stop):
            parts = [magnitudes_of(delta) for delta in deltas(low, high)]
            for number, (ask, (half, _)) in enumerate(zip(self._asks, halves, strict=True)):
                bits = parts[self._models.index(ask.model)]
                inside = bits[bits >> np.uint32(_HALF) == np.uint32(half)] & np.uint32(_LOW - 1)
                counts[number] += np.bincount(inside.astype(np.int64), minlength=_LOW)
        return counts

    # -- ties ---------------------------------------------------------------------------------------------------------

    def _ends(self, deltas: Deltas, found: Sequence[Threshold]) -> list[int]:
        """Up to which element of the line those at each threshold are taken."""
        ends = [self._numel if each.taken == each.equal else 0 for each in found]
        parted = [number for number, each in enumerate(found) if 0 < each.taken < each.equal]
        if not parted:
            return ends

        def count(start: int, stop: int) -> Counts:
            rows = [self._equal(deltas, found, parted, low, high) for low, high in tiles(start, stop)]
            return np.array([[np.count_nonzero(flags) for flags in row] for row in rows], np.int64)

        of_tiles = self._ties.get(count, same)
        for slot, number in enumerate(parted):
            last = found[number].taken - 1
            tile, before = self._place(of_tiles[:, slot], last)
            low = tile * TILE
            flags = self._equal(deltas, found, parted, low, min(low + TILE, self._numel))[slot]
            ends[number] = low + int(np.flatnonzero(flags)[last - before]) + 1
        return ends

    def _equal(
        self, deltas: Deltas, found: Sequence[Threshold], parted: Sequence[int], low: int, high: int
    ) -> list[Flags]:
        """Which elements of a tile lie at the threshold, for each Ask of `parted`."""
        parts = [magnitudes_of(delta) for delta in deltas(low, high)]
        return [parts[self._models.index(self._asks[n].model)] == np.uint32(found[n].bits) for n in parted]


def _stacked(rows: Counts, more: Counts) -> Counts:
    return np.concatenate([rows[:, : more.shape[1]], more])
