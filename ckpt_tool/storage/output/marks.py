"""Marks on an output itself: what a later process must know about it and no file in it may contain.

A mark is an extended attribute. The plan that wrote an output in parts can be recognised without them too: by the
fractions of a second in the modification times of its folder, or of its first files, which are derived from the plan
and each inode. A worker that was overtaken writes the same bytes once more, which changes the times of files; one that
comes at the last moment changes that of the folder: so either is enough. An output of another plan, or a copy, has such
times by chance once in 10^9, a single file once in 10^7. On file systems that keep no fractions nothing is recognised,
and a late part gets the error that the output exists.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ckpt_tool.core.inner_path import is_journal
from ckpt_tool.errors import is_failure
from ckpt_tool.storage import platform_calls
from ckpt_tool.storage.descriptors import close_read, naming
from ckpt_tool.storage.output.open_below import files_beneath

_PLAN = "user.ckpt.plan"
_STAMPED = 3  # files
_SECOND = 10**9  # ns
_STEP = 100  # ns, of the coarsest file systems that keep fractions; a folder's are finer


def mark(path: Path, name: str, value: str) -> bool:
    """Set a mark. Returns False if it could not be set, as on a file system without extended attributes."""
    try:
        platform_calls.set_mark(path, name, value.encode())
    except OSError:
        return False
    return True


def marked(path: Path, name: str) -> str:
    """The mark on a path, "" if there is none or the file system does not support them. Raises OSError if the disk
    fails."""
    try:
        return platform_calls.get_mark(path, name).decode("ascii", "replace")
    except OSError as e:
        if is_failure(e) and e.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return ""


def mark_plan(output: Path, plan_id: str) -> None:
    """Mark an output, just before it gets its name, as written in parts by this plan, so that a part that is started
    again can see that nothing is left to do."""
    if mark(output, _PLAN, plan_id):
        return
    with suppress(OSError):  # without it a late part only learns that the output exists
        for path in (*_first_files(output), output):
            info = os.lstat(path)
            fraction = _fraction_of(plan_id, info)
            seconds = info.st_mtime_ns // _SECOND
            earlier = fraction > info.st_mtime_ns % _SECOND  # then one second back, so that no time is in the future
            written = (seconds - earlier) * _SECOND + fraction
            os.utime(path, ns=(info.st_atime_ns, written), follow_symlinks=False)


def was_committed(destination: Path, plan_id: str) -> bool:
    """Is the existing output marked as written in parts by this plan? Raises StorageError."""
    with naming(destination, "looking which plan wrote it"):
        said = marked(destination, _PLAN)
        return said == plan_id if said else _is_stamped(destination, plan_id)


def _is_stamped(destination: Path, plan_id: str) -> bool:
    """Has the output, or have its first files, the modification times that this plan sets? Raises OSError."""
    try:
        whole = os.lstat(destination)
        files = [os.lstat(file) for file in _first_files(destination)]
    except FileNotFoundError:
        return False
    return _has_time_of(plan_id, whole) or (bool(files) and all(_has_time_of(plan_id, info) for info in files))


def _has_time_of(plan_id: str, info: os.stat_result) -> bool:
    return info.st_mtime_ns % _SECOND == _fraction_of(plan_id, info)


def _first_files(output: Path) -> list[Path]:
    """The first files of an output by name; the output itself if it is no folder. Raises OSError."""
    if not stat.S_ISDIR(os.lstat(output).st_mode):
        return [output]
    folder = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Journals are left out: a worker that joined at the last moment may have created one, and will remove it.
        names = sorted(name for name in files_beneath(folder) if not is_journal(name.partition("/")[0]))
    finally:
        close_read(folder)
    return [output / name for name in islice(names, _STAMPED)]


def _fraction_of(plan_id: str, info: os.stat_result) -> int:
    """Nanoseconds."""
    digest = hashlib.sha256(b"ckpt plan\0%d\0%s" % (info.st_ino, plan_id.encode())).digest()
    step = 1 if stat.S_ISDIR(info.st_mode) else _STEP
    return int.from_bytes(digest[:8], "big") % (_SECOND // step) * step
