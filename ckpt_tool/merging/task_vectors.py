"""Merges of task vectors: the difference of each model from the base is trimmed and weighted, then added to the base.

    base + lambda * sum_i w_i trim(x_i - base)          divided by the weights that count where `normalize`

`task-arithmetic` trims nothing; `ties` keeps the largest elements of each tensor; `breadcrumbs` also drops the very
largest; `dare` drops elements at random; `della` drops them at random, with a probability by rank. With `consensus`
(the methods with `ties` in their name, and della) an element counts only if its sign is that of the sum. Order and
rounding are those of mergekit 0.1.5 `generalized_task_arithmetic.py` and `sparsify.py` in fp32; sums over entire
tensors (`rescale`) are fp64 here and fp32 there, so a rescaled vector differs by a few units in the last place.

Cost: `ties` and `breadcrumbs` read their inputs twice before the first element (`Selection`), `rescale` once.

Random masks come from a counter-based generator, so that any part of a mask can be computed independently of the rest.
Element k of a tensor draws the 32-bit number k of the stream of Philox 4x64 whose key is made of the seed, the model's
number and the tensor's name. A mask depends on nothing else: not on tiles, threads, formats or shards, nor on other
tensors.

    draws(stream(42, 0, "model.norm.weight"), 10, 20) == draws(stream(42, 0, "model.norm.weight"), 0, 20)[10:]

An element with probability p is kept if its number is less than p * 2**32. mergekit draws from torch's global
generator, tensor by tensor: the distribution is the same, the masks are not.

The largest elements of a task vector are found by exact k-th magnitudes in bounded memory. Magnitudes of fp32 values
are ordered as their lower 31 bits, so two histograms find any rank exactly: one of the upper half of those bits, then
one of the lower half among the elements whose upper half contains the rank. All models are counted in one pass over
their elements. Of elements equal to the threshold the first ones are taken (mergekit 0.1.5 leaves the choice to
`torch.argsort`, which is not stable on processors with AVX2); only if not all of them are taken, a third pass finds the
position up to which they are.

    [3, -1, 4, 1, -5], the largest 2: magnitudes from 4 on;   [1, 1, 1, 1], the largest 2: 1 on, before element 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.merging.tiles import TILE, Doubles, Span, Tiled, WalkOutcome, floats, same, tiles
from ckpt_tool.run.computed import Floats, Read

LEAST_SUM = 1e-7  # a vector whose sum of magnitudes is smaller is not rescaled
LEAST_WEIGHT = 1e-8  # results are not divided by a smaller sum of weights


class Trim(NamedTuple):
    """The rule by which elements of a task vector are kept."""

    # `largest`; `crumbs` (all but the `gamma` largest, then the largest); `chance`; `ranks` (by chance, density +-
    # epsilon by rank in the row of the last axis)
    kind: Literal["largest", "crumbs", "chance", "ranks"]
    density: float  # the share, in (0, 1]; 1 keeps all
    gamma: float = 0.0
    epsilon: float = 0.0
    key: Stream = (0, 0)  # seeds the random numbers

    def asks(self, model: int, numel: int) -> list[Ask]:
        """The order statistics that this rule needs of model `model`, [] for random rules."""
        if self.density >= 1 or self.kind not in ("largest", "crumbs"):
            return []
        if self.kind == "largest":
            return [Ask(model, max(1, int(self.density * numel)), True)]
        remaining = int(self.density * numel)
        top = int(self.gamma * numel)
        bottom = max(0, numel - remaining - top)
        return [Ask(model, count, False) for count in (bottom, bottom + remaining) if 0 < count < numel]


@dataclass(frozen=True, eq=False)
class TaskVectors(Tiled):
    """The recipe for task vectors added to the base. The inputs are the base, then the models."""

    weights: tuple[float, ...]  # one for each model
    trims: tuple[Trim | None, ...]  # one for each model, None if its task vector is not trimmed
    consensus: bool  # only elements with the sign of their sum count
    normalize: bool  # divide by the sum of the weights that count
    rescale: bool  # scale a trimmed vector so that the sum of its magnitudes is what it was before
    factor: float = 1.0  # lambda
    selection: Selection = field(init=False)
    sums: WalkOutcome[Doubles, Doubles, Doubles] = field(init=False)

    def __post_init__(self) -> None:
        asks = [ask for k, trim in enumerate(self.trims) if trim for ask in trim.asks(k, self.numel)]
        object.__setattr__(self, "selection", Selection(self.numel, asks))
        empty = np.zeros((len(self.trims), 2), np.float64)
        object.__setattr__(self, "sums", WalkOutcome(self.numel, empty, np.add))
        if any(trim is not None and trim.kind == "ranks" and trim.density < 1 for trim in self.trims):
            object.__setattr__(self, "row", self.shape[-1] if self.shape else 1)

    # -- trimming -----------------------------------------------------------------------------------------------------

    def _delta(self, read: Read, model: int, base: Floats, low: int, high: int) -> Floats:
        return floats(read(model + 1, low, high)) - base

    def _flags(self, model: int, cuts: Sequence[MagnitudeCut], delta: Floats, low: int) -> Flags | None:
        """A mask of the elements of a tile that are kept, None for all."""
        trim = self.trims[model]
        if trim is None or trim.density >= 1:
            return None
        if trim.kind == "chance":
            return draw_kept(draws(trim.key, low, low + delta.size), trim.density)
        bits = magnitudes_of(delta)
        if trim.kind == "ranks":
            numbers = draws(trim.key, low, low + delta.size)
            return kept_by_rank(numbers, bits, max(self.row, 1), trim.density, trim.epsilon)
        if trim.kind == "largest":
            return cuts[0].flags(bits, low)
        return self._crumbs(trim, cuts, bits, low)

    def _crumbs(self, trim: Trim, cuts: Sequence[MagnitudeCut], bits: Bits, low: int) -> Flags:
        """A mask of the elements among the smallest `bottom + remaining` but not among the smallest `bottom`."""
        remaining = int(trim.density * self.numel)
        top = int(trim.gamma * self.numel)
        bottom = max(0, self.numel - remaining - top)
        if not remaining:
            return np.zeros(bits.shape, np.bool_)
        other_cuts = list(cuts)
        below = other_cuts.pop(0).flags(bits, low) if 0 < bottom < self.numel else np.zeros(bits.shape, np.bool_)
        if bottom + remaining >= self.numel:
            return ~below
        return other_cuts[0].flags(bits, low) & ~below

    def _trim(
        self, read: Read, cuts: Sequence[Sequence[MagnitudeCut]], low: int, high: int
    ) -> Iterator[tuple[Floats, Floats]]:
        """Yield (task vector, trimmed task vector) for each model, for one tile."""
        base = floats(read(0, low, high))
        for model in range(len(self.trims)):
            delta = self._delta(read, model, base, low, high)
            flags = self._flags(model, cuts[model], delta, low)
            yield delta, delta if flags is None else delta * flags

    def _cuts(self, read: Read) -> list[list[MagnitudeCut]]:
        asking = [k for k, trim in enumerate(self.trims) if trim and trim.asks(k, self.numel)]

        def deltas(low: int, high: int) -> Iterator[Floats]:
            base = floats(read(0, low, high))
            for model in asking:
                yield self._delta(read, model, base, low, high)

        cuts = iter(self.selection.cuts(deltas))
        cuts_of: list[list[MagnitudeCut]] = []
        for k, trim in enumerate(self.trims):
            questions = trim.asks(k, self.numel) if trim else ()
            cuts_of.append([next(cuts) for _ in questions])
        return cuts_of

    def _factors(self, read: Read, cuts: Sequence[Sequence[MagnitudeCut]]) -> list[np.float32 | None]:
        """The factor of each trimmed vector for `rescale`, None for vectors that are not rescaled."""
        if not self.rescale or all(trim is None or trim.density >= 1 for trim in self.trims):
            return [None] * len(self.trims)

        def look(start: int, stop: int) -> Doubles:
            sums: Doubles = np.zeros((len(self.trims), 2), np.float64)
            for low, high in tiles(start, stop, self.row):
                part = slice(max(low, start) - low, min(high, stop) - low)
                for model, pair in enumerate(self._trim(read, cuts, low, high)):
                    sums[model] += [np.abs(values[part]).sum(dtype=np.float64) for values in pair]
            return sums

        factors: list[np.float32 | None] = []
        sums = self.sums.get(look, same).astype(np.float32)
        for number, trim in enumerate(self.trims):
            before = sums[number, 0]
            after = sums[number, 1]
            plain = trim is None or trim.density >= 1 or before < LEAST_SUM or after < LEAST_SUM
            factors.append(None if plain else before / after)
        return factors

    # -- merging ------------------------------------------------------------------------------------------------------

    def tile(self, read: Read) -> Span:
        """See `Tiled.tile`. Thresholds and factors of the entire tensor are computed before the first tile."""
        cuts = self._cuts(read)
        factors = self._factors(read, cuts)
        weights = [np.float32(weight) for weight in self.weights]

        def made(low: int, high: int) -> Floats:
            parts = []
            for (_, part), factor, weight in zip(self._trim(read, cuts, low, high), factors, weights, strict=True):
                scaled = part if factor is None else part * factor
                parts.append(scaled * weight)
            mixed = self._sum_agreeing(parts, weights) if self.consensus else self._sum_parts(parts, weights)
            if self.factor != 1:
                mixed *= np.float32(self.factor)
            return floats(read(0, low, high)) + mixed

        return made

    def _sum_parts(self, parts: Sequence[Floats], weights: Sequence[np.float32]) -> Floats:
        total = np.zeros(parts[0].shape, np.float32)
        divisor = np.float32(0)
        for part, weight in zip(parts, weights, strict=True):
            total += part
            divisor = divisor + weight
        if self.normalize and abs(divisor) >= LEAST_WEIGHT:
            total /= divisor
        return total

    def _sum_agreeing(self, parts: Sequence[Floats], weights: Sequence[np.float32]) -> Floats:
        """The sum of the elements that have the sign of the total; a total of zero counts as positive."""
        total: Floats = np.zeros(parts[0].shape, np.float32)
        for part in parts:
            total += part
        positive = total >= 0
        mixed = np.zeros_like(total)
        divisor = np.zeros_like(total)
        for part, weight in zip(parts, weights, strict=True):
            flags = (part > 0) == positive
            flags &= part != 0
            mixed += part * flags
            divisor += weight * flags
        if self.normalize:
            divisor[divisor == 0] = 1
            mixed /= divisor
        return mixed


# -- random masks ------------------------------------------------------------------------------------------------------


Stream = tuple[int, int]  # the key of a Philox generator
_BLOCK = 8  # 32-bit numbers per step of the counter: Philox 4x64 makes four 64-bit numbers
_ALL = 1 << 32


def stream(seed: int, model: int, name: str) -> Stream:
    """The Philox key of the random numbers for one tensor of one model: 128 bits of a hash."""
    digest = blake2b(f"{seed}\0{model}\0{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def draws(key: Stream, low: int, high: int) -> Bits:
    """The random numbers of elements [low, high), each of 32 uniform bits."""
    first_block = low // _BLOCK
    last_block = ceil_div(high, _BLOCK)
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([first_block, 0, 0, 0], np.uint64))
    raw: np.ndarray[Any, np.dtype[np.uint64]] = generator.random_raw((last_block - first_block) * 4)
    return raw.astype("<u8", copy=False).view("<u4")[low - first_block * _BLOCK : high - first_block * _BLOCK]


def draw_kept(numbers: Bits, probability: float) -> Flags:
    """A mask of the elements that are kept, each with the same probability."""
    limit = round(probability * _ALL)
    return numbers < np.uint32(limit) if limit < _ALL else np.ones(numbers.shape, np.bool_)


def kept_by_rank(numbers: Bits, magnitudes: Bits, columns: int, density: float, epsilon: float) -> Flags:
    """A mask of the elements that are kept, with a probability by rank within a row (MAGPRUNE of DELLA).

    The probability is density - epsilon for the smallest element of a row, density + epsilon for the largest, and
    linear in the rank between them. In rows of one element it is `density`. Equal magnitudes rank by their position.

    Args:
        numbers, magnitudes: those of complete rows of `columns` elements.
    """
    if columns < 2:
        return draw_kept(numbers, density)
    keys = magnitudes.reshape(-1, columns).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(columns, dtype=np.uint64)
    keys.sort(axis=1)
    order = (keys & np.uint64(_ALL - 1)).astype(np.intp)
    ranks: Any = np.empty(order.shape, np.float32)
    share = np.arange(columns, dtype=np.float32) / np.float32(columns - 1)
    limits = np.float32(density - epsilon) + share * np.float32(2) * np.float32(epsilon)
    np.put_along_axis(ranks, order, np.broadcast_to(limits, order.shape), axis=1)
    flags: Flags = numbers < (ranks.reshape(-1).astype(np.float64) * _ALL).astype(np.uint64)
    return flags


# -- the largest elements: exact k-th magnitudes -----------------------------------------------------------------------


Bits = np.ndarray[Any, np.dtype[np.uint32]]
Counts = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Deltas = Callable[[int, int], Iterator[Floats]]  # elements [low, high) of each model's task vector
_HALF = 16
_LOW = 1 << 16
_TOP = 1 << 15  # number of upper halves: the sign bit of fp32 is masked out, which leaves 31 bits


class Ask(NamedTuple):
    """A request for the `taken` largest or smallest elements of model number `model`. 0 < taken < numel."""

    model: int
    taken: int
    largest: bool


class MagnitudeCut(NamedTuple):
    """The answer to an Ask: the threshold `bits`, and the end `until` of the elements equal to it that are taken."""

    bits: int
    until: int
    largest: bool  # True: larger magnitudes are taken too; False: smaller ones

    def flags(self, magnitudes: Bits, low: int) -> Flags:
        """A mask of the elements that are taken. magnitudes: those of elements [low, ...)."""
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
    """The bits of fp32 values without the sign: unsigned integers in the order of the magnitudes, NaN above all."""
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


class Threshold(NamedTuple):
    """The magnitude at which a selection ends."""

    bits: int
    taken: int  # how many of the elements equal to it are taken
    equal: int  # how many elements are equal to it


class Selection:
    """Computes the MagnitudeCuts for some Asks about one tensor, once for all threads."""

    def __init__(self, numel: int, asks: Sequence[Ask]) -> None:
        self._numel = numel
        self._asks = tuple(asks)
        self._models = tuple(dict.fromkeys(ask.model for ask in asks))
        none: Counts = np.zeros((1, 1), np.int64)  # broadcasts against counts of any shape
        nowhere: Counts = np.zeros((0, len(self._asks)), np.int64)
        self._upper: WalkOutcome[Counts, Counts, list[tuple[int, int]]] = WalkOutcome(numel, none, np.add)
        self._lower: WalkOutcome[Counts, Counts, list[Threshold]] = WalkOutcome(numel, none, np.add)
        self._ties: WalkOutcome[Counts, Counts, Counts] = WalkOutcome(numel, nowhere, _append_rows)
        self._cuts: tuple[MagnitudeCut, ...] | None = None

    def cuts(self, deltas: Deltas) -> tuple[MagnitudeCut, ...]:
        """A MagnitudeCut for each Ask.

        Args:
            deltas: the reader of the calling thread. It returns the task vectors of the models in the Asks, in the
                order in which these first appear there.
        """
        if self._cuts is None:  # several threads may compute this at once; they get equal results
            self._cuts = self._find_cuts(deltas) if self._asks else ()
        return self._cuts

    def _find_cuts(self, deltas: Deltas) -> tuple[MagnitudeCut, ...]:
        halves = self._upper.get(lambda start, stop: self._count_upper(deltas, start, stop), self._halves)
        thresholds = self._lower.get(
            lambda start, stop: self._count_lower(deltas, halves, start, stop),
            lambda counts: self._thresholds(counts, halves),
        )
        ends = self._ends(deltas, thresholds)
        return tuple(
            MagnitudeCut(threshold.bits, end, ask.largest)
            for threshold, end, ask in zip(thresholds, ends, self._asks, strict=True)
        )

    def _halves(self, counts: Counts) -> list[tuple[int, int]]:
        """For each Ask, the upper half of its threshold, and how many elements have a smaller upper half."""
        return [self._place(counts[self._models.index(ask.model)], self._rank(ask)) for ask in self._asks]

    def _thresholds(self, lower: Counts, halves: Sequence[tuple[int, int]]) -> list[Threshold]:
        thresholds = []
        for number, ((half, below), ask) in enumerate(zip(halves, self._asks, strict=True)):
            counts = lower[number]
            rank, under = self._place(counts, self._rank(ask) - below)
            equal = int(counts[rank])
            smaller = below + under
            taken = ask.taken - (self._numel - smaller - equal if ask.largest else smaller)
            thresholds.append(Threshold(half << _HALF | rank, taken, equal))
        return thresholds

    def _rank(self, ask: Ask) -> int:
        """The rank of the element at the threshold, counted from the smallest."""
        return self._numel - ask.taken if ask.largest else ask.taken - 1

    @staticmethod
    def _place(counts: Counts, rank: int) -> tuple[int, int]:
        """The bucket of a histogram that contains the rank, and the number of elements in the buckets before it."""
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
        """For each threshold, the end of the elements equal to it that are taken."""
        ends = [self._numel if threshold.taken == threshold.equal else 0 for threshold in found]
        cut_numbers = [number for number, threshold in enumerate(found) if 0 < threshold.taken < threshold.equal]
        if not cut_numbers:
            return ends

        def count(start: int, stop: int) -> Counts:
            """How many elements of each tile are equal to each threshold: a row for each tile."""
            rows = [self._equal(deltas, found, cut_numbers, low, high) for low, high in tiles(start, stop)]
            return np.array([list(map(np.count_nonzero, row)) for row in rows], np.int64)

        of_tiles = self._ties.get(count, same)
        for slot, number in enumerate(cut_numbers):
            last_taken = found[number].taken - 1
            tile, before = self._place(of_tiles[:, slot], last_taken)
            low = tile * TILE
            flags = self._equal(deltas, found, cut_numbers, low, min(low + TILE, self._numel))[slot]
            ends[number] = low + int(np.flatnonzero(flags)[last_taken - before]) + 1
        return ends

    def _equal(
        self, deltas: Deltas, found: Sequence[Threshold], parted: Sequence[int], low: int, high: int
    ) -> list[Flags]:
        """Masks of the elements of a tile that equal the threshold, for the Asks with the numbers in `parted`."""
        parts = [magnitudes_of(delta) for delta in deltas(low, high)]
        return [parts[self._models.index(self._asks[n].model)] == np.uint32(found[n].bits) for n in parted]


def _append_rows(rows: Counts, more: Counts) -> Counts:
    return np.concatenate([rows[:, : more.shape[1]], more])
