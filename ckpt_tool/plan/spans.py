"""Spans: which bytes of a file are taken, and whether any byte is taken twice.

A span runs from its first to its last byte. One with gaps of one size is a comb, and combs of one pitch may fill each
other's gaps: the columns of one matrix.

    offset 0, extents (3, 4), strides (32, 4), 4 bytes an element     span 0..80, comb: pitch 32, teeth of 16 bytes at 0

Pure arithmetic on numbers of bytes; cost: n log n for n spans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple


class Comb(NamedTuple):
    """Bytes [offset + k * pitch, + width) for any k: a tooth every `pitch` bytes."""

    offset: int
    pitch: int
    width: int


class Span(NamedTuple):
    """Bytes [start, stop), or only the teeth of a comb among them."""

    start: int
    stop: int
    comb: Comb | None = None  # the bytes that are taken, if there are gaps of one size between them


def comb_of(offset: int, extents: Sequence[int], strides: Sequence[int], item: int) -> Comb | None:
    """The comb of a strided array; None for an array without gaps, or with gaps of several sizes.

    offset, strides, item: bytes; extents: elements.
    """
    width = item
    pitch = 0
    for extent, stride in sorted(zip(extents, strides, strict=True), key=lambda dim: dim[1]):
        if extent == 1:
            continue
        if not pitch and stride == width:
            width *= extent
        elif not pitch:
            pitch = stride
        elif stride % pitch:
            return None
    return Comb(offset, pitch, width) if pitch else None


def meets_itself(extents: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """May two elements of a strided array share a byte? False proves that none do, True is no proof. For arrays that
    ckpt plans it is always False."""
    reach = item
    for extent, stride in sorted(zip(extents, strides, strict=True), key=lambda dim: dim[1]):
        if extent > 1 and stride < reach:
            return True
        reach += (extent - 1) * stride
    return False


def first_clash(spans: Iterable[Span]) -> Span | None:
    """The first span, by its start, that overlaps one before it; None if no byte is taken twice.

    Two spans whose ranges overlap count as overlapping, unless both are combs of one pitch with disjoint teeth.
    """
    ordered = sorted(spans, key=itemgetter(0, 1))
    if all(a.stop <= b.start for a, b in pairwise(ordered)) and not any(span.comb for span in ordered):
        return None
    end = 0
    teeth = _Teeth(0)
    for span in ordered:
        if span.start >= end:
            teeth = _Teeth(span.comb.pitch if span.comb else 0)
        if not teeth.takes(span) and (span.start < end or span.comb is not None):
            return span
        end = max(end, span.stop)
    return None


class _Teeth:
    """The teeth of combs of one pitch whose ranges overlap, as disjoint stretches of [0, pitch).

    pitch 0: the bytes belong to a span without gaps, which shares them with no other.
    """

    def __init__(self, pitch: int) -> None:
        self._pitch = pitch
        self._starts: list[int] = []
        self._rest: list[tuple[int, int]] = []  # (end of the stretch, end of the comb's span), aligned

    def takes(self, span: Span) -> bool:
        """Add a span that begins no earlier than those before it. False if it overlaps one that has not ended."""
        comb = span.comb
        if comb is None or comb.pitch != self._pitch or comb.width > comb.pitch:
            return False
        low = comb.offset % comb.pitch
        high = low + comb.width
        whole = [(low, min(high, comb.pitch)), (0, high - comb.pitch)]
        return all(self._add(a, b, span) for a, b in whole if a < b)

    def _add(self, low: int, high: int, span: Span) -> bool:
        """Add the stretch [low, high) of one tooth; stretches whose combs have ended are replaced. False if it overlaps
        a stretch of a comb that has not ended."""
        at = bisect_left(self._starts, low)
        first = at - 1 if at and self._rest[at - 1][0] > low else at
        last = first
        while last < len(self._starts) and self._starts[last] < high:
            if self._rest[last][1] > span.start:
                return False
            last += 1
        self._starts[first:last] = [low]
        self._rest[first:last] = [(high, span.stop)]
        return True
