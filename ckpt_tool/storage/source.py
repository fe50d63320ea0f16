"""A source of bytes: a `Tree` of files below one root, read with `pread`, never mapped, never followed outside.

A tree is opened from the path that the user gave: a folder, or one file (then `single` is its name, and the tree lists
that file alone; its siblings can be opened by name). Paths that come from a checkpoint's own files are untrusted data:
`safe_relative` refuses everything but plain relative paths, and opening walks them component by component with
O_NOFOLLOW, so a link that leads out of the folder is refused (exit 4), and a FIFO never blocks. Links whose target is
inside the given folder are followed, and those of a Hugging Face cache into its own `blobs/` (`storage.links`).

Cost: one open per file and thread (a small cache), one pread per call. `bytes_read` is counted for tests, which check
that readers of headers read nothing else.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.inner_path import FOLDERS, base_of, is_leaving, is_view, leaves, unfit
from ckpt_tool.errors import (
    CkptError,
    CorruptFile,
    InconsistentCheckpoint,
    InputError,
    SourceChanged,
    StorageError,
    UnsafeInput,
    is_failure,
    wrap_os_error,
)
from ckpt_tool.storage.descriptors import close_read, stat_of
from ckpt_tool.storage.links import CIRCLE, LEAVES, NO_FILE, NOWHERE, Bounds, open_below, real_path
from ckpt_tool.storage.records import Met, past_the_end
from ckpt_tool.storage.views import Views

FILE_LIMIT = 1_000_000  # entries of one tree
INTERRUPTED = "named like what an interrupted run of ckpt leaves"
TOO_DEEP = f"deeper than {FOLDERS} folders"


class Identity(NamedTuple):
    """What must not change between plan and commit: device, inode, size (bytes), mtime and ctime (ns)."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int


def identity_of(info: os.stat_result) -> Identity:
    """The fields of a `stat` result by which an unchanged file is recognised."""
    return Identity(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def safe_relative(path: str, *, named_in: str, place: str | None = None) -> str:
    """`path` if it is a plain relative path of safe components, else UnsafeInput (exit 4).

    Args:
        path: as it was read from a file of the checkpoint.
        named_in: that file, for the message.
        place: where in that file (JSON pointer, pickle position).
    """
    reason = unfit(path)
    if reason:
        raise UnsafeInput(
            f"the file name {path[:200]!r} {reason}; only plain names inside the checkpoint's folder are opened",
            code="E0410",
            path=named_in,
            place=place,
            hint="a checkpoint that points outside its own folder is not opened; get it from its author again",
        )
    return path


class Tree:
    """The files below `root`. `single`: the name of the one file that the user gave, None for a folder.

    Thread-safe for reading. `shown` is what messages call the root. `local`: its files have descriptors (a tree behind
    a URL, `stores.remote`, has none).
    """

    local = True
    computed = False  # True: values are computed while they are read, so no digest of them is recorded anywhere
    packed_in: Path | None = None  # the local archive whose members the files are (`storage.archive`)
    odd_links: dict[str, str] = {}  # links that were listed and are not followed -> what they are
    # folders and files below the root that `listing` leaves out -> why: needed by commands that must account for
    # everything in the folder
    left_out: dict[str, str] = {}
    above: Tree | None = None  # the tree that `below` was called on to make this one, of a sub-folder
    hidden: frozenset[str] = frozenset()  # files, as messages show them, that count as missing (`sources.damaged`)

    def __init__(
        self, path: str | os.PathLike[str], *, follow_symlinks: bool = False, bounds: Bounds | None = None
    ) -> None:
        """bounds: where links may lead, if the tree is part of a larger one; by default inside this tree."""
        given = Path(path)
        self.shown = os.fspath(path)
        self.bytes_read = 0
        self._listing: dict[str, int] | None = None
        self._folders = 0  # folders listed so far
        self._links = follow_symlinks
        self._seen: dict[str, Identity] = {}
        self._local = threading.local()
        self._lock = threading.Lock()

        try:
            info = given.stat()
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR):
                raise StorageError(
                    f"{self.shown} does not exist", code="E0702", path=self.shown, hint="check the path"
                ) from e
            raise wrap_os_error(e, self.shown, "opening") from e

        self.single: str | None = None
        if stat.S_ISDIR(info.st_mode):
            self.root = given.resolve()
        elif stat.S_ISREG(info.st_mode):
            # Not resolved: a single file may be a link, whose siblings are next to the link.
            self.root = Path(os.path.abspath(given)).parent
            self.single = given.name
        else:
            raise UnsafeInput(
                f"{self.shown} is neither a file nor a folder", code="E0411", path=self.shown, hint="pass a checkpoint"
            )

        self._bounds = bounds or Bounds.of(self.root)
        self.odd_links = {}
        self.left_out = {}

    def display(self, path: str = "") -> str:
        """`path` as messages show it."""
        path = base_of(path)
        if self.single is not None and path in ("", self.single):
            return self.shown
        base = os.path.dirname(self.shown) if self.single is not None else self.shown
        return os.path.join(base, path) if path else self.shown

    @cached_property
    def met(self) -> Met:
        """What readers have learned about the files so far."""
        return Met()

    @cached_property
    def views(self) -> Views:
        """The decoded views of the tree's files."""
        return Views(self)

    def compute_rounded(self, path: str, start: int, dtype: DType, out: memoryview) -> bool:
        """Fill `out` with elements of a computed file's line from `start` on, rounded to `dtype`. Returns False if this
        is not supported, or if values might overflow: the caller then reads the values and casts them."""
        return False

    def files_behind(self, path: str) -> Iterator[tuple[Tree, str]]:
        """Yields the (tree, path) of each file that `path` is made from: itself, unless it is computed."""
        yield self, base_of(path)

    def late_faults(self, paths: Iterable[str]) -> Iterator[CkptError]:
        """Yields faults of files that can be detected only after they have been read: for computed files, damaged
        records of their inputs."""
        return iter(())

    # -- listing ------------------------------------------------------------------------------------------------

    def listing(self) -> dict[str, int]:
        """Relative path -> size in bytes of every regular file (-1: not a regular file), sorted by path.

        For a tree of one file only that file is listed. Names that are not UTF-8 come surrogate-escaped. Files that are
        too deep, and remains of an interrupted run of ckpt, are not listed but noted in `left_out`.
        Raises InconsistentCheckpoint (E0387) for names that differ only in case: which one is meant depends on the
        file system, and a copy on another one would lose a file.
        """
        if self._listing is None:
            found: dict[str, int] = {}
            if self.single is not None:
                found[self.single] = self.identity(self.single).size
            else:
                real = str(self.root.resolve())
                self._walk("", real, found, frozenset((real,)))
                self._check_case(found)
            self._listing = {path: found[path] for path in sorted(found) if self.display(path) not in self.hidden}
        return self._listing

    def _walk(self, prefix: str, real: str, found: dict[str, int], above: frozenset[str]) -> None:
        """List a folder into `found`. real: its resolved path. above: the resolved paths of the folders on the way to
        it and its own, to detect links that lead in a circle."""
        try:
            entries = sorted(os.scandir(self.root / prefix), key=lambda entry: entry.name)
        except OSError as e:
            raise wrap_os_error(e, self.display(prefix), "listing") from e

        for entry in entries:
            path = prefix + entry.name
            inner = os.path.join(real, entry.name)
            linked = entry.is_symlink()
            folder = entry.is_dir(follow_symlinks=False)
            if linked:
                size, inner = self._behind(path, above)
                folder = size is None
            else:
                size = None if folder else self._size_of(entry, path)
            if folder:
                self._folders += 1
                if is_leaving(entry.name):
                    self.left_out[path] = INTERRUPTED
                elif len(above) > FOLDERS:
                    self.left_out[path] = TOO_DEEP
                else:
                    self._walk(path + "/", inner, found, above | {inner})
            else:
                found[path] = -1 if size is None else size
            # Somebody passed a home folder, say: stop before listing millions of files.
            if len(found) + self._folders > FILE_LIMIT:
                raise CorruptFile(
                    f"more than {FILE_LIMIT} files",
                    code="E0310",
                    path=self.display(),
                    hint="pass the checkpoint's folder",
                )

    def _size_of(self, entry: os.DirEntry[str], path: str) -> int:
        """Size in bytes of a regular file, -1 for anything else."""
        try:
            info = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # it vanished while we looked
            return -1
        except OSError as e:
            raise wrap_os_error(e, self.display(path), "looking at it") from e
        return info.st_size if stat.S_ISREG(info.st_mode) else -1

    def _behind(self, path: str, above: frozenset[str]) -> tuple[int | None, str]:
        """Returns (size in bytes of the link's target, resolved path). The size is None for a folder, and -1 if the
        link is not followed."""
        try:
            real = real_path(self.root / path)
        except OSError as e:
            raise wrap_os_error(e, self.display(path), "looking where it leads") from e

        odd = None if self._links else self._bounds.why_not(self.root / path)
        size: int | None = -1
        if odd is None:
            try:
                info = os.stat(real)
            except OSError as e:
                if is_failure(e):
                    raise wrap_os_error(e, self.display(path), "looking where it leads") from e
                odd = CIRCLE if e.errno == errno.ELOOP else NOWHERE
            else:
                if stat.S_ISREG(info.st_mode):
                    size = info.st_size
                elif not stat.S_ISDIR(info.st_mode):
                    odd = NO_FILE
                elif real in above:
                    odd = CIRCLE
                elif not (self._links or self._bounds.holds(real)):
                    odd = LEAVES  # a cache links files alone
                else:
                    size = None

        if odd is not None:
            self.odd_links[path] = odd
        return size, real

    def _check_case(self, found: dict[str, int]) -> None:
        folded: dict[str, str] = {}
        for path in found:
            other = folded.setdefault(path.casefold(), path)
            if other != path:
                raise InconsistentCheckpoint(
                    f"{other} and {path} differ only in case",
                    code="E0387",
                    path=self.display(path),
                    hint="a file system that folds case would have lost one of them: move away the one that "
                    "is not meant",
                )

    def names(self) -> list[str]:
        """The files directly below the root."""
        return [path for path in self.listing() if "/" not in path]

    def seen(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that can be read: without links that are not followed, which are reported as such."""
        return [name for name in names if name not in self.odd_links]

    def exists(self, path: str) -> bool:
        """Is `path` in the listing?"""
        return path in self.listing()

    def below(self, folder: str) -> Tree:
        """The tree of a sub-folder, named by our own code or checked by `safe_relative`. Refuses links that leave this
        one."""
        tree = Tree(self.display(folder), follow_symlinks=self._links, bounds=self._bounds)
        if not (self._links or self._bounds.holds(str(tree.root))):
            raise self._behind_link(folder)
        tree.above = self
        tree.hidden = self.hidden
        return tree

    # -- reading ------------------------------------------------------------------------------------------------

    def open(self, path: str) -> int:
        """A file descriptor for reading, which the caller closes. Refuses links that leave the tree, folders, devices,
        FIFOs, and files of other folders."""
        # Names from a checkpoint's files may try to leave the folder.
        if path != self.single and leaves(path):
            safe_relative(path, named_in=self.shown)
        if self.hidden and self.display(path) in self.hidden:
            raise missing_file(path, self.display(path))
        try:
            return self._open(path)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENOTDIR):
                raise self._behind_link(path) from e
            if e.errno == errno.ENXIO:  # a socket, or a device without a driver
                raise self._not_regular(path) from e
            if e.errno == errno.ENOENT:
                raise missing_file(path, self.display(path), link=os.path.islink(self.root / path)) from e
            raise wrap_os_error(e, self.display(path), "opening") from e

    def _open(self, path: str) -> int:
        if self.single == path or self._links:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        else:
            try:
                fd = open_below(self.root, path)
            except OSError as e:
                inside = self._bounds.inside(self.root / path) if e.errno in (errno.ELOOP, errno.ENOTDIR) else None
                if inside is None:
                    raise
                fd = open_below(*inside)
        try:
            is_regular = stat.S_ISREG(stat_of(fd, self.display(path)).st_mode)
        except StorageError:
            close_read(fd)
            raise
        if not is_regular:
            close_read(fd)
            raise self._not_regular(path)
        return fd

    def _behind_link(self, path: str) -> UnsafeInput:
        why = self._bounds.why_not(self.root / path) or LEAVES
        return UnsafeInput(
            f"{path} is, or is behind, a link that {why}",
            code="E0412",
            path=self.display(path),
            hint="--follow-symlinks follows it, if you trust where it leads; or put in its place what it points to",
        )

    def _not_regular(self, path: str) -> UnsafeInput:
        linked = os.path.islink(self.root / path)
        return UnsafeInput(
            f"{path} is a link that {NO_FILE}" if linked else f"{path} is not a regular file",
            code="E0413",
            path=self.display(path),
            hint="remove it or pass the real file",
        )

    def fd(self, path: str) -> int:
        """This thread's cached descriptor of `path`: valid until four more files were asked for."""
        cache: OrderedDict[str, int] | None = getattr(self._local, "cache", None)
        if cache is None:
            cache = self._local.cache = _FdCache()
        fd = cache.get(path)
        if fd is None:
            fd = cache[path] = self.open(path)
            if len(cache) > 4:
                close_read(cache.popitem(last=False)[1])
            self._hold(path, fd)
        else:
            cache.move_to_end(path)
        return fd

    def identity(self, path: str) -> Identity:
        """Device, inode, size and times of the file when it was first opened. Raises SourceChanged if they differ
        now."""
        path = base_of(path)
        return self._hold(path, self.fd(path))

    def _hold(self, path: str, fd: int) -> Identity:
        """Check that a path still refers to the file that was first opened under it, so that the header of one file is
        never combined with bytes of another. Returns that file's identity."""
        now = identity_of(stat_of(fd, self.display(path)))
        first = self._seen.setdefault(path, now)
        if first != now:
            raise changed_while_read(self.display(path))
        return first

    def identity_by_name(self, path: str) -> Identity:
        """The identity of the file that has the name now; it is opened again for this."""
        file = base_of(path)
        fd = self.open(file)
        try:
            return identity_of(stat_of(fd, self.display(file)))
        finally:
            close_read(fd)

    def identities_by_name(self, paths: Iterable[str]) -> list[Identity | None]:
        """The same for several files; None for one that a store does not have any more. Raises as `open` does."""
        return [self.identity_by_name(path) for path in paths]

    def check_unchanged(self, *, pointers: bool = True) -> None:
        """Raise SourceChanged E0604 unless every file that was read or watched is still the one that was opened.
        Reading can't detect this: the descriptor of a file that is rewritten in place stays valid.

        Args:
            pointers: check the folders above too, whose pointer files led here.

        Raises:
            StorageError: the disk fails, so whether a file changed is not known.
        """
        first_sight = dict(self._seen)
        for path, first in first_sight.items():
            try:
                now = self.identity_by_name(path)
            except StorageError:
                raise
            except CkptError:
                now = None
            if now != first:
                raise changed_while_read(self.display(path))
        if pointers and self.above is not None:
            self.above.check_unchanged()

    def watch(self, paths: Iterable[str]) -> None:
        """Include files in `check_unchanged` although nothing is read of them."""
        for path in paths:
            self.identity(path)

    def expect(self, ranges: Iterable[tuple[str, int, int]], *, then: bool = False) -> None:
        """Announce the ranges that this thread will read next, in order: (path, first byte, number of bytes). Trees
        behind a URL prefetch them; others do nothing. then: after the ranges announced before."""

    def size(self, path: str) -> int:
        """Size in bytes."""
        if is_view(path):
            return self.views.size(path)
        return stat_of(self.fd(path), self.display(path)).st_size

    def parts(self, path: str, offset: int, nbytes: int) -> list[memoryview]:
        """As `read`, as a list of buffers, without a copy if the tree has the bytes in buffers."""
        return [memoryview(self.view(path, offset, nbytes))]

    def fill(self, path: str, offset: int, view: memoryview) -> None:
        """Read all of `view` from byte `offset`."""
        view[:] = self.view(path, offset, len(view))

    def view(self, path: str, offset: int, nbytes: int) -> bytes | memoryview:
        """As `read`, without a copy if the tree has the bytes in one buffer. For callers that copy them immediately."""
        return self.read(path, offset, nbytes)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`. Raises CorruptFile if the file ends before. The size is checked first,
        so that a false length in a damaged file costs no memory."""
        if is_view(path):
            return self.views.read(path, offset, nbytes)

        fd = self.fd(path)
        size = stat_of(fd, self.display(path)).st_size
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise past_the_end(self.display(path), offset, nbytes, size)

        parts = []
        at = offset
        while nbytes:
            try:
                # Linux reads at most 2 GiB in one call.
                part = os.pread(fd, min(nbytes, 1 << 30), at)
            except OSError as e:
                raise wrap_os_error(e, self.display(path), "reading", offset=at) from e
            # The size shows which of two causes an empty read has: the file was cut, or the disk fails.
            now = size if part else stat_of(fd, self.display(path)).st_size
            if now < at + nbytes and not part:
                raise SourceChanged(
                    f"the file shrank from {size} to {now} bytes while it was read",
                    code="E0603",
                    path=self.display(path),
                    offset=at,
                    hint="run again when nothing writes to it any more",
                )
            if not part:
                raise StorageError(
                    "the file ended early while it was read",
                    code="E0703",
                    path=self.display(path),
                    offset=at,
                    hint="the disk or the network file system fails: check it before you try again",
                )
            parts.append(part)
            nbytes -= len(part)
            at += len(part)

        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.count(len(data))
        return data

    def count(self, nbytes: int) -> None:
        """Add to `bytes_read` what was read through a descriptor."""
        with self._lock:
            self.bytes_read += nbytes

    def size_within(self, path: str, *, limit: int) -> int:
        """The size in bytes. Raises CorruptFile E0312 if it is larger than `limit`."""
        size = self.size(path)
        if size > limit:
            raise CorruptFile(
                f"{size} bytes, want at most {limit}",
                code="E0312",
                path=self.display(path),
                hint="no real checkpoint has one this large",
            )
        return size

    def read_whole(self, path: str, *, limit: int) -> bytes:
        """The whole file. Raises CorruptFile E0312 if it is longer than `limit` bytes."""
        return self.read(path, 0, self.size_within(path, limit=limit))

    def head(self, path: str, nbytes: int = 64) -> bytes:
        """The first `nbytes` bytes, fewer when the file is shorter."""
        return self.read(path, 0, min(nbytes, self.size(path)))

    def close(self) -> None:
        """Close this thread's descriptors."""
        cache = getattr(self._local, "cache", None)
        if cache:
            cache.close()


class _FdCache(OrderedDict[str, int]):
    """Descriptors that are closed when their thread ends."""

    def close(self) -> None:
        """Close all descriptors."""
        while self:
            close_read(self.popitem()[1])

    def __del__(self) -> None:
        self.close()


def missing_file(path: str, shown: str, *, link: bool = False) -> CkptError:
    """The error (exit 3) for a missing file that the checkpoint names. link: the name exists, as a broken link."""
    from ckpt_tool.errors import Incomplete

    return Incomplete(
        f"{path} is a link that {NOWHERE}" if link else f"{path} is missing",
        code="E0313",
        path=shown,
        hint="fetch the file, or pass the folder that holds it",
    )


def changed_while_read(shown: str) -> SourceChanged:
    """The error (E0604) for a file that is not the one any more that was opened."""
    return SourceChanged(
        "the file changed after its header was read",
        code="E0604",
        path=shown,
        hint="run again when nothing writes into the checkpoint any more",
    )


@contextmanager
def unchanged(*trees: Tree, pointers: bool = True) -> Iterator[None]:
    """Ensures that everything read from these trees inside the context belongs to one state of their files.

    Raises SourceChanged E0604 at the end if a file that was read has changed, also in place of a fault of the input
    that is raised inside: the change may have caused it. pointers: check the trees above too.

    with unchanged(opened.tree):
        findings = read_all(opened)
    """
    try:
        yield
    except InputError as fault:
        for tree in trees:
            try:
                tree.check_unchanged(pointers=pointers)
            except SourceChanged as change:
                raise change from fault
        raise
    for tree in trees:
        tree.check_unchanged(pointers=pointers)
