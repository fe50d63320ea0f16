"""What is done to an open descriptor, with errors that name the file: the system's own name none.

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
    """Close a file or folder that was only read, or that holds nothing that anybody counts on."""
    try:
        os.close(fd)
    except OSError:  # the descriptor is gone all the same
        return


def close_written(fd: int, path: str | os.PathLike[str]) -> None:
    """Close a file that was written. Raises StorageError."""
    try:
        os.close(fd)
    except OSError as e:
        raise wrap_os_error(e, path, "closing") from e


@contextmanager
def naming(path: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Raise an OSError that comes from inside as a StorageError that names the file and says what was being done."""
    try:
        yield
    except OSError as e:
        raise wrap_os_error(e, path, doing) from e
