"""The interface of a store for outputs: objects are sent in parts, and become visible when they are completed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from ckpt_tool.core.inner_path import STAGED
from ckpt_tool.storage.stores.malloc_arenas import few_arenas
from ckpt_tool.storage.stores.multipart import Pending, Sent, StoreListing, WritableBucket


class OutputStore(Protocol):
    """A place in a store. Keys are relative to it, "" is the place itself. Thread-safe; raises CkptError alone."""

    shown: str

    def objects(self) -> dict[str, int]:
        """Key -> bytes of the objects at the place and below it."""
        ...

    def listing(self) -> StoreListing:
        """The same objects, with times by the store's clock and ETags."""
        ...

    def note(self, key: str, name: str) -> str | None:
        """The value of metadata `name` that `put`, `begin` or `complete` set on an object, None if there is none."""
        ...

    def put(self, key: str, data: bytes | bytearray, notes: Mapping[str, str], *, new: bool) -> None:
        """Write an object with one request. notes: its metadata. new: raise OutputExists if an object exists there."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create a small object if none exists. Returns False if one does, unless it came from this very call, in a
        request whose answer was lost."""
        ...

    def read(self, key: str, nbytes: int) -> Iterator[bytes]:
        """An object's bytes in order, in pieces."""
        ...

    def get(self, key: str) -> bytes | None:
        """The content of a small object, None if it does not exist."""
        ...

    def remove(self, key: str, *, etag: str = "") -> None:
        """Remove an object if it exists; with `etag` only if it has that ETag, on stores that support the condition."""
        ...

    def begin(self, key: str, notes: Mapping[str, str]) -> str:
        """Begin an upload in parts. Returns its id, the `upload` of the other methods."""
        ...

    def part(self, key: str, upload: str, number: int, data: bytearray) -> str:
        """Send part `number` (from 1); may be repeated. The store verifies a checksum. Returns the part's ETag."""
        ...

    def complete(self, key: str, upload: str, etags: Mapping[int, str], notes: Mapping[str, str], *, new: bool) -> None:
        """Assemble the object from its parts and make it visible. notes: as in `begin`. new: raise OutputExists if an
        object exists there."""
        ...

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload and its parts. Does nothing if the upload has ended."""
        ...

    def pending(self) -> list[Pending]:
        """Uploads at the place and below that were begun and not ended, the oldest first."""
        ...

    def parts(self, key: str, upload: str) -> dict[int, Sent]:
        """Part number -> ETag and size of the parts of an upload that the store has."""
        ...

    def display(self, key: str) -> str:
        """The URL of an object."""
        ...

    def at_url(self, url: str) -> OutputStore:
        """Another place of the same bucket."""
        ...


def staging_url(url: str) -> str:
    """The URL of the records of workers that write one output together: a hidden name next to the output.

    >>> staging_url("s3://bucket/run/out")
    's3://bucket/run/.out.ckpt-partial'
    """
    above, _, name = url.rstrip("/").rpartition("/")
    return f"{above}/.{name}{STAGED}"


def output_store(url: str) -> OutputStore:
    """The place of an `s3://` or `az://` URL. Raises UsageError as `WritableBucket.at`."""
    few_arenas()
    if url.lower().startswith("az"):
        from ckpt_tool.storage.stores.block_blobs import Container

        return Container.at(url)
    return WritableBucket.at(url)
