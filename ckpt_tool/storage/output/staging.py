"""Staging: the output grows in a hidden sibling folder and appears under its name by one rename, or not at all.

`out` is written in `.out.ckpt-partial/` (mode 0700) next to it. The folder contains the output's files under their
final names and one `.ckpt-journal` whose first line identifies the plan; the lock of the journal excludes a second run,
its lines record which units are done. To commit: every file is fsynced, the journal is removed, the folder is fsynced
and renamed to a name that is free, the parent is fsynced. A kill at any moment leaves the name absent, old and whole,
or new and whole; the same command goes on from the journal.

Nothing is removed because it is in that folder: `.ckpt-journal-files` lists what a run stages and, once the new output
is in place, what of the replaced one goes. A file that is on no list stays, and the folder with it.

What this does not do: it never touches a folder that is not ours (another owner, a link, unknown content without a
journal), never opens anything below it but by `output.open_below`, never retries an fsync that failed (Linux marks the
pages clean: the second call would succeed for nothing).
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

_REPLACED = "user.ckpt.replaced"
_SOON = 50  # looks at a lock, 20 ms apart, before the one who waits says so
_NFS = re.compile(r"\.nfs[0-9a-f]{16,}")  # how NFS calls a file that was removed and is still open


def new_worker() -> str:
    """A name that no other worker has, of characters that every file system takes."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{token_hex(4)}"


def statuses_of(destination: Path) -> list[journal.PartStatus]:
    """How far every process is that writes `destination`, or has; none where nothing has begun, or all is committed."""
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
        plan_id: of the plan being carried out; another plan's leavings are removed first.
        files: names that the plan writes: the only ones that a folder without a journal may hold.
        force: replace what is there, which is what `replaced` lists; None replaces nothing.
        part: (i, n) for one share of a plan that several processes carry out, or the name of a worker that claims what
            it does; each has a journal of its own.
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
        elif os.path.lexists(self.destination):  # an equal run committed while we came
            raise exists(self.destination)

        if not fresh and self._put_back():
            self._check_put_back()
        self._replaces = _inode(self.destination)
        if self.part is not None:
            self.check_parts()

        name = journal.name_of(self.part)
        self._journal_fd = self._open_journal(name)
        if isinstance(self.part, str) and self.gone:  # committed while this worker was coming: it leaves nothing there
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
        """Raise SourceChanged where another part of the output was begun by another plan (E0611) or as one of another
        number of parts (E1602). A journal without a whole first line says nothing yet."""
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
        """Make the folder or find it, and lock it: alone, or shared with the other parts. True when it was made.

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
                continue  # the other run has just committed or given up
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
                self._release()  # another part looks whether it is the last one, or commits
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
        """Remove what an earlier run has left, but for the file `keep`."""
        try:
            _remove_left(self.path, self._folder_fd, self._names, keep=keep)
            _unmark_replaced(self.path)
        except OSError as e:
            raise wrap_os_error(e, self.path, "removing what an earlier run left") from e

    def _list_files(self) -> None:
        """Say which files are going to be staged, once: by that list they are known as ours later on."""
        try:
            _write_list(self._folder_fd, self._names)
        except OSError as e:
            raise wrap_os_error(e, self.path, "writing the list of staged files") from e

    def _put_back(self) -> bool:
        """Where a run was killed between two renames, on a file system that exchanges no names, the old output gets
        its name back. Did it?"""
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
        """After a commit: the staging folder, or the old output, where it could not be removed."""
        return next((path for path in (self.path, self._old) if os.path.lexists(path)), None)

    @property
    def worth_keeping(self) -> bool:
        """Is there finished work in the folder that the same command could go on from?"""
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
        """Say in the journal what this process is going to do, for those who look on."""
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self.record({"run": {**process, "began": time.time(), "units": units, "bytes": nbytes}})

    def close_part(self) -> list[list[journal.Line]] | None:
        """Called when this part's share is done: locks the folder exclusively, so that this part may commit.

        Returns the journals of all parts, in order, with an empty list for a part that has not begun; None if another
        part is running or has committed meanwhile. Never waits: the last part to get here finds the folder free. Raises
        as `check_parts`.
        """
        with naming(self.path, "unlocking the staging folder"):
            # before asking for more: two that both held on would both give up
            fcntl.flock(self._folder_fd, fcntl.LOCK_UN)
        if not self._alone() or self.gone:
            return None
        self.check_parts()
        count = self.part[1] if isinstance(self.part, tuple) else 1
        return [self._read(journal.name_of((i + 1, count))) for i in range(count)]

    def lines(self) -> list[journal.Line]:
        """What all workers have written into their journals."""
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
        """What this worker and others of the plan claim: `count` shares."""
        return Claims(self._folder_fd, self._journal_fd, journal.name_of(self.part), count)

    @property
    def gone(self) -> bool:
        """Was the folder committed, or removed, by another?"""
        info = stat_of(self._folder_fd, self.path)
        return _inode(self.path) != (info.st_dev, info.st_ino)

    def statuses(self) -> list[journal.PartStatus]:
        """How far every part is that has begun."""
        with naming(self.path, "reading the journals"):
            return journal.statuses(self._folder_fd)

    # -- files ----------------------------------------------------------------------------------------------------

    def create(self, name: str, size: int) -> int:
        """A descriptor of the staged file, `size` bytes long and preallocated; an earlier run's is kept."""
        doing = f"allocating {size} bytes for {name}"
        fd = self._open(name, os.O_RDWR | os.O_CREAT, doing, make=True)
        try:
            info = os.fstat(fd)
            if info.st_size > size:
                os.ftruncate(fd, size)
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
        """fsync one staged file. A failure is final: the staged bytes are not to be trusted and are discarded."""
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
        """Remove what is ours in the folder, and the folder where nothing else is in it. Not once it has been renamed:
        it is the output then."""
        with suppress(OSError, StorageError):
            if not self.gone:
                _remove_own(self._folder_fd, self._names)
                _remove_empty(self.path)

    def commit(self, *, single: str | None = None) -> None:
        """Make the staged output appear under its name, in one step. All files are synced already.

        Raises StorageError E0707 when the name is there but what comes after it failed (durability unknown).
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
                os.chmod(self._folder_fd, 0o777 & ~_umask())
            self._old = self._rename(self.path, self.destination)
        else:
            self._old = self._rename(self.path / single, self.destination)

        doing = "removing what the run kept in it"
        try:
            self._clear()  # of a worker that came in this moment, and goes again
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

        The list comes first: a run that is killed in between leaves a folder that says what may go.
        """
        try:
            if self._replaced.files and self._old.is_dir() and not self._old.is_symlink():
                _list_replaced(self._old, self._replaced.files)
        except OSError:
            if self._old.parent == self.destination.parent and self._old != self.path:
                return  # set aside, and without a list it seems to be whole: nothing of it goes
        if self._replaced.remove(self._old, FILES) and self._old != self.path:
            _remove_empty(self.path)

    def _clear(self) -> None:
        """Nothing but the output is left in the folder."""
        remove_claims(self._folder_fd)
        for name in (*journal.names(self._folder_fd), FILES):
            _unlink(name, self._folder_fd)

    def _check_whole(self) -> None:
        """Refuse to commit what no run of this plan has written."""
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
    """Do the two share the work out in different ways?"""
    if isinstance(one, str) or isinstance(other, str):
        return not (isinstance(one, str) and isinstance(other, str)) and None not in (one, other)
    return one is not None and other is not None and one[1] != other[1]


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:  # another that commits the same was quicker
        return


def _mark_replaced(old: Path, files: Mapping[str, Stamp]) -> None:
    """Say on the old output itself that it is being replaced, and what was in it: a kill right after the exchange
    leaves it under the staging name, and the next run must know what may go. Where the file system has no such marks,
    that run will ask."""
    mark(old, _REPLACED, _digest_of(files))


def _digest_of(files: Mapping[str, Stamp]) -> str:
    """Of the files of an output, but for our records. Without device numbers, which a restart may change."""
    rows = [
        b"%s\0%d\0%d\0%d" % (os.fsencode(path), seen.kind, seen.size, seen.mtime_ns)
        for path, seen in files.items()
        if not _is_record(path)
    ]
    return sha256(b"\0\0".join(sorted(rows))).hexdigest()


def _unmark_replaced(path: Path) -> None:
    """Take the mark of a replaced output away. Raises OSError: it must not outlive the list of what may go."""
    try:
        platform_calls.remove_mark(path, _REPLACED)
    except OSError as e:
        if e.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise


def was_replaced(path: Path) -> bool:
    """Was this output marked, by a run that was killed in the act, as one that its new self replaces, and is it still
    what it was then? Raises OSError, StorageError."""
    digest = marked(path, _REPLACED)
    return bool(digest) and digest == _digest_of(entries_below(path))


def strays(folder: int, names: Iterable[str] = ()) -> list[str]:
    """What is in an open staging folder that no run of ours has put there: neither one of `names`, nor listed there,
    nor a journal or a claim."""
    known = {*names, *read_list(folder)}
    return [path for path in files_beneath(folder) if path not in known and not _is_record(path)]


def _is_record(path: str) -> bool:
    """Is it a file of ours about the run, or of NFS about a file that is still open?"""
    return is_journal(path.partition("/")[0]) or _NFS.fullmatch(path) is not None


def read_list(folder: int) -> list[str]:
    """The files that a run has listed in an open staging folder; [] where there is no list, or none that is whole.
    Raises OSError where the disk does not give it: without a list a folder may seem to be all ours."""
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
    """Write the list, where it is not there yet. Raises OSError."""
    if read_list(folder):
        return
    with open(open_own(folder, FILES, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(json.dumps(sorted(names)).encode())


def _remove_own(folder: int, names: Iterable[str], *, keep: str | None = None) -> None:
    """Remove from an open staging folder what a run has put there, but for the file `keep`. Raises OSError."""
    listed = dict.fromkeys((*names, *read_list(folder)))
    remove_listed(folder, listed)
    remove_claims(folder)
    for name in (*journal.names(folder), FILES):
        if name != keep:
            _unlink(name, folder)


def remove_leavings(folder: Path) -> bool:
    """Remove what a run has left in its staging folder, whose lock the caller holds. Is the folder gone? Files that no
    run has put there stay. Raises OSError."""
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

    One that is marked and has no list is a whole output, if it is still as the mark says: the run was killed between
    giving it this name and listing it, and had found all of it accounted for the moment before.
    """
    if not read_list(folder) and was_replaced(path):
        files = {inner: seen for inner, seen in entries_below(path).items() if not _is_record(inner)}
        # on a full disk the list can't be written: a kill could then not be repaired, but removing makes room
        with suppress(OSError):
            _write_list(folder, files)
        remove_listed(folder, files)
    _unmark_replaced(path)  # first: whatever stays when the list is gone is not ours
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
