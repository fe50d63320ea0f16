"""`ckpt clean`: find what interrupted runs left in a folder, and remove it when asked."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_tool.core.inner_path import STAGED, is_leaving, is_set_aside, is_staging
from ckpt_tool.errors import OutputExists, wrap_os_error
from ckpt_tool.storage.descriptors import close_read
from ckpt_tool.storage.mounts import mounts_below
from ckpt_tool.storage.output.destination import RemotePlace, place_of, staging_path
from ckpt_tool.storage.output.removal import erase, is_locked, was_taken
from ckpt_tool.storage.output.replaced import entries_below
from ckpt_tool.storage.output.set_aside import destination_of, put_back, was_set_aside
from ckpt_tool.storage.output.staging import read_list, remove_leavings, strays, was_replaced


def clean(folder: str, *, remove: bool = False) -> dict[str, Any]:
    """Staging folders directly below `folder`, what a killed `ckpt prune` had begun to delete, and old outputs that a
    killed run had set aside: path, bytes, whether a run still holds the lock; removed with `remove`, or put back where
    no new output has come. Of a place in a store: uploads at and below it that were begun
    and not ended, and the records of workers that shared it out, or what lies below it."""
    found = []
    if isinstance(place_of(folder), RemotePlace):
        return {"schema_version": 1, "folder": folder, "leavings": _uploads(folder, remove=remove)}
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        raise wrap_os_error(e, folder, "listing") from e
    # What was set aside first: the staging folder beside it says whether a run is at it.
    leavings = sorted((entry for entry in entries if is_leaving(entry.name)), key=lambda each: is_staging(each.name))
    for entry in leavings:
        look = _set_aside if is_set_aside(entry.name) else _leaving
        row = look(Path(entry.path), remove=remove)
        if row is not None:
            found.append(row)
    return {"schema_version": 1, "folder": folder, "leavings": found}


def _leaving(path: Path, *, remove: bool) -> dict[str, Any] | None:
    """What a run left at a hidden path, removed with `remove`; None for what only bears such a name.

    In a staging folder only what a run has listed there goes: with anything else in it the folder stays, and `kept`
    names the others. Nothing goes where something is mounted.
    """
    try:
        info = os.lstat(path)
        is_folder = stat.S_ISDIR(info.st_mode)
        staged = is_staging(path.name)
        if staged and not (is_folder and info.st_uid == os.geteuid()):
            return None
        if not staged and not was_taken(path):
            return None
        mounted = [os.path.relpath(point, path) for point in mounts_below(path)]
        kept = mounted or (_kept_in(path) if staged else [])
        busy = is_folder and is_locked(path)
        nbytes = _blocks_below(path) if is_folder else info.st_size
        gone = False
        if remove and not busy and not mounted:
            gone = _remove(path, staged=staged)
    except OSError as e:
        raise wrap_os_error(e, path, "looking at what a run left") from e
    row: dict[str, Any] = {"path": str(path), "bytes": nbytes, "locked": busy, "removed": gone}
    return row | ({"kept": kept} if kept else {})


def _set_aside(path: Path, *, remove: bool) -> dict[str, Any] | None:
    """An old output under its hidden name; None for what only bears such a name, or has just lost it.

    With `remove` it goes where the new output has its name, and gets its name back where nothing has. It stays where a
    run is at it, and where somebody else has taken the name: what the run has staged is still there then.
    """
    try:
        if not was_set_aside(path):
            return None
        is_folder = path.is_dir() and not path.is_symlink()
        nbytes = _blocks_below(path) if is_folder else os.lstat(path).st_size
        listed = is_folder and _is_listed(path)
        kept = (_kept_in(path) if listed else _others_in(path)) if is_folder else []
        destination = destination_of(path)
        busy, waits = _look_at_staging(staging_path(destination))
        restored = put_back(destination) if remove and not busy else None
        gone = remove and not busy and not waits and restored is None
        if gone and listed:
            gone = remove_leavings(path)
        elif gone:  # whole: nothing is removed of it before the list is written
            gone = os.path.lexists(destination) and not kept
            if gone:
                erase(path)
    except FileNotFoundError:  # another has put it back
        return None
    except OSError as e:
        raise wrap_os_error(e, path, "looking at what a run left") from e
    row: dict[str, Any] = {"path": str(path), "bytes": nbytes, "locked": busy, "removed": gone}
    return row | ({"put_back": str(destination)} if restored == path else {}) | ({"kept": kept} if kept else {})


def _others_in(folder: Path) -> list[str]:
    """What stays of an old output that is not listed: what is mounted in it, or all of it where something is there that
    no checkpoint or delta accounts for: it was put there since. Raises StorageError."""
    from ckpt_tool.conversion.accounted import refuse_unaccounted
    from ckpt_tool.deltas.folder import delta_files

    mounted = [os.path.relpath(point, folder) for point in mounts_below(folder)]
    there = [*entries_below(folder)]
    try:
        refuse_unaccounted(str(folder), there, not there, delta_files)
    except OutputExists:
        return mounted or there
    return mounted


def _is_listed(folder: Path) -> bool:
    """Is there a whole list of what may go of it? Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return bool(read_list(fd))
    finally:
        close_read(fd)


def _look_at_staging(folder: Path) -> tuple[bool, bool]:
    """(does a run hold its lock, is there anything in it). Raises OSError."""
    if folder.is_symlink() or not folder.is_dir():
        return False, os.path.lexists(folder)
    return is_locked(folder), bool(os.listdir(folder))


def _remove(path: Path, *, staged: bool) -> bool:
    """Remove it, locked meanwhile. Is it gone? Raises OSError, StorageError."""
    if not staged:
        erase(path)
        return True
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_leavings(path)
    except BlockingIOError:  # a run has just come
        return False
    finally:
        close_read(fd)


def _kept_in(folder: Path) -> list[str]:
    """The files in a staging folder that no run has put there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = strays(fd)
        whole = bool(found) and not read_list(fd) and was_replaced(folder)
    finally:
        close_read(fd)
    return [] if whole else found


def _blocks_below(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk, links not followed. Raises OSError."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a run has just ended
            raise error

    nbytes = 0
    for above, folders, names in os.walk(folder, onerror=fail):
        for name in (*folders, *names):
            with suppress(FileNotFoundError):
                nbytes += os.lstat(os.path.join(above, name)).st_blocks * 512
    return nbytes


_RECORDS = re.compile(rf"(?:^|(.*/))\.([^/]+){re.escape(STAGED)}/([^/]+)$")


def _uploads(url: str, *, remove: bool) -> list[dict[str, Any]]:
    from ckpt_tool.storage.stores.output_store import output_store, staging_url
    from ckpt_tool.storage.stores.store_claims import is_held, is_record, remove_records

    bucket = output_store(url)
    found = list[dict[str, Any]]()
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
