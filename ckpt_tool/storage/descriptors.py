"""Calls on open descriptors with errors that name the file, which the system's own errors do not.

info = stat_of(fd, "out/model.safetensors")     StorageError with this path where it fails
close_read(fd)                                  nothing was written through it, so nothing is lost if it fails
close_written(fd, "out/model.safetensors")      StorageError: a network file system may report a lost write here
with naming("out", "listing"):                  StorageError "listing failed: ..." for an OSError inside
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_tool.errors import wrap_os_error


def stat_of(fd: int, path: str | os.PathLike[str]) -> os.stat_result:
    """`os.fstat`. Raises StorageError."""
    try:
        return os.fstat(fd)
    except OSError as e:
        raise wrap_os_error(e, path, "looking at it") from e


def close_read(fd: int) -> None:
    """Close a file or folder that was only read, or whose content does not matter. Never raises."""
    try:
        os.close(fd)
    except OSError:  # the descriptor is closed even if `close` reports an error
        return


def close_written(fd: int, path: str | os.PathLike[str]) -> None:
    """Close a file that was written. Raises StorageError."""
    try:
        os.close(fd)
    except OSError as e:
        raise wrap_os_error(e, path, "closing") from e


@contextmanager
def naming(path: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Turns an OSError from inside the context into a StorageError that names the file and the operation."""
    try:
        yield
    except OSError as e:
        raise wrap_os_error(e, path, doing) from e
