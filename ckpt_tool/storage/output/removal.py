"""Removes a checkpoint so that at every moment it is either complete or gone, even if the process is killed.

    step-100/  ->  .step-100.3f9c21aa.ckpt-removed/      one rename, made durable by an fsync of the folder
                   checked once more                      gets its name back if it has changed meanwhile
                   deleted file by file                   a kill here leaves a hidden name that `ckpt clean` removes

`measure` reports in advance what deleting would free and what prevents it: files that have other names elsewhere
(hard links) free nothing, links that lead elsewhere are named, what is mounted inside is never entered. Nothing here
follows a link. What it does not do: choose (`commands.prune`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckpt_tool.core.inner_path import COMPONENT, REMOVED, is_removed
from ckpt_tool.errors import CkptError, SourceChanged, wrap_os_error
from ckpt_tool.storage import platform_calls
from ckpt_tool.storage.descriptors import close_read
from ckpt_tool.storage.links import real_path
from ckpt_tool.storage.mounts import mounts_below
from ckpt_tool.storage.output.open_below import sync_folder
from ckpt_tool.storage.output.proven_names import extra_bytes, is_proven, proven_name

Inode = tuple[int, int]  # device and number
Identity = tuple[int, int, int]  # device, number, and mtime in ns, because numbers are reused


class PathContents(NamedTuple):
    """What is below a path, as `measure` found it."""

    identity: Identity
    # (inode, bytes, how many names it has anywhere), one row for each name below the path
    files: tuple[tuple[Inode, int, int], ...]
    changed: float  # mtime of its newest file, seconds, 0 if there is none
    links: tuple[tuple[str, str], ...]  # symbolic links and their targets
    digest: bytes  # of the name, kind, size and time of everything below
    mounted: str = ""  # a mount point in it, "" for none
    closed: str = ""  # a folder in which this user may not delete, "" for none

    @property
    def nbytes(self) -> int:
        """The bytes of all files; a file with several names counts once."""
        return sum({inode: size for inode, size, _ in self.files}.values())


def measure(path: Path) -> PathContents:
    """Collect names, sizes and times of a file, a link, or everything in a folder. Raises StorageError."""
    try:
        info = os.lstat(path)
        files = list[tuple[Inode, int, int]]()
        links = list[tuple[str, str]]()
        rows = list[bytes]()
        changed = 0.0
        mounted = next(iter(mounts_below(path)), "")
        closed = ""
        for place, each in _below(path, info):
            name = os.path.relpath(place, path)
            if stat.S_ISLNK(each.st_mode):
                links.append((place, real_path(place)))
                name = f"{name}\0{os.readlink(place)}"
            elif stat.S_ISDIR(each.st_mode):
                mounted = mounted or (place if each.st_dev != info.st_dev else "")
                closed = closed or ("" if _may_delete_in(place) else place)
            else:
                files.append(((each.st_dev, each.st_ino), each.st_size, each.st_nlink))
                changed = max(changed, each.st_mtime)
            rows.append(_row_of(name, each))
    except OSError as e:
        raise wrap_os_error(e, path, "looking at what it holds") from e
    digest = hashlib.sha256(b"\0\0".join(sorted(rows))).digest()
    return PathContents(_identity(info), tuple(files), changed, tuple(links), digest, mounted, closed)


def _row_of(name: str, info: os.stat_result) -> bytes:
    """The attributes by which an unchanged entry is recognised. Inode numbers are not used: some network file systems
    assign new ones."""
    is_folder = stat.S_ISDIR(info.st_mode)
    size = 0 if is_folder else info.st_size
    mtime_ns = 0 if is_folder else info.st_mtime_ns
    return b"%s\0%d\0%d\0%d" % (os.fsencode(name), stat.S_IFMT(info.st_mode), size, mtime_ns)


def _below(path: Path, info: os.stat_result) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the path and everything below it, without following links."""
    yield os.fspath(path), info
    if stat.S_ISDIR(info.st_mode):
        with os.scandir(path) as entries:
            for entry in entries:
                yield from _below(Path(entry.path), entry.stat(follow_symlinks=False))


def _may_delete_in(folder: str) -> bool:
    """May this user delete names in a folder? Raises OSError if the disk fails, which `os.access` would report as
    no."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.access(os.fsencode(folder), os.W_OK | os.X_OK) == 0:
        return True
    number = ctypes.get_errno()
    if number not in (errno.EACCES, errno.EPERM, errno.EROFS):
        raise OSError(number, os.strerror(number), folder)
    return False


def _identity(info: os.stat_result) -> Identity:
    return info.st_dev, info.st_ino, info.st_mtime_ns


def freed(held: Iterable[PathContents]) -> int:
    """The bytes that removing all of these would free: those of files without another name elsewhere."""
    names: dict[Inode, list[int]] = {}
    for each in held:
        for inode, size, count in each.files:
            names.setdefault(inode, [size, count])[1] -= 1
    return sum(size for size, left in names.values() if left <= 0)


def retire(path: Path, held: PathContents) -> Path | None:
    """Rename a path to a hidden name in one step. Returns that name, None if the path was gone. Durable on return.

    After the rename it is checked again, so that what was written there in the last moment is not lost. Raises
    StorageError, and SourceChanged E0612 if it differs from `held`; it then has its own name again.
    """
    try:
        hidden = path.parent / _hidden_name(path.name, held.identity[1])
        if _identity(os.lstat(path)) != held.identity:
            raise _changed(path, "it was replaced by another while prune looked at the run")
        _mark_taken(path)
        os.rename(path, hidden)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise wrap_os_error(e, path, "taking it away") from e

    try:
        _check_unchanged(hidden, path, held)
    except CkptError:
        _give_back(hidden, path)
        raise

    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_folder(folder)
        finally:
            close_read(folder)
    except OSError as e:
        raise wrap_os_error(e, path, "taking it away") from e
    return hidden


def _check_unchanged(there: Path, path: Path, held: PathContents) -> None:
    """Raise SourceChanged E0612 if what was at `path` has changed, StorageError if that can't be determined."""
    now = measure(there)
    if now.mounted:
        raise _changed(path, f"something was mounted in it: {now.mounted}")
    if (now.identity[:2], now.digest) != (held.identity[:2], held.digest):
        raise _changed(path, "it changed while prune looked at the run")


def _changed(path: Path, what: str) -> SourceChanged:
    return SourceChanged(
        what,
        code="E0612",
        path=path,
        hint="it was left alone: run again when nothing writes into the run's folder",
    )


def _give_back(hidden: Path, path: Path) -> None:
    """Rename it back. If the name has been taken meanwhile, the error names the hidden path."""
    try:
        platform_calls.rename_new(hidden, path)
        with suppress(OSError):
            platform_calls.remove_mark(path, _TAKEN)
    except OSError as e:
        raise wrap_os_error(e, hidden, f"giving {path.name} its name back, which changed meanwhile,") from e


def _hidden_name(name: str, inode: int) -> str:
    """The name of a path while it is deleted, unique in its folder."""
    # A hidden name is longer: it must still fit into one component of a path.
    short = os.fsencode(name)[: COMPONENT - extra_bytes(REMOVED)]
    return proven_name(os.fsdecode(short), inode, REMOVED)


_TAKEN = "user.ckpt.removed"
NO_MARKS = (errno.EOPNOTSUPP, errno.EPERM)  # the file system, or this kind of file on it, has no marks


def _mark_taken(path: Path) -> None:
    """Mark a path as being removed, if the file system supports extended attributes."""
    with suppress(OSError):
        platform_calls.set_mark(path, _TAKEN, b"1")


def was_taken(hidden: Path) -> bool:
    """Did `retire` give it its hidden name? Decided by its mark, or by the digits in the name if the file system has no
    marks, because a user may have chosen such a name. Raises OSError if the disk fails."""
    if not is_removed(hidden.name):
        return False
    try:
        return platform_calls.get_mark(hidden, _TAKEN) == b"1"
    except OSError as e:
        if e.errno in NO_MARKS:
            return is_proven(hidden, REMOVED)
        if e.errno == errno.ENODATA:
            return False
        raise


def erase(hidden: Path) -> None:
    """Delete what `retire` has renamed. It is locked meanwhile, so that `ckpt clean` leaves it alone. Raises
    StorageError; the rest then keeps its hidden name."""
    fd = -1
    try:
        if hidden.is_dir() and not hidden.is_symlink():
            fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(hidden)
        else:
            os.unlink(hidden)
    except OSError as e:
        raise wrap_os_error(e, hidden, "deleting what was taken away") from e
    finally:
        if fd >= 0:
            close_read(fd)


def is_locked(folder: Path) -> bool:
    """Does a process hold the lock on a hidden folder? Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        close_read(fd)
