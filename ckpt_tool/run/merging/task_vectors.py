"""Merges of task vectors: what each model changed of its base, trimmed, weighed, agreed on and added to the base.

    base + lambda * sum_i w_i trim(x_i - base)          divided by the weights that count where `normalize`

`task-arithmetic` trims nothing; `ties` keeps the largest of each tensor; `breadcrumbs` leaves out the very largest too; `dare`
drops by chance; `della` by chance and rank. With `consensus` (ties, and what is called after it) an element counts only where
its sign is that of the sum. Order and rounding are those of mergekit 0.1.5 `generalized_task_arithmetic.py` and
`sparsify.py` in fp32; sums of whole tensors (`rescale`) are fp64 here and fp32 there, so a rescaled vector differs by a few
units in the last place.

Cost: `ties` and `breadcrumbs` read their inputs twice before the first element (`selection`), `rescale` once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ckpt_tool.run.computed import Floats, Read
from ckpt_tool.run.merging.line import Doubles, Span, Tiled, floats, tiles
from ckpt_tool.run.merging.masks import Stream, draws, kept, kept_by_rank
from ckpt_tool.run.merging.selection import Ask, Bits, Cut, Flags, Selection, magnitudes_of
from ckpt_tool.run.merging.whole import Whole, same

LEAST_SUM = 1e-7  # sums of magnitudes below which nothing is rescaled
LEAST_WEIGHT = 1e-8  # sums of weights that nothing is divided by


class Trim(NamedTuple):
    """What of a task vector stays. density: the share, in (0, 1]; 1 keeps all.

    kind: `largest`; `crumbs` (all but the `gamma` largest, then the largest); `chance`; `ranks` (by chance, density +-
    epsilon by rank in the row of the last axis). key: of the numbers that chance draws.
    """

    kind: Literal["largest", "crumbs", "chance", "ranks"]
    density: float
    gamma: float = 0.0
    epsilon: float = 0.0
    key: Stream = (0, 0)

    def asks(self, model: int, numel: int) -> list[Ask]:
        """The order statistics that it takes."""
        if self.density >= 1 or self.kind not in ("largest", "crumbs"):
            return []
        if self.kind == "largest":
            return [Ask(model, max(1, int(self.density * numel)), True)]
        left, top = int(self.density * numel), int(self.gamma * numel)
        bottom = max(0, numel - left - top)
        return [Ask(model, count, False) for count in (bottom, bottom + left) if 0 < count < numel]


@dataclass(frozen=True, eq=False)
class TaskVectors(Tiled):
    """inputs: the base, then the models. weights, trims: one for each model, a trim of None for none.

    factor: lambda. consensus: only elements of the sign of their sum count. rescale: a trimmed vector is made as large again
    as it was, by the sums of the magnitudes.
    """

    weights: tuple[float, ...]
    trims: tuple[Trim | None, ...]
    consensus: bool
    normalize: bool
    rescale: bool
    factor: float = 1.0
    selection: Selection = field(init=False)
    sums: Whole[Doubles, Doubles, Doubles] = field(init=False)

    def __post_init__(self) -> None:
        asks = [ask for k, trim in enumerate(self.trims) if trim for ask in trim.asks(k, self.numel)]
        object.__setattr__(self, "selection", Selection(self.numel, asks))
        empty = np.zeros((len(self.trims), 2), np.float64)
        object.__setattr__(self, "sums", Whole(self.numel, empty, np.add))
        if any(trim is not None and trim.kind == "ranks" and trim.density < 1 for trim in self.trims):
            object.__setattr__(self, "row", self.shape[-1] if self.shape else 1)

    # -- trimming -----------------------------------------------------------------------------------------------------

    def _delta(self, read: Read, model: int, base: Floats, low: int, high: int) -> Floats:
        return floats(read(model + 1, low, high)) - base

    def _flags(self, model: int, cuts: Sequence[Cut], delta: Floats, low: int) -> Flags | None:
        """Which elements of a tile stay, None for all."""
        trim = self.trims[model]
        if trim is None or trim.density >= 1:
            return None
        if trim.kind == "chance":
            return kept(draws(trim.key, low, low + delta.size), trim.density)
        bits = magnitudes_of(delta)
        if trim.kind == "ranks":
            numbers = draws(trim.key, low, low + delta.size)
            return kept_by_rank(numbers, bits, max(self.row, 1), trim.density, trim.epsilon)
        if trim.kind == "largest":
            return cuts[0].flags(bits, low)
        return self._crumbs(trim, cuts, bits, low)

    def _crumbs(self, trim: Trim, cuts: Sequence[Cut], bits: Bits, low: int) -> Flags:
        """Those among the smallest `bottom + left` and not among the smallest `bottom`."""
        left, top = int(trim.density * self.numel), int(trim.gamma * self.numel)
        bottom = max(0, self.numel - left - top)
        if not left:
            return np.zeros(bits.shape, np.bool_)
        rest = list(cuts)
        below = rest.pop(0).flags(bits, low) if 0 < bottom < self.numel else np.zeros(bits.shape, np.bool_)
        if bottom + left >= self.numel:
            return ~below
        return rest[0].flags(bits, low) & ~below

    def _trimmed(
        self, read: Read, cuts: Sequence[Sequence[Cut]], low: int, high: int
    ) -> Iterator[tuple[Floats, Floats]]:
        """Each model's (task vector, what of it stays)."""
        base = floats(read(0, low, high))
        for model in range(len(self.trims)):
            delta = self._delta(read, model, base, low, high)
            flags = self._flags(model, cuts[model], delta, low)
            yield delta, delta if flags is None else delta * flags

    def _cuts(self, read: Read) -> list[list[Cut]]:
        asking = [k for k, trim in enumerate(self.trims) if trim and trim.asks(k, self.numel)]

        def deltas(low: int, high: int) -> Iterator[Floats]:
            base = floats(read(0, low, high))
            for model in asking:
                yield self._delta(read, model, base, low, high)

        found = iter(self.selection.cuts(deltas))
        return [[next(found) for _ in trim.asks(k, self.numel)] if trim else [] for k, trim in enumerate(self.trims)]

    def _factors(self, read: Read, cuts: Sequence[Sequence[Cut]]) -> list[np.float32 | None]:
        """What each trimmed vector is multiplied with, None for nothing."""
        if not self.rescale or all(trim is None or trim.density >= 1 for trim in self.trims):
            return [None] * len(self.trims)

        def look(start: int, stop: int) -> Doubles:
            sums: Doubles = np.zeros((len(self.trims), 2), np.float64)
            for low, high in tiles(start, stop, self.row):
                part = slice(max(low, start) - low, min(high, stop) - low)
                for model, pair in enumerate(self._trimmed(read, cuts, low, high)):
                    sums[model] += [np.abs(each[part]).sum(dtype=np.float64) for each in pair]
            return sums

        out: list[np.float32 | None] = []
        for trim, (before, after) in zip(self.trims, self.sums.get(look, same).astype(np.float32), strict=True):
            plain = trim is None or trim.density >= 1 or before < LEAST_SUM or after < LEAST_SUM
            out.append(None if plain else before / after)
        return out

    # -- merging ------------------------------------------------------------------------------------------------------

    def tile(self, read: Read) -> Span:
        cuts = self._cuts(read)
        factors = self._factors(read, cuts)
        weights = [np.float32(weight) for weight in self.weights]

        def made(low: int, high: int) -> Floats:
            parts = []
            for (_, part), factor, weight in zip(self._trimmed(read, cuts, low, high), factors, weights, strict=True):
                scaled = part if factor is None else part * factor
                parts.append(scaled * weight)
            mixed = self._agreed(parts, weights) if self.consensus else self._summed(parts, weights)
            if self.factor != 1:
                mixed *= np.float32(self.factor)
            return floats(read(0, low, high)) + mixed

        return made

    def _summed(self, parts: Sequence[Floats], weights: Sequence[np.float32]) -> Floats:
        total, divisor = np.zeros(parts[0].shape, np.float32), np.float32(0)
        for part, weight in zip(parts, weights, strict=True):
            total += part
            divisor = divisor + weight
        if self.normalize and abs(divisor) >= LEAST_WEIGHT:
            total /= divisor
        return total

    def _agreed(self, parts: Sequence[Floats], weights: Sequence[np.float32]) -> Floats:
        """The sum of what has the sign of the whole sum; a sum of zero counts as positive."""
        total: Floats = np.zeros(parts[0].shape, np.float32)
        for part in parts:
            total += part
        positive = total >= 0
        mixed, divisor = np.zeros_like(total), np.zeros_like(total)
        for part, weight in zip(parts, weights, strict=True):
            flags = (part > 0) == positive
            flags &= part != 0
            mixed += part * flags
            divisor += weight * flags
        if self.normalize:
            divisor[divisor == 0] = 1
            mixed /= divisor
        return mixed
