"""Stores that fsspec knows and `stores.object_store` does not: `hf://`, `memory://`, and every scheme whose own
package is installed; also `s3://`, `gs://` and `az://` where obstore is not installed.

What it does not do: ask again (the stores' clients do), follow links.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from ckpt_tool.core.installation import install_command
from ckpt_tool.core.urls import cause_without_secrets, hide_in_message
from ckpt_tool.errors import CkptError, StorageError, UsageError, near_misses
from ckpt_tool.storage.stores.store import ObjectChanged, Parts, StoreEntry

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


class FsspecStore:
    """A place in one of fsspec's file systems."""

    def __init__(self, fs: Any, base: str, shown: str, query: str = "") -> None:
        """query: what a web server wants behind every path, a signature say."""
        self._fs = fs
        self._base = base.rstrip("/")
        self._shown = shown
        self._query = query
        self._places: dict[str, str] = {}  # name without secrets -> the place's last part, where it has a secret

    @classmethod
    def at(cls, url: str, shown: str = "") -> FsspecStore:
        """The place of a URL. shown: the URL as errors show it. Raises UsageError E0247 (no package), E2502 (no such
        scheme)."""
        try:
            import fsspec
        except ImportError as e:
            raise UsageError(
                f"reading {shown or url} needs the extra `remote`", code="E0247", hint=install_command("remote")
            ) from e

        try:
            fs, base = fsspec.core.url_to_fs(url)
        except ImportError as e:
            package = hide_in_message(str(e))
            raise UsageError(
                f"this store needs a package that is not installed: {package}",
                code="E0247",
                path=shown or url,
                hint=install_command("remote"),
            ) from cause_without_secrets(e)
        except ValueError as e:
            scheme = url.partition(":")[0]
            raise UsageError(
                hide_in_message(f"the URL can't be opened: {e}"),
                code="E2502",
                path=shown or url,
                hint=near_misses(scheme, fsspec.available_protocols())
                or "the common schemes are s3://, gs:// and hf://",
            ) from cause_without_secrets(e)

        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        query = ""
        if "https" in protocols:
            start = min([at for at in (base.find("?"), base.find("#")) if at >= 0], default=len(base))
            query = base[start:]
            base = base[:start]

        return cls(fs, base, shown or url, query)

    def single(self) -> StoreEntry | None:
        """See `Store.single`."""
        info = self._info("")
        return _entry(info) if info["type"] == "file" else None

    def list(self) -> dict[str, StoreEntry]:
        """See `Store.list`."""
        try:
            entries = self._fs.find(self._base, withdirs=False, detail=True)
        except _errors() as e:
            self._fail(e, "", "listing")
        return {name.removeprefix(self._base).lstrip("/"): _entry(info) for name, info in entries.items()}

    def look(self, key: str) -> StoreEntry:
        """See `Store.look`."""
        # fsspec caches listings: without this an object that has changed would look the same.
        self._fs.invalidate_cache()
        return _entry(self._info(key))

    def get(self, key: str, start: int, stop: int, pinned: StoreEntry) -> Parts:
        """See `Store.get`."""
        try:
            data: bytes = self._fs.cat_file(self._place(key), start=start, end=stop)
        except FileNotFoundError:
            raise
        except _errors() as e:
            self._fail(e, key, "reading", start)
        if len(data) != stop - start and self.look(key) != pinned:
            raise ObjectChanged
        return [memoryview(data)]

    def parent(self, name: str) -> FsspecStore:
        """See `Store.parent`."""
        above, _, last = self._base.rpartition("/")
        store = FsspecStore(self._fs, above, self._shown.rpartition("/")[0], self._query)
        store._places[name] = last
        return store

    def below(self, folder: str) -> FsspecStore:
        """See `Store.below`."""
        return FsspecStore(self._fs, f"{self._base}/{folder}", f"{self._shown.rstrip('/')}/{folder}", self._query)

    def _place(self, key: str) -> str:
        name = self._places.get(key, key)
        return (f"{self._base}/{name}" if name else self._base) + self._query

    def _info(self, key: str) -> Mapping[str, Any]:
        try:
            info: Mapping[str, Any] = self._fs.info(self._place(key))
        except FileNotFoundError:
            raise
        except _errors() as e:
            self._fail(e, key, "looking at" if key else "opening")
        return info

    def _fail(self, error: BaseException, key: str, doing: str, offset: int | None = None) -> NoReturn:
        """An error of the store's client as ours."""
        reason = hide_in_message(f"{type(error).__name__}: {str(error) or 'no reason given'}")[:300]
        denied = isinstance(error, PermissionError) or "redential" in reason or "403" in reason
        raise StorageError(
            f"{doing} failed: {reason}",
            code="E0700",
            path=f"{self._shown}/{key}" if key else self._shown,
            offset=offset,
            hint="log in to the store as its own tool does (aws configure, gcloud auth login, hf auth login)"
            if denied
            else "check the URL and the network, then try again",
        ) from cause_without_secrets(error)


def _errors() -> tuple[type[BaseException], ...]:
    """What a store's client may raise: OSErrors, and the classes of the clients that are loaded."""
    found: list[type[BaseException]] = [OSError, ValueError, NotImplementedError]
    for module, names in _FOREIGN:
        loaded = sys.modules.get(module)
        kinds = (getattr(loaded, name, None) for name in names)
        found += [kind for kind in kinds if isinstance(kind, type)]
    return tuple(kind for kind in found if not issubclass(kind, CkptError))


def _entry(info: Mapping[str, Any]) -> StoreEntry:
    """The mark is the ETag or whatever else changes with the content."""
    mark = next((f"{name}={info[name]}" for name in _MARKS if info.get(name)), "")
    time = next((info[name] for name in _TIMES if info.get(name) is not None), "")
    size = info.get("size")
    regular = info["type"] == "file" and not info.get("islink") and isinstance(size, int)
    return StoreEntry(int(size) if regular and size is not None else -1, mark, _stamp(time))


def _stamp(time: object) -> str:
    """A time in one spelling: stores give datetimes, seconds or text, sometimes one in lists and another alone."""
    if isinstance(time, datetime.datetime):
        time = time.timestamp()
    return f"{time:.6f}" if isinstance(time, int | float) else str(time)
