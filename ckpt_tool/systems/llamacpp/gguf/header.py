"""The header of one GGUF file: its metadata and the places of its tensors, read in windows and bounded by the file.

    read_header(tree, "model.gguf").tensors[0]
      -> Info("token_embd.weight", Q4_K, (32000, 16), 1748672)        # rows, blocks of a row; byte of the file

No memory is allocated by a number in the file until the file is known to be that long. Values of arrays longer than
`SHORT` (tokens, merges) are skipped, and only their position is kept: `raw` gives the bytes of an entry. Cost: one pass
over the header, 0.4 us a string; 64 KiB are read if the header is short.

Source: llama.cpp of October 2026 `ggml/src/gguf.cpp` and gguf 0.19.0 `gguf_reader.py`: version 2 and 3 have the same
layout; no program reads version 1 any more (lengths of 32 bits, 2023). A file of the other byte order has its version's
bytes swapped. gguf-py allows arrays in arrays; llama.cpp refuses them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.faults import together
from ckpt_tool.errors import CkptError, CorruptFile, InconsistentCheckpoint
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes.ggml_types import of_number

MAGIC = b"GGUF"
ALIGNMENT = "general.alignment"
ARCHITECTURE = "general.architecture"
DEFAULT_ALIGNMENT = 32  # bytes; `GGUF_DEFAULT_ALIGNMENT`
DAMAGED = "E1700"
TWICE = "E1701"
OVERLAP = "E1702"
NOT_PADDING = "E2870"
HEADER_LIMIT = 256 << 20  # bytes: the largest vocabularies take 20 MB
MOST_TENSORS = 1_000_000
MOST_PAIRS = 65_536
MOST_DIMS = 64
DEEPEST = 4
# bytes
NAME_LIMIT = 65_535
STRING_LIMIT = 64 << 20
SHORT = 64  # values of an array that are kept; of longer ones the count
SHOWN = 50
STRING = 8
ARRAY = 9
BOOL = 7
# type of a value -> (its name, struct's letter)
SCALARS = {
    0: ("UINT8", "B"),
    1: ("INT8", "b"),
    2: ("UINT16", "H"),
    3: ("INT16", "h"),
    4: ("UINT32", "I"),
    5: ("INT32", "i"),
    6: ("FLOAT32", "f"),
    7: ("BOOL", "B"),
    10: ("UINT64", "Q"),
    11: ("INT64", "q"),
    12: ("FLOAT64", "d"),
}
_AGAIN = "the file is damaged or cut short: fetch it again, and compare its size with the source"


class MetadataPair(NamedTuple):
    """A pair of the metadata."""

    key: str
    kind: int  # the type of its value
    # Type and value are bytes start..stop of the file.
    start: int
    stop: int
    value: Any = None  # None for an array that is longer than `SHORT`
    length: int = 0  # of an array
    inner: int = 0  # the type of its values


class Info(NamedTuple):
    """A row of the table of tensors."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # in items of the dtype (blocks, for a quantised one), slowest dim first
    offset: int  # in bytes of the file


class Header(NamedTuple):
    """The parsed header of one file."""

    path: str
    version: int
    big: bool  # are its numbers big-endian?
    entries: Mapping[str, MetadataPair]
    tensors: tuple[Info, ...]
    data: int  # where the tensors begin, in bytes of the file
    paddings: tuple[tuple[int, int], ...]  # (first byte in the file, length) of the padding after a tensor, if any

    def value(self, key: str) -> Any:
        """The value of a key, None if it is missing or a long array (see `value_of`)."""
        found = self.entries.get(key)
        return None if found is None else found.value


class _FileFront:
    """A cursor over the start of a file, which reads more bytes as they are needed."""

    def __init__(self, tree: Tree, path: str, entry: bytes | None = None) -> None:
        """entry: the bytes of a single metadata entry, to parse instead of the file."""
        self.tree = tree
        self.path = path
        self.bytes = bytearray(entry or b"")
        self.at = 0  # byte of the next field
        self.order = "<"  # struct's letter of the byte order
        self.size = tree.size(path) if entry is None else len(entry)
        self.whole = False  # keep long arrays, and strings that are not UTF-8 (escaped)

    def fault(self, message: str, *, at: int | None = None, key: str | None = None) -> CorruptFile:
        """The error E1700 with the place `at` in the file, by default the cursor's."""
        where = self.at if at is None else at
        return CorruptFile(message, code=DAMAGED, path=self.tree.display(self.path), offset=where, key=key, hint=_AGAIN)

    def need(self, nbytes: int, what: str) -> None:
        """Buffer the next `nbytes`. Raises CorruptFile if the file ends before, or a header can't be that long."""
        end = self.at + nbytes
        if end > min(self.size, HEADER_LIMIT):
            room = min(self.size, HEADER_LIMIT) - self.at
            raise self.fault(f"{what} of {nbytes} bytes, but {room} are left of the {self._room()}")
        if end > len(self.bytes):
            # The window at least doubles, so that the number of reads grows with the logarithm of the header's length.
            start = len(self.bytes)
            stop = min(self.size, max(end, 2 * start, 64 << 10))
            self.bytes += self.tree.read(self.path, start, stop - start)

    def _room(self) -> str:
        return "file" if self.size <= HEADER_LIMIT else f"{HEADER_LIMIT >> 20} MiB that a header may have"

    def number(self, letter: str, what: str) -> Any:
        """The next number, of `struct`'s type `letter`. what: a name for messages."""
        size = struct.calcsize("<" + letter)
        self.need(size, what)
        (value,) = struct.unpack_from(self.order + letter, self.bytes, self.at)
        self.at += size
        return value

    def text(self, what: str, limit: int = STRING_LIMIT, *, strict: bool = True) -> str:
        """The next string. strict: bytes that are not UTF-8 are an error; otherwise they become U+FFFD."""
        begin = self.at
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise self.fault(f"{what} should have {length} bytes, want at most {limit}", at=begin)
        self.need(length, what)
        if self.whole:
            self.at += length
            return self.bytes[self.at - length : self.at].decode("utf-8", "surrogateescape")
        try:
            found = self.bytes[self.at : self.at + length].decode("utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError as e:
            raise self.fault(f"{what} is not UTF-8", at=begin) from e
        self.at += length
        return found

    def skip_texts(self, count: int, what: str) -> None:
        """Skip `count` strings. A vocabulary has 100,000 and more, so the buffer is checked without `need`'s call."""
        length_at = struct.Struct(self.order + "Q").unpack_from
        for _ in range(count):
            if self.at + 8 > len(self.bytes):
                self.need(8, f"the length of {what}")
            (length,) = length_at(self.bytes, self.at)
            if length > STRING_LIMIT or self.at + 8 + length > len(self.bytes):
                self.at += 8
                self.need(length, what)
                self.at -= 8
            self.at += 8 + length


def read_header(tree: Tree, path: str) -> Header:
    """The header of the file `path`; the tree caches it.

    Raises:
        CorruptFile: E1700, an invalid header; E2870, bytes after or between the tensors that it does not account for.
        InconsistentCheckpoint: E1701, a name that appears twice; E1702, tensors that overlap.
    """
    return tree.met.header("gguf", path, lambda: _read(_FileFront(tree, path)))


def _read(window: _FileFront) -> Header:
    window.need(24, "the first fields")
    if bytes(window.bytes[:4]) != MAGIC:
        raise window.fault(f"the file begins with {bytes(window.bytes[:4])!r}, want {MAGIC!r}")
    window.at = 4
    version = window.number("I", "the version")
    if version & 0xFFFF == 0:  # a small number with its bytes swapped: a big-endian file
        window.order = ">"
        window.at = 4
        version = window.number("I", "the version")
    if version not in (2, 3):
        raise window.fault(f"version {version} of GGUF, want 2 or 3", at=4)
    count = window.number("Q", "the number of tensors")
    pairs = window.number("Q", "the number of metadata pairs")
    # The shortest row of the table takes 24 bytes, the shortest pair 13: larger counts can't be true.
    room = window.size - window.at
    if count > min(MOST_TENSORS, room // 24) or pairs > min(MOST_PAIRS, room // 13):
        raise window.fault(f"{count} tensors and {pairs} metadata pairs in {room} bytes", at=8)
    entries: dict[str, MetadataPair] = {}
    for number in range(pairs):
        entry = _entry(window, number)
        if entry.key in entries:
            raise _twice(window, f"the metadata key {entry.key!r}")
        entries[entry.key] = entry
    alignment = _alignment(window, entries.get(ALIGNMENT))
    rows = _rows(window, count)
    data = window.at + _padding_of(window.at, alignment)
    _check_front_padding(window, data)
    tensors = _check_places(window, rows, data, alignment)
    paddings = _check_packed(window, tensors, data, alignment)

    return Header(window.path, version, window.order == ">", entries, tensors, data, paddings)


def find_padding_faults(tree: Tree, header: Header) -> Iterator[CkptError]:
    """An error E2870 for each tensor that is followed by padding other than zeros. Reads the padding."""
    for start, nbytes in header.paddings:
        if any(tree.read(header.path, start, nbytes)):
            yield _not_padding(tree, header.path, start, f"{nbytes} bytes of padding are not all zero")


def raw(tree: Tree, header: Header, key: str) -> bytes:
    """The bytes of an entry's type and value, as stored in the file."""
    entry = header.entries[key]
    return tree.read(header.path, entry.start, entry.stop - entry.start)


def name_of(kind: int) -> str:
    """gguf's name of a value type."""
    return "STRING" if kind == STRING else SCALARS[kind][0]


def value_of(tree: Tree, header: Header, key: str) -> Any:
    """The complete value of an entry, long arrays too. Bytes of a string that are not UTF-8 are escaped."""
    window = _FileFront(tree, header.path, raw(tree, header, key))
    window.order = ">" if header.big else "<"
    window.whole = True  # the header's pass kept only the position of long arrays
    kind = window.number("I", f"the type of {key}")
    return _array(window, key, 1)[0] if kind == ARRAY else _scalar(window, kind, key)


def _entry(window: _FileFront, number: int) -> MetadataPair:
    begin = window.at
    key = window.text(f"metadata key number {number}", NAME_LIMIT)
    if not key:
        raise window.fault(f"metadata key number {number} is empty", at=begin)
    start = window.at
    kind = window.number("I", f"the type of {key}")
    count = inner = 0
    if kind == ARRAY:
        value, count, inner = _array(window, key, 1)
    else:
        value = _scalar(window, kind, key)
    return MetadataPair(key, kind, start, window.at, value, count, inner)


def _scalar(window: _FileFront, kind: int, key: str) -> Any:
    if kind == STRING:
        return window.text(f"the value of {key}", strict=False)
    if kind not in SCALARS:
        raise window.fault(f"{key} has a value of type {kind}, which GGUF does not have", at=window.at - 4)
    value = window.number(SCALARS[kind][1], f"the value of {key}")
    return bool(value) if kind == BOOL else value


def _array(window: _FileFront, key: str, depth: int) -> tuple[Any, int, int]:
    """An array as (values, or None if there are more than `SHORT`; their number; their type)."""
    if depth > DEEPEST:
        raise window.fault(f"{key} has arrays in arrays, more than {DEEPEST} deep")
    inner = window.number("I", f"the type of {key}")
    count = window.number("Q", f"the length of {key}")
    if inner == ARRAY:
        least = 12  # bytes of a value: here its type and its length
    elif inner == STRING:
        least = 8  # its length
    elif inner in SCALARS:
        least = struct.calcsize("<" + SCALARS[inner][1])
    else:
        raise window.fault(f"{key} has values of type {inner}, which GGUF does not have", at=window.at - 12)
    # Checked before anything is allocated: a damaged count may be any number.
    if count * least > window.size - window.at:
        raise window.fault(f"{key} should have {count} values, in {window.size - window.at} bytes", at=window.at - 8)
    if inner == ARRAY:
        found = [_array(window, key, depth + 1)[0] for _ in range(count)]
        return found if count <= SHORT or window.whole else None, count, inner
    if count > SHORT and not window.whole:
        if inner == STRING:
            window.skip_texts(count, f"a value of {key}")
        else:
            window.need(count * least, f"the values of {key}")
            window.at += count * least
        return None, count, inner
    return [_scalar(window, inner, key) for _ in range(count)], count, inner


def _alignment(window: _FileFront, entry: MetadataPair | None) -> int:
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.value
    if type(value) is not int or not 0 < value <= 1 << 20 or value & (value - 1):
        raise window.fault(f"{ALIGNMENT} is {str(value)[:40]}, want a power of two", at=entry.start)
    return value


def _rows(window: _FileFront, count: int) -> list[Info]:
    """The table of tensors; offsets are relative to the start of the data."""
    rows: list[Info] = []
    names = set[str]()
    for number in range(count):
        begin = window.at
        name = window.text(f"the name of tensor number {number}", NAME_LIMIT)
        dims = window.number("I", f"the number of dims of {name[:200]}")
        if dims > MOST_DIMS:
            raise window.fault(f"{dims} dims, want at most {MOST_DIMS}", at=begin, key=name[:200])
        shape = tuple(window.number("Q", f"a dim of {name[:200]}") for _ in range(dims))[::-1]
        kind = window.number("I", f"the type of {name[:200]}")
        offset = window.number("Q", "an offset")
        dtype = of_number(kind, big=window.order == ">")
        if dtype is None:
            raise window.fault(f"type {kind}, which this build does not know", at=begin, key=name[:200])
        if name in names:
            raise _twice(window, f"the tensor {name[:200]!r}")
        names.add(name)
        if dtype.block > 1 and (not shape or shape[-1] % dtype.block):
            raise window.fault(
                f"rows of {shape[-1] if shape else 1} elements, {dtype.name} has blocks of {dtype.block}",
                at=begin,
                key=name[:200],
            )
        items = (*shape[:-1], shape[-1] // dtype.block) if dtype.block > 1 else shape
        # No file has a tensor of 2**62 bytes: the numbers are damaged.
        if max(shape, default=0) >= 1 << 62 or prod(items) * dtype.bits > 8 << 62:
            raise window.fault(f"a shape of {list(shape)[:8]} is out of range", at=begin, key=name[:200])
        rows.append(Info(name, dtype, items, offset))

    return rows


def _check_places(window: _FileFront, rows: list[Info], data: int, alignment: int) -> tuple[Info, ...]:
    """The tensors with offsets in the file. Raises for those that are beyond its end, unaligned, or overlap."""
    faults: list[CkptError] = []
    for row in rows:
        nbytes = row.dtype.nbytes(prod(row.shape))
        room = window.size - data
        if row.offset % alignment:
            faults.append(
                window.fault(f"its offset {row.offset} is no multiple of {alignment}", at=data, key=row.name[:200])
            )
        elif row.offset + nbytes > max(room, 0) and nbytes:
            what = f"{nbytes} bytes at {row.offset} of the data, which has {max(room, 0)}"
            faults.append(window.fault(what, at=window.size, key=row.name[:200]))
    faults += _overlaps(window, rows) if not faults else []
    if faults:
        raise together(faults[:SHOWN])
    return tuple(row._replace(offset=data + row.offset) for row in rows)


def _padding_of(position: int, alignment: int) -> int:
    """Bytes from a position to the next multiple of the alignment."""
    return -position % alignment


def _not_padding(tree: Tree, path: str, offset: int, message: str, *, key: str | None = None) -> CorruptFile:
    return CorruptFile(
        message,
        code=NOT_PADDING,
        path=tree.display(path),
        offset=offset,
        key=key,
        hint="fetch the file again, or write it again with the program that made it",
    )


def _check_front_padding(window: _FileFront, data: int) -> None:
    """Raise CorruptFile E2870 if something is stored between the table of tensors and their values.

    A count that is too small ends the table early, and its other rows would be read as values.
    """
    stop = min(data, window.size)
    nbytes = max(0, stop - window.at)
    window.need(nbytes, "the padding before the values")
    if any(window.bytes[window.at : window.at + nbytes]):
        message = "the table of tensors is followed by other bytes than zeros: it has more rows than are counted"
        raise _not_padding(window.tree, window.path, window.at, message)


def _check_packed(
    window: _FileFront, tensors: tuple[Info, ...], data: int, alignment: int
) -> tuple[tuple[int, int], ...]:
    """The padding after each tensor, as (first byte in the file, length).

    Raises CorruptFile E2870 for a tensor that does not begin where the previous one ends, and for bytes after the last
    one, as llama.cpp does: those bytes belong to a tensor that the header does not have, or the header's offsets, types
    or alignment are not those that the values were written with.
    """
    paddings: list[tuple[int, int]] = []
    position = data
    for tensor in tensors:
        if tensor.offset != position:
            message = (
                f"it begins at byte {tensor.offset}, and what the header lists before it ends at byte {position}: "
                "the values were written for another header"
            )
            raise _not_padding(window.tree, window.path, tensor.offset, message, key=tensor.name[:200])

        end = tensor.offset + tensor.dtype.nbytes(prod(tensor.shape))
        position = end + _padding_of(end - data, alignment)
        present = min(position, window.size) - end
        if present > 0:
            paddings.append((end, present))

    if window.size > position:
        message = f"{window.size - position} bytes are stored after the last tensor, which the header does not name"
        raise _not_padding(window.tree, window.path, position, message)
    return tuple(paddings)


def _overlaps(window: _FileFront, rows: list[Info]) -> Iterator[CkptError]:
    """An error E1702 for each tensor that begins before the previous one in the file ends."""
    last: Info | None = None
    end = 0
    for row in sorted((row for row in rows if prod(row.shape)), key=lambda row: row.offset):
        if last is not None and row.offset < end:
            yield InconsistentCheckpoint(
                f"{row.name[:200]} begins at {row.offset} of the data, before {last.name[:200]} ends at {end}",
                code=OVERLAP,
                path=window.tree.display(window.path),
                key=row.name[:200],
                hint="one of the two is overwritten: fetch the file again",
            )
        last = row
        end = row.offset + row.dtype.nbytes(prod(row.shape))


def _twice(window: _FileFront, what: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        f"{what} appears there twice",
        code=TWICE,
        path=window.tree.display(window.path),
        offset=window.at,
        hint="it is not known which one is meant: fetch the file again",
    )
