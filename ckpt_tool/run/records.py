"""Checks source records against their checksums: CRCs of the bytes that are read are collected, and compared at the
end.

    checked = CheckedRecords(source.files, source.records)
    reader = checked.reader(16)
    reader.fill(...)                   # any number of readers, on any threads
    checked.done(reader)
    raise_all(checked.faults())        # E0351 names every damaged record; parts that were not read yet are read now

Cost: a CRC of what is read anyway, and a read of what is left of a record of which a part was wanted.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from ckpt_tool.errors import CkptError, CorruptFile
from ckpt_tool.plan.plan import Record
from ckpt_tool.run.blocks import BlockReader, OpenFiles
from ckpt_tool.run.checksum import ChecksummedRange, join
from ckpt_tool.storage.records import damaged

ALONE = 16 << 20  # bytes: what is left to read for checksums goes to several threads from here on


class CheckedRecords:
    """The checksummed records of some files, and the CRCs of what was read of them. Thread-safe."""

    def __init__(self, files: OpenFiles, records: Sequence[Record]) -> None:
        self.files = files
        self.records = records
        self._starts: dict[int, set[int]] = {}
        for record in records:
            self._starts.setdefault(record.file, set()).add(record.offset)
        self._pieces: dict[int, list[ChecksummedRange]] = {}
        self._lock = threading.Lock()

    def reader(self, room: int) -> BlockReader:
        """A reader whose bytes count, for one thread; give it back to `done`. room: descriptors that it may keep."""
        return BlockReader(self.files, room, self._starts)

    def done(self, reader: BlockReader) -> None:
        """Collect the CRCs of what the reader has read, and close it."""
        with self._lock:
            for file, collected in reader.pieces.items():
                self._pieces.setdefault(file, []).extend(collected.take())
        reader.close()

    def faults(self, *, unread: bool = True) -> Iterator[CkptError]:
        """Yields every damaged record. With `unread` off, only records that were read completely are checked, and
        nothing more is read."""
        yield from record_faults(self.records, self.files, self._pieces, unread=unread)
        if unread:
            yield from self.files.late_faults()


def record_faults(
    records: Sequence[Record],
    files: OpenFiles,
    pieces: Mapping[int, Sequence[ChecksummedRange]],
    *,
    unread: bool = True,
) -> Iterator[CorruptFile]:
    """Yields an error for every record whose bytes do not have the stored CRC-32.

    Args:
        pieces: source file -> the CRCs of the runs that were read.
        unread: read the parts of records that were not read yet; False skips such records.
    """
    by_file = {file: sorted(found) for file, found in pieces.items()}

    def fault(record: Record) -> CorruptFile | None:
        """The error for a damaged record, None if it is intact."""
        stop = record.offset + record.nbytes
        reader = BlockReader(files, 1, {})
        own = within(by_file.get(record.file, []), record.offset, stop)
        try:
            have = join(record.offset, stop, own, partial(reader.chunks, record.file))
        finally:
            reader.close()
        if have == record.crc:
            return None
        return damaged(files.shown(record.file), (record.offset, record.nbytes, record.crc), have)

    if not unread:
        records = [record for record in records if _is_whole(record, by_file.get(record.file, []))]
    seen = sum(piece.stop - piece.start for found in by_file.values() for piece in found)
    if sum(record.nbytes for record in records) - seen < ALONE:
        yield from filter(None, map(fault, records))
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # strips of transposed arrays were not hashed
        yield from filter(None, pool.map(fault, records))


def _is_whole(record: Record, pieces: Sequence[ChecksummedRange]) -> bool:
    """Were all bytes of the record read?"""
    at = record.offset
    stop = record.offset + record.nbytes
    for piece in within(pieces, at, stop):
        at = piece.stop if piece.start == at else at
    return at == stop


def raise_all(faults: Iterable[CkptError]) -> None:
    """Raise the first fault, which then names the others."""
    found = list(faults)
    if found:
        first = found[0]
        first.faults = tuple(
            f"{fault.path} at byte {fault.offset}: {fault.message}"
            if fault.offset is not None
            else f"{fault.where()}: {fault.message}"
            for fault in found[1:]
        )
        raise first


def within(pieces: Sequence[ChecksummedRange], start: int, stop: int) -> list[ChecksummedRange]:
    """Those of the sorted `pieces` that are inside [start, stop)."""
    found = []
    for piece in pieces[bisect_left(pieces, ChecksummedRange(start, 0, 0)) :]:
        if piece.start >= stop:
            break
        if piece.stop <= stop:
            found.append(piece)
    return found
