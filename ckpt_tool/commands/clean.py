"""`ckpt clean`: find what interrupted runs left in a folder, and remove it when asked."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from ckpt_tool.core.inner_path import STAGED
from ckpt_tool.errors import wrap_os_error
from ckpt_tool.storage.destination import RemotePlace, place_of


def clean(folder: str, *, remove: bool = False) -> dict[str, Any]:
    """Staging folders directly below `folder`: path, bytes, whether a run still holds the lock; removed with
    `remove`. Of a place in a store: uploads at and below it that were begun and not ended."""
    found = []
    if isinstance(place_of(folder), RemotePlace):
        return {"schema_version": 1, "folder": folder, "leavings": _uploads(folder, remove=remove)}
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        raise wrap_os_error(e, folder, "listing") from e
    for entry in entries:
        if not (entry.name.startswith(".") and entry.name.endswith(STAGED)):
            continue
        info = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            continue
        busy = _locked(entry.path)
        nbytes = sum(path.lstat().st_blocks * 512 for path in Path(entry.path).rglob("*"))
        gone = remove and not busy
        if gone:
            shutil.rmtree(entry.path)
        found.append({"path": entry.path, "bytes": nbytes, "locked": busy, "removed": gone})
    return {"schema_version": 1, "folder": folder, "leavings": found}


def _uploads(url: str, *, remove: bool) -> list[dict[str, Any]]:
    from ckpt_tool.storage.output_store import output_store

    bucket, found = output_store(url), []
    for each in bucket.pending():
        nbytes = sum(part.nbytes for part in bucket.parts(each.key, each.upload).values())
        if remove:
            bucket.abort(each.key, each.upload)
        path = f"{bucket.display(each.key)} (upload {each.upload}, begun {each.begun})"
        found.append({"path": path, "bytes": nbytes, "locked": False, "removed": remove})
    return found


def _locked(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
