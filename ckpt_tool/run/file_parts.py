"""Output files as parts of one size: how many bytes of each part moves write, and so when all of it has come.

    parts = FileParts(size=12 << 20, step=5 << 20)
    parts.count(region, item)               # parts.moved == {0: 5 << 20, 1: 5 << 20, 2: 2 << 20}

Uploads send parts (`run.upload`), hashes are taken of them in order (`run.hashes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.plan.copy import Region, clip
from ckpt_tool.plan.plan import Plan
from ckpt_tool.plan.schedule import Unit


class FileParts:
    """A file of `size` bytes, cut every `step` bytes. moved: part -> bytes that moves write of it."""

    def __init__(self, size: int, step: int) -> None:
        self.size = size
        self.step = step
        self.parts = max(1, ceil_div(size, step))
        self.moved: dict[int, int] = {}

    def bounds(self, part: int) -> tuple[int, int]:
        """The bytes [start, stop) of a part."""
        return part * self.step, min((part + 1) * self.step, self.size)

    def parts_of(self, start: int, stop: int) -> range:
        """The numbers of the parts that bytes [start, stop) touch."""
        return range(start // self.step, ceil_div(stop, self.step))

    def count(self, region: Region, nbytes: int) -> None:
        """Add a region's bytes, elements of `nbytes`, to those that moves write of each part."""
        for number, some in self.shares(region.in_file_order(), nbytes):
            self.moved[number] = self.moved.get(number, 0) + some

    def shares(self, region: Region, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yields (part, bytes) for a region whose dims are in the file's order, elements of `nbytes`. A part may be
        yielded several times: the caller adds the bytes up."""
        if 0 in region.extents:
            return
        reach = region.reach(nbytes)
        whole = region.numel * nbytes
        parts = self.parts_of(region.offset, region.offset + reach)
        # Nearly always: a region is smaller than a part.
        if len(parts) == 1:
            yield parts[0], whole
        # Without gaps: each part gets its intersection with the range.
        elif reach == whole:
            for number in parts:
                low, high = self.bounds(number)
                yield number, min(high, region.offset + reach) - max(low, region.offset)
        else:
            for i in range(region.extents[0]):
                yield from self.shares(region.row(i), nbytes)


def in_order_of_files(plan: Plan, shares: Sequence[tuple[int, Unit]]) -> list[tuple[int, Unit]]:
    """The numbered units sorted by the output file and offset of their first byte, so that files are filled one after
    the other, from start to end."""

    def first(pair: tuple[int, Unit]) -> tuple[int, int]:
        """(output file, offset) of the first byte that a unit writes."""
        index, start, stop = pair[1].items[0]
        places = (
            (part.file, part.offset) for region in plan.moves[index].outputs for part in clip(region, start, stop)
        )
        return min(places, default=(0, 0))

    return sorted(shares, key=first)
