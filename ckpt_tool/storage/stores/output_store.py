"""The store that an output grows in, by its URL: objects made of parts, that appear when they are completed."""

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
        """key -> bytes of what lies at the place and below it."""
        ...

    def listing(self) -> StoreListing:
        """The same with the times that the store says."""
        ...

    def note(self, key: str, name: str) -> str | None:
        """What was noted on an object under a name."""
        ...

    def put(self, key: str, data: bytes | bytearray, notes: Mapping[str, str], *, new: bool) -> None:
        """A whole object at once. new: raise OutputExists where there is one."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """A small object where there is none. False where there is one, other than by a request of ours whose answer
        was lost."""
        ...

    def read(self, key: str, nbytes: int) -> Iterator[bytes]:
        """An object's bytes in order, in pieces."""
        ...

    def get(self, key: str) -> bytes | None:
        """A small object, None where there is none."""
        ...

    def remove(self, key: str, *, etag: str = "") -> None:
        """Remove an object, if it is there; with `etag` only the one that has it, as far as the store knows such
        conditions."""
        ...

    def begin(self, key: str, notes: Mapping[str, str]) -> str:
        """An upload of parts; what the others take for `upload`."""
        ...

    def part(self, key: str, upload: str, number: int, data: bytearray) -> str:
        """Send part `number` (from 1), any number of times; the store checks what comes. Returns its ETag."""
        ...

    def complete(self, key: str, upload: str, etags: Mapping[int, str], notes: Mapping[str, str], *, new: bool) -> None:
        """Make the object of its parts. notes: as `begin`. new: raise OutputExists where there is one."""
        ...

    def abort(self, key: str, upload: str) -> None:
        """Give up an upload and its parts; one that has ended is none."""
        ...

    def pending(self) -> list[Pending]:
        """Uploads at the place and below that were begun and not ended, the oldest first."""
        ...

    def parts(self, key: str, upload: str) -> dict[int, Sent]:
        """What the store has of an upload."""
        ...

    def display(self, key: str) -> str:
        """The URL of an object."""
        ...

    def at_url(self, url: str) -> OutputStore:
        """Another place of the same bucket."""
        ...


def staging_url(url: str) -> str:
    """Where the workers that share an output out keep their records: the hidden name beside it.

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
