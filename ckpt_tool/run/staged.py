"""Verifies staged work of others: of an earlier run, or of another part of this one.

A journal line contains the hash of what a unit wrote. The staged bytes are read back and hashed, in every copy. A unit
counts as not done if the hash differs, bytes are missing or its line is malformed. Padding that no unit writes must be
zero, and is zeroed again.

Cost: one read of the units that are taken over, by all threads. For the part that commits, these are the units of all
other parts.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.errors import CkptError
from ckpt_tool.plan.copy import Region, clip
from ckpt_tool.plan.plan import Move, Plan
from ckpt_tool.plan.schedule import Unit
from ckpt_tool.run.blocks import BlockReader, OpenFiles, view_strided
from ckpt_tool.run.threads import Workers
from ckpt_tool.run.walk import read_back

if TYPE_CHECKING:
    import numpy as np

WINDOW = 1 << 20  # bytes of a gap that are read at a time
Line = Mapping[str, Any]


def intact(
    moves: Sequence[Move],
    todo: Sequence[tuple[int, Unit]],
    lines: Mapping[int, Line],
    files: OpenFiles,
    *,
    threads: int,
    room: int,
    panel: int,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> set[int]:
    """The numbers of those units of `todo` whose journal line is well-formed and matches the staged `files`.

    Args:
        todo: numbered units; those without a line are skipped.
        lines: unit -> journal line.
        room, panel: arguments of each thread's `BlockReader`.
        advance: called with the bytes of each unit that was checked.
    """
    waiting = [(number, unit) for number, unit in todo if number in lines]
    found: set[int] = set()
    failures: list[BaseException] = []

    def look() -> None:
        """Check units until none is left or one thread has failed."""
        reader = BlockReader(files, room, {}, panel=panel)
        try:
            try:
                while waiting and not failures:
                    number, unit = waiting.pop()
                    if _is_sound(lines[number], unit) and _is_there(reader, moves, unit, lines[number]):
                        found.add(number)
                    advance(unit.nbytes)
            finally:
                reader.close()
        except IndexError:  # another thread took the last one
            return
        except (CkptError, OSError, MemoryError) as e:
            failures.append(e)

    if waiting:
        Workers(look, max(1, min(threads, len(waiting)))).run(failures.append)
    if failures:
        raise failures[0]
    return found


def _is_there(reader: BlockReader, moves: Sequence[Move], unit: Unit, line: Line) -> bool:
    """Do the staged files hold, in every copy, what the journal says this unit wrote?"""
    return all(
        read_back(reader, moves[item.move], item.start, item.stop) == want
        for item, want in zip(unit.items, line["hashes"], strict=True)
    )


def _is_sound(line: Line, unit: Unit) -> bool:
    """Has the journal line the form that this unit's line must have? Anyone can write a journal file with a valid seal,
    so its content is not trusted."""
    hashes = line.get("hashes")
    leaves = line.get("leaves")
    overflows = line.get("overflows")
    if not isinstance(hashes, list) or not isinstance(leaves, list) or not isinstance(overflows, dict):
        return False
    own = {str(item.move) for item in unit.items}
    if len(hashes) != len(unit.items) or not own >= overflows.keys() or not _numbers(overflows.values()):
        return False
    try:
        for item, (move, first, text, out_first, out_text) in zip(unit.items, leaves, strict=True):
            b64decode(text, validate=True), b64decode(out_text, validate=True)
            if move != item.move or not _numbers([first, out_first]):
                return False
    except (TypeError, ValueError):
        return False
    return True


def _numbers(values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


# -- padding that no unit writes ---------------------------------------------------------------------------------------


class Gaps:
    """The ranges of each output file that neither a literal nor a move writes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._dense = [array("q") for _ in plan.outputs]  # starts and ends, alternating
        self._combs: list[list[tuple[Region, int]]] = [
            [] for _ in plan.outputs
        ]  # with gaps: (region, bytes an element)
        for move in plan.moves:
            for region in move.outputs:
                reach = region.reach(move.item_out)
                if reach == region.numel * move.item_out:
                    self._dense[region.file].extend((region.offset, region.offset + reach))
                else:
                    self._combs[region.file].append((region, move.item_out))

    def stray(self, number: int, reader: BlockReader) -> Iterator[tuple[int, int]]:
        """Yields (offset, bytes) of runs that are not zero in the gaps of file `number`. Copied side files have
        none."""
        if self._plan.outputs[number].copy_of is not None:
            return
        for start, stop in self._gaps(number):
            for at in range(start, stop, WINDOW):
                data = bytearray(min(WINDOW, stop - at))
                reader.pread(number, at, memoryview(data))
                # Nearly all gaps are zero, which is quick to see.
                if data.count(0) < len(data):
                    yield from self._odd(number, at, data)

    def _gaps(self, number: int) -> Iterator[tuple[int, int]]:
        """Yields (start, stop) between the dense regions and literals; strided regions are inside these gaps."""
        dense = self._dense[number]
        file = self._plan.outputs[number]
        spans = [*zip(dense[::2], dense[1::2], strict=True), *((at, at + len(data)) for at, data in file.literals)]
        end = 0
        for start, stop in sorted(spans):
            if start > end:
                yield end, start
            end = max(end, stop)
        if end < file.size:
            yield end, file.size

    def _odd(self, number: int, at: int, data: bytearray) -> Iterator[tuple[int, int]]:
        """Yields (offset, bytes) of runs of `data`, read from byte `at`, that are not zero and belong to no strided
        region."""
        import numpy as np

        odd = np.frombuffer(data, np.uint8) != 0
        for region, item in self._combs[number]:
            _clear_teeth(odd, at, region, item)
        edges = np.flatnonzero(np.diff(odd, prepend=False, append=False))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield at + start, stop - start


def _clear_teeth(odd: np.ndarray[Any, np.dtype[np.bool_]], at: int, region: Region, item: int) -> None:
    """Set `odd` to False for those of bytes [at, at + len(odd)) of a file that a strided region writes."""
    import numpy as np

    dims = sorted(zip(region.extents, region.strides, strict=True), key=lambda dim: -dim[1])
    extents = tuple(n for n, _ in dims)
    strides = tuple(s for _, s in dims)
    lead = item - 1  # an element may begin before the window, or end behind it
    room = np.zeros(lead + len(odd) + lead, np.bool_)
    along = Region(0, 0, region.offset, extents, (0,) * len(extents), strides)  # its line is the file
    for part in clip(along, at - lead, at + len(odd)):
        where = view_strided(room.view(np.uint8).data, part.at - at + lead, (*part.extents, item), (*part.steps, 1), 1)
        where[...] = 1
    odd &= ~room[lead : lead + len(odd)]
