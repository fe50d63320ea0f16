"""SHA-256 of every output file, computed while the files are written: each file is hashed from its start, as far as it
is complete, from pages that were just written.

    hashes = FileHashes(plan, staging)
    hashes.landed(unit)                # from any thread: the unit is written; hashes what has become complete
    hashes.finish()                    # {"model.safetensors": "9f86d0...", ...}

A file must be hashed in order, but units are finished in any order. Files are cut into windows; the plan determines how
many bytes moves write to each, so a window is complete when as many have arrived. The thread that completes the next
windows of a file hashes them, one thread per file at a time. If a record's CRC precedes the record (zips), the hash
waits for the record, and the CRC is computed and written first; `run.finish` computes it again from the CRCs taken on
the way, and the two must be equal.

Usually nothing is read from the disk: what is hashed was written moments before and is still in the page cache. What an
earlier run staged is read, as resuming reads it. Cost: the hash, 0.5 to 0.7 s a GB and core if the processor has
instructions for it, and a copy from the page cache. Windows behind a gap wait, and may have left the cache by then.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from ckpt_tool.core.target import TargetFile
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.plan.copy import clip
from ckpt_tool.plan.plan import Extent, Plan
from ckpt_tool.plan.schedule import Unit
from ckpt_tool.run.checksum import crc32
from ckpt_tool.run.file_parts import FileParts
from ckpt_tool.run.finish import read_chunks, write_all
from ckpt_tool.run.threads import Workers
from ckpt_tool.storage.descriptors import close_read
from ckpt_tool.storage.output.staging import Staging

WINDOW = 4 << 20  # bytes
BACKLOG = 256 << 20  # bytes of a file that may be complete and not hashed before writing threads wait

_Hole = tuple[int, tuple[int, int] | None]  # where, and whose CRC (offset, length) fills it; None: known at the end


class _HashedFile(FileParts):
    """One output file while it is hashed. at: bytes hashed so far. left: window -> bytes still to be written."""

    def __init__(self, file: TargetFile, arrays: Sequence[Extent]) -> None:
        super().__init__(file.size, WINDOW)
        self.path = file.path
        self.copied = file.copy_of is not None
        self.at = 0
        self.first = 0  # all windows before this one are complete
        self.digest = hashlib.sha256()
        self.turn = threading.Lock()
        self.left: dict[int, int] = {}
        self.holes = sorted(_holes(file, arrays), reverse=True)  # the next one last
        self.crcs: dict[tuple[int, int], bytes] = {}
        self.filled: list[tuple[int, bytes]] = []

    def ready(self) -> int:
        """The byte up to which everything that moves write has been written."""
        if self.copied:
            return 0
        while self.first < self.parts and not self.left.get(self.first):
            self.first += 1
        return min(self.first * self.step, self.size)

    def lacks(self, span: tuple[int, int]) -> bool:
        """Are bytes of (offset, length) still to be written?"""
        return any(self.left.get(part) for part in self.parts_of(span[0], sum(span)))


def _holes(file: TargetFile, arrays: Sequence[Extent]) -> Iterator[_Hole]:
    for patch in file.patches:
        span = patch.span or (arrays[patch.of].offset, arrays[patch.of].nbytes) if patch.kind == "crc32" else None
        yield patch.offset, span


class FileHashes:
    """The hashes of one run's files. Call `landed` once per unit, from any thread, then `finish` when every hole is
    filled."""

    def __init__(self, plan: Plan, staging: Staging, threads: int) -> None:
        self._moves = plan.moves
        self._staging = staging
        self._threads = threads
        self._files = [_HashedFile(file, arrays) for file, arrays in zip(plan.outputs, plan.arrays, strict=True)]
        self._lock = threading.Lock()
        for move in plan.moves:
            for region in move.outputs:
                self._files[region.file].count(region, move.item_out)
        for file in self._files:
            # `count` has added up what moves write; from here on the windows count down.
            file.left = file.moved
            file.moved = {}

    def landed(self, unit: Unit, *, later: bool = False) -> None:
        """Note that everything the unit writes has been written, and hash what is complete. later: do not hash now."""
        came: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for index, start, stop in unit.items:
            move = self._moves[index]
            for region in move.outputs:
                file = self._files[region.file]
                windows = came[region.file]
                for part in clip(region, start, stop):
                    for window, nbytes in file.shares(part.in_file_order(), move.item_out):
                        windows[window] += nbytes
        with self._lock:
            for number, windows in came.items():
                left = self._files[number].left
                for window, nbytes in windows.items():
                    left[window] -= nbytes
        for number in came if not later else ():
            self._go_on(self._files[number])

    def _go_on(self, file: _HashedFile) -> None:
        """Hash the next complete windows of a file, unless another thread is doing so. If more than BACKLOG bytes are
        waiting, block until it is done, so that writing does not run ahead of hashing."""
        with self._lock:
            behind = file.ready() - file.at
        if behind <= 0 or not file.turn.acquire(blocking=behind > BACKLOG):
            return
        try:
            fd = self._staging.open(file.path)
            try:
                while (stop := self._reach(file, fd)) > file.at:
                    self._hash(file, fd, stop)
            finally:
                close_read(fd)
        finally:
            file.turn.release()

    def _reach(self, file: _HashedFile, fd: int) -> int:
        """The byte up to which a file can be hashed now. Fills the holes before it. The caller holds `file.turn`."""
        while True:
            with self._lock:
                ready = file.ready()
                offset, span = file.holes[-1] if file.holes else (file.size, None)
                # The next hole is not reached yet.
                if offset >= ready:
                    return ready
                # Hash up to the hole; the rest waits for its content.
                if span is None or file.lacks(span):
                    return offset
            if span not in file.crcs:
                crc = 0
                for data in read_chunks(fd, *span):
                    crc = crc32(data, crc)
                file.crcs[span] = crc.to_bytes(4, "little")
            write_all(fd, file.crcs[span], offset, file.path)
            file.filled.append((offset, file.crcs[span]))
            file.holes.pop()

    def _hash(self, file: _HashedFile, fd: int, stop: int) -> None:
        for data in read_chunks(fd, file.at, stop - file.at):
            file.digest.update(data)
        file.at = stop

    def finish(self, advance: Callable[[int], None]) -> dict[str, str]:
        """Hash what is left. Returns path -> hash in hex. advance: called with the number of bytes hashed.

        Raises StorageError E0709 if a CRC in a file differs from the one that was hashed.
        """
        # `pop` takes the longest first, so that no long file is left for one thread at the end.
        waiting = sorted(self._files, key=lambda file: file.size - file.at)
        failures = list[BaseException]()

        def work() -> None:
            """Finish files until none is left or one thread has failed."""
            try:
                while waiting and not failures:
                    self._end(waiting.pop(), advance)
            except IndexError:  # another thread took the last one
                return
            except (CkptError, OSError, MemoryError) as e:
                failures.append(e)

        Workers(work, max(1, min(self._threads, len(waiting)))).run(failures.append)
        if failures:
            raise failures[0]
        return {file.path: file.digest.hexdigest() for file in self._files}

    @property
    def left(self) -> int:
        """Bytes that are not hashed yet."""
        return sum(file.size - file.at for file in self._files)

    def _end(self, file: _HashedFile, advance: Callable[[int], None]) -> None:
        fd = self._staging.open(file.path)
        try:
            while file.at < file.size:
                before = file.at
                self._hash(file, fd, min(file.at + BACKLOG, file.size))
                advance(file.at - before)
            # The hash is over CRCs that were computed here; `fill_patches` has written its own since. They must agree.
            for offset, crc in file.filled:
                if b"".join(read_chunks(fd, offset, len(crc))) != crc:
                    raise StorageError(
                        "the values read back differ from those written",
                        code="E0709",
                        path=self._staging.path / file.path,
                        offset=offset,
                        hint="the disk or the memory of this machine fails",
                    )
        finally:
            close_read(fd)
