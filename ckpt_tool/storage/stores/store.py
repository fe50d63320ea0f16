"""The interface of a store for trees behind a URL, and the retries for a store that does not answer.

A store is a bucket and a place in it. It lists the objects below that place, looks up one object and gets ranges of it,
each pinned to the version that was seen first. `stores.object_store` implements it for S3, Google Cloud and Azure,
`stores.fsspec_store` for every other scheme. Keys are relative to the place; "" is the place itself.

`patiently` retries when that may help: after 0.2 s, then twice as long each time, half of it at random so that many
clients do not come back together; 30 s in all, two minutes if the store asks for fewer requests. Every wait is reported
(`core.progress.aside`), one line a second at most. A server's `Retry-After` is obeyed if the client passes it on: boto3
does, obstore 0.12 does not.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ckpt_tool.core.progress import aside

T = TypeVar("T")
Parts = Sequence[memoryview]  # bytes that follow each other
FIRST_WAIT = 0.2  # seconds before the first retry
LONGEST_WAIT = 8.0  # seconds between two retries, at most
UNANSWERED = 30.0  # seconds of all retries of a store that does not answer
THROTTLED = 120.0  # seconds of all retries of a store that asks for fewer requests
_said_at = 0.0
_saying = threading.Lock()


class StoreEntry(NamedTuple):
    """An object as a listing or look-up showed it."""

    size: int  # bytes, -1 if it is not a regular file
    mark: str = ""  # its ETag, or another value that changes with its content
    time: str = ""  # the time of its last change, if there is no mark


class ObjectChanged(Exception):
    """The object is another one than the entry that it was pinned to."""


class Store(Protocol):
    """Thread-safe. Raises FileNotFoundError for a missing object, CkptError for all else."""

    def single(self) -> StoreEntry | None:
        """The entry of the place itself if it is an object, None if it is a folder. Raises FileNotFoundError if there
        is nothing."""
        ...

    def list(self) -> dict[str, StoreEntry]:
        """Everything below the place."""
        ...

    def look(self, key: str) -> StoreEntry:
        """The object as it is now."""
        ...

    def get(self, key: str, start: int, stop: int, pinned: StoreEntry) -> Parts:
        """Bytes [start, stop) of the object in parts, in order, fewer where it ends. Raises Changed."""
        ...

    def parent(self, name: str) -> Store:
        """The folder that holds the place. name: the key of the place there, which has no secrets as a URL may."""
        ...

    def below(self, folder: str) -> Store:
        """A folder below the place."""
        ...


class Again(NamedTuple):
    """Why a request is retried."""

    reason: str
    throttled: bool = False  # the store asks for fewer requests
    wait: float = 0.0  # seconds for which the store asks


def patiently(
    ask: Callable[[], T],
    *,
    shown: str,
    faults: tuple[type[Exception], ...],
    judge: Callable[[Exception], Again | None],
) -> T:
    """Returns what `ask` returns, retrying it after errors.

    Args:
        faults: the exceptions after which a retry is considered.
        judge: decides whether an error is worth a retry; None if not.

    Raises the last error, with the one before it as its cause if it was not the first.
    """
    began = time.monotonic()
    wait = FIRST_WAIT
    before: Exception | None = None
    while True:
        try:
            return ask()
        except faults as e:
            again = judge(e)
            limit = THROTTLED if again and again.throttled else UNANSWERED
            left = limit - (time.monotonic() - began)
            if again is None or max(wait, again.wait) >= left:
                if before is None:
                    raise
                raise e from before
            before = e
            pause = max(wait * random.uniform(0.5, 1.0), again.wait)
            _say(f"{shown}: {again.reason}, trying again in {pause:.1f} s, for {left:.0f} s more at most")
        time.sleep(pause)
        wait = min(2 * wait, LONGEST_WAIT)


def _say(message: str) -> None:
    global _said_at
    with _saying:
        now = time.monotonic()
        if now - _said_at < 1.0:
            return
        _said_at = now
    aside(message)
