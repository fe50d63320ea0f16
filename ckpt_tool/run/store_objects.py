"""The objects of an output in a store, and the parts that they are sent in: what an upload fills.

for item in objects_of(plan):
    item.moved[3]        # bytes that moves write of part 3
    item.bounds(3)       # where it begins and ends
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpt_tool.core.target import PATCH_BYTES, TargetFile
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.plan import Plan
from ckpt_tool.run.checksum import ChecksummedRange, join
from ckpt_tool.run.file_parts import FileParts
from ckpt_tool.storage.stores.multipart import Sent, part_size


class Hole(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file that are known late."""

    offset: int
    nbytes: int


class UploadPart:
    """One part of an object while it is in memory.

    left: bytes that moves have still to write. holes: how many of its holes are not filled yet.
    """

    __slots__ = ("data", "file", "holes", "left", "number", "start")

    def __init__(self, file: int, number: int, start: int, data: bytearray, left: int) -> None:
        self.file = file
        self.number = number
        self.start = start
        self.data = data
        self.left = left
        self.holes = 0

    @property
    def stop(self) -> int:
        """The byte of the object after the part's last one."""
        return self.start + len(self.data)


class StoredObject(FileParts):
    """One output file: its parts, its holes, and the CRCs that fill these. For the copy of a side file, `moved` counts
    the copied bytes."""

    def __init__(self, number: int, file: TargetFile, arrays: Sequence[tuple[int, int]]) -> None:
        super().__init__(file.size, part_size(file.size))
        self.number = number
        self.path = file.path
        self.literals = sorted(file.literals)
        self.valued = False  # does it hold what moves write?
        self.done = set[int]()  # parts that have been complete once
        self.known: dict[int, bytes] = {}  # offset of a hole -> what fills it
        self.holes = [Hole(patch.offset, PATCH_BYTES[patch.kind]) for patch in file.patches]
        self.spans: dict[tuple[int, int], list[int]] = defaultdict(list)  # (offset, length) -> holes of its CRC
        for patch in file.patches:
            if patch.kind == "crc32":
                self.spans[patch.span or arrays[patch.of][:2]].append(patch.offset)
        self.pieces: dict[tuple[int, int], list[ChecksummedRange]] = {span: [] for span in self.spans}
        self.seen: dict[tuple[int, int], int] = dict.fromkeys(self.spans, 0)
        self.upload = ""
        self.beginning = threading.Lock()
        self.before: dict[int, Sent] = {}  # what an earlier run has sent
        self.etags: dict[int, str] = {}

    def forget(self) -> None:
        """Reset everything that depends on values; the upload and the layout are kept."""
        self.done.clear()
        self.known.clear()
        self.before = {}
        self.etags = {}
        self.pieces = {span: [] for span in self.spans}
        self.seen = dict.fromkeys(self.spans, 0)

    def crc(self, span: tuple[int, int]) -> bytes:
        """The CRC-32 of a span, little-endian as in a zip header, once all its bytes were written. Drops its pieces."""

        def lacks(offset: int, nbytes: int) -> Iterable[bytes]:
            """Raises InternalError: the caller has checked that the pieces are complete."""
            raise InternalError(f"{self.path}: a CRC lacks {nbytes} bytes at {offset}")

        return join(span[0], sum(span), self.pieces.pop(span), lacks).to_bytes(4, "little")


def objects_of(plan: Plan) -> list[StoredObject]:
    """The objects of a plan's output, each with the number of bytes that moves write of each of its parts."""
    objects: list[StoredObject] = []
    for number, (file, arrays) in enumerate(zip(plan.outputs, plan.arrays, strict=True)):
        objects.append(StoredObject(number, file, [(extent.offset, extent.nbytes) for extent in arrays]))
    for move in plan.moves:
        for region in move.outputs:
            objects[region.file].count(region, move.item_out)
    for item in objects:
        item.valued = bool(item.moved)
        if plan.outputs[item.number].copy_of is not None:
            item.moved = {part: item.bounds(part)[1] - item.bounds(part)[0] for part in range(item.parts)}
    return objects


def within(literals: Iterable[tuple[int, bytes]], start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, bytes) of the literals, cut to [start, stop)."""
    for offset, data in literals:
        low = max(offset, start)
        high = min(offset + len(data), stop)
        if low < high:
            yield low, data[low - offset : high - offset]


def fill(part: UploadPart, hole: Hole, data: bytes) -> None:
    """Write the content of a hole into a part, as far as the part contains it."""
    for low, some in within([(hole.offset, data)], part.start, part.stop):
        part.data[low - part.start : low - part.start + len(some)] = some
