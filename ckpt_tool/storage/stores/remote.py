"""A tree behind a URL: the reading surface of `Tree` over a store, by ranges.

The one idea: a store answers a range in tens of milliseconds whatever its length, so few and larger requests are made,
many of them at once. Who knows what it will read says so (`expect`, see `stores.read_ahead`). Of the rest, a read that
nothing is known of fetches at least 64 KiB; a read that goes on where the last one of its thread ended fetches twice as
much as that one did, up to 2 MiB, and what was fetched beyond the request is kept for the next. No file is ever fetched
whole unless someone reads all of it.

    read 8 bytes at 0         -> fetches [0, 64 KiB)
    read 9,000 bytes at 8     -> from memory
    read 256 KiB at 64 KiB    -> fetches [64 KiB, 320 KiB); the next 256 KiB fetch 512 KiB, then 1 MiB, then 2 MiB

A store's file has no inode: its identity consists of its ETag (or checksum, or version), size and modification time, as
they were when the tree was opened; every range that is fetched is checked against it. One listing serves a folder and
the folders below. Memory: at most 16 pieces of 2 MiB a thread, and what is fetched ahead. What it does not do: write,
follow links.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt_tool.core.inner_path import FOLDERS, base_of, is_view
from ckpt_tool.core.urls import last_name
from ckpt_tool.errors import CorruptFile, Incomplete, SourceChanged, StorageError, UnsafeInput
from ckpt_tool.storage.records import past_the_end
from ckpt_tool.storage.source import (
    FILE_LIMIT,
    TOO_DEEP,
    Identity,
    Tree,
    changed_while_read,
    missing_file,
    safe_relative,
)
from ckpt_tool.storage.stores.read_ahead import PIECE, Ahead, Fetchers, Range, cut
from ckpt_tool.storage.stores.store import ObjectChanged, Parts, Store, StoreEntry
from ckpt_tool.storage.views import behind

FIRST_FETCH = 64 << 10  # bytes that are fetched at a time; doubled with each fetch that continues the last one
LAST_FETCH = 2 << 20  # bytes up to which they are doubled
PIECES = 16  # fetched pieces that each thread keeps


class RemoteTree(Tree):
    """The files below a URL. Thread-safe. `local` is False: files have no descriptors, so `open` and `fd` raise."""

    local = False

    def __init__(self, url: str, store: Store, *, listed: dict[str, StoreEntry] | None = None) -> None:
        """Looks the URL up, unless `listed`, the entries of the files below it, is given. Raises StorageError E0702 if
        there is nothing, and what the store raises."""
        self.shown = url
        self.bytes_read = 0
        self.requests = 0
        self._listing: dict[str, int] | None = None
        self._links = False
        self._blobs = None
        self._lock = threading.Lock()
        self._local = threading.local()
        self._entries: dict[str, StoreEntry] = {}
        self._fetched: set[str] = set()  # files of which something was read
        self._store = store
        self._listed = listed
        self.single: str | None = None
        if listed is None:
            try:
                entry = store.single()
            except FileNotFoundError as e:
                raise StorageError(f"{url} does not exist", code="E0702", path=url, hint="check the URL") from e
            if entry is not None:
                self.single = last_name(url)
                self._entries[self.single] = entry
                self._store = store.parent(self.single)
        self.root = Path(url)
        self._fetchers = Fetchers(self._fetch)

    # -- listing --------------------------------------------------------------------------------------------------

    def listing(self) -> dict[str, int]:
        """As `Tree.listing`, with one request for a folder."""
        if self._listing is None:
            if self.single is not None:
                self._listing = {self.single: self.size(self.single)}
            else:
                found = self._find()
                self._check_case(found)
                self._listing = dict(sorted(found.items()))
        return self._listing

    def _find(self) -> dict[str, int]:
        entries = self._store.list() if self._listed is None else self._listed
        if len(entries) > FILE_LIMIT:
            raise CorruptFile(
                f"more than {FILE_LIMIT} files", code="E0310", path=self.shown, hint="pass the checkpoint's folder"
            )
        found: dict[str, int] = {}
        self.left_out = {}
        for path, entry in entries.items():
            parts = path.split("/")
            if any(part in ("", ".", "..") for part in parts):
                # a key may be any text, but the path is used for local files too
                safe_relative(path, named_in=self.shown)
            if len(parts) <= FOLDERS + 1:
                found[path] = entry.size
                self._entries[path] = entry
            else:
                self.left_out[path] = TOO_DEEP
        return found

    def below(self, folder: str) -> Tree:
        """The tree of a sub-folder, from this tree's listing."""
        inside = {
            path.removeprefix(f"{folder}/"): self._entries[path]
            for path in self.listing()
            if path.startswith(f"{folder}/")
        }
        tree = RemoteTree(self.display(folder), self._store.below(folder), listed=inside or None)
        tree.above = self
        return tree

    # -- what a file is -------------------------------------------------------------------------------------------

    def open(self, path: str) -> int:
        """Never gives a descriptor. Raises Incomplete for a missing file, StorageError E0710 else."""
        self._entry(path)
        raise StorageError(
            "a file behind a URL has no descriptor",
            code="E0710",
            path=self.display(path),
            hint="copy it to this machine first",
        )

    def fd(self, path: str) -> int:
        """Raises as `open`."""
        return self.open(path)

    def identity(self, path: str) -> Identity:
        """The identity of the file when it was first looked up."""
        path = base_of(path)
        return _identity(self.shown, path, self._entry(path))

    def identity_by_name(self, path: str) -> Identity:
        """The identity of the file now, from a new request."""
        path = base_of(path)
        return _identity(self.shown, path, self._look(path))

    def identities_by_name(self, paths: Iterable[str]) -> list[Identity | None]:
        """The same for several files; for those of a folder with one listing."""
        names = [base_of(path) for path in paths]
        if self.single is not None or len(names) < 2:
            return super().identities_by_name(names)
        now = self._store.list()
        return [_identity(self.shown, name, now[name]) if name in now else None for name in names]

    def check_unchanged(self, *, pointers: bool = True) -> None:
        """As `Tree.check_unchanged`, by one listing, or one request for a single file."""
        names = sorted(self._fetched)
        try:
            found = self.identities_by_name(names)
        except Incomplete:
            raise changed_while_read(self.display()) from None
        for name, now in zip(names, found, strict=True):
            if now != self.identity(name):
                raise changed_while_read(self.display(name))
        if pointers and self.above is not None:
            self.above.check_unchanged()

    def watch(self, paths: Iterable[str]) -> None:
        """Include files in `check_unchanged` although nothing is read of them."""
        for path in paths:
            self._entry(path)
            self._fetched.add(path)

    def size(self, path: str) -> int:
        """The size in bytes of a file or a view."""
        return self.views.size(path) if is_view(path) else self._entry(path).size

    def _entry(self, path: str) -> StoreEntry:
        entry = self._entries.get(path)
        if entry is None:
            entry = self._entries[path] = self._look(path)
        if entry.size < 0:
            raise UnsafeInput(
                f"{path} is not a regular file of known size",
                code="E0413",
                path=self.display(path),
                hint="copy the checkpoint to this machine first",
            )
        return entry

    def _look(self, path: str) -> StoreEntry:
        # The listing is complete, so no request is needed for a file that it does not have.
        if self._listing is not None and self.single is None and path not in self._entries:
            raise missing_file(path, self.display(path))
        try:
            return self._store.look(path)
        except FileNotFoundError as e:
            raise missing_file(path, self.display(path)) from e

    # -- reading --------------------------------------------------------------------------------------------------

    def expect(self, ranges: Iterable[Range], *, then: bool = False) -> None:
        found = (behind(*wanted) if is_view(wanted[0]) else wanted for wanted in ranges)
        self._mine().ahead.expect((wanted for wanted in found if wanted[2]), then=then)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`. Raises CorruptFile when the file ends before."""
        return bytes(self.view(path, offset, nbytes))

    def view(self, path: str, offset: int, nbytes: int) -> bytes | memoryview:
        """As `read`, without a copy if all of it is in one buffer that was fetched."""
        if nbytes > PIECE and not is_view(path):
            self._check(path, offset, nbytes)
            whole = memoryview(bytearray(nbytes))
            self.fill(path, offset, whole)
            return whole
        parts = self.parts(path, offset, nbytes)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fill(self, path: str, offset: int, view: memoryview) -> None:
        """Fill all of `view` from byte `offset` of a file."""
        at = 0
        for part in self._parts(path, offset, len(view)):
            view[at : at + len(part)] = part
            at += len(part)

    def parts(self, path: str, offset: int, nbytes: int) -> list[memoryview]:
        """As `read`, as a list of the buffers that were fetched, without a copy."""
        return list(self._parts(path, offset, nbytes))

    def _parts(self, path: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        if is_view(path):
            yield memoryview(self.views.read(path, offset, nbytes))
            return
        size = self._check(path, offset, nbytes)
        mine = self._mine()
        at = offset
        end = offset + nbytes
        while at < end:
            parts = mine.ahead.take(path, at, end) or mine.take(path, at, end)
            if not parts and end - at > PIECE:  # a long read that was not announced: many requests at once
                mine.ahead.expect([(path, at, end - at)])
            elif not parts:
                length = min(max(end - at, mine.next_fetch(path, at)), LAST_FETCH, size - at)
                mine.keep(path, at, length, self._fetch(path, at, length))
            for part in parts:
                yield part
                at += len(part)

    def _check(self, path: str, offset: int, nbytes: int) -> int:
        """The file's size. Raises CorruptFile for bytes that it does not have."""
        size = self.size(path)
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise past_the_end(self.display(path), offset, nbytes, size)
        return size

    def _mine(self) -> _Pieces:
        pieces: _Pieces | None = getattr(self._local, "pieces", None)
        if pieces is None:
            pieces = self._local.pieces = _Pieces(Ahead(self._fetchers))
        return pieces

    def _fetch(self, path: str, at: int, nbytes: int) -> Parts:
        try:
            data = self._store.get(path, at, at + nbytes, self._entry(path))
        except (FileNotFoundError, ObjectChanged) as e:
            raise SourceChanged(
                "the file changed in the store while it was read",
                code="E0603",
                path=self.display(path),
                offset=at,
                hint="run again when nothing writes to it any more",
            ) from e
        got = sum(map(len, data))
        with self._lock:
            self.bytes_read += got
            self._fetched.add(path)
            self.requests += 1
        if got != nbytes:
            raise StorageError(
                f"the store gave {got} bytes where {nbytes} were asked for",
                code="E0703",
                path=self.display(path),
                offset=at,
                hint="try again; if it lasts, copy the checkpoint to this machine first",
            )
        return data

    def close(self) -> None:
        """Drop the pieces that this thread has kept."""
        self._local.pieces = None


class _Pieces:
    """One thread's fetched pieces, the least recently used dropped first, and where each file's last fetch ended."""

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead
        self._kept: OrderedDict[tuple[str, int], tuple[int, Parts]] = OrderedDict()
        self._last: dict[str, tuple[int, int]] = {}  # path -> (end of the last fetch, its length)

    def take(self, path: str, at: int, end: int) -> list[memoryview]:
        """The kept bytes of [at, end), from `at` on, in parts; empty if byte `at` is not kept."""
        for (name, start), (length, parts) in self._kept.items():
            if name == path and start <= at < start + length:
                self._kept.move_to_end((name, start))
                return cut(parts, at - start, end - start)
        return []

    def next_fetch(self, path: str, at: int) -> int:
        """The least number of bytes to fetch: twice the last fetch if the read continues where that ended."""
        end, length = self._last.get(path, (-1, 0))
        return min(2 * length, LAST_FETCH) if at == end else FIRST_FETCH

    def keep(self, path: str, at: int, length: int, parts: Parts) -> None:
        """Keep a fetched piece, and drop the least recently used ones beyond `PIECES`."""
        self._last[path] = (at + length, length)
        self._kept[path, at] = length, parts
        while len(self._kept) > PIECES:
            self._kept.popitem(last=False)


def _identity(url: str, path: str, entry: StoreEntry) -> Identity:
    """(url, mark, size, time) as numbers."""
    return Identity(_number(url), _number(f"{path}\0{entry.mark}"), entry.size, _number(entry.time), 0)


def _number(text: str) -> int:
    """63 bits of a hash: identities are numbers."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1
