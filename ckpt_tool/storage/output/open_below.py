"""Creates, opens and lists files below an open folder without ever leaving it.

    open_beneath(staging_fd, "zero/w/fp32.pt", os.O_RDWR | os.O_CREAT, make=True)

The path must be valid for `core.inner_path`, each folder on the way is opened relative to the one above it and never
through a link, and the file must be a regular one with a single name: a link, a FIFO, a device or a second hard link
was created by someone else, and leads elsewhere. So whatever happens to the folder's own path meanwhile, bytes are
written into this folder or nowhere.

Why not `openat2(RESOLVE_BENEATH)`: it is cheaper only for deep paths, needs Linux 5.6, and seccomp profiles of
containers refuse it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ckpt_tool.core.inner_path import inner_path
from ckpt_tool.storage.descriptors import close_read
from ckpt_tool.storage.platform_calls import flush

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO never blocks


class UnexpectedEntry(OSError):
    """Below the folder there is an entry that no run has created; `strerror` describes it."""


def open_beneath(folder: int, path: str, flags: int, mode: int = 0o666, *, make: bool = False) -> int:
    """A descriptor of the file `path` below the open `folder`. make: create the folders on the way.

    Raises UnsafeInput E1600 for a path that leads elsewhere, UnexpectedEntry for an entry that no run has created, and
    OSError.
    """
    *parents, name = inner_path(path)
    return _open(folder, parents, name, flags, mode, make=make)


def open_own(folder: int, name: str, flags: int, mode: int = 0o600) -> int:
    """As `open_beneath`, for a name directly in the folder that the caller has chosen and that needs no check."""
    return _open(folder, [], name, flags, mode, make=False)


def _open(folder: int, parents: list[str], name: str, flags: int, mode: int, *, make: bool) -> int:
    with folder_beneath(folder, parents, make=make) as at:
        try:
            fd = os.open(name, flags | _FILE, mode, dir_fd=at)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise UnexpectedEntry(e.errno, "is no regular file") from e
            raise
    try:
        info = os.fstat(fd)
    except OSError:
        close_read(fd)
        raise
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:  # (some file systems count no names)
        close_read(fd)
        why = f"has {info.st_nlink} names" if stat.S_ISREG(info.st_mode) else "is no regular file"
        raise UnexpectedEntry(errno.EMLINK, why)
    return fd


@contextmanager
def folder_beneath(folder: int, parents: Iterable[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor, for the length of the context, of the folder at `parents` below the open `folder`. Raises
    UnexpectedEntry for a link or a file on the way."""
    at = folder
    try:
        for part in parents:
            below = _enter(at, part, make=make)
            if at != folder:
                close_read(at)
            at = below
        yield at
    finally:
        if at != folder:
            close_read(at)


def _enter(folder: int, name: str, *, make: bool) -> int:
    while True:
        try:
            return os.open(name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENOTDIR):
                raise UnexpectedEntry(e.errno, f"is in {name}, which is no folder") from e
            raise
        try:
            os.mkdir(name, 0o777, dir_fd=folder)
        except FileExistsError:  # another thread or another part made it
            continue


def files_beneath(folder: int) -> Iterator[str]:
    """Yields the path of everything below the open folder that is not a folder; links count as files."""
    for at, folders, names, fd in os.fwalk(".", onerror=_fail, dir_fd=folder):
        for name in (*names, *(link for link in folders if stat.S_ISLNK(os.lstat(link, dir_fd=fd).st_mode))):
            yield os.path.normpath(os.path.join(at, name))


def _fail(error: OSError) -> NoReturn:
    raise error


def sync_folders(folder: int) -> None:
    """fsync the open folder and all folders below it, the inner ones first. Raises OSError."""
    for _, _, _, fd in os.fwalk(".", topdown=False, onerror=_fail, dir_fd=folder):
        sync_folder(fd)


def sync_folder(fd: int) -> None:
    """fsync an open folder. Raises OSError."""
    try:
        flush(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some network file systems have no folder fsync
            raise
