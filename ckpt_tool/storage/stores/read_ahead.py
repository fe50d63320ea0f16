"""Prefetching from a store: bytes that a thread has announced are fetched before it reads them, many requests at once.

    ahead.expect([("model-1.safetensors", 8 << 20, 64 << 20), ...])     # in the order in which they will be read
    ahead.take("model-1.safetensors", at, end)           # waits for the piece that holds `at`; in parts, as it came

Ranges of one file that are near each other become one request; long ones are cut into requests of 4 MiB, at multiples
of that in the object. Requests are begun in the announced order, as long as the bytes that are requested or not yet
read stay below `WINDOW` for all threads or `SHARE` for this one; a range that is read out of order is requested
immediately. Bytes before the last read of a file are dropped, and so is everything when new ranges are announced.
Ranges announced to follow those (`then`) are kept in a separate set, since they may precede them in the same file.
Memory: `WINDOW`, or `SHARE` per thread if that is more, plus the results of the last reads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue

from ckpt_tool.storage.stores.store import Parts

PIECE = 4 << 20  # bytes of one request, at most
NEAR = 512 << 10  # bytes: ranges closer than this are one request
SHORT = 512 << 10  # bytes: a shorter rest is added to the request before or after it
WINDOW = 32 << 20  # bytes requested or not yet read, of all threads
SHARE = 8 << 20  # the same of one thread, which may use so much even if WINDOW is exhausted
CONNECTIONS = 16  # requests at once, of one tree
IDLE = 10.0  # seconds without work after which a fetching thread ends

Fetch = Callable[[str, int, int], Parts]  # path, first byte, number of bytes -> them, in order
Range = tuple[str, int, int]  # path, first byte, number of bytes


class FetchedRange:
    """Bytes [start, stop) of a file that are to be fetched, being fetched, fetched, or failed."""

    __slots__ = ("_error", "_here", "_parts", "begun", "path", "start", "stop")

    def __init__(self, path: str, start: int, stop: int) -> None:
        self.path = path
        self.start = start
        self.stop = stop
        self.begun = False
        self._here = threading.Event()
        self._parts: Parts = ()
        self._error: BaseException | None = None

    def fill(self, fetch: Fetch) -> None:
        """Fetch the bytes. An error is kept for the thread that reads them."""
        try:
            self._parts = fetch(self.path, self.start, self.stop - self.start)
        except BaseException as e:  # raised in the thread that reads it
            self._error = e
        self._here.set()

    def take(self, at: int, end: int) -> list[memoryview]:
        """Those of bytes [at, end) that are in this range, in parts. Waits until they are fetched."""
        while not self._here.wait(0.5):  # with a timeout, so that a signal can interrupt the wait
            continue
        if self._error is not None:
            raise self._error
        return cut(self._parts, at - self.start, end - self.start)


def cut(parts: Parts, at: int, end: int) -> list[memoryview]:
    """Bytes [at, end) of parts that follow each other.

    >>> [bytes(part) for part in cut([memoryview(b"abc"), memoryview(b"def"), memoryview(b"ghi")], 1, 5)]
    [b'bc', b'de']
    """
    found = []
    start = 0
    for part in parts:
        stop = start + len(part)
        if stop > at and start < end:
            found.append(part if at <= start and stop <= end else part[max(0, at - start) : end - start])
        start = stop
    return found


class Fetchers:
    """The threads that fetch for all readers of a tree. A thread ends after `IDLE` seconds without work."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._wanted = SimpleQueue[FetchedRange]()
        self._threads = 0
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.held = 0  # bytes requested and not dropped yet, of all reading threads

    def hold(self, nbytes: int) -> None:
        """Add to `held`; negative when bytes are dropped."""
        with self._lock:
            self.held += nbytes

    def begin(self, piece: FetchedRange) -> None:
        """Have a thread fetch the piece: an idle one, a new one, or the next that becomes idle."""
        piece.begun = True
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._threads < CONNECTIONS:
                    self._threads += 1
                    threading.Thread(target=self._work, name="ckpt-fetch", daemon=True).start()
        self._wanted.put(piece)

    def _work(self) -> None:
        while True:
            try:
                piece = self._wanted.get(timeout=IDLE)
            except Empty:
                with self._lock:
                    if self._idle.acquire(blocking=False):
                        self._threads -= 1
                        return
                continue  # `begin` has counted on this thread: a piece will be in the queue
            piece.fill(self._fetch)
            del piece  # releases its memory while waiting for the next
            self._idle.release()


class Ahead:
    """The announced reads of one thread."""

    def __init__(self, fetchers: Fetchers) -> None:
        self._fetchers = fetchers
        self._coming = deque[FetchedRange]()  # ranges not requested yet, in order
        # By file: the ranges that are read now, and those announced with `then`.
        self._expected = deque[dict[str, list[FetchedRange]]]()
        self._held = 0  # bytes requested and not dropped yet, of this thread

    def expect(self, ranges: Iterable[Range], *, then: bool = False) -> None:
        """Announce the next reads and begin to fetch them. Earlier announcements are dropped.

        then: these reads follow the last announced ones, which are kept.
        """
        while self._expected and not (then and len(self._expected) == 1):
            self._forget_first()
        more = pieces_of(ranges)
        by_file = dict[str, list[FetchedRange]]()
        for piece in more:
            by_file.setdefault(piece.path, []).append(piece)
        for pieces in by_file.values():
            pieces.sort(key=lambda piece: piece.start)
        self._expected.append(by_file)
        self._coming.extend(more)
        self._begin_more()

    def take(self, path: str, at: int, end: int) -> list[memoryview]:
        """The announced bytes of [at, end), from `at` on, in parts; empty if byte `at` was not announced."""
        for number, by_file in enumerate(self._expected):
            pieces = by_file.get(path, [])
            found = bisect_right(pieces, at, key=lambda piece: piece.start) - 1
            if found < 0 or at >= pieces[found].stop:
                continue
            if number:  # the thread has passed on to the following reads
                self._forget_first()
            return self._take(pieces, found, at, end)
        return []

    def _take(self, pieces: list[FetchedRange], found: int, at: int, end: int) -> list[memoryview]:
        piece = pieces[found]
        self._forget(pieces, found)
        if not piece.begun:
            self._begin(piece)
        parts = piece.take(at, end)
        if end >= piece.stop:
            self._forget(pieces, 1)
        self._begin_more()
        return parts

    def _forget_first(self) -> None:
        for pieces in self._expected.popleft().values():
            self._forget(pieces, len(pieces))

    def _forget(self, pieces: list[FetchedRange], count: int) -> None:
        for piece in pieces[:count]:
            if piece.begun:
                self._hold(piece.start - piece.stop)
            piece.begun = True  # so that it is never requested
        del pieces[:count]

    def _begin(self, piece: FetchedRange) -> None:
        self._hold(piece.stop - piece.start)
        self._fetchers.begin(piece)

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        self._fetchers.hold(nbytes)

    def __del__(self) -> None:
        self._fetchers.hold(-self._held)

    def _begin_more(self) -> None:
        while self._coming and (self._coming[0].begun or self._held < SHARE or self._fetchers.held < WINDOW):
            piece = self._coming.popleft()
            if not piece.begun:
                self._begin(piece)


def pieces_of(ranges: Iterable[Range]) -> list[FetchedRange]:
    """The requests for the ranges, in their order. Neighbours are merged, and requests are cut at multiples of `PIECE`,
    as stores divide objects themselves. A rest shorter than `SHORT` before or after such a multiple is merged too.

    >>> [(p.start, p.stop) for p in pieces_of([("f", 0, 10), ("f", 100, 10), ("f", 5 << 20, 4 << 20)])]
    [(0, 110), (5242880, 8388608), (8388608, 9437184)]
    >>> [(p.start, p.stop) for p in pieces_of([("f", 99, (8 << 20) + 1)])]
    [(99, 4194304), (4194304, 8388708)]
    """
    runs: list[tuple[str, int, int]] = []
    for path, offset, nbytes in ranges:
        if runs:
            last, start, stop = runs[-1]
            if last == path and max(start, (stop - 1) // PIECE * PIECE) <= offset <= stop + NEAR:
                runs[-1] = path, start, max(stop, offset + nbytes)
                continue
        if nbytes > 0:
            runs.append((path, offset, offset + nbytes))
    return [FetchedRange(path, at, end) for path, start, stop in runs for at, end in _cuts(start, stop)]


def _cuts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = (start // PIECE + 1) * PIECE
        end += PIECE if end - start < SHORT else 0
        if stop - end < SHORT:
            end = stop
        yield start, end
        start = end
