"""Claims in a store: workers of one plan that share no disk agree by objects that only one of them can create.

    .out.ckpt-partial/plan                     the plan, and the bytes of its shares
    .out.ckpt-partial/claim-12-1               share 12 is being done, while this object is put again regularly
    .out.ckpt-partial/claim-12-2               another worker took it over
    .out.ckpt-partial/share-12                 share 12 is done: its record, for the worker that commits
    .out.ckpt-partial/claim-commit-1           a worker commits
    .out.ckpt-partial/.ckpt-journal-by-vm-7-0a the progress of a worker (or of a part: `-2-of-8`)

Works as `output.claims` does on a file system, except for the following. A store has no locks, so a dead worker is
recognised by its silence alone: while it works it puts its claim again every `BEAT` seconds. A claim that was not put
again for a lease is free, and whoever creates the next one takes it over. Times are compared within one listing, by the
store's clock. There is no mutual exclusion: two workers with the same share send the same bytes, and so do two that
commit. A worker tries claims at random without listing first; it lists after several failures, and in the background,
so that a claim costs one request even if few shares are left and two thousand workers compete for them.

Records count only while `plan` exists: the worker that commits removes it first, once the output is visible.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

from ckpt_tool.core.inner_path import is_journal
from ckpt_tool.errors import CkptError, OutputExists, SourceChanged
from ckpt_tool.storage.output import journal
from ckpt_tool.storage.output.claims import LEASE, Taken
from ckpt_tool.storage.output.replaced import RECORD
from ckpt_tool.storage.stores.multipart import StoreListing, md5
from ckpt_tool.storage.stores.output_store import OutputStore

T = TypeVar("T")
BEAT = 15.0  # seconds between two heartbeats
PLAN = "plan"
COMMIT = "commit"
AT_ONCE = 16  # requests for records at the same time
_TRIES = 4  # claims that are tried before the next listing
_CLAIM = re.compile(r"claim-(\d{1,9}|commit)-(\d{1,9})", re.ASCII)
_SHARE = re.compile(r"share-(\d{1,9})", re.ASCII)
_RECORD = re.compile(
    r"(?:claim|share|upload|held)-[0-9a-z]{1,9}(?:-\d{1,9})*", re.ASCII
)  # whatever a worker puts there


class _View(NamedTuple):
    """A listing, read."""

    now: float
    here: bool  # does the object `plan` exist?
    claims: dict[int | str, tuple[int, float]]  # share or `COMMIT` -> (generation, when it was put last)
    done: set[int]
    names: set[str]


class StoreClaims:
    """The claims on a plan's shares, for one worker. Use `begin`, `take`, `finish`, `take_commit`, `end`.

    Args:
        store: the place of the records.
        writer: a worker's name, or (i, n) for part i of n.
        sizes: bytes of each share of the plan.
        mine: the shares of a part; None for a worker that claims shares.
    """

    def __init__(
        self,
        store: OutputStore,
        plan_id: str,
        writer: journal.Writer,
        sizes: Sequence[int],
        mine: Collection[int] | None = None,
    ) -> None:
        self._store = store
        self._plan = plan_id
        self._sizes = sizes
        self._claims = mine is None
        self._me = journal.name_of(writer)
        self._token = token_hex(8)  # differs between processes, of which two may run the same part
        self._random = random.Random(f"{self._me} {self._token}")
        self._view = _View(0.0, True, {}, set(), set())
        self._own = set[int]()  # shares that this worker has claimed
        self.mine: Collection[int] = range(len(sizes)) if mine is None else mine  # shares that this worker may do
        self.first = self._went_on = False
        self._held = dict[int | str, str]()  # the claims that are kept alive
        self._next: Callable[[], Taken | None] | None = None
        self._said: Callable[[], None] = lambda: None
        self._began = time.time()
        self._ended = ""
        self._beat_at = time.monotonic()
        self._stop = threading.Event()
        self._beating = threading.Thread(target=self._go_on, daemon=True)
        self.moving: Callable[[], int] = lambda: 0  # bytes of the share that is being done

    # -- begin and end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> StoreClaims:
        """Join the plan's workers and start the heartbeat. Raises SourceChanged E0611 if another plan is running
        there."""
        self.begin()
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(CkptError):  # what went wrong before is reported
            self.end()

    def begin(self) -> None:
        """Join the plan's workers. Sets `first` for the one that creates the records."""
        line = {"plan": self._plan, "shares": list(self._sizes)}
        listing = self._store.listing()
        if PLAN not in listing.objects:
            self.first = self._create(PLAN, line)
        same = PLAN in listing.objects and listing.objects[PLAN].etag == md5(self._sealed(line)).hex()
        if not self.first and not same:
            theirs = journal.parsed(self._store.get(PLAN) or b"")
            if not theirs or theirs[0]["plan"] != self._plan:
                raise SourceChanged(
                    "the output was started with another plan",
                    code="E0611",
                    path=self._store.shown,
                    hint="run every worker with the same plan file, or remove what the other run left: ckpt clean",
                )
        self._view = _read(listing)._replace(here=True)
        self._went_on = self._me in self._view.names

    def end(self, *, done: bool = False) -> list[journal.PartStatus]:
        """Release unfinished claims and record that this process has ended.

        With `done` its part is complete, and the progress of all processes is returned.
        """
        self._rest()
        if not self._ended:
            self._ended = "done" if done else "ended"
            for name in self._held.values():
                self._store.remove(name)
            self.look()
            if not self.gone:
                self._put_status()
        return statuses(self._store) if done else []

    def clear(self) -> None:
        """Remove all records, the plan first."""
        self._rest()
        self._held.clear()
        self._ended = "done"
        remove_records(self._store)
        self._view = self._view._replace(here=False)

    def _rest(self) -> None:
        self._stop.set()
        if self._beating.is_alive():
            self._beating.join()
        for going_on in (self._next, self._said):
            with suppress(CkptError):
                if going_on is not None:
                    going_on()

    @property
    def gone(self) -> bool:
        """Has someone removed the records, who has committed or given up?"""
        return not self._view.here

    # -- claiming -----------------------------------------------------------------------------------------------------

    def take(self) -> Taken | None:
        """Claim a share that no other worker is doing; None if the latest listing shows none. For a part: its next
        share that is not done."""
        ahead = self._next
        self._next = None
        taken = ahead() if ahead is not None else None
        return taken or (self._take() if self._claims else self._own_next())

    def ahead(self) -> None:
        """Claim the next share in the background, called when the present one is nearly done."""
        if self._claims and self._next is None:
            self._next = self._aside(self._take)

    def _take(self) -> Taken | None:
        # First by the last listing, which costs nothing; then by a new one.
        for fresh in (False, True):
            if fresh:
                self.look()
            view = self._view  # the heartbeat may replace it with a newer one meanwhile
            free = self._free(view)
            for number in self._random.sample(free, min(_TRIES, len(free))):
                generation, _ = view.claims.get(number, (0, 0.0))
                if self._claim(view, number, generation + 1):
                    self._own.add(number)
                    return Taken(number, generation > 0)
        return None

    def _own_next(self) -> Taken | None:
        number = next((each for each in self.mine if each not in self._own and each not in self._view.done), None)
        if number is None:
            self._said()
            self.look()
            return None
        self._own.add(number)
        return Taken(number, self._went_on)

    def take_commit(self) -> bool:
        """Claim the commit; False if another worker has it. Only called when all shares are done."""
        view = self._view
        generation, _ = view.claims.get(COMMIT, (0, 0.0))
        return (not generation or _silent(view, COMMIT)) and self._claim(view, COMMIT, generation + 1)

    def commits_still(self) -> bool:
        """Does this worker still have the claim to commit, with a recent heartbeat? Checked before steps that must not
        be done twice."""
        self.beat()
        self.look()
        generation, _ = self._view.claims.get(COMMIT, (0, 0.0))
        return (
            self._held.get(COMMIT) == _claim_name(COMMIT, generation) and time.monotonic() - self._beat_at < LEASE / 4
        )

    def finish(self, number: int, record: journal.Line) -> None:
        """Record in the background that a share is done. It is recorded for certain when `left` returns or the next
        share is finished. Raises the error of the last such record."""
        self._said()
        self._said = self._aside(partial(self._say, number, self._sealed(record)))

    def _say(self, number: int, data: bytes) -> None:
        self._store.put(f"share-{number}", data, {}, new=False)
        self._view.done.add(number)
        self._held.pop(number, None)

    def _aside(self, job: Callable[[], T]) -> Callable[[], T]:
        """Start `job` in a thread. Returns a function that waits for its result."""
        future = Future[T]()

        def do() -> None:
            try:
                future.set_result(job())
            except CkptError as e:
                future.set_exception(e)

        threading.Thread(target=do, name="ckpt-claim", daemon=True).start()
        return future.result

    def records(self) -> Iterator[journal.Line]:
        """Yields the record of each share, in order; empty for a share whose record is damaged or missing."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for at in range(0, len(self._sizes), AT_ONCE):
                names = (f"share-{number}" for number in range(at, min(at + AT_ONCE, len(self._sizes))))
                for data in list(pool.map(self._store.get, names)):
                    lines = journal.parsed(data or b"")
                    yield lines[0] if lines and lines[0]["plan"] == self._plan else {}

    @property
    def done(self) -> set[int]:
        """The shares that are done, according to the last listing."""
        return self._view.done

    def left(self) -> int:
        """The number of shares that are not done, according to the last listing."""
        self._said()
        return len(self._sizes) - len(self._view.done)

    def look(self) -> None:
        """List the records again."""
        seen = _read(self._store.listing())
        # Shares that this worker has just recorded may be missing in the listing.
        if seen.here:
            seen.done.update(self._view.done & self._own)
        self._view = seen

    def _free(self, view: _View) -> list[int]:
        """Shares without a claim; if there are none, those whose worker has been silent for a lease."""
        left = [number for number in range(len(self._sizes)) if number not in view.done and number not in self._own]
        free = [number for number in left if number not in view.claims]
        return free or [number for number in left if _silent(view, number)]

    def _claim(self, view: _View, number: int | str, generation: int) -> bool:
        name = _claim_name(number, generation)
        if self._create(name, self._claiming()):
            self._held[number] = name
            return True
        view.claims[number] = (generation, view.now)  # another worker was quicker
        return False

    def _create(self, key: str, line: journal.Line) -> bool:
        return self._store.create(key, self._sealed(line))

    def _claiming(self) -> journal.Line:
        return {"plan": self._plan, "by": self._me, "process": self._token}

    def _sealed(self, line: journal.Line) -> bytes:
        return journal.sealed(self._plan, line)

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Put this worker's claims and its progress again."""
        began = time.monotonic()
        for name in list(self._held.values()):
            self._store.put(name, self._sealed(self._claiming()), {}, new=False)
        self._put_status()
        self._beat_at = began

    def _put_status(self) -> None:
        about: dict[str, Any] = {"pid": os.getpid(), "host": os.uname().nodename, "began": self._began}
        done = self._view.done & (self._own if self._claims else set(self.mine))
        nbytes = sum(self._sizes[number] for number in done) + self.moving()
        about |= {"units": len(done), "of_units": len(self.mine), "bytes": nbytes}
        about |= {"of_bytes": sum(self._sizes[number] for number in self.mine), "ended": self._ended}
        self._store.put(self._me, self._sealed({"plan": self._plan, "worker": about}), {}, new=False)

    def _go_on(self) -> None:
        pause = self._random.uniform(0, BEAT / 3)  # spreads the requests of thousands of workers that begin at once
        while not self._stop.wait(pause):
            pause = BEAT
            try:
                if not self._pulse():
                    return
            except CkptError:  # if the store stays unreachable, the work itself will fail too
                continue

    def _pulse(self) -> bool:
        """List, then beat. Puts nothing if another worker has committed and removed the records."""
        self.look()
        if not self.gone:
            self.beat()
        return not self.gone


def _claim_name(number: int | str, generation: int) -> str:
    return f"claim-{number}-{generation}"


def _silent(view: _View, number: int | str) -> bool:
    """Was a claim not put again for a lease?"""
    return view.claims[number][1] < view.now - LEASE


def _read(listing: StoreListing) -> _View:
    claims = dict[int | str, tuple[int, float]]()
    done = set[int]()
    for key, entry in listing.objects.items():
        if found := _CLAIM.fullmatch(key):
            number = found[1] if found[1] == COMMIT else int(found[1])
            claims[number] = max(claims.get(number, (0, 0.0)), (int(found[2]), entry.modified))
        elif found := _SHARE.fullmatch(key):
            done.add(int(found[1]))
    return _View(listing.now, PLAN in listing.objects, claims, done, set(listing.objects))


# -- for observers -----------------------------------------------------------------------------------------------------


def statuses(store: OutputStore) -> list[journal.PartStatus]:
    """The progress of every process that has begun, from the records; empty before the first and after the commit."""
    listing = store.listing()
    names = sorted(key for key in listing.objects if journal.is_writer(key))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = zip(names, pool.map(store.get, names), strict=True)
        return [_status(name, data or b"", listing) for name, data in found if data]


def _status(name: str, data: bytes, listing: StoreListing) -> journal.PartStatus:
    lines = journal.parsed(data)
    modified = listing.objects[name].modified
    about = lines[0].get("worker", {}) if lines else {}
    state = "dead"
    if modified > listing.now - LEASE and not about.get("ended"):
        state = "running"
    elif about.get("ended") == "done":
        state = "done"
    return journal.PartStatus(
        journal.part_of(name),
        state,
        int(about.get("units", 0)),
        int(about.get("of_units", 0)),
        int(about.get("bytes", 0)),
        int(about.get("of_bytes", 0)),
        0,
        float(about.get("began", 0)),
        modified,
        f"{about.get('pid')} on {about.get('host')}",
        journal.worker_of(name),
    )


def plan_of(store: OutputStore) -> str | None:
    """The identifier of the plan that is being executed, from the records; None if there is none."""
    lines = journal.parsed(store.get(PLAN) or b"")
    return lines[0]["plan"] if lines else None


class Done(NamedTuple):
    """The bytes of a plan's shares that are done, by any worker."""

    nbytes: int
    of_bytes: int


def done_of(store: OutputStore) -> Done | None:
    """How much of the plan is done; None before the first worker has begun and after the commit."""
    lines = journal.parsed(store.get(PLAN) or b"")
    sizes = lines[0].get("shares") if lines else None
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        return None
    done = (number for number in _read(store.listing()).done if number < len(sizes))
    return Done(sum(sizes[number] for number in done), sum(sizes))


def is_held(store: OutputStore) -> bool:
    """Is a worker running there?"""
    return any(each.state == "running" for each in statuses(store))


def refuse_held(store: OutputStore, destination: str) -> None:
    """Called before a single run writes the whole output: raises OutputExists E0503 if workers are writing it, and
    removes the records of dead ones."""
    there = any(is_record(key) and key != RECORD for key in store.listing().objects)
    if there and is_held(store):
        raise OutputExists(
            f"workers are writing {destination}",
            code="E0503",
            path=store.shown,
            hint="join them with ckpt apply PLAN --claim, or wait for them to end",
        )
    if there:
        remove_records(store, keep=RECORD)


def is_record(key: str) -> bool:
    """Is it the name of a record of ours? Other objects there are never touched."""
    return key in (PLAN, RECORD) or _RECORD.fullmatch(key) is not None or is_journal(key)


def remove_records(store: OutputStore, *, keep: str = "") -> None:
    """Remove all records but `keep`, the plan first: without it the others have no effect."""
    store.remove(PLAN)
    for _ in range(3):  # a worker that has not noticed yet may add to them
        left = [key for key in store.listing().objects if is_record(key) and key != keep]
        if not left:
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(store.remove, left))
