"""Do boxes meet? Kernels write in no order, so a byte that is written twice, or written and read, is a race: refused here.

Two boxes meet if some byte of one is some byte of the other:

    start + i0*s0 + i1*s1 + i2*s2 + x == start' + j0*t0 + j1*t1 + j2*t2 + y      all within their extents, x and y in the runs

The search fixes the level of the largest stride first: only the indexes are tried for which what is left can still be made up
by the smaller levels. Boxes of one tensor, whose strides are alike and nested, take two tries a level.

Cost: a sort by first byte, then some 5 us for each pair whose ranges of bytes cross: k column slices of one tensor are
k*k/2 of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ckpt_tool.device.descriptors import Strided
from ckpt_tool.errors import InternalError

MOST_TRIES = 100_000
Levels = Sequence[tuple[int, int, int]]  # lowest index, highest index, stride: of a sum of products


class Side(NamedTuple):
    """The bytes that a box reads or writes."""

    start: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    run: int

    @property
    def hull(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        reach = [(n - 1) * stride for n, stride in zip(self.extents, self.strides, strict=True)]
        return self.start + sum(r for r in reach if r < 0), self.start + sum(r for r in reach if r > 0) + self.run


def sides(boxes: Iterable[Strided]) -> tuple[list[Side], list[Side]]:
    """(what is read, what is written)."""
    listed = list(boxes)
    read = [Side(box.source, box.extents, box.source_strides, box.run) for box in listed]
    return read, [Side(box.target, box.extents, box.target_strides, box.run) for box in listed]


def refuse_overlap(boxes: Iterable[Strided]) -> None:
    """Raise InternalError E1571 where a byte is written twice, or written and read, by one list; E1572 where that can't be
    found out."""
    read, written = sides(boxes)
    for side in written:
        if meets_itself(side):
            raise InternalError(f"a box writes a byte twice: {side}", code="E1571")
    for one, other in crossing(read, written):
        if meet(one, other):
            raise InternalError(
                f"two boxes of one list meet where one of them is written: {one}, {other}", code="E1571"
            )


def crossing(read: Sequence[Side], written: Sequence[Side]) -> Iterator[tuple[Side, Side]]:
    """The pairs whose hulls cross, at least one of which is written."""
    marked = sorted(((*side.hull, number >= len(read), number) for number, side in enumerate([*read, *written])))
    everything = [*read, *written]
    open_sides: list[tuple[int, bool, int]] = []  # by end
    for first, end, writes, number in marked:
        while open_sides and open_sides[0][0] <= first:
            heappop(open_sides)
        for _, other_writes, other in open_sides:
            if writes or other_writes:
                yield everything[other], everything[number]
        heappush(open_sides, (end, writes, number))


def meets_itself(side: Side) -> bool:
    """Are two of its elements at one place? A stride that clears all that is below it is proof that they are not."""
    reach, levels = side.run, [(n, abs(s)) for n, s in zip(side.extents, side.strides, strict=True) if n > 1]
    nested = True
    for extent, stride in sorted(levels, key=lambda level: level[1]):
        nested = nested and stride >= reach
        reach += (extent - 1) * stride
    if nested:
        return False
    # Some difference of indexes other than all zeros gives less than a run. Up to its sign, its first index that is not 0
    # is positive.
    for k, (extent, stride) in enumerate(levels):
        rest = [(1 - n, n - 1, s) for n, s in levels[k + 1 :]]
        if _reaches([(1, extent - 1, stride), *rest], 1 - side.run, side.run - 1):
            return True
    return False


def meet(one: Side, other: Side) -> bool:
    """Have two boxes a byte in common?"""
    levels = [(0, n - 1, s) for n, s in zip(one.extents, one.strides, strict=True)]
    levels += [(1 - n, 0, s) for n, s in zip(other.extents, other.strides, strict=True)]
    apart = other.start - one.start
    return _reaches(levels, apart - (one.run - 1), apart + other.run - 1)


def _reaches(levels: Levels, low: int, high: int) -> bool:
    """Is there a sum of index * stride, each index in its range, in [low, high]?"""
    # equal strides are one level; signs are folded into the ranges
    joined: dict[int, tuple[int, int]] = {}
    for first, last, stride in levels:
        first, last = (first, last) if stride >= 0 else (-last, -first)
        before = joined.get(abs(stride), (0, 0))
        joined[abs(stride)] = before[0] + first, before[1] + last
    joined.pop(0, None)
    ordered = sorted(((stride, first, last) for stride, (first, last) in joined.items()), reverse=True)
    least, most = [0], [0]  # what the levels from k on can make up
    for stride, first, last in reversed(ordered):
        least.insert(0, least[0] + first * stride)
        most.insert(0, most[0] + last * stride)
    tries = 0
    todo = [(0, low, high)]
    while todo:
        level, below, above = todo.pop()
        tries += 1
        if tries > MOST_TRIES:
            raise InternalError(f"can't find out whether two boxes meet: {levels}", code="E1572")
        if level == len(ordered):
            if below <= 0 <= above:
                return True
            continue
        stride, first, last = ordered[level]
        start = max(first, -(-(below - most[level + 1]) // stride))
        stop = min(last, (above - least[level + 1]) // stride)
        todo.extend(
            (level + 1, below - k * stride, above - k * stride) for k in range(stop, start - 1, -1)[:MOST_TRIES]
        )
    return False
