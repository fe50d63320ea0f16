"""A tree behind a URL: the reading surface of `Tree` over any fsspec file system, by ranges.

The one idea: a store answers a range in tens of milliseconds whatever its length, so few and larger requests are made.
A read that nothing is known of fetches at least 64 KiB; a read that goes on where the last one of its thread ended
fetches twice as much as that one did, up to 2 MiB, and what was fetched beyond the request is kept for the next. No
file is ever fetched whole unless someone reads all of it.

    read 8 bytes at 0         -> fetches [0, 64 KiB)
    read 9,000 bytes at 8     -> from memory
    read 256 KiB at 64 KiB    -> fetches [64 KiB, 320 KiB); the next 256 KiB fetch 512 KiB, then 1 MiB, then 2 MiB

A store's file has no inode: its identity is made of its ETag (or checksum, or version), size and modification time.
Memory: at most 16 pieces of 2 MiB a thread. What it does not do: write, retry (the stores' clients do), follow links.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ckpt_tool.core.inner_path import FOLDERS
from ckpt_tool.errors import (
    CkptError,
    CorruptFile,
    SourceChanged,
    StorageError,
    UnsafeInput,
    UsageError,
    near_misses,
)
from ckpt_tool.storage.inline_arrays import INLINE, base_of
from ckpt_tool.storage.source import FILE_LIMIT, Identity, Tree, missing_file, safe_relative

FIRST_FETCH = 64 << 10  # bytes
LAST_FETCH = 2 << 20  # bytes
PIECES = 16  # kept a thread
_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "md5",
    "content_md5",
    "checksum",
    "sha256",
    "blob_id",
    "version_id",
    "generation",
    "ino",
)
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
# Exceptions of the stores' clients that are no OSError; looked up only where the client is loaded.
_FOREIGN = (
    ("botocore.exceptions", ("BotoCoreError", "ClientError")),
    ("aiohttp", ("ClientError",)),
    ("gcsfs.retry", ("HttpError",)),
    ("google.auth.exceptions", ("GoogleAuthError",)),
    ("huggingface_hub.errors", ("HfHubHTTPError", "EntryNotFoundError", "RepositoryNotFoundError")),
    ("requests.exceptions", ("RequestException",)),
    ("httpx", ("HTTPError",)),
    ("azure.core.exceptions", ("AzureError",)),
)


class RemoteTree(Tree):
    """The files below a URL. Thread-safe. `local` is False: `open` and `fd` have nothing to give."""

    local = False

    def __init__(self, url: str) -> None:
        """Raises UsageError E0247 (no package), E2502 (no such scheme), StorageError E0702 (nothing there), E0700."""
        self.shown = url
        self.bytes_read = 0
        self.requests = 0
        self._listing: dict[str, int] | None = None
        self._links, self._blobs = False, None
        self._lock = threading.Lock()
        self._local = threading.local()
        self._infos: dict[str, Mapping[str, Any]] = {}
        self._fs, base = _file_system(url)
        self._base = base.rstrip("/")
        self.single: str | None = None
        info = self._ask_store(base, "opening")
        if info["type"] == "file":
            self._base, _, self.single = self._base.rpartition("/")
            self._infos[self.single] = info
        self.root = Path(self._base)

    # -- listing --------------------------------------------------------------------------------------------------

    def listing(self) -> dict[str, int]:
        if self._listing is None:
            if self.single is not None:
                self._listing = {self.single: self.size(self.single)}
            else:
                found = self._find()
                self._check_case(found)
                self._listing = dict(sorted(found.items()))
        return self._listing

    def _find(self) -> dict[str, int]:
        try:
            entries = self._fs.find(self._base, maxdepth=FOLDERS + 1, withdirs=False, detail=True)
        except _errors() as e:
            self._fail(e, "", "listing")
        if len(entries) > FILE_LIMIT:
            raise CorruptFile(
                f"more than {FILE_LIMIT} files", code="E0310", path=self.shown, hint="pass the checkpoint's folder"
            )
        found: dict[str, int] = {}
        for name, info in entries.items():
            path = name.removeprefix(self._base).lstrip("/")
            if any(part in ("", ".", "..") for part in path.split("/")):
                safe_relative(path, named_in=self.shown)  # a store's key may be anything; ours name local files too
            size = info.get("size")
            regular = info["type"] == "file" and not info.get("islink") and isinstance(size, int)
            found[path] = size if regular else -1
            self._infos[path] = info
        return found

    def below(self, folder: str) -> Tree:
        return RemoteTree(self.display(folder))

    # -- what a file is -------------------------------------------------------------------------------------------

    def open(self, path: str) -> int:
        """Never gives a descriptor. Raises Incomplete for a missing file, StorageError E0710 else."""
        self._info(path)
        raise StorageError(
            "a file behind a URL has no descriptor",
            code="E0710",
            path=self.display(path),
            hint="copy it to this machine first",
        )

    def fd(self, path: str) -> int:
        return self.open(path)

    def identity(self, path: str) -> Identity:
        """The identity at first sight."""
        path = base_of(path)
        return _identity(self.shown, path, self._info(path))

    def identity_by_name(self, path: str) -> Identity:
        """The identity now, asked of the store again."""
        path = base_of(path)
        self._fs.invalidate_cache()
        return _identity(self.shown, path, self._ask_store(self._key(path), "looking at", path))

    def size(self, path: str) -> int:
        return int(self._info(path)["size"])

    def _key(self, path: str) -> str:
        return f"{self._base}/{path}"

    def _info(self, path: str) -> Mapping[str, Any]:
        info = self._infos.get(path)
        if info is None:
            info = self._infos[path] = self._ask_store(self._key(path), "looking at", path)
        if info["type"] != "file" or info.get("islink") or not isinstance(info.get("size"), int):
            raise UnsafeInput(
                f"{path} is not a regular file of known size",
                code="E0413",
                path=self.display(path),
                hint="copy the checkpoint to this machine first",
            )
        return info

    def _ask_store(self, key: str, doing: str, path: str | None = None) -> Mapping[str, Any]:
        try:
            info: Mapping[str, Any] = self._fs.info(key)
        except FileNotFoundError as e:
            if path is not None:
                raise missing_file(path, self.display(path)) from e
            raise StorageError(
                f"{self.shown} does not exist", code="E0702", path=self.shown, hint="check the URL"
            ) from e
        except _errors() as e:
            self._fail(e, path or "", doing)
        return info

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`. Raises CorruptFile when the file ends before."""
        if path.endswith(INLINE):
            return self._read_view(base_of(path), offset, nbytes)
        size = self.size(path)
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise CorruptFile(
                f"want {nbytes} bytes at {offset}, but the file has {size}",
                code="E0311",
                path=self.display(path),
                offset=min(max(offset, 0), size),
                hint="the file is cut short: compare its size with the source",
            )
        pieces = self._pieces()
        parts, at, end = [], offset, offset + nbytes
        while at < end:
            part = pieces.take(path, at, end)
            if not part:
                length = min(max(end - at, pieces.ahead(path, at)), max(LAST_FETCH, FIRST_FETCH), size - at)
                pieces.keep(path, at, self._fetch(path, at, length))
                continue
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _pieces(self) -> _Pieces:
        pieces: _Pieces | None = getattr(self._local, "pieces", None)
        if pieces is None:
            pieces = self._local.pieces = _Pieces()
        return pieces

    def _fetch(self, path: str, at: int, nbytes: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(self._key(path), start=at, end=at + nbytes)
        except FileNotFoundError as e:
            raise self._gone(path, at) from e
        except _errors() as e:
            self._fail(e, path, "reading", at)
        with self._lock:
            self.bytes_read += len(data)
            self.requests += 1
        if len(data) != nbytes:
            if self.identity_by_name(path) != self.identity(path):
                raise self._gone(path, at)
            raise StorageError(
                f"the store gave {len(data)} bytes where {nbytes} were asked for",
                code="E0703",
                path=self.display(path),
                offset=at,
                hint="try again; if it lasts, copy the checkpoint to this machine first",
            )
        return data

    def _gone(self, path: str, at: int) -> SourceChanged:
        return SourceChanged(
            "the file changed in the store while it was read",
            code="E0603",
            path=self.display(path),
            offset=at,
            hint="run again when nothing writes to it any more",
        )

    def close(self) -> None:
        """Forget what this thread has kept."""
        self._local.pieces = _Pieces()

    def _fail(self, error: BaseException, path: str, doing: str, offset: int | None = None) -> NoReturn:
        """An error of the store's client as ours."""
        reason = f"{type(error).__name__}: {str(error) or 'no reason given'}"[:300]
        denied = isinstance(error, PermissionError) or "redential" in reason or "403" in reason
        raise StorageError(
            f"{doing} failed: {reason}",
            code="E0700",
            path=self.display(path),
            offset=offset,
            hint="log in to the store as its own tool does (aws configure, gcloud auth login, hf auth login)"
            if denied
            else "check the URL and the network, then try again",
        ) from error


class _Pieces:
    """One thread's fetched pieces, the least recently used dropped first, and where each file's last fetch ended."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._last: dict[str, tuple[int, int]] = {}  # path -> (end of the last fetch, its length)

    def take(self, path: str, at: int, end: int) -> bytes:
        """What is kept of [at, end), from `at` on; b"" when nothing."""
        for (name, start), data in self._kept.items():
            if name == path and start <= at < start + len(data):
                self._kept.move_to_end((name, start))
                return data[at - start : end - start]
        return b""

    def ahead(self, path: str, at: int) -> int:
        """How many bytes to fetch at least: more for a file that is read on from where its last fetch ended."""
        end, length = self._last.get(path, (-1, 0))
        return min(2 * length, LAST_FETCH) if at == end else FIRST_FETCH

    def keep(self, path: str, at: int, data: bytes) -> None:
        self._last[path] = (at + len(data), len(data))
        self._kept[path, at] = data
        while len(self._kept) > PIECES:
            self._kept.popitem(last=False)


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for `url`, and the path in it."""
    install = "pip install 'ckpt-tool[remote]'"
    try:
        import fsspec
    except ImportError as e:
        raise UsageError(f"reading {url} needs the extra `remote`", code="E0247", hint=install) from e
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except ImportError as e:
        raise UsageError(
            f"this store needs a package that is not installed: {e}", code="E0247", path=url, hint=install
        ) from e
    except ValueError as e:
        scheme = url.partition(":")[0]
        raise UsageError(
            f"the URL can't be opened: {e}",
            code="E2502",
            path=url,
            hint=near_misses(scheme, fsspec.available_protocols()) or "the common schemes are s3://, gs:// and hf://",
        ) from e
    return found


def _errors() -> tuple[type[BaseException], ...]:
    """What a store's client may raise: OSErrors, and the classes of the clients that are loaded."""
    found: list[type[BaseException]] = [OSError, ValueError, NotImplementedError]
    for module, names in _FOREIGN:
        loaded = sys.modules.get(module)
        found += [kind for name in names if isinstance(kind := getattr(loaded, name, None), type)]
    return tuple(kind for kind in found if not issubclass(kind, CkptError))


def _identity(url: str, path: str, info: Mapping[str, Any]) -> Identity:
    """(url, mark, size, time): the mark is the ETag or whatever else changes with the content."""
    mark = next((f"{name}={info[name]}" for name in _MARKS if info.get(name)), "")
    time = next((info[name] for name in _TIMES if info.get(name) is not None), "")
    return Identity(_number(url), _number(f"{path}\0{mark}"), int(info["size"]), _number(_stamp(time)), 0)


def _stamp(time: object) -> str:
    """A time in one spelling: stores give datetimes, seconds or text, sometimes one in lists and another alone."""
    if isinstance(time, datetime.datetime):
        time = time.timestamp()
    return f"{time:.6f}" if isinstance(time, int | float) else str(time)


def _number(text: str) -> int:
    """63 bits of a hash: identities are numbers."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1
