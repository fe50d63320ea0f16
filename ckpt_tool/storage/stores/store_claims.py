"""Claims in a store: workers of one plan that share no disk agree by objects that only one of them can create.

    .out.ckpt-partial/plan                     the plan, and the bytes of its shares
    .out.ckpt-partial/claim-12-1               share 12 is being done, for as long as this is put again
    .out.ckpt-partial/claim-12-2               another took it over
    .out.ckpt-partial/share-12                 share 12 is done, with what the one that commits has to know of it
    .out.ckpt-partial/claim-commit-1           someone commits
    .out.ckpt-partial/.ckpt-journal-by-vm-7-0a a worker, or `-2-of-8` a part, with how far it is

As `output.claims`, with what differs. A store has no locks, so a dead worker is known by its silence alone: while it
works it puts its claim again every `BEAT` seconds, and one that was not put again for a lease is anybody's who creates
the next. Times are compared within one listing, as the store gives them. Nothing here excludes: two that do the same
share send the same bytes, and so do two that commit. A worker tries claims blindly, at places of its own; it lists when
several were taken, and beside its work, so that a claim costs one request where few are left and two thousand want it.

`plan` is what makes the rest count: the one that commits removes it first, after the output is there.
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
BEAT = 15.0  # seconds between two signs of life
PLAN = "plan"
COMMIT = "commit"
AT_ONCE = 16  # requests for records
_TRIES = 4  # claims that are tried before the next listing
_CLAIM = re.compile(r"claim-(\d{1,9}|commit)-(\d{1,9})", re.ASCII)
_SHARE = re.compile(r"share-(\d{1,9})", re.ASCII)
_RECORD = re.compile(
    r"(?:claim|share|upload|held)-[0-9a-z]{1,9}(?:-\d{1,9})*", re.ASCII
)  # whatever a worker puts there


class _View(NamedTuple):
    """A listing, read."""

    now: float
    here: bool  # is the plan?
    claims: dict[int | str, tuple[int, float]]  # share or `COMMIT` -> (generation, when it was put last)
    done: set[int]
    names: set[str]


class StoreClaims:
    """The claims on a plan's shares, for one worker. Use `begin`, `take`, `finish`, `take_commit`, `end`.

    Args:
        store: the place of the records. writer: a worker's name, or the part (i, n) that this is.
        sizes: bytes of the plan's shares. mine: those of a part, None for a worker that claims.
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
        self._token = token_hex(8)  # two processes may be the same part
        self._random = random.Random(f"{self._me} {self._token}")
        self._view = _View(0.0, True, {}, set(), set())
        self._own = set[int]()  # shares that this worker has claimed
        self.mine: Collection[int] = range(len(sizes)) if mine is None else mine  # that it may do
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
        """Be one of the plan's workers, and give signs of life from now on. Raises SourceChanged E0611 where another
        plan is being carried out."""
        self.begin()
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(CkptError):  # what went wrong before is reported
            self.end()

    def begin(self) -> None:
        """Say that this worker is there; `first`: it is the first of them."""
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
        """Let go of what is not finished, and say that this process has ended. done: its part is. Returns how far all
        are."""
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
        """A share that nobody does, now this worker's; None where there is none, by what was seen just now. Of a part:
        the next of its own that is not done."""
        ahead = self._next
        self._next = None
        taken = ahead() if ahead is not None else None
        return taken or (self._take() if self._claims else self._own_next())

    def ahead(self) -> None:
        """The share that is being done is so soon: claim the next, beside the work."""
        if self._claims and self._next is None:
            self._next = self._aside(self._take)

    def _take(self) -> Taken | None:
        for fresh in (False, True):
            if fresh:
                self.look()
            view = self._view  # another look, beside, may take its place meanwhile
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
        """Is it this worker that commits? Only asked when all is done."""
        view = self._view
        generation, _ = view.claims.get(COMMIT, (0, 0.0))
        return (not generation or _silent(view, COMMIT)) and self._claim(view, COMMIT, generation + 1)

    def commits_still(self) -> bool:
        """Was this worker heard of in time, and has nobody taken over the commit? For what can't be done twice."""
        self.beat()
        self.look()
        generation, _ = self._view.claims.get(COMMIT, (0, 0.0))
        return (
            self._held.get(COMMIT) == _claim_name(COMMIT, generation) and time.monotonic() - self._beat_at < LEASE / 4
        )

    def finish(self, number: int, record: journal.Line) -> None:
        """Say that a share is done, beside what comes next: it is said when `left` returns, or the next is finished.
        Raises what went wrong with the last."""
        self._said()
        self._said = self._aside(partial(self._say, number, self._sealed(record)))

    def _say(self, number: int, data: bytes) -> None:
        self._store.put(f"share-{number}", data, {}, new=False)
        self._view.done.add(number)
        self._held.pop(number, None)

    def _aside(self, job: Callable[[], T]) -> Callable[[], T]:
        """Do it beside; what comes back waits for it."""
        future = Future[T]()

        def do() -> None:
            try:
                future.set_result(job())
            except CkptError as e:
                future.set_exception(e)

        threading.Thread(target=do, name="ckpt-claim", daemon=True).start()
        return future.result

    def records(self) -> Iterator[journal.Line]:
        """What was said of the shares, in order; nothing of one whose record is damaged or gone."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for at in range(0, len(self._sizes), AT_ONCE):
                names = (f"share-{number}" for number in range(at, min(at + AT_ONCE, len(self._sizes))))
                for data in list(pool.map(self._store.get, names)):
                    lines = journal.parsed(data or b"")
                    yield lines[0] if lines and lines[0]["plan"] == self._plan else {}

    @property
    def done(self) -> set[int]:
        """Shares that are done, by the last look."""
        return self._view.done

    def left(self) -> int:
        """Shares that are not done, by the last look."""
        self._said()
        return len(self._sizes) - len(self._view.done)

    def look(self) -> None:
        """See how far all are."""
        seen = _read(self._store.listing())
        if seen.here:
            seen.done.update(self._view.done & self._own)
        self._view = seen

    def _free(self, view: _View) -> list[int]:
        """Shares that nobody has claimed; where there are none, those whose worker is silent."""
        left = [number for number in range(len(self._sizes)) if number not in view.done and number not in self._own]
        free = [number for number in left if number not in view.claims]
        return free or [number for number in left if _silent(view, number)]

    def _claim(self, view: _View, number: int | str, generation: int) -> bool:
        name = _claim_name(number, generation)
        if self._create(name, self._claiming()):
            self._held[number] = name
            return True
        view.claims[number] = (generation, view.now)  # by another, who was quicker
        return False

    def _create(self, key: str, line: journal.Line) -> bool:
        return self._store.create(key, self._sealed(line))

    def _claiming(self) -> journal.Line:
        return {"plan": self._plan, "by": self._me, "process": self._token}

    def _sealed(self, line: journal.Line) -> bytes:
        return journal.sealed(self._plan, line)

    # -- signs of life ------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Put what this worker holds, and how far it is, once more."""
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
        pause = self._random.uniform(0, BEAT / 3)  # thousands may begin at once
        while not self._stop.wait(pause):
            pause = BEAT
            try:
                if not self._pulse():
                    return
            except CkptError:  # the work itself will fail too, if that lasts
                continue

    def _pulse(self) -> bool:
        """Look, then beat; nothing is put again where another has committed and cleaned up."""
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


# -- for those who look on ---------------------------------------------------------------------------------------------


def statuses(store: OutputStore) -> list[journal.PartStatus]:
    """How far every process is that has begun, by the records; none where nobody has, or all is committed."""
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
    """The plan that is being carried out, by the records."""
    lines = journal.parsed(store.get(PLAN) or b"")
    return lines[0]["plan"] if lines else None


class Done(NamedTuple):
    """How much of a plan is done, by its shares, whoever did them."""

    nbytes: int
    of_bytes: int


def done_of(store: OutputStore) -> Done | None:
    """None where nobody has begun, or all is committed."""
    lines = journal.parsed(store.get(PLAN) or b"")
    sizes = lines[0].get("shares") if lines else None
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        return None
    done = (number for number in _read(store.listing()).done if number < len(sizes))
    return Done(sum(sizes[number] for number in done), sum(sizes))


def is_held(store: OutputStore) -> bool:
    """Is someone at work there?"""
    return any(each.state == "running" for each in statuses(store))


def refuse_held(store: OutputStore, destination: str) -> None:
    """Before one run writes it all: raise OutputExists E0503 where workers share the output out; what dead ones have
    left goes."""
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
    """Is it the name of a record of ours? Whatever else somebody keeps there is not touched."""
    return key in (PLAN, RECORD) or _RECORD.fullmatch(key) is not None or is_journal(key)


def remove_records(store: OutputStore, *, keep: str = "") -> None:
    """Remove all records but `keep`, the plan first: without it the others say nothing."""
    store.remove(PLAN)
    for _ in range(3):  # a worker that has not noticed yet may add to them
        left = [key for key in store.listing().objects if is_record(key) and key != keep]
        if not left:
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(store.remove, left))
