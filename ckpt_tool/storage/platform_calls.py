"""The system calls that only some systems or file systems have, each with what happens where it is missing.

    call                Linux            macOS         without it
    rename_new          renameat2        renamex_np    a file: a link, and the old name goes; a folder: a look, a rename
    exchange            renameat2        renamex_np    a file: a link, a rename; a folder: two renames (`set_aside`)
    set_mark, get_mark  xattr            xattr         OSError EOPNOTSUPP: the next run asks in place of knowing
    allocate            posix_fallocate  none          only the size is set: a full disk shows when bytes are written
    copy_file_range     copy_file_range  none          OSError ENOSYS: the bytes are read and written
    flush               fsync            F_FULLFSYNC   fsync, which on macOS leaves bytes in the disk's own cache

What is promised is the same on each: an output that is whole or not there, and no file of a user's lost. One promise is
weaker: a run that is killed while it replaces a folder, where names can't be exchanged, may leave the old one under a
hidden name, and the same command or `ckpt clean` gives it its name back. Everything else that the tool asks of a
system (`dir_fd`, O_NOFOLLOW, flock, preadv) is there on both; `openat2` is not used.

CKPT_TEST_WITHOUT=renameat2,xattr,fallocate,copy_file_range takes calls away, for tests of what happens without them. On
macOS itself only the wheel's own tests in the release workflow run.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "CKPT_TEST_WITHOUT"
_WITHOUT = frozenset(os.environ.get(VARIABLE, "").split(","))

# Flags of Linux' renameat2.
_NOREPLACE = 1
_EXCHANGE = 2
# Flags of macOS' renamex_np.
_MAC_SWAP = 2
_MAC_EXCLUSIVE = 4
_MAC_NOFOLLOW = 1  # of macOS' calls for extended attributes: those of the link itself
# Error numbers of macOS.
_MAC_ENOATTR = 93
_MAC_ENOTSUP = 45
LONGEST_MARK = 4096  # bytes of a mark's value, at most
_AT_FDCWD = -100  # paths are relative to the working directory
# Errors of a system or file system without the call.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def rename_new(old: Path, new: Path) -> None:
    """Rename. Raises FileExistsError if `new` exists."""
    if _rename(old, new, linux=_NOREPLACE, mac=_MAC_EXCLUSIVE):
        return
    if _link(old, new):
        with suppress(OSError):  # the new name exists: an old one that remains is removed by `ckpt clean`
            os.unlink(old)
        return
    _rename_after_look(old, new)


def _rename_after_look(old: Path, new: Path) -> None:
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(new))
    os.rename(old, new)


def exchange(old: Path, new: Path, aside: Path) -> Path:
    """Exchange two names. Returns the name that the former `new` has then: `old`, or `aside` if the system can't
    exchange names. In that case the name `new` is free for a moment if it is a folder; for a file never."""
    if _rename(old, new, linux=_EXCHANGE, mac=_MAC_SWAP):
        return old
    is_linked = _link(new, aside)
    if not is_linked:
        _rename_after_look(new, aside)
    try:
        os.rename(old, new)
    except OSError:
        with suppress(OSError):  # give the former `new` its name back; if the disk refuses, the next run does it
            if is_linked:
                os.unlink(aside)
            else:
                os.rename(aside, new)
        raise
    return aside


def _link(file: Path, name: Path) -> bool:
    """Give a file a second name, unless it has it already. Returns False, with nothing done, for a folder, or if the
    file system has no hard links. Raises OSError; FileExistsError if the name belongs to another file."""
    info = os.lstat(file)
    if stat.S_ISDIR(info.st_mode):
        return False
    try:
        os.link(file, name, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samestat(info, os.lstat(name)):
            raise
    except OSError as e:
        # EPERM: the file system has no hard links, or the kernel protects files of other users from being linked.
        if e.errno in UNSUPPORTED or e.errno in (errno.EPERM, errno.EMLINK):
            return False
        raise
    return True


def _rename(old: Path, new: Path, *, linux: int, mac: int) -> bool:
    """Rename with flags. Returns False, with nothing done, if the system or the file system does not support them."""
    if "renameat2" in _WITHOUT:
        return False

    libc = ctypes.CDLL(None, use_errno=True)
    source = os.fsencode(old)
    target = os.fsencode(new)
    if hasattr(libc, "renameat2"):
        status = libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, ctypes.c_uint(linux))
    elif hasattr(libc, "renamex_np"):
        status = libc.renamex_np(source, target, ctypes.c_uint(mac))
    else:
        return False

    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), os.fspath(new))


def set_mark(path: Path, name: str, value: bytes) -> None:
    """Set an extended attribute of the path itself, links not followed. Raises OSError; EOPNOTSUPP without support."""
    _need_marks(path)
    if hasattr(os, "setxattr"):
        os.setxattr(path, name, value, follow_symlinks=False)
        return
    _call_mac("setxattr", path, name, value, ctypes.c_size_t(len(value)), 0, _MAC_NOFOLLOW)


def get_mark(path: Path, name: str) -> bytes:
    """The value of an extended attribute. Raises OSError; ENODATA if it is not set, EOPNOTSUPP without support."""
    _need_marks(path)
    if hasattr(os, "getxattr"):
        return os.getxattr(path, name, follow_symlinks=False)
    buffer = ctypes.create_string_buffer(LONGEST_MARK)
    length = _call_mac("getxattr", path, name, buffer, ctypes.c_size_t(LONGEST_MARK), 0, _MAC_NOFOLLOW)
    return buffer.raw[:length]


def remove_mark(path: Path, name: str) -> None:
    """Remove an extended attribute. Raises OSError, as `get_mark`."""
    _need_marks(path)
    if hasattr(os, "removexattr"):
        os.removexattr(path, name, follow_symlinks=False)
        return
    _call_mac("removexattr", path, name, _MAC_NOFOLLOW)


def _need_marks(path: Path) -> None:
    if "xattr" in _WITHOUT or not (hasattr(os, "setxattr") or sys.platform == "darwin"):
        os.lstat(path)  # raises first if the path does not exist or can't be read
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), os.fspath(path))


def _call_mac(call: str, path: Path, name: str, *more: Any) -> int:
    """Call a function of macOS' C library for extended attributes, which Python does not offer there. Raises OSError
    with the error names of Linux."""
    function = getattr(ctypes.CDLL(None, use_errno=True), call)
    function.restype = ctypes.c_ssize_t
    result = int(function(os.fsencode(path), name.encode(), *more))
    if result >= 0:
        return result

    number = ctypes.get_errno()
    number = {_MAC_ENOATTR: errno.ENODATA, _MAC_ENOTSUP: errno.EOPNOTSUPP}.get(number, number)
    raise OSError(number, os.strerror(number), os.fspath(path))


def allocate(fd: int, size: int) -> None:
    """Set the size of an open file, and reserve its space if the system can. Raises OSError."""
    if "fallocate" not in _WITHOUT and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as e:
            if e.errno not in UNSUPPORTED:
                raise
    os.ftruncate(fd, size)


def copy_file_range(fd: int, to_fd: int, nbytes: int, offset: int, to_offset: int) -> int:
    """Copy inside the kernel. Returns the bytes copied, 0 at the end of the file. Raises OSError; ENOSYS without such a
    call."""
    if "copy_file_range" in _WITHOUT or not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.copy_file_range(fd, to_fd, nbytes, offset, to_offset)


def flush(fd: int) -> None:
    """fsync, through the disk's own cache too. Raises OSError."""
    # On macOS fsync leaves the data in the cache of the disk; F_FULLFSYNC does not.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
            return
        except OSError as e:
            if e.errno not in UNSUPPORTED:
                raise
    os.fsync(fd)
