"""Shares of a plan that writes into a store: sets of whole parts of objects, so that no two workers fill one part.

Parts stand in the order in which units first touch them, units in the order of the objects; a share is a run of them,
some hundred MiB, and follows from the plan alone. To fill its parts it moves what touches them and drops what goes to
others' parts. What is moved twice therefore lies at the borders, and is cut small there:

    unit   0     1     2     3          one object, parts of 5 MiB, units of 64 MiB
    part   0-12  ..25  ..38  ..51       share 0: parts 0-25, share 1: the rest
                    ^                   unit 2 begins in part 25: share 0 moves its first MiB too

An item all of whose parts are of one share is moved whole, by it alone. One that touches parts of several is cut into
cells, the same for all of them: so leaves of the digest never overlap in part, and overflows are counted by the first.
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

# bytes of a share, at least; shares of a plan
SHARE = 256 << 20
MOST = 4096
CELL = 1 << 20  # bytes of an item's line that are moved as one where two shares want them
NOBODY = -1


class Object(Protocol):
    """What is asked of an object: which of its parts moves fill, if it holds values."""

    size: int
    step: int
    valued: bool
    moved: dict[int, int]

    def parts_of(self, start: int, stop: int) -> range: ...


class UploadShare(NamedTuple):
    """units: by number, that touch its parts. nbytes: of the parts."""

    units: list[int]
    nbytes: int


class Work(NamedTuple):
    """What a share moves."""

    unit: Unit
    counts: bool  # is it this share that counts the unit's overflows?


class Shares(Sequence[UploadShare]):
    """A plan's shares. order: its units, numbered, as objects lie."""

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
        """Whose part it is; `NOBODY` of one that no move fills."""
        parts = self._owner[file]
        return parts[part] if part < len(parts) else NOBODY

    def _cut(self, order: Sequence[tuple[int, Unit]], size: int) -> None:
        share = UploadShare([], 0)
        for number, unit in order:
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
        """(object, part) of all that items write, again and again."""
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
        """What share `number` moves, in order."""
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
                share = sum((item.stop - item.start) * self._plan.moves[item.move].item for item in whole)
                yield Work(Unit(unit.files, tuple(whole), share), counts=True)

    def _cells(self, unit: Unit, item: MoveRange, number: int) -> Iterator[Work]:
        move = self._plan.moves[item.move]
        cell = max(1, CELL // move.item)
        cell -= cell % find_grain(move, cell)
        for at in range(item.start, item.stop, cell):
            some = MoveRange(item.move, at, min(at + cell, item.stop))
            owners = self._owners(some)
            if number in owners:
                yield Work(Unit(unit.files, (some,), (some.stop - at) * move.item), counts=number == min(owners))


def of_part(sizes: Sequence[int], part: tuple[int, int]) -> list[int]:
    """The numbers of what part (i, n) does, from 1: balanced by bytes, the same on every machine."""
    index, count = part
    loads = [(0, each) for each in range(count)]
    mine = []
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        load, lightest = loads[0]
        heapreplace(loads, (load + sizes[number] + 1, lightest))
        if lightest == index - 1:
            mine.append(number)
    return sorted(mine)
