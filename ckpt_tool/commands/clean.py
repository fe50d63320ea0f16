"""`ckpt clean`: find what interrupted runs left in a folder, and remove it with `--remove`.

Three kinds of remains, all under hidden names in the folder of the output:

    staging folders      in which an output was being written
    retired steps        that `ckpt prune` had renamed and not yet deleted
    set-aside outputs    old outputs that `--force` had moved away and not yet replaced

In a store: uploads that were begun and never completed, and the records of workers that shared an output.
"""

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
    """The document of `clean --json`: the remains directly below `folder`, each with its path, size and lock state.

    With `remove` they are removed, except those that a running process has locked; an old output that was set aside is
    moved back instead if no new output has taken its name. In a store, remains at and below the URL are listed.
    """
    found = []
    if isinstance(place_of(folder), RemotePlace):
        return {"schema_version": 1, "folder": folder, "leavings": _uploads(folder, remove=remove)}
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        raise wrap_os_error(e, folder, "listing") from e
    # Set-aside outputs come first: whether a run still needs one is decided by its staging folder, which must exist
    # until then.
    leavings = sorted((entry for entry in entries if is_leaving(entry.name)), key=lambda each: is_staging(each.name))
    for entry in leavings:
        look = _set_aside if is_set_aside(entry.name) else _leaving
        row = look(Path(entry.path), remove=remove)
        if row is not None:
            found.append(row)
    return {"schema_version": 1, "folder": folder, "leavings": found}


def _leaving(path: Path, *, remove: bool) -> dict[str, Any] | None:
    """The row for a staging folder or a retired step, removed with `remove`; None for something else of such a name.

    From a staging folder only files that a run has listed there are removed: if it contains others, the folder is kept
    and `kept` names them. Nothing is removed if the folder contains a mount point.
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
    """The row for an old output that was set aside; None for something else of such a name, or if it was just restored.

    With `remove` it is deleted if the new output has taken its name, and gets its name back if the name is free. It is
    kept while a run is active, and if staged files show that whatever has the name now is not the run's output.
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
        elif gone:  # still complete, since a run writes the list of its files before it removes any of them
            gone = os.path.lexists(destination) and not kept
            if gone:
                erase(path)
    except FileNotFoundError:  # another process has moved it back
        return None
    except OSError as e:
        raise wrap_os_error(e, path, "looking at what a run left") from e
    row: dict[str, Any] = {"path": str(path), "bytes": nbytes, "locked": busy, "removed": gone}
    return row | ({"put_back": str(destination)} if restored == path else {}) | ({"kept": kept} if kept else {})


def _others_in(folder: Path) -> list[str]:
    """The paths to keep of a set-aside output without a list of its files. Raises StorageError.

    These are its mount points; or all of its files, if one of them belongs to no checkpoint or delta and so was added
    by someone else.
    """
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
    """Does the folder contain a complete list of the files that may be removed? Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return bool(read_list(fd))
    finally:
        close_read(fd)


def _look_at_staging(folder: Path) -> tuple[bool, bool]:
    """Whether a run holds the lock of a staging folder, and whether the folder contains anything. Raises OSError."""
    if folder.is_symlink() or not folder.is_dir():
        return False, os.path.lexists(folder)
    return is_locked(folder), bool(os.listdir(folder))


def _remove(path: Path, *, staged: bool) -> bool:
    """Remove a path while holding its lock; returns whether it is gone. Raises OSError, StorageError."""
    if not staged:
        erase(path)
        return True
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_leavings(path)
    except BlockingIOError:  # a run has just started and taken the lock
        return False
    finally:
        close_read(fd)


def _kept_in(folder: Path) -> list[str]:
    """The files in a staging folder that no run has written."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = strays(fd)
        whole = bool(found) and not read_list(fd) and was_replaced(folder)
    finally:
        close_read(fd)
    return [] if whole else found


def _blocks_below(folder: Path) -> int:
    """Bytes on disk of all files below a folder, without following links. Raises OSError."""

    def fail(error: OSError) -> None:
        """Raise errors of os.walk, except for a folder that has disappeared because a run has just ended."""
        if not isinstance(error, FileNotFoundError):
            raise error

    nbytes = 0
    for above, folders, names in os.walk(folder, onerror=fail):
        for name in (*folders, *names):
            with suppress(FileNotFoundError):
                nbytes += os.lstat(os.path.join(above, name)).st_blocks * 512  # POSIX: st_blocks counts 512-byte units
    return nbytes


_RECORDS = re.compile(rf"(?:^|(.*/))\.([^/]+){re.escape(STAGED)}/([^/]+)$")


def _uploads(url: str, *, remove: bool) -> list[dict[str, Any]]:
    from ckpt_tool.storage.stores.output_store import output_store, staging_url
    from ckpt_tool.storage.stores.store_claims import is_held, is_record, remove_records

    bucket = output_store(url)
    found = list[dict[str, Any]]()
    outputs = {url: ""}  # URL of an output that workers share -> the prefix of its objects' keys
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
            continue  # an active run continues this upload
        nbytes = sum(part.nbytes for part in bucket.parts(each.key, each.upload).values())
        if remove:
            bucket.abort(each.key, each.upload)
        path = f"{bucket.display(each.key)} (upload {each.upload}, begun {each.begun})"
        found.append({"path": path, "bytes": nbytes, "locked": False, "removed": remove})
    return found
