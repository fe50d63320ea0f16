"""Files that a report is written to: looked at before any work, written in one step, and nothing else is replaced."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from ckpt_tool.errors import OutputExists, StorageError, wrap_os_error

HEAD = 4096  # bytes by which an earlier report is known


def check_target(path: str, option: str, ours: Callable[[bytes], bool]) -> None:
    """Refuse a folder that is not there (exit 7), a file that is no report of this kind (exit 5). ours: is it one, by
    its first bytes?"""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise StorageError(
            f"the folder of {option} does not exist: {folder}", code="E0702", path=path, hint="make it first"
        )
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except FileNotFoundError:
        return
    except OSError as e:
        raise wrap_os_error(e, path, f"opening the file of {option}") from e
    if head and not ours(head):
        raise OutputExists(
            f"the file of {option} exists and is no report",
            code="E0511",
            path=path,
            hint="choose another name; only an earlier report is replaced",
        )


def save(path: str, data: bytes) -> None:
    """Write the file in one step. Raises StorageError."""
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=".ckpt-report-", dir=os.path.dirname(os.path.abspath(path)))
        with open(fd, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as e:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise wrap_os_error(e, path, "writing the report") from e
