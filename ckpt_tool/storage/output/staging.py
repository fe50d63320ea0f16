"""Staging: the output grows in a hidden sibling folder and appears under its name by one rename, or not at all.

`out` is written in `.out.ckpt-partial/` (mode 0700) next to it. The folder contains the output's files under their
final names and one `.ckpt-journal` whose first line identifies the plan; the lock of the journal excludes a second run,
its lines record which units are done. To commit: every file is fsynced, the journal is removed, the folder is fsynced
and renamed to a name that is free, the parent is fsynced. If the process is killed at any moment, the name is absent,
or is the complete old output, or the complete new one; the same command resumes from the journal.

Being in that folder is no reason to remove a file: `.ckpt-journal-files` lists what a run stages and, once the new
output is in place, which files of the replaced one are to be removed. A file that is on no list stays, and so does the
folder.

What this does not do: it never touches a folder that is not ours (another owner, a link, unknown content without a
journal), never opens anything below it except through `output.open_below`, never retries an fsync that failed (Linux
marks the pages clean, so that a second call would succeed without writing them).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from ckpt_tool.core.inner_path import FILES, JOURNAL, is_journal, leaves
from ckpt_tool.core.progress import aside
from ckpt_tool.errors import OutputExists, SourceChanged, StorageError, wrap_os_error
from ckpt_tool.storage import platform_calls
from ckpt_tool.storage.descriptors import close_read, close_written, naming, stat_of
from ckpt_tool.storage.output import journal
from ckpt_tool.storage.output.claims import Claims
from ckpt_tool.storage.output.claims import remove as remove_claims
from ckpt_tool.storage.output.destination import exists, refuse_link, staging_path
from ckpt_tool.storage.output.marks import mark, mark_plan, marked
from ckpt_tool.storage.output.open_below import (
    UnexpectedEntry,
    files_beneath,
    open_beneath,
    open_own,
    sync_folder,
    sync_folders,
)
from ckpt_tool.storage.output.replaced import (
    NOT_EMPTY,
    ReplacedOutput,
    Stamp,
    entries_below,
    remove_listed,
    some_of,
)

_REPLACED = "user.ckpt.replaced"  # the extended attribute on an output that is being replaced
_SOON = 50  # attempts to get a lock, 20 ms apart, before the wait is reported
_NFS = re.compile(r"\.nfs[0-9a-f]{16,}")  # how NFS calls a file that was removed and is still open


def new_worker() -> str:
    """A name that no other worker has, of characters that every file system takes."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{token_hex(4)}"


def statuses_of(destination: Path) -> list[journal.PartStatus]:
    """The progress of every process that writes `destination` or did; empty before the first and after the commit."""
    path = staging_path(destination)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError as e:
        raise wrap_os_error(e, path, "looking at the staging folder") from e
    try:
        with naming(path, "reading the journals"):
            return journal.statuses(folder)
    finally:
        close_read(folder)


class Staging:
    """The hidden folder of one run, locked. Use as a context manager; without `commit` the folder stays for `--resume`
    unless `discard` was called.

    Args:
        destination: the output's final path.
        plan_id: the plan that is executed; what another plan has staged is removed first.
        files: names that the plan writes: the only ones that a folder without a journal may contain.
        force: replace an existing output, as far as `replaced` lists its files; None replaces nothing.
        part: (i, n) for one part of a plan that several processes execute, or the name of a worker that claims shares;
            each has its own journal.
    """

    def __init__(
        self,
        destination: Path,
        plan_id: str,
        files: Sequence[str],
        *,
        resume: bool = True,
        force: bool = False,
        replaced: ReplacedOutput | None = None,
        part: journal.Writer = None,
    ) -> None:
        self.destination = destination
        self.path = staging_path(destination)
        self.plan_id = plan_id
        self.part = part
        self._force = force
        self._replaced = replaced or ReplacedOutput({})
        self._folder_fd = self._journal_fd = -1
        self._write = threading.Lock()
        self.failed_sync = self._recorded = self.went_on = False  # went_on: an earlier run of the plan has been here
        self.resumed: list[journal.Line] = []
        self._names = set(files)
        self._old = self.path  # the path of the old output after the commit
        self._replaces: tuple[int, int] | None = None
        self._claim(resume=resume)

    # -- claiming -----------------------------------------------------------------------------------------------

    def _claim(self, *, resume: bool) -> None:
        fresh = self._lock_folder()
        try:
            self._take(fresh=fresh, resume=resume)
        except BaseException:
            if fresh and self._alone():
                _remove_empty(self.path)
            self._release()
            raise

    def _alone(self) -> bool:
        """Lock the folder exclusively; False if another process has a lock."""
        try:
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _take(self, *, fresh: bool, resume: bool) -> None:
        """Check that the locked folder is ours, and read what an earlier run of the plan has done there."""
        if not fresh:
            self._check_ours()
        if self._force:
            refuse_link(self.destination)
        elif os.path.lexists(self.destination):  # another run of the same plan has committed meanwhile
            raise exists(self.destination)

        if not fresh and self._put_back():
            self._check_put_back()
        self._replaces = _inode(self.destination)
        if self.part is not None:
            self.check_parts()

        name = journal.name_of(self.part)
        self._journal_fd = self._open_journal(name)
        if isinstance(self.part, str) and self.gone:  # committed meanwhile: leave no journal in the finished output
            _unlink(name, self._folder_fd)
            raise exists(self.destination)

        lines = self._read(name)
        if lines and lines[0]["plan"] == self.plan_id and resume:
            self.went_on = True
            self.resumed = lines[1:]
            return

        if self.part is None:
            self._wipe(keep=name)
        self._list_files()
        with naming(self.path / name, "emptying the journal"):
            os.ftruncate(self._journal_fd, 0)

        self.record({"plan": self.plan_id, "pid": os.getpid(), "host": socket.gethostname()})

    def _open_journal(self, name: str) -> int:
        fd = -1
        try:
            fd = open_own(self._folder_fd, name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            os.close(fd)
            raise self._locked(name) from e
        except UnexpectedEntry as e:
            raise self._foreign(f"holds {name}, which {e.strerror}") from e
        except OSError as e:
            raise wrap_os_error(e, self.path / name, "opening the journal") from e
        return fd

    def check_parts(self) -> None:
        """Raise SourceChanged if another part of the output was begun with another plan (E0611) or another number of
        parts (E1602). A journal without a complete first line is ignored."""
        for name in self._journals():
            lines = self._read(name, first=True)
            part = journal.part_of(name)
            worker = journal.worker_of(name)
            what = "a worker" if worker else "the whole output"
            if part:
                what = f"part {part[0]}/{part[1]}"
            if lines and lines[0]["plan"] != self.plan_id:
                raise SourceChanged(
                    f"{what} was started with another plan",
                    code="E0611",
                    path=self.path,
                    hint="run every part with the same plan file, or remove what the other run left: ckpt clean",
                )
            if lines and _mixed(worker or part, self.part):
                mine = "a worker" if isinstance(self.part, str) else "part {}/{}".format(*self.part or (1, 1))
                raise SourceChanged(
                    f"{what} was started, and this is {mine}",
                    code="E1602",
                    path=self.path,
                    hint="run every part of the plan with the same N of --part I/N, or all of it with --claim; or "
                    "remove the leavings: ckpt clean",
                )

    def _lock_folder(self) -> bool:
        """Create or open the folder, and lock it: exclusively, or shared with the other parts. Returns True if created.

        The lock is on the folder itself, so that it holds while the journal is removed and the folder renamed.
        """
        kind = fcntl.LOCK_EX if self.part is None else fcntl.LOCK_SH
        waited = 0
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
                continue  # another run has just committed or discarded it
            except OSError as e:
                if e.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise self._foreign("is not a folder") from e
                raise wrap_os_error(e, self.path, "opening the staging folder") from e

            try:
                fcntl.flock(self._folder_fd, kind | fcntl.LOCK_NB)
            except BlockingIOError as e:
                if self.part is None or os.path.lexists(self.path / JOURNAL):
                    locked = self._locked(journal.name_of(self.part))
                    self._release()
                    raise locked from e
                self._release()  # another part has it for a moment to see whether it is the last one, or commits
                if waited == _SOON:
                    aside(f"another part is about to commit {self.destination}: waiting for it")
                waited += 1
                time.sleep(0.02)
                continue
            except OSError as e:
                raise wrap_os_error(e, self.path, "locking the staging folder") from e

            if not self.gone:
                return fresh

            self._release()  # it was renamed away between the open and the lock

    def _locked(self, name: str) -> OutputExists:
        lines = self._read(name, first=True)
        owner = "it is just starting or about to end"
        if lines:
            owner = f"process {lines[0].get('pid')} on {lines[0].get('host')}"
        return OutputExists(
            f"another run is writing {self.destination}: {owner}",
            code="E0503",
            path=self.path,
            hint="wait for it to end; if it died on another machine: ckpt clean",
        )

    def _foreign(self, why: str) -> OutputExists:
        return OutputExists(
            f"the staging name {self.path} exists and {why}",
            code="E0504",
            path=self.path,
            hint="look at it and move it away: it is never followed or overwritten",
        )

    def _check_ours(self) -> None:
        """Refuse a staging folder that this user's earlier run cannot have left."""
        if stat_of(self._folder_fd, self.path).st_uid != os.geteuid():
            raise self._foreign("belongs to another user")
        with naming(self.path, "looking at what an earlier run left"):
            stray = strays(self._folder_fd, self._names)
            is_ours = bool(stray) and not read_list(self._folder_fd) and was_replaced(self.path)
        if stray and not is_ours:
            raise self._foreign(f"holds {some_of(stray)}, which no run has written")

    def _wipe(self, *, keep: str | None = None) -> None:
        """Remove what an earlier run has left, except the file `keep`."""
        try:
            _remove_left(self.path, self._folder_fd, self._names, keep=keep)
            _unmark_replaced(self.path)
        except OSError as e:
            raise wrap_os_error(e, self.path, "removing what an earlier run left") from e

    def _list_files(self) -> None:
        """Write the list of files that will be staged, once. Later runs recognise files by it as ours."""
        try:
            _write_list(self._folder_fd, self._names)
        except OSError as e:
            raise wrap_os_error(e, self.path, "writing the list of staged files") from e

    def _put_back(self) -> bool:
        """If a run was killed between two renames, on a file system that can't exchange names, give the old output its
        name back. Returns whether this was necessary."""
        from ckpt_tool.storage.output import set_aside

        with naming(self.destination, "giving the old output its name back"):
            return set_aside.put_back(self.destination) is not None

    def _check_put_back(self) -> None:
        """Refuse to continue after the old output got its name back, because it was not checked before this run. The
        same command, started again, checks it."""
        if not self._force:
            raise exists(self.destination)
        self._replaced.check(self.destination)

    @property
    def left(self) -> Path | None:
        """After a commit: the staging folder or the old output, if it could not be removed."""
        return next((path for path in (self.path, self._old) if os.path.lexists(path)), None)

    @property
    def worth_keeping(self) -> bool:
        """Is there finished work in the folder from which the same command could resume?"""
        return self._recorded or any("unit" in line for line in self.resumed)

    # -- the journal ----------------------------------------------------------------------------------------------

    def record(self, line: journal.Line) -> None:
        """Append one line, sealed. Torn lines are ignored, so no fsync: a resumed run checks the bytes anyway."""
        self._recorded = self._recorded or "unit" in line
        data = journal.sealed(self.plan_id, line)
        with self._write:
            try:
                while data:
                    data = data[os.write(self._journal_fd, data) :]
            except OSError as e:
                raise wrap_os_error(e, self.path, "writing the journal") from e

    def begin(self, units: int, nbytes: int) -> None:
        """Record in the journal what this process is going to do, for commands that show the progress."""
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self.record({"run": {**process, "began": time.time(), "units": units, "bytes": nbytes}})

    def close_part(self) -> list[list[journal.Line]] | None:
        """Called when this part's share is done: locks the folder exclusively, so that this part may commit.

        Returns the journals of all parts, in order, with an empty list for a part that has not begun; None if another
        part is running or has committed meanwhile. Never waits: the last part to get here finds the folder free. Raises
        as `check_parts`.
        """
        with naming(self.path, "unlocking the staging folder"):
            # Unlock first: if two parts kept their shared locks, neither could get the exclusive one.
            fcntl.flock(self._folder_fd, fcntl.LOCK_UN)
        if not self._alone() or self.gone:
            return None
        self.check_parts()
        count = self.part[1] if isinstance(self.part, tuple) else 1
        return [self._read(journal.name_of((i + 1, count))) for i in range(count)]

    def lines(self) -> list[journal.Line]:
        """The journal lines of all workers."""
        names = [name for name in self._journals() if journal.worker_of(name)]
        return [line for name in names for line in self._read(name)]

    def _journals(self) -> list[str]:
        """The names of the journals in the folder."""
        with naming(self.path, "listing the staging folder"):
            return journal.names(self._folder_fd)

    def _read(self, name: str, *, first: bool = False) -> list[journal.Line]:
        """The lines of a journal, or the first one alone."""
        with naming(self.path / name, "reading the journal"):
            return journal.read(self._folder_fd, name, first=first)

    def claims(self, count: int) -> Claims:
        """The claims of this worker on the plan's `count` shares."""
        return Claims(self._folder_fd, self._journal_fd, journal.name_of(self.part), count)

    @property
    def gone(self) -> bool:
        """Was the folder committed, or removed, by another?"""
        info = stat_of(self._folder_fd, self.path)
        return _inode(self.path) != (info.st_dev, info.st_ino)

    def statuses(self) -> list[journal.PartStatus]:
        """The progress of every part that has begun."""
        with naming(self.path, "reading the journals"):
            return journal.statuses(self._folder_fd)

    # -- files ----------------------------------------------------------------------------------------------------

    def create(self, name: str, size: int) -> int:
        """A descriptor of the staged file, `size` bytes long and preallocated. The content from an earlier run is
        kept."""
        doing = f"allocating {size} bytes for {name}"
        fd = self._open(name, os.O_RDWR | os.O_CREAT, doing, make=True)
        try:
            info = os.fstat(fd)
            if info.st_size > size:
                os.ftruncate(fd, size)
            # Not fully allocated: a full disk should be noticed now, not in the middle of the run.
            if size and info.st_blocks * 512 < size:
                platform_calls.allocate(fd, size)
            elif info.st_size < size:
                os.ftruncate(fd, size)
        except OSError as e:
            os.close(fd)
            raise wrap_os_error(e, self.path / name, doing) from e
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open(self, name: str) -> int:
        """A descriptor of a staged file, for reading and writing."""
        return self._open(name, os.O_RDWR, "opening the staged file")

    def _open(self, name: str, flags: int, doing: str, *, make: bool = False) -> int:
        try:
            return open_beneath(self._folder_fd, name, flags, make=make)
        except UnexpectedEntry as e:
            raise self._foreign(f"holds {name}, which {e.strerror}") from e
        except OSError as e:
            raise wrap_os_error(e, self.path / name, doing) from e

    def sync(self, name: str) -> None:
        """fsync one staged file. A failure is final: the staged bytes can't be trusted any more and are discarded."""
        fd = self.open(name)
        try:
            platform_calls.flush(fd)
        except OSError as e:
            self.failed_sync = True
            close_read(fd)
            raise wrap_os_error(e, self.path / name, "fsync") from e
        try:
            close_written(fd, self.path / name)
        except StorageError:
            self.failed_sync = True
            raise

    def discard(self) -> None:
        """Remove the staging folder, so that nothing of this run is left. A part of a plan keeps it, because it
        contains finished work of other parts, unless an fsync failed: then nothing in it can be trusted."""
        if self.part is None or self.failed_sync:
            self._discard_own()
        self._release()

    def _discard_own(self) -> None:
        """Remove our files from the folder, and the folder if nothing else is in it. Does nothing after the rename: the
        folder is the output then."""
        with suppress(OSError, StorageError):
            if not self.gone:
                _remove_own(self._folder_fd, self._names)
                _remove_empty(self.path)

    def commit(self, *, single: str | None = None) -> None:
        """Rename the staged output to its final name, in one step. All files must be synced already.

        Raises StorageError E0707 if the rename succeeded but a later step failed, so that durability is unknown.
        """
        self._check_whole()
        try:
            self._clear()
            sync_folders(self._folder_fd)
        except OSError as e:
            raise wrap_os_error(e, self.path, "closing the staging folder") from e

        if self.part is not None:
            mark_plan(self.path if single is None else self.path / single, self.plan_id)
        if single is None:
            with naming(self.path, "setting the permissions of the output"):
                # The staging folder is private (0700); the output gets the permissions of a new folder.
                os.chmod(self._folder_fd, 0o777 & ~_umask())
            self._old = self._rename(self.path, self.destination)
        else:
            self._old = self._rename(self.path / single, self.destination)

        doing = "removing what the run kept in it"
        try:
            self._clear()  # again, for a worker that joined at this very moment and will leave
            doing = "the fsync of its folder"
            _sync_parent(self.destination)
        except OSError as e:
            raise StorageError(
                f"{self.destination} is complete, but {doing} failed: {os.strerror(e.errno or 0)}",
                code="E0707",
                path=self.destination,
                hint="its durability is unknown: check the disk, then ckpt verify",
            ) from e
        finally:
            self._release()
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove what was replaced, file by file, and the emptied folder of an output that is one file.

        The list is written first: if the run is killed in between, the next one knows from it what may be removed.
        """
        try:
            if self._replaced.files and self._old.is_dir() and not self._old.is_symlink():
                _list_replaced(self._old, self._replaced.files)
        except OSError:
            if self._old.parent == self.destination.parent and self._old != self.path:
                return  # it was set aside, and without a list the next run would take it for complete: keep all of it
        if self._replaced.remove(self._old, FILES) and self._old != self.path:
            _remove_empty(self.path)

    def _clear(self) -> None:
        """Remove journals, claims and the list of files, so that only the output is left in the folder."""
        remove_claims(self._folder_fd)
        for name in (*journal.names(self._folder_fd), FILES):
            _unlink(name, self._folder_fd)

    def _check_whole(self) -> None:
        """Refuse to commit a folder that contains files that no run of this plan has written."""
        if self.gone:
            raise self._foreign("is not the folder that was written")
        with naming(self.path, "listing the staging folder"):
            there = set(files_beneath(self._folder_fd))
        ours = {name for name in there if is_journal(name.partition("/")[0]) or _NFS.fullmatch(name)}
        found = there - ours
        if found - self._names:
            raise self._foreign(f"holds {min(found - self._names)}, which no run of this plan has written")

    def _rename(self, staged: Path, final: Path) -> Path:
        """Rename the staged output to its final name. Returns the path of the old output, if there was one."""
        try:
            # Only the output that was there at the start is replaced, not one that appeared since.
            if self._force and self._replaces is not None and _inode(final) == self._replaces:
                from ckpt_tool.storage.output.set_aside import hidden_path

                self._replaced.check(final)
                _mark_replaced(final, self._replaced.files)
                return platform_calls.exchange(staged, final, hidden_path(final))
            platform_calls.rename_new(staged, final)
            return staged
        except FileExistsError as e:
            raise OutputExists(
                f"{final} appeared while this run was writing",
                code="E0505",
                path=final,
                hint=f"it was left alone; this run's result is in {self.path}",
            ) from e
        except OSError as e:
            raise wrap_os_error(e, final, "renaming the finished output") from e

    def _release(self) -> None:
        """Release the locks. A failing close is ignored: the journal contains no values of the output, and every reader
        checks the seal of each line."""
        held = (self._journal_fd, self._folder_fd)
        self._journal_fd = self._folder_fd = -1  # first: a signal between two closes must not close one twice
        for fd in held:
            if fd >= 0:
                close_read(fd)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()


def _mixed(one: journal.Writer, other: journal.Writer) -> bool:
    """Do the two writers divide the plan in different ways?"""
    if isinstance(one, str) or isinstance(other, str):
        return not (isinstance(one, str) and isinstance(other, str)) and None not in (one, other)
    return one is not None and other is not None and one[1] != other[1]


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:  # another that commits the same was quicker
        return


def _mark_replaced(old: Path, files: Mapping[str, Stamp]) -> None:
    """Mark the old output as being replaced, with a digest of its files. If the run is killed directly after the
    exchange, the old output has the staging name, and the next run must know what may be removed. On file systems
    without extended attributes that run refuses to continue."""
    mark(old, _REPLACED, _digest_of(files))


def _digest_of(files: Mapping[str, Stamp]) -> str:
    """A digest of the files of an output, without our records, and without device numbers, which a restart may
    change."""
    rows = [
        b"%s\0%d\0%d\0%d" % (os.fsencode(path), seen.kind, seen.size, seen.mtime_ns)
        for path, seen in files.items()
        if not _is_record(path)
    ]
    return sha256(b"\0\0".join(sorted(rows))).hexdigest()


def _unmark_replaced(path: Path) -> None:
    """Remove the mark of a replaced output. Raises OSError: the mark must not outlive the list of removable files."""
    try:
        platform_calls.remove_mark(path, _REPLACED)
    except OSError as e:
        if e.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise


def was_replaced(path: Path) -> bool:
    """Was this output marked as being replaced, by a run that was killed, and is it unchanged since? Raises OSError,
    StorageError."""
    digest = marked(path, _REPLACED)
    return bool(digest) and digest == _digest_of(entries_below(path))


def strays(folder: int, names: Iterable[str] = ()) -> list[str]:
    """The files in an open staging folder that no run of ours has created: neither one of `names`, nor listed, nor a
    journal or a claim."""
    known = {*names, *read_list(folder)}
    return [path for path in files_beneath(folder) if path not in known and not _is_record(path)]


def _is_record(path: str) -> bool:
    """Is it a record of a run, or a file that NFS keeps because a removed file is still open?"""
    return is_journal(path.partition("/")[0]) or _NFS.fullmatch(path) is not None


def read_list(folder: int) -> list[str]:
    """The files that a run has listed in an open staging folder; [] if there is no complete list. Raises OSError if it
    can't be read: without its list a folder might be taken for one that is all ours."""
    try:
        fd = open_own(folder, FILES, os.O_RDONLY)
    except (FileNotFoundError, UnexpectedEntry):
        return []
    with open(fd, "rb") as file:
        text = file.read()
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return (
        [path for path in listed if isinstance(path, str) and path and not leaves(path)]
        if isinstance(listed, list)
        else []
    )


def _write_list(folder: int, names: Iterable[str]) -> None:
    """Write the list of files, unless there is one already. Raises OSError."""
    if read_list(folder):
        return
    with open(open_own(folder, FILES, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(json.dumps(sorted(names)).encode())


def _remove_own(folder: int, names: Iterable[str], *, keep: str | None = None) -> None:
    """Remove a run's files from an open staging folder, except the file `keep`. Raises OSError."""
    listed = dict.fromkeys((*names, *read_list(folder)))
    remove_listed(folder, listed)
    remove_claims(folder)
    for name in (*journal.names(folder), FILES):
        if name != keep:
            _unlink(name, folder)


def remove_leavings(folder: Path) -> bool:
    """Remove what a run has left in its staging folder, whose lock the caller holds. Returns whether the folder is
    gone: it stays if it contains files that no run has created. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _remove_left(folder, fd, ())
    finally:
        close_read(fd)
    try:
        os.rmdir(folder)
    except OSError as e:
        if e.errno not in NOT_EMPTY:
            raise
        return False
    return True


def _remove_left(path: Path, folder: int, names: Iterable[str], *, keep: str | None = None) -> None:
    """Remove what a run has left in the staging folder at `path`, open as `folder`. Raises OSError.

    A folder that is marked, has no list, and still matches its mark is a complete old output: the run was killed
    between renaming it and writing the list, and had checked just before that every file of it may be removed.
    """
    if not read_list(folder) and was_replaced(path):
        files = {inner: seen for inner, seen in entries_below(path).items() if not _is_record(inner)}
        # on a full disk the list can't be written: a kill could then not be repaired, but removing makes room
        with suppress(OSError):
            _write_list(folder, files)
        remove_listed(folder, files)
    _unmark_replaced(path)  # before the list is removed: files that stay after that are not ours
    _remove_own(folder, names, keep=keep)


def _list_replaced(old: Path, files: Iterable[str]) -> None:
    """Write the list into a folder that was replaced. Raises OSError."""
    fd = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _write_list(fd, files)
    finally:
        close_read(fd)


def _remove_empty(folder: Path) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return


def _umask() -> int:
    # The umask can be read only by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_parent(path: Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_folder(fd)
    finally:
        close_read(fd)


def _inode(path: Path) -> tuple[int, int] | None:
    """(device, inode) of the entry `path` itself, links not followed; None if it does not exist. Raises StorageError if
    that can't be determined."""
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise wrap_os_error(e, path, "looking at it") from e
    return info.st_dev, info.st_ino
