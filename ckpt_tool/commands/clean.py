"""`ckpt clean`: find what interrupted runs left in a folder, and remove it when asked."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from ckpt_tool.core.inner_path import STAGED, is_leaving, is_staging
from ckpt_tool.errors import wrap_os_error
from ckpt_tool.storage.destination import RemotePlace, place_of
from ckpt_tool.storage.removal import erase, is_locked


def clean(folder: str, *, remove: bool = False) -> dict[str, Any]:
    """Staging folders directly below `folder`, and what a killed `ckpt prune` had begun to delete: path, bytes, whether
    a run still holds the lock; removed with `remove`. Of a place in a store: uploads at and below it that were begun
    and not ended, and the records of workers that shared it out, or what lies below it."""
    found = []
    if isinstance(place_of(folder), RemotePlace):
        return {"schema_version": 1, "folder": folder, "leavings": _uploads(folder, remove=remove)}
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        raise wrap_os_error(e, folder, "listing") from e
    for entry in entries:
        if not is_leaving(entry.name):
            continue
        info, path = entry.stat(follow_symlinks=False), Path(entry.path)
        folder_itself = stat.S_ISDIR(info.st_mode)
        if is_staging(entry.name) and not (folder_itself and info.st_uid == os.geteuid()):
            continue
        busy = folder_itself and is_locked(path)
        nbytes = sum(each.lstat().st_blocks * 512 for each in path.rglob("*")) if folder_itself else info.st_size
        gone = remove and not busy
        if gone:
            erase(path)
        found.append({"path": entry.path, "bytes": nbytes, "locked": busy, "removed": gone})
    return {"schema_version": 1, "folder": folder, "leavings": found}


_RECORDS = re.compile(rf"(?:^|(.*/))\.([^/]+){re.escape(STAGED)}/([^/]+)$")


def _uploads(url: str, *, remove: bool) -> list[dict[str, Any]]:
    from ckpt_tool.storage.output_store import output_store, staging_url
    from ckpt_tool.storage.store_claims import is_held, is_record, remove_records

    bucket, found = output_store(url), list[dict[str, Any]]()
    outputs = {url: ""}  # a place that is shared out -> what its objects' keys begin with
    for key in bucket.objects():
        at = _RECORDS.search(key)
        if at and is_record(at[3]):
            outputs[f"{bucket.shown}/{at[1] or ''}{at[2]}"] = f"{at[1] or ''}{at[2]}/"
    busy = set[str]()
    for output, prefix in outputs.items():
        records = bucket.at_url(staging_url(output))
        there = {key: each for key, each in records.listing().objects.items() if is_record(key)}
        nbytes = sum(each.nbytes for each in there.values())
        if not there:
            continue
        if held := is_held(records):
            busy.add(prefix)
        elif remove:
            remove_records(records)
        found.append({"path": records.shown, "bytes": nbytes, "locked": held, "removed": remove and not held})
    for each in bucket.pending():
        if any(each.key.startswith(prefix) or each.key == prefix[:-1] for prefix in busy):
            continue  # a run goes on with it
        nbytes = sum(part.nbytes for part in bucket.parts(each.key, each.upload).values())
        if remove:
            bucket.abort(each.key, each.upload)
        path = f"{bucket.display(each.key)} (upload {each.upload}, begun {each.begun})"
        found.append({"path": path, "bytes": nbytes, "locked": False, "removed": remove})
    return found
