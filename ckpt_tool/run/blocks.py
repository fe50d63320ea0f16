"""Blocks: reading and writing regions through a small buffer.

A block holds elements [start, stop) of a tensor's line. `BlockReader.fill` reads what the source regions have of it,
`Writer.drain` writes what the output regions want of it. Runs go straight between file and block, as do long rows of a
matrix; strided parts pass through one scratch of 1 MiB and a NumPy assignment, never element by element.
Descriptors are kept in a small least-recently-used cache, so that 10,000 shards work under `ulimit -n 64`.

Cost: one pread and one pwrite a run; strided parts add one pass over memory that stays in L2.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from ckpt_tool.core.inner_path import is_view
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import REPLICAS_DIFFER, CkptError, ReplicasDiffer, SourceChanged, StorageError, wrap_os_error
from ckpt_tool.plan.copy import Region, clip, hull, is_transposed
from ckpt_tool.plan.plan import Move, SourceFile
from ckpt_tool.run.checksum import RunPieces
from ckpt_tool.run.digest import LEAF
from ckpt_tool.run.transposed import PANEL, Strips, Transposed
from ckpt_tool.storage.descriptors import close_read, close_written, stat_of
from ckpt_tool.storage.output.staging import Staging
from ckpt_tool.storage.platform_calls import copy_file_range
from ckpt_tool.storage.source import Tree, identity_of

if TYPE_CHECKING:  # at run time by those who need it: a move of plain runs does without, and saves 40 ms
    import numpy as np

SCRATCH = 1 << 20  # bytes of the strided side
GAP = 64 << 10  # bytes: runs closer than this are read in one pread
LONG = 64 << 10  # bytes: rows of at least this length are runs of their own
SEGMENT = 16 << 20  # bytes of a line: within it a store is asked for ranges file by file
_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}  # bytes of an element -> a NumPy type to move it


def view_strided(
    buffer: memoryview | bytearray, offset: int, extents: Sequence[int], strides: Sequence[int], item: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """A view of `buffer` from byte `offset`: extents in elements of `item` bytes, strides in bytes."""
    import numpy as np

    return np.ndarray(tuple(extents), _TYPES[item], buffer, offset, tuple(strides))


def _reads(part: Region, item: int, near: int) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of what is read for a part: all of it where its rows are at most `near` bytes
    apart."""
    if not part.extents or part.strides[0] <= near or part.extents[0] == 1:
        yield part.offset, part.reach(item)
    else:
        for i in range(part.extents[0]):
            yield from _reads(part.row(i), item, near)


class Spans:
    """Regions in the order of the line, so that a block cheaply skips those that it does not meet. Quick where blocks
    come in the line's order."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._spans = sorted((*hull(region), region) for region in regions)
        self._at = self._next = 0  # where the last block began, and the first region that did not end before it

    def parts(self, start: int, stop: int) -> list[Region]:
        """What the regions have of elements [start, stop)."""
        spans = self._spans

        # Regions that end before the block begins: those before `_next` are known from the last block.
        at = self._next if start >= self._at else 0
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        self._at = start
        self._next = at

        parts: list[Region] = []
        while at < len(spans):
            low, high, region = spans[at]
            if low >= stop:
                break
            if start <= low and high <= stop:
                parts.append(region)
            elif high > start:
                parts += clip(region, start, stop)
            at += 1
        return parts


def is_in_runs(region: Region, item: int) -> bool:
    """Is the region a run, or are its rows long, which are runs then?"""
    _, _, _, extents, strides, steps, _ = region
    if not extents:
        return True
    return strides[-1] == item and steps[-1] == 1 and (len(extents) == 1 or extents[-1] * item >= LONG)


class FdCache:
    """Descriptors by file number, the least recently used closed first. For one thread.

    path_of: given for files that are written, whose failing close is an error that names the file; None where they are
    only read.
    """

    def __init__(
        self, opener: Callable[[int], int], room: int, path_of: Callable[[int], str | os.PathLike[str]] | None = None
    ) -> None:
        self._open = opener
        self._room = room
        self._path_of = path_of
        self._fds: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is None:
            while len(self._fds) >= self._room:
                self._close(*self._fds.popitem(last=False))
            fd = self._fds[number] = self._open(number)
        else:
            self._fds.move_to_end(number)
        return fd

    def close(self) -> None:
        """Close them all; then raise the first failure: a network file system may report a lost write only here."""
        # The first failure is kept: all other descriptors must be closed as well.
        failed: StorageError | None = None
        while self._fds:
            try:
                self._close(*self._fds.popitem())
            except StorageError as e:
                failed = failed or e
        if failed is not None:
            raise failed

    def _close(self, number: int, fd: int) -> None:
        if self._path_of is None:
            close_read(fd)
        else:
            close_written(fd, self._path_of(number))


class OpenFiles(Protocol):
    """Numbered files that a Reader reads: the plan's sources, or the staged output when it is read back."""

    def open(self, number: int) -> int: ...
    def shown(self, number: int) -> str: ...
    def make_changed_error(self, number: int) -> CkptError: ...
    def remote(self, number: int) -> Tree | None: ...
    def path(self, number: int) -> str: ...
    def late_faults(self) -> Iterable[CkptError]: ...


class Sources:
    """The plan's source files, opened and held to the identity that the plan saw. Thread-safe (no state of its own)."""

    def __init__(self, files: Sequence[SourceFile], trees: dict[str, Tree]) -> None:
        self.files = files
        self.trees = trees

    def shown(self, number: int) -> str:
        """The file's path as messages show it."""
        file = self.files[number]
        return self.trees[file.root].display(file.path)

    def path(self, number: int) -> str:
        """The file's path below its tree."""
        return self.files[number].path

    def remote(self, number: int) -> Tree | None:
        """The tree to read through where the file has no descriptor (a URL, a view), else None."""
        tree = self.trees[self.files[number].root]
        return None if tree.local and not is_view(self.files[number].path) else tree

    @property
    def has_remote_files(self) -> bool:
        """Are some of the files behind a URL?"""
        return any(not tree.local and not tree.computed for tree in self.trees.values())

    def late_faults(self) -> Iterator[CkptError]:
        """What is wrong with the files and shows only when all has been read (`Tree.late_faults`)."""
        for root, tree in self.trees.items():
            yield from tree.late_faults(file.path for file in self.files if file.root == root)

    def open(self, number: int) -> int:
        """A descriptor of the file. Raises SourceChanged if it is not the file that the plan saw."""
        file = self.files[number]
        fd = self.trees[file.root].open(file.path)
        try:
            now = identity_of(stat_of(fd, self.shown(number)))
        except StorageError:
            close_read(fd)
            raise
        # Checked on the descriptor, so that the file can't be replaced between check and read.
        if tuple(now) != tuple(file.identity):
            close_read(fd)
            raise self.make_changed_error(number)
        return fd

    def make_changed_error(self, number: int) -> SourceChanged:
        """The error for a file that is not what the plan saw any more."""
        return SourceChanged(
            "the file changed after the plan was made",
            code="E0601",
            path=self.shown(number),
            hint="wait until nothing writes into the checkpoint, then plan again",
        )

    def check(self) -> None:
        """Raise SourceChanged unless each file is, by name, still the one that the plan saw."""
        for root, tree in self.trees.items():
            numbers = [number for number, file in enumerate(self.files) if file.root == root]
            now = tree.identities_by_name(self.files[number].path for number in numbers)
            for number, identity in zip(numbers, now, strict=True):
                if identity is None or tuple(identity) != tuple(self.files[number].identity):
                    raise self.make_changed_error(number)


class StagedFiles:
    """The output's files while they are staged, or a finished output's, by number."""

    def __init__(self, opener: Callable[[str], int], names: Sequence[str]) -> None:
        self._opener = opener
        self._names = names

    def path(self, number: int) -> str:
        """The file's path below the output."""
        return self._names[number]

    shown = path

    def late_faults(self) -> Iterable[CkptError]:
        """None: what this run wrote has no faults of a format."""
        return ()

    def remote(self, number: int) -> Tree | None:
        """None: all have descriptors."""
        return None

    def open(self, number: int) -> int:
        """A descriptor of the file."""
        return self._opener(self._names[number])

    def make_changed_error(self, number: int) -> CkptError:
        """The error for a file that ends too early."""
        return StorageError("a staged file is shorter than planned", code="E0708", path=self._names[number])


class BlockReader:
    """Fills blocks from source regions. For one thread.

    crc_starts: for files with checksummed records, the bytes where a record begins; their CRCs collect in `pieces`.
    panel: bytes that transposed sources may take, see `run/transposed.py`. strips: those bytes, lent to outputs too.
    """

    def __init__(
        self, files: OpenFiles, room: int, crc_starts: Mapping[int, Container[int]], *, panel: int = PANEL
    ) -> None:
        self._files = files
        self.strips = Strips(panel)
        self._panels: Transposed | None = None
        self._fds = FdCache(files.open, room)
        self._scratch = bytearray()
        self._starts = crc_starts
        self._move: Move | None = None  # the move that `_spans` and `_panels` belong to
        self._spans = Spans(())
        self.pieces: dict[int, RunPieces] = {}

    def fill(
        self, move: Move, block: memoryview, start: int, stop: int, *, count: bool = True, until: int | None = None
    ) -> None:
        """Read elements [start, stop) of the move's line into `block`; replicas are compared with what is there.

        count: whether the bytes count for record checksums (False for a second look at the same bytes).
        until: the element up to which the caller will go on, all of them if None.
        """
        # Transposed sources are read in panels of whole rows, and replicas are compared there.
        panels = self.find_panels(move)
        if panels is not None:
            panels.fill(block, start, stop, move.numel if until is None else until)
            return

        # Replicas are compared with the block once all of it is read.
        copies = []
        for part in self._spans.parts(start, stop):
            if part.replica:
                copies.append(part)
            else:
                self._read(part, block, start, move.item, count=count)
        for part in copies:
            self._compare(move, part, block, start, count=count)

    def lend_parts(self, move: Move, start: int, stop: int) -> list[memoryview] | None:
        """Elements [start, stop) of the move's line as the buffers that a store has sent, to be looked at without a
        copy, in parts that may end within an element. None where they must be read into a block: from a local file,
        from several places, with replicas."""
        # Local files have no buffers to lend, and panels are overwritten by the next read.
        if not move.sources or self._files.remote(move.sources[0].file) is None or self.find_panels(move) is not None:
            return None

        regions = self._spans.parts(start, stop)
        if len(regions) != 1 or len(regions[0].extents) > 1 or regions[0].numel != stop - start:
            return None
        (region,) = regions
        tree = self._files.remote(region.file)
        if tree is None or not is_in_runs(region, move.item):
            return None
        parts = tree.parts(self._files.path(region.file), region.offset, (stop - start) * move.item)
        offset = region.offset

        # What is lent counts as read.
        for part in parts:
            self._count(region.file, offset, part)
            offset += len(part)
        return parts

    def expect(self, items: Iterable[tuple[Move, int, int]], *, then: bool = False) -> None:
        """Elements [start, stop) of these moves' lines will be filled next, in this order: files of stores are fetched
        ahead. then: after what was expected before. For transposed sources the panels announce their reads."""
        ranges: dict[int, tuple[Tree, list[tuple[str, int, int]]]] = {}
        for move, start, stop in items:
            remotes = [(region, self._files.remote(region.file)) for region in move.sources]
            far = [(region, tree) for region, tree in remotes if tree is not None]
            if not far or any(map(is_transposed, move.sources)):
                continue

            from ckpt_tool.storage.stores.read_ahead import NEAR

            # Segment by segment, as the blocks will want it; to the end of the digest's last leaf.
            stop = min(move.numel, ceil_div(stop * move.item, LEAF) * LEAF // move.item)
            step = max(1, SEGMENT // move.item)
            for at in range(start, stop, step):
                for region, tree in far:
                    _, wanted = ranges.setdefault(id(tree), (tree, []))
                    for part in clip(region, at, min(at + step, stop)):
                        wanted.extend((self._files.path(part.file), *run) for run in _reads(part, move.item, NEAR))

        for tree, wanted in ranges.values():
            tree.expect(wanted, then=then)

    def find_panels(self, move: Move) -> Transposed | None:
        """The panels of a move with transposed sources, None for others. Good until another move is asked for."""
        if self._move is not move:
            self._move = move
            self._spans = Spans(())
            self._panels = None
            if any(map(is_transposed, move.sources)):
                self._panels = Transposed(move, self, self.strips, partial(self._differs, move))
            else:
                self._spans = Spans(move.sources)
        return self._panels

    def _compare(self, move: Move, part: Region, block: memoryview, start: int, *, count: bool) -> None:
        import numpy as np

        other_block = memoryview(bytearray(len(block)))
        self._read(part, other_block, start, move.item, count=count)
        view = ((part.at - start) * move.item, part.extents, [step * move.item for step in part.steps], move.item)
        first_copy = view_strided(block, *view)
        this_copy = view_strided(other_block, *view)
        if not np.array_equal(first_copy, this_copy):
            self._differs(move, part)

    def _differs(self, move: Move, part: Region) -> NoReturn:
        raise ReplicasDiffer(
            f"replicas differ: this copy of elements {part.at}.. is not equal to the first rank's",
            code=REPLICAS_DIFFER,
            path=self._files.shown(part.file),
            offset=part.offset,
            key=str(move.key),
            hint="the ranks have drifted apart; choose one with --replica-policy first, or save again",
        )

    def _read(self, part: Region, block: memoryview, start: int, item: int, *, count: bool) -> None:
        """Read a part straight into the block where it is a run, or row by row where its rows are; else strided."""
        if is_in_runs(part, item):
            if len(part.extents) > 1:
                for i in range(part.extents[0]):
                    self._read(part.row(i), block, start, item, count=count)
                return
            at = (part.at - start) * item
            nbytes = part.extents[0] * item if part.extents else item
            self.pread(part.file, part.offset, block[at : at + nbytes], count=count)
        else:
            self._spread(part.in_file_order(), block, start, item, count=count)

    def _spread(self, part: Region, block: memoryview, start: int, item: int, *, count: bool) -> None:
        """Read a strided part, its dims in the file's order: spans through the scratch, the outermost dim split until a
        span fits and is dense, or is thin and of many rows that are near each other."""
        extents = part.extents
        strides = part.strides
        span = part.reach(item)
        useful = item
        for extent, stride in zip(extents, strides, strict=True):
            useful *= extent if stride else 1
        is_near = bool(extents) and 0 < strides[0] <= GAP
        rows_per_span = SCRATCH // strides[0] if is_near else 1

        # One read of the whole span: at most four bytes for each that is wanted.
        if span <= max(GAP, min(4 * useful, SCRATCH)) or (is_near and extents[0] <= rows_per_span):
            if len(self._scratch) < span:
                self._scratch = bytearray(max(span, SCRATCH))
            self.pread(part.file, part.offset, memoryview(self._scratch)[:span], count=count and span == useful)
            target = view_strided(block, (part.at - start) * item, extents, [step * item for step in part.steps], item)
            target[...] = view_strided(self._scratch, 0, extents, strides, item)
        elif rows_per_span > 1:
            for i in range(0, extents[0], rows_per_span):
                first = part.row(i)
                rows = min(rows_per_span, extents[0] - i)
                band = part._replace(offset=first.offset, at=first.at, extents=(rows, *extents[1:]))
                self._spread(band, block, start, item, count=count)
        else:
            for i in range(extents[0]):  # one of them may be a run
                self._read(part.row(i), block, start, item, count=count)

    def fd(self, file: int) -> int:
        """A descriptor of a source file, good until another file's is asked for."""
        return self._fds[file]

    def remote(self, file: int) -> Tree | None:
        """The tree to read through where the file has no descriptor, else None."""
        return self._files.remote(file)

    def path(self, file: int) -> str:
        """The file's path below its tree."""
        return self._files.path(file)

    def pread(self, file: int, offset: int, view: memoryview, *, count: bool = True) -> None:
        """Read all of `view` from byte `offset` of a source file."""
        tree = self._files.remote(file)
        if tree is None:
            self._pread_local(self._fds[file], file, offset, view)
        else:
            tree.fill(self._files.path(file), offset, view)
        if count:
            self._count(file, offset, view)

    def _count(self, file: int, offset: int, view: memoryview) -> None:
        """Count bytes of a file that have been read into the CRCs of its records."""
        starts = self._starts.get(file)
        if starts is not None:
            if file not in self.pieces:
                self.pieces[file] = RunPieces()
            self.pieces[file].add(offset, view, breaks=starts)

    def _pread_local(self, fd: int, file: int, offset: int, view: memoryview) -> None:
        done = 0
        try:
            done = os.preadv(fd, (view,), offset)
            while done < len(view):
                n = os.preadv(fd, (view[done:],), offset + done)
                if n == 0:
                    raise self._files.make_changed_error(file)  # shorter than it was when the plan was made
                done += n
        except OSError as e:
            raise wrap_os_error(e, self._files.shown(file), "reading", offset=offset + done) from e

    def chunks(self, file: int, offset: int, nbytes: int) -> Iterator[bytes]:
        """Bytes [offset, offset + nbytes) of a source file, in pieces of at most 256 KiB; not counted."""
        while nbytes:
            view = memoryview(bytearray(min(nbytes, 256 << 10)))
            self.pread(file, offset, view, count=False)
            yield view.obj  # type: ignore[misc]
            offset += len(view)
            nbytes -= len(view)

    def copy_range(self, file: int, offset: int, to_fd: int, to_offset: int, nbytes: int) -> bool:
        """Copy bytes from file to file inside the kernel. False, with nothing lost, where the kernel can't."""
        if self._files.remote(file) is not None:
            return False
        fd = self._fds[file]
        while nbytes:
            try:
                n = copy_file_range(fd, to_fd, nbytes, offset, to_offset)
            except OSError as e:
                if e.errno in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                    return False
                raise wrap_os_error(e, self._files.shown(file), "copying", offset=offset) from e
            if n == 0:
                raise self._files.make_changed_error(file)
            offset = offset + n
            to_offset = to_offset + n
            nbytes = nbytes - n
        return True

    def close(self) -> None:
        """Close the descriptors."""
        self._fds.close()


class Writer:
    """Drains blocks into output regions of staged files. For one thread."""

    def __init__(
        self, staging: Staging, names: Sequence[str], room: int, crc_starts: Mapping[int, Container[int]]
    ) -> None:
        self._staging = staging
        self._names = names
        self.fds = FdCache(
            lambda number: staging.open(names[number]), room, lambda number: staging.path / names[number]
        )
        self._scratch = bytearray()
        self._starts = crc_starts
        self._regions: Sequence[Region] = ()  # whose spans are at hand
        self._spans = Spans(())
        self.pieces: dict[int, RunPieces] = {}

    def files(self) -> StagedFiles:
        """The files that are written, to be read back."""
        return StagedFiles(self._staging.open, self._names)

    def is_checksummed(self, file: int) -> bool:
        """Must every byte of the file's arrays be written through this process, for the CRC of its records?"""
        return file in self._starts

    def drain(self, regions: Sequence[Region], block: memoryview, start: int, stop: int, item: int) -> None:
        """Write what `regions` want of elements [start, stop), which `block` holds."""
        if self._regions is not regions:
            self._regions = regions
            self._spans = Spans(regions)
        for part in self._spans.parts(start, stop):
            self._write(part, block, start, item)

    def _write(self, part: Region, block: memoryview, start: int, item: int) -> None:
        """Write a part: a run at once, rows that are runs row by row, a dense strided part through the scratch."""
        run = part.numel * item
        at = (part.at - start) * item
        rows = is_in_runs(part, item)
        if rows and len(part.extents) < 2:
            self.pwrite(part.file, part.offset, block[at : at + run])
            return

        part = part if rows else part.in_file_order()
        if rows or part.reach(item) > run:  # with gaps: parts without gaps gather in the scratch
            for i in range(part.extents[0]):
                self._write(part.row(i), block, start, item)
            return

            return
        if len(self._scratch) < run:
            self._scratch = bytearray(max(run, SCRATCH))
        steps = [step * item for step in part.steps]
        source = view_strided(block, at, part.extents, steps, item)
        view_strided(self._scratch, 0, part.extents, part.strides, item)[...] = source
        self.pwrite(part.file, part.offset, memoryview(self._scratch)[:run])

    def pwrite(self, file: int, offset: int, view: memoryview, *, count: bool = True) -> None:
        """Write all of `view` at byte `offset` of the staged file. count: whether a record's checksum takes it in
        now."""
        fd = self.fds[file]
        done = 0
        try:
            done = os.pwrite(fd, view, offset)
            while done < len(view):
                n = os.pwrite(fd, view[done:], offset + done)
                if n == 0:
                    raise StorageError(
                        "the device accepts no more bytes", code="E0700", path=self._names[file], offset=offset + done
                    )
                done += n
        except OSError as e:
            raise wrap_os_error(e, self._names[file], "writing", offset=offset + done) from e

        starts = self._starts.get(file)
        if count and starts is not None:
            if file not in self.pieces:
                self.pieces[file] = RunPieces()
            self.pieces[file].add(offset, view, breaks=starts)

    def close(self) -> None:
        """Close the files. Raises StorageError: a network file system may report a lost write only here."""
        try:
            self.fds.close()
        except OSError as e:
            raise wrap_os_error(e, self._staging.path, "closing a staged file") from e
