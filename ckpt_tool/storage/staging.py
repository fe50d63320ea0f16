"""Staging: the output grows in a hidden sibling folder and appears under its name by one rename, or not at all.

`out` is written in `.out.ckpt-partial/` (mode 0700) beside it. The folder holds the output's files under their final
names and one `.ckpt-journal` whose first line says which plan is being carried out; the journal's lock keeps a second
run away, its lines say which units are done. To commit: every file is fsynced, the journal is removed, the folder is
fsynced and renamed with RENAME_NOREPLACE, the parent is fsynced. A kill at any moment leaves the name absent, old and
whole, or new and whole; the same command goes on from the journal.

What this does not do: it never touches a folder that is not ours (another owner, a link, unknown content without a
journal), never retries an fsync that failed (Linux marks the pages clean: the second call would lie).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_tool.errors import OutputExists, SourceChanged, StorageError, wrap_os_error
from ckpt_tool.storage.destination import staging_path

JOURNAL = ".ckpt-journal"
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_REPLACED = "user.ckpt.replaced"


class Staging:
    """The hidden folder of one run, locked. Use as a context manager; without `commit` the folder stays for `--resume`
    unless `discard` was called.

    Args:
        destination: the output's final path.
        plan_id: of the plan being carried out; another plan's leavings are removed first.
        files: names that the plan writes: the only ones that a folder without a journal may hold.
        part: (i, n) for one share of a plan that several processes carry out, each with a journal of its own.
    """

    def __init__(
        self,
        destination: Path,
        plan_id: str,
        files: Sequence[str],
        *,
        resume: bool = True,
        force: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.destination = destination
        self.path = staging_path(destination)
        self.plan_id = plan_id
        self.part = part
        self._force = force
        self._folder_fd = self._journal_fd = -1
        self._write = threading.Lock()
        self.failed_sync = self._recorded = False
        self.resumed: list[dict[str, Any]] = []
        self._names = set(files)
        self._claim(resume=resume)

    # -- claiming -----------------------------------------------------------------------------------------------

    def _claim(self, *, resume: bool) -> None:
        name = self._journal_name(self.part)
        fresh = self._lock_folder()
        if not fresh:
            self._check_ours()
        if not self._force and os.path.lexists(self.destination):  # an equal run committed while we came
            if fresh:
                os.rmdir(self.path)
            self._release()
            raise OutputExists(
                f"{self.destination} exists", code="E0501", path=self.destination,
                hint="choose a new name, or --force to replace it in one step",
            )  # fmt: skip
        try:
            self._journal_fd = os.open(
                self.path / name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._journal_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise self._locked(name) from e
        except OSError as e:
            raise wrap_os_error(e, self.path / name, "opening the journal") from e
        lines = self._lines(name)
        if lines and lines[0].get("plan") == self.plan_id and resume:
            self.resumed = lines[1:]
            return
        if self.part is None:
            self._wipe(keep=name)
        elif lines:
            raise SourceChanged(
                f"part {self.part[0]}/{self.part[1]} was started with another plan", code="E0611", path=self.path,
                hint="run every part with the same plan file, or remove the leavings: ckpt clean",
            )  # fmt: skip
        os.ftruncate(self._journal_fd, 0)
        self.record({"plan": self.plan_id, "pid": os.getpid(), "host": socket.gethostname()})

    def _lock_folder(self) -> bool:
        """Make the folder or find it, and lock it: alone, or shared with the other parts. True when it was made.

        The lock is on the folder itself, so that it holds while the journal is removed and the folder renamed.
        """
        kind = fcntl.LOCK_EX if self.part is None else fcntl.LOCK_SH
        while True:
            fresh = True
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                fresh = False
            except OSError as e:
                raise wrap_os_error(e, self.path, "making the staging folder") from e
            try:
                self._folder_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # the other run has just committed or given up
            except OSError as e:
                if e.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise self._foreign("is not a folder") from e
                raise wrap_os_error(e, self.path, "opening the staging folder") from e
            try:
                fcntl.flock(self._folder_fd, kind | fcntl.LOCK_NB)
            except BlockingIOError as e:
                if self.part is None or os.path.lexists(self.path / JOURNAL):
                    raise self._locked(self._journal_name(self.part)) from e
                os.close(self._folder_fd)  # another part looks whether it is the last one, or commits: soon over
                time.sleep(0.02)
                continue
            held = os.fstat(self._folder_fd)
            try:
                now = os.lstat(self.path)
            except FileNotFoundError:
                now = None
            if now is not None and (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino):
                return fresh
            os.close(self._folder_fd)  # it was renamed away between the open and the lock

    def _locked(self, name: str) -> OutputExists:
        owner = self._owner(name)
        self._release()
        return OutputExists(
            f"another run is writing {self.destination}: {owner}", code="E0503", path=self.path,
            hint="wait for it to end; if it died on another machine: ckpt clean",
        )  # fmt: skip

    def _foreign(self, why: str) -> OutputExists:
        self._release()
        return OutputExists(
            f"the staging name {self.path} exists and {why}", code="E0504", path=self.path,
            hint="look at it and move it away: it is never followed or overwritten",
        )  # fmt: skip

    def _check_ours(self) -> None:
        """Refuse a staging folder that this user's earlier run cannot have left."""
        if os.fstat(self._folder_fd).st_uid != os.geteuid():
            raise self._foreign("belongs to another user")
        found = {
            os.path.relpath(os.path.join(at, name), self.path) for at, _, names in os.walk(self.path) for name in names
        }  # one look: between two, another part may begin its journal
        begun = any(name.startswith(JOURNAL) for name in found)
        if not begun and not found <= self._names and not _was_replaced(self.path):
            raise self._foreign("holds files that no run of this plan has written")

    def _journal_name(self, part: tuple[int, int] | None) -> str:
        return JOURNAL if part is None else f"{JOURNAL}-{part[0]}-of-{part[1]}"

    def _owner(self, name: str) -> str:
        lines = self._lines(name)
        return (
            f"process {lines[0].get('pid')} on {lines[0].get('host')}"
            if lines
            else "it is just starting or about to end"
        )

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The journal's lines as far as they are whole and sealed: a torn or edited line ends it."""
        try:
            text = (self.path / name).read_bytes()
        except OSError:
            return []
        lines: list[dict[str, Any]] = []
        for raw in text.split(b"\n")[:-1]:
            seal, _, body = raw.partition(b" ")
            try:
                line = json.loads(body)
                plan = str((lines or [line])[0]["plan"])
            except (ValueError, TypeError, KeyError):
                break
            if seal != _seal(plan, body):
                break
            lines.append(line)
        return lines

    def _wipe(self, *, keep: str) -> None:
        for entry in os.scandir(self.path):
            if entry.name == keep:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    @property
    def left(self) -> Path | None:
        """After a commit: the staging folder where it could not be removed."""
        return self.path if os.path.lexists(self.path) else None

    @property
    def worth_keeping(self) -> bool:
        """Is there finished work in the folder that the same command could go on from?"""
        return self._recorded or any("unit" in line for line in self.resumed)

    # -- the journal ----------------------------------------------------------------------------------------------

    def record(self, line: dict[str, Any]) -> None:
        """Append one line, sealed. Torn lines are ignored by `_lines`, so no fsync: a resumed run checks the bytes anyway."""
        self._recorded = self._recorded or "unit" in line
        body = json.dumps(line, separators=(",", ":")).encode()
        data = _seal(self.plan_id, body) + b" " + body + b"\n"
        with self._write:
            try:
                while data:
                    data = data[os.write(self._journal_fd, data) :]
            except OSError as e:
                raise wrap_os_error(e, self.path, "writing the journal") from e

    def part_journals(self, count: int) -> list[list[dict[str, Any]]]:
        """The journals of all parts, in order; an empty list for a part that has not begun."""
        return [self._lines(self._journal_name((i + 1, count))) for i in range(count)]

    def close_part(self) -> None:
        """Part of a plan: wait until no other part is at work, so that one of them may commit."""
        fcntl.flock(self._folder_fd, fcntl.LOCK_EX)

    # -- files ----------------------------------------------------------------------------------------------------

    def create(self, name: str, size: int) -> int:
        """A descriptor of the staged file, `size` bytes long and preallocated; an earlier run's is kept."""
        path = self.path / name
        try:
            if "/" in name:
                path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                info = os.fstat(fd)
                if info.st_size > size:
                    os.ftruncate(fd, size)
                if size and info.st_blocks * 512 < size:
                    _allocate(fd, size)
                elif info.st_size < size:
                    os.ftruncate(fd, size)
            except BaseException:
                os.close(fd)
                raise
        except OSError as e:
            raise wrap_os_error(e, path, f"allocating {size} bytes for {name}") from e
        return fd

    def open(self, name: str) -> int:
        """A descriptor of a staged file, for reading and writing."""
        try:
            return os.open(self.path / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            raise wrap_os_error(e, self.path / name, "opening the staged file") from e

    def sync(self, name: str) -> None:
        """fsync one staged file. A failure is final: the staged bytes are not to be trusted and are discarded."""
        fd = self.open(name)
        try:
            os.fsync(fd)
        except OSError as e:
            self.failed_sync = True
            os.close(fd)
            raise wrap_os_error(e, self.path / name, "fsync") from e
        try:
            os.close(fd)
        except OSError as e:
            self.failed_sync = True
            raise wrap_os_error(e, self.path / name, "closing") from e

    def discard(self) -> None:
        """Remove the staging folder: nothing of this run is left. One part of a plan leaves it: others' finished work
        lies there too; but for a failed fsync, after which nothing in it can be trusted."""
        if self.part is None or self.failed_sync:
            _remove(self.path)
        self._release()

    def commit(self, *, single: str | None = None) -> None:
        """Make the staged output appear under its name, in one step. All files are synced already.

        Raises StorageError E0707 when the name is there but the parent's fsync failed (durability unknown).
        """
        for name in os.listdir(self.path):
            if name.startswith(JOURNAL):
                os.unlink(self.path / name)
        _sync_folders(self.path)
        if single is None:
            os.chmod(self.path, 0o777 & ~_umask())
            self._rename(self.path, self.destination)
        else:
            self._rename(self.path / single, self.destination)
        try:
            _sync_folder(self.destination.parent)
        except OSError as e:
            raise StorageError(
                f"{self.destination} is complete, but the fsync of its folder failed: {os.strerror(e.errno or 0)}",
                code="E0707", path=self.destination, hint="its durability is unknown: check the disk, then ckpt verify",
            ) from e  # fmt: skip
        finally:
            self._release()
            if self.path.exists():  # what --force replaced, or the emptied folder of a single file
                _remove(self.path)

    def _rename(self, staged: Path, final: Path) -> None:
        try:
            if self._force and os.path.lexists(final):
                _mark_replaced(final)
                _renameat2(staged, final, _RENAME_EXCHANGE)
                if staged != self.path and staged.is_dir():
                    _remove(staged)
            else:
                _renameat2(staged, final, _RENAME_NOREPLACE)
        except FileExistsError as e:
            raise OutputExists(
                f"{final} appeared while this run was writing", code="E0505", path=final,
                hint=f"it was left alone; this run's result lies in {self.path}",
            ) from e  # fmt: skip
        except OSError as e:
            raise wrap_os_error(e, final, "renaming the finished output") from e

    def _release(self) -> None:
        held = (self._journal_fd, self._folder_fd)
        self._journal_fd = self._folder_fd = -1  # first: a signal between two closes must not close one twice
        for fd in held:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()


def _seal(plan_id: str, body: bytes) -> bytes:
    """What binds a journal line to its plan and its own words. No secret: it finds damage, not forgers."""
    return hashlib.blake2b(plan_id.encode() + b"\0" + body, digest_size=8).hexdigest().encode()


def _mark_replaced(old: Path) -> None:
    """Say on the old output itself that it is being replaced: a kill right after the exchange leaves it under the staging
    name, and the next run must know that it may go. Where the file system has no such marks, that run will ask."""
    try:
        os.setxattr(old, _REPLACED, b"1", follow_symlinks=False)
    except OSError:
        return


def _was_replaced(path: Path) -> bool:
    try:
        return os.getxattr(path, _REPLACED, follow_symlinks=False) == b"1"
    except OSError:
        return False


def _remove(folder: Path) -> None:
    """Remove a folder that is not needed any more; what can't be removed stays for `ckpt clean`."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # rmtree closes a descriptor twice when the first close fails
        return


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some network file systems have no folder fsync
            raise
    finally:
        os.close(fd)


def _sync_folders(root: Path) -> None:
    try:
        for at, _, _ in os.walk(root, topdown=False):
            _sync_folder(Path(at))
    except OSError as e:
        raise wrap_os_error(e, root, "fsync of the staging folder") from e


def _renameat2(old: Path, new: Path, flags: int) -> None:
    """rename with flags (Linux 3.15); where the file system lacks them, NOREPLACE falls back to a check and a rename."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is not None:
        if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags)) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            raise OSError(number, os.strerror(number), os.fspath(new))
    if flags == _RENAME_NOREPLACE:
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(new))
        os.rename(old, new)
        return
    aside = (
        old.parent / f"{old.name}-old"
    )  # --force without an exchange: a moment without the name, old kept until then
    os.rename(new, aside)
    os.rename(old, new)
    shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else os.unlink(aside)
