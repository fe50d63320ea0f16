"""Writes documents next to an output, which may replace an earlier document of the same kind but nothing else.

    --report page.html, --sarif, --junit, --attest    replace an earlier document of ours of the same kind, atomically
    --plan, --emit                                     replace nothing (`conversion.plan_file.write_new`)

An existing file is checked before any work and again before it is replaced: a link, a folder, a private key, a user's
notes and another program's report are never replaced. `output.destination.check_beside` checks that the path is inside
no source and no output.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Mapping

from ckpt_tool.errors import OutputExists, StorageError, UsageError, wrap_os_error

HEAD = 4096  # bytes at the beginning of a file by which an earlier report is recognised
_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def check_target(path: str, option: str, ours: Callable[[bytes], bool], *, limit: int = HEAD) -> bool:
    """Is there an earlier document of this kind at the path?

    Args:
        ours: recognises an earlier document by its first `limit` bytes.

    Raises:
        StorageError: the folder does not exist (exit code 7).
        OutputExists: something else is at the path (exit code 5).
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise StorageError(
            f"the folder of {option} does not exist: {folder}", code="E0702", path=path, hint="make it first"
        )
    try:
        fd = os.open(path, _PLAIN)
    except FileNotFoundError:
        return False
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise _refuse_existing(path, option, "is a symbolic link") from e
        raise wrap_os_error(e, path, f"opening the file of {option}") from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _refuse_existing(path, option, "is no regular file")
    with open(fd, "rb") as file:
        head = file.read(limit)
    if not ours(head):  # an empty file is somebody's too
        raise _refuse_existing(path, option, "is there and is no earlier one")
    return True


def place_file(temporary: str, path: str, option: str, *, replaces: bool) -> None:
    """Give a file that was written its name. replaces: an earlier one has been seen there; else nothing may be there.
    Raises OutputExists, OSError."""
    if not replaces:
        try:
            os.link(temporary, path)  # which replaces nothing
        except FileExistsError as e:
            raise _refuse_existing(path, option, "appeared while this run was at work") from e
        except OSError:  # a file system without links
            replaces = True
    if replaces:
        os.replace(temporary, path)
    else:
        os.unlink(temporary)


def _refuse_existing(path: str, option: str, what: str) -> OutputExists:
    return OutputExists(
        f"the file of {option} {what}",
        code="E0511",
        path=path,
        hint="choose another name: only an earlier file of this option is replaced",
    )


def check_apart(files: Mapping[str, str | None]) -> None:
    """Raise UsageError E2831 where two options name one file. files: option -> path, None where it is not given."""
    option_of: dict[str, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        real = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
        earlier = option_of.setdefault(real, option)
        if earlier != option:
            raise UsageError(f"{earlier} and {option} name one file", code="E2831", path=path)


def save(path: str, data: bytes, option: str, ours: Callable[[bytes], bool]) -> None:
    """Write the file in one step. Raises as `check_target`, and StorageError."""
    replaces = check_target(path, option, ours)
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=".ckpt-report-", dir=os.path.dirname(os.path.abspath(path)))
        with open(fd, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        place_file(temporary, path, option, replaces=replaces)
    except (OSError, OutputExists) as e:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(e, OutputExists):
            raise
        raise wrap_os_error(e, path, "writing the report") from e
