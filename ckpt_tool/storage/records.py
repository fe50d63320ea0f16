"""Stored records: arrays of files without checksums, the zips found in a tree's files, and small values from records
whose checksum is verified.

A stored record (a member of a torch zip) has a CRC-32, and every reader of its bytes checks it. Bulk bytes are checked
while they are read (`run.checksum`); a value that a reader needs immediately, a step or an RNG state, is read here:

    read_array(tree, StoredArray("model.pt", 704, F32, (), crc=(704, 4, 0x2144DF1C)))     # b"\\0\\0\\0\\0", or E0351

Cost: the whole record is read, once per tree: most often a value of 4 bytes has its own record.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.errors import CorruptFile

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree

T = TypeVar("T")
DAMAGED = "E0351"
_BLOCK = 4 << 20  # bytes of a read


class FileExtent(NamedTuple):
    """A range of a file, in bytes."""

    start: int
    nbytes: int


class Met:
    """What readers have learned about a tree's files: headers, zips, verified records. Thread-safe."""

    def __init__(self) -> None:
        self._zips: dict[str, dict[FileExtent, None]] = {}
        self._many: dict[str, list[tuple[array[int], array[int]]]] = {}  # the same, as columns: starts and bytes
        self._sound: set[tuple[str, tuple[int, int, int]]] = set()
        self._headers: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def header(self, kind: str, path: str, read: Callable[[], T]) -> T:
        """The header of file `path` as `read` returns it; `read` is called only for the first request of that kind."""
        if (kind, path) not in self._headers:
            found = read()  # without the lock: two threads may both read it, and the first result is kept
            with self._lock:
                self._headers.setdefault((kind, path), found)
        found = self._headers[kind, path]
        return found

    def zip(self, path: str, start: int, nbytes: int) -> None:
        """Note that bytes [start, start + nbytes) of file `path` are a zip."""
        with self._lock:
            self._zips.setdefault(path, {})[FileExtent(start, nbytes)] = None

    def several(self, path: str, starts: array[int], nbytes: array[int]) -> None:
        """Note many zips of a file at once."""
        with self._lock:
            self._many.setdefault(path, []).append((starts, nbytes))

    def zips(self, path: str) -> list[FileExtent]:
        """The zips in a file, sorted by position."""
        with self._lock:
            many = [FileExtent(*zip_) for columns in self._many.get(path, ()) for zip_ in zip(*columns, strict=True)]
            return sorted({*self._zips.get(path, ()), *many})

    def is_sound(self, path: str, crc: tuple[int, int, int]) -> bool:
        """Was the record (offset, length, CRC-32) of file `path` read before, and had that CRC?"""
        with self._lock:
            return (path, crc) in self._sound

    def sound(self, path: str, crc: tuple[int, int, int]) -> None:
        """The record (offset, length, CRC-32) of file `path` was read and has that CRC."""
        with self._lock:
            self._sound.add((path, crc))


def past_the_end(shown: str, offset: int, nbytes: int, size: int) -> CorruptFile:
    """The error (E0311) for bytes that a file of `size` bytes does not have."""
    return CorruptFile(
        f"want {nbytes} bytes at {offset}, but the file has {size}",
        code="E0311",
        path=shown,
        offset=min(max(offset, 0), size),
        hint="the file is cut short: compare its size with the source",
    )


def plain_array(tree: Tree, path: str, offset: int, dtype: DType, shape: tuple[int, ...]) -> StoredArray:
    """An array that is stored row-major at byte `offset` of a file without checksums. Raises CorruptFile (E0311) if
    the file ends before the array does."""
    size = tree.size(path)
    nbytes = dtype.nbytes(prod(shape))
    if min(offset, *shape, 0) < 0 or offset + nbytes > size:
        raise past_the_end(tree.display(path), offset, nbytes, size)
    return StoredArray(path, offset, dtype, shape)


def read_array(tree: Tree, array: StoredArray, nbytes: int | None = None) -> bytes:
    """The bytes of a small array without strides, or its first `nbytes`. Raises CorruptFile (E0351) if the record that
    contains them is damaged, and what `Tree.read` raises."""
    wanted = array.dtype.nbytes(array.numel) if nbytes is None else nbytes
    if array.crc is None or tree.met.is_sound(array.path, array.crc):
        return tree.read(array.path, array.offset, wanted)
    offset, length, want = array.crc

    # A short record is read once for both: its CRC, and the array inside it.
    if length <= _BLOCK and offset <= array.offset and array.offset + wanted <= offset + length:
        record = tree.read(array.path, offset, length)
        have = zlib.crc32(record)
        data = record[array.offset - offset : array.offset - offset + wanted]
    else:
        have = 0
        data = tree.read(array.path, array.offset, wanted)
        for at in range(offset, offset + length, _BLOCK):
            have = zlib.crc32(tree.read(array.path, at, min(_BLOCK, offset + length - at)), have)
    if have != want:
        raise damaged(tree.display(array.path), array.crc, have)
    tree.met.sound(array.path, array.crc)
    return data


def damaged(path: str, crc: tuple[int, int, int], have: int, place: str | None = None) -> CorruptFile:
    """The error (E0351) for a record whose bytes do not have the stored CRC-32. crc: (offset, length, stored CRC);
    have: the CRC of its bytes."""
    offset, nbytes, want = crc
    return CorruptFile(
        f"the stored CRC-32 of a record is {want:08x}, its {nbytes} bytes give {have:08x}",
        code=DAMAGED,
        path=path,
        offset=offset,
        place=place,
        hint="the file is damaged (torch would load it in silence): fetch it again or restore a backup",
    )
