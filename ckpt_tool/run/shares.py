"""Shares of a plan that writes into a store: sets of whole parts of objects, so that no two workers fill one part.

Parts are sorted by the first unit that touches them, units by their position in the objects; a share is a run of parts,
some hundred MiB, determined by the plan alone. To fill its parts, a worker moves every unit that touches them and drops
bytes that belong to other shares. Only elements at the borders are therefore moved twice, in small cells:

    unit   0     1     2     3          one object, parts of 5 MiB, units of 64 MiB
    part   0-12  ..25  ..38  ..51       share 0: parts 0-25, share 1: the rest
                    ^                   unit 2 begins in part 25: share 0 moves its first MiB too

An item whose parts all belong to one share is moved as one piece, by that share alone. An item that touches parts of
several shares is cut into cells, the same for all of them: so leaves of the digest never overlap partially, and
overflows are counted by the first of the shares alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapreplace
from typing import NamedTuple, Protocol

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.plan.copy import clip
from ckpt_tool.plan.plan import Plan
from ckpt_tool.plan.schedule import MoveRange, Unit, find_grain

SHARE = 256 << 20  # bytes of a share, at least
MOST = 4096  # shares of a plan, at most
CELL = 1 << 20  # bytes of an item's line that two shares both move, if they both need any of them
NOBODY = -1  # the owner of a part that no move fills


class Object(Protocol):
    """What is used of a `StoredObject`."""

    size: int  # bytes
    step: int  # bytes of each part but the last
    valued: bool  # does it contain tensor values?
    moved: dict[int, int]  # part -> bytes that moves write of it

    def parts_of(self, start: int, stop: int) -> range:
        """The numbers of the parts that bytes [start, stop) touch."""
        ...


class UploadShare(NamedTuple):
    """One share of the output: what one worker claims."""

    units: list[int]  # the numbers of the units that touch its parts
    nbytes: int  # of its parts


class Work(NamedTuple):
    """What a share moves."""

    unit: Unit
    counts: bool  # is it this share that counts the unit's overflows?


class Shares(Sequence[UploadShare]):
    """A plan's shares. order: its numbered units, sorted by object and position (`in_order_of_files`)."""

    def __init__(self, plan: Plan, objects: Sequence[Object], order: Sequence[tuple[int, Unit]]) -> None:
        self._plan = plan
        self._objects = objects
        self._units = dict(order)
        self._owner = [array("i", [NOBODY]) * (max(item.moved, default=-1) + 1) for item in objects]
        self._found: list[UploadShare] = []
        self._cut(order, max(SHARE, ceil_div(sum(item.size for item in objects if item.valued), MOST)))

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, number: int) -> UploadShare:  # type: ignore[override]
        return self._found[number]

    def owner(self, file: int, part: int) -> int:
        """The number of the share that a part belongs to; -1 for a part that no move fills."""
        parts = self._owner[file]
        return parts[part] if part < len(parts) else NOBODY

    def _cut(self, order: Sequence[tuple[int, Unit]], size: int) -> None:
        share = UploadShare([], 0)
        for number, unit in order:
            # A part belongs to the first share that touches it.
            touched = set[int]()
            for file, part in self._parts(unit.items):
                owner = self._owner[file][part]
                if owner == NOBODY:
                    if share.nbytes >= 2 * size:  # in the middle of a unit that writes very many parts
                        share = self._add(share)
                    owner = self._owner[file][part] = len(self._found)
                    item = self._objects[file]
                    share = share._replace(nbytes=share.nbytes + min(item.step, item.size - part * item.step))
                touched.add(owner)
            # Earlier shares have to move this unit too, for the parts of it that they own.
            for owner in touched - {len(self._found)}:
                self._found[owner].units.append(number)
            if len(self._found) in touched:
                share.units.append(number)
            if share.nbytes >= size:
                share = self._add(share)
        if share.nbytes:
            self._add(share)

    def _add(self, share: UploadShare) -> UploadShare:
        self._found.append(share)
        return UploadShare([], 0)

    def _parts(self, items: Sequence[MoveRange]) -> Iterator[tuple[int, int]]:
        """Yields (object, part) for everything that the items write, with repetitions."""
        for index, start, stop in items:
            move = self._plan.moves[index]
            for region in move.outputs:
                item = self._objects[region.file]
                for piece in clip(region, start, stop):
                    for part in item.parts_of(piece.offset, piece.offset + piece.reach(move.item_out)):
                        if part in item.moved:
                            yield region.file, part

    def _owners(self, item: MoveRange) -> set[int]:
        return {self._owner[file][part] for file, part in self._parts([item])}

    def work(self, number: int) -> Iterator[Work]:
        """Yields the units, or parts of units, that share `number` has to move, in order."""
        for each in self._found[number].units:
            unit = self._units[each]
            whole = list[MoveRange]()
            for item in unit.items:
                owners = self._owners(item)
                if owners == {number}:
                    whole.append(item)
                elif number in owners:
                    yield from self._cells(unit, item, number)
            if whole:
                # Items that no other share needs are moved as one unit.
                share = sum((item.stop - item.start) * self._plan.moves[item.move].item for item in whole)
                yield Work(Unit(unit.files, tuple(whole), share), counts=True)

    def _cells(self, unit: Unit, item: MoveRange, number: int) -> Iterator[Work]:
        move = self._plan.moves[item.move]
        cell = max(1, CELL // move.item)
        # Cells must not cut rows of a transposed region, which two cells would both read.
        cell -= cell % find_grain(move, cell)
        for at in range(item.start, item.stop, cell):
            some = MoveRange(item.move, at, min(at + cell, item.stop))
            owners = self._owners(some)
            if number in owners:
                yield Work(Unit(unit.files, (some,), (some.stop - at) * move.item), counts=number == min(owners))


def of_part(sizes: Sequence[int], part: tuple[int, int]) -> list[int]:
    """The numbers of the jobs that part (i, n), counted from 1, has to do.

    Jobs of `sizes` bytes are balanced by size, largest first to the least loaded part. The result depends on the
    arguments alone, so every machine computes the same distribution.
    """
    index, count = part
    loads = [(0, each) for each in range(count)]
    mine = []
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        # The heap of loads: the part with the least bytes, and among equals the one with the lowest number.
        load, lightest = loads[0]
        heapreplace(loads, (load + sizes[number] + 1, lightest))
        if lightest == index - 1:
            mine.append(number)
    return sorted(mine)
