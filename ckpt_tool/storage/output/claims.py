"""Claims: workers of one plan agree on who does what, by files that only one of them can create.

    .ckpt-journal-claim-12-1    the worker that does share 12: the name of its journal
    .ckpt-journal-claim-12-2    the worker that took it over, because the first one was dead or slow
    .ckpt-journal-done-12       share 12 is done

    .ckpt-journal-commit        locked by the worker that commits

There is no coordinator. A worker touches its journal every few seconds. A claim is free again if no process holds the
lock of its worker's journal (the process has ended), or if the journal was not touched for a lease; whoever creates the
claim's next file takes it over. A worker that was only slow writes the same bytes to the same places as its successor:
that costs time and nothing else. Committing is different: headers are written with holes which are filled later, so two
workers must never do that at once. It is protected by a lock, which ends with its process and not by a timeout. Times
are compared by the clock of the file system, since clocks of machines may differ. The folder is removed at the commit:
a worker that was slow and still holds it open can make nothing in it any more, and so leaves nothing in the output.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from contextlib import suppress
from typing import NamedTuple

from ckpt_tool.core.inner_path import JOURNAL
from ckpt_tool.storage.output import journal
from ckpt_tool.storage.output.open_below import open_own

LEASE = 60.0  # seconds without a sign of life after which a claim is free
FOLDER = f"{JOURNAL}-claims"
_COMMIT = "commit"
_FILE = re.compile(r"(\d{1,9})-(?:(\d{1,9})|done)", re.ASCII)


class Taken(NamedTuple):
    """A share that this worker has claimed."""

    number: int
    over: bool  # taken over from another worker, which had begun it


class Claims:
    """The claims in an open staging folder. A context manager: while it lasts, this worker's claims are kept alive.

    Args:
        folder, own: descriptors of the folder and of this worker's journal. me: the journal's name.
        count: shares of the plan, numbered from 0.
    """

    def __init__(self, folder: int, own: int, me: str, count: int, lease: float = LEASE) -> None:
        self._staged = folder
        # A descriptor of its own: the commit closes the journal while this worker's claims are still kept alive, and
        # the number of a closed descriptor may soon be another file's.
        self._own = os.dup(own)
        self._me = me
        self._count = count
        self._lease = lease
        self._stop = threading.Event()
        self._committing = -1
        with suppress(FileExistsError):
            os.mkdir(FOLDER, 0o700, dir_fd=folder)
        self._folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        self._first = hash(me) % max(count, 1)  # workers begin at different places and seldom meet

    def __enter__(self) -> Claims:
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._beating.join()
        for fd in (self._committing, self._folder, self._own):
            if fd >= 0:
                os.close(fd)

    def take(self, most: int) -> list[Taken]:
        """Claim at most so many shares that no other worker is doing."""
        claims, done = self._seen()
        found: list[Taken] = []
        for place in range(self._count):
            number = (self._first + place) % self._count
            if len(found) == most:
                break
            if number not in done:
                generation, owner = claims.get(number, (0, ""))
                if (not generation or not self._alive(owner)) and self._create(number, generation):
                    found.append(Taken(number, generation > 0))
        return found

    def take_commit(self) -> bool:
        """Lock the commit for this worker, until it ends; False if another worker has it. Only called when all shares
        are done."""
        if self._committing < 0:
            try:
                self._committing = open_own(self._folder, _COMMIT, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # another has committed
                return False
        try:
            fcntl.flock(self._committing, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def finish(self, number: int) -> None:
        """Record that a share is done."""
        with suppress(FileNotFoundError):  # it was overtaken, and the output is committed
            os.close(os.open(f"{number}-done", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=self._folder))

    def left(self) -> int:
        """The number of shares that are not done."""
        return self._count - len(self._seen()[1])

    def done(self) -> set[int]:
        """The shares that are done, by any worker."""
        return self._seen()[1]

    def _seen(self) -> tuple[dict[int, tuple[int, str]], set[int]]:
        """({share: (generation of its last claim, that claim's file)}, shares that are done)."""
        claims: dict[int, tuple[int, str]] = {}
        done = set()
        for name in os.listdir(self._folder):
            match = _FILE.fullmatch(name)
            if match and match[2] is None:
                done.add(int(match[1]))
            elif match:
                number = int(match[1])
                claims[number] = max(claims.get(number, (0, "")), (int(match[2]), name))
        return claims, done

    def _alive(self, name: str) -> bool:
        """Is the worker of the claim file `name` running, with a sign of life in time?"""
        try:
            fd = open_own(self._folder, name, os.O_RDONLY)
            try:
                owner = os.read(fd, 255).decode("ascii", "replace")
                made = os.fstat(fd).st_mtime
            finally:
                os.close(fd)
            if owner == self._me:
                return True
            held, touched = journal.held(self._staged, owner) if journal.worker_of(owner) else (True, made)
        except OSError:
            return True  # the file is being created or the folder committed, or the disk fails: leave the claim alone
        return held and max(touched, made) > self._now() - self._lease

    def _create(self, number: int, generation: int) -> bool:
        try:
            made = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            fd = os.open(f"{number}-{generation + 1}", made, 0o600, dir_fd=self._folder)
        except (FileExistsError, FileNotFoundError):  # another was quicker, or has committed
            return False
        try:
            os.write(fd, self._me.encode())
        finally:
            os.close(fd)
        return True

    def _now(self) -> float:
        """The current time by the clock of the file system."""
        os.utime(self._own)
        return os.fstat(self._own).st_mtime

    def _beat(self) -> None:
        while not self._stop.wait(self._lease / 6):
            os.utime(self._own)


def remove(folder: int) -> None:
    """Remove the claims from an open staging folder, even if slow workers are still adding files."""
    for _ in range(1000):
        try:
            fd = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return
        try:
            for name in os.listdir(fd):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
        with suppress(OSError):  # a slow worker has just made a file
            os.rmdir(FOLDER, dir_fd=folder)
