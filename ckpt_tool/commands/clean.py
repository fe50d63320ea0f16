"""`ckpt clean`: find what interrupted runs left in a folder, and remove it when asked."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from ckpt_tool.core.inner_path import HIDDEN, STAGED
from ckpt_tool.errors import wrap_os_error
from ckpt_tool.storage.destination import RemotePlace, place_of
from ckpt_tool.storage.retiring import erase, is_locked


def clean(folder: str, *, remove: bool = False) -> dict[str, Any]:
    """Staging folders directly below `folder`, and what a killed `ckpt prune` had begun to delete: path, bytes, whether
    a run still holds the lock; removed with `remove`. Of a place in a store: uploads at and below it that were begun
    and not ended."""
    found = []
    if isinstance(place_of(folder), RemotePlace):
        return {"schema_version": 1, "folder": folder, "leavings": _uploads(folder, remove=remove)}
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        raise wrap_os_error(e, folder, "listing") from e
    for entry in entries:
        if not (entry.name.startswith(".") and entry.name.endswith(HIDDEN)):
            continue
        info, path = entry.stat(follow_symlinks=False), Path(entry.path)
        folder_itself = stat.S_ISDIR(info.st_mode)
        if entry.name.endswith(STAGED) and not (folder_itself and info.st_uid == os.geteuid()):
            continue
        busy = folder_itself and is_locked(path)
        nbytes = sum(each.lstat().st_blocks * 512 for each in path.rglob("*")) if folder_itself else info.st_size
        gone = remove and not busy
        if gone:
            erase(path)
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
