"""The torch .pt container: directory, records, aligned writer. (API first; the body follows.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.storage.pickle_values import Pickled, TensorRef
from ckpt_tool.storage.source import Tree


class ZipRecord(NamedTuple):
    """One stored member. offset: absolute bytes in the file to its first byte; nbytes; crc32: None when the writer
    did not compute one (a stored 0)."""

    offset: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class TorchZip:
    """An opened torch zip: `records` by name below the root folder (`data.pkl`, `data/0`, `version`).

    tree, path: where it lies. start, length: the byte range of the file that is the zip (a DCP item is a range of a
    `.distcp`). root: the archive's top folder. byteorder: "little".
    tail: bytes of central directory and end records; pass it as `tail` for the next item of the same file.
    """

    tree: Tree
    path: str
    start: int
    length: int
    root: str
    records: dict[str, ZipRecord]
    byteorder: str
    tail: int

    @staticmethod
    def open(tree: Tree, path: str, start: int = 0, length: int | None = None, *, tail: int = 0) -> TorchZip:
        """Parse and check the directory. Reads no storage bytes.

        tail: a guess of the size of the directory at the end, in bytes; right, it saves a pread.
        Raises CorruptFile E0340-E0349 (exit 3), UnsafeInput E0430-E0449 (exit 4).
        """
        raise NotImplementedError

    def pickled(self) -> Pickled:
        """`data.pkl`, read inertly, its CRC checked, every storage it names present with the right length."""
        raise NotImplementedError

    def array(self, tensor: TensorRef) -> StoredArray:
        """Where the tensor's bytes lie in the file: absolute offset, strides None when contiguous, the record's CRC."""
        raise NotImplementedError


class ZipPlan(NamedTuple):
    """The whole layout of a torch zip before any tensor byte exists.

    size: bytes. literals: (offset, bytes), everything but the storages. offsets: where the bytes of each storage go,
    in bytes, one per given storage. crcs: for each storage the file offsets (bytes) of its CRC-32 holes, 4 bytes
    little-endian each.
    """

    size: int
    literals: tuple[tuple[int, bytes], ...]
    offsets: tuple[int, ...]
    crcs: tuple[tuple[int, ...], ...]


def plan_zip(root: str, pickle: bytes, storages: Sequence[tuple[str, int]], *, base: int = 0) -> ZipPlan:
    """Lay out a torch zip: `root` its top folder, `pickle` the bytes of data.pkl, storages (key, nbytes).

    base: added to every offset of the plan (an item inside a `.distcp`).
    """
    raise NotImplementedError
