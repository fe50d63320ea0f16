"""The entries of a safetensors header as columns: a quick path for what writers write, a strict path for the rest.

The quick path matches whole entries, one after the other, by one compiled pattern for each of two spellings (the
library's compact one, and `json.dumps` with its default separators), and proves that the matches cover every byte of
the header. If it can't prove that a header is valid, it returns None, and the strict path reads the header as JSON and
either accepts it or reports which rule is broken, and where. So acceptance depends on the rules alone:

* every key is a name of at most 4,096 bytes, at most 1,000,000 of them, none twice;
* an entry has `dtype` (a known name), `shape` (at most 64 integers in [0, 2^63)), `data_offsets` (begin <= end);
  other fields are reported, never copied;
* `end - begin` is exactly the bytes of that shape and dtype;
* sorted by offset the entries tile the data: the first begins at 0, each next where the one before ends.

`{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}` gives one name, one `EntryKind(BF16, (2, 3), 12)`, begin 0.

Cost: 0.5 us an entry on the quick path and 71 bytes of memory besides the header; 6 us on the strict one.
Source of the rules: safetensors 0.8 `tensor.rs` (`Metadata::validate`), tightened (duplicates, limits, white space).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from operator import sub
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES, SAFETENSORS_NAMES, DType
from ckpt_tool.core.faults import together
from ckpt_tool.errors import CorruptFile
from ckpt_tool.storage.possessive import possessive
from ckpt_tool.storage.safetensors_files.name_column import NameColumn
from ckpt_tool.storage.texts.strict_json import LIMIT, JsonMember, check_utf8, members, pointer, value_at

METADATA = "__metadata__"
TENSOR_LIMIT = 1_000_000  # entries of one header
NAME_LIMIT = 4_096  # bytes of one name
RANK_LIMIT = 64
NUMBER_LIMIT = 1 << 63  # of a dim or an offset, exclusive
ENTRY_VALUES = 200_000  # JSON values inside one member (`__metadata__` may have many)

NULL_METADATA = "__metadata__ is null"
TYPE = "E0327"
SHAPE = "E0328"
DTYPE = "E0329"
SIZE = "E0330"
OFFSETS = "E0331"
OVERLAP = "E0332"
HOLE = "E0333"

_BLOCK = 1 << 20  # bytes of header matched at a time
_INT = rb"(?:0|[1-9][0-9]{0,17}+)"  # fits 64 bits; longer ones are the strict path's


class EntryKind(NamedTuple):
    """What many tensors share."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int  # of one such tensor


class Columns(NamedTuple):
    """The entries in header order."""

    names: NameColumn
    kinds: list[EntryKind]
    begins: array[int]  # bytes from the start of the data
    filled: int  # bytes from the start of the data to the end of the last entry
    metadata: dict[str, str]
    warnings: tuple[str, ...] = ()  # what was accepted but is not right, in words


class _Spelling(NamedTuple):
    """How a writer spaces its JSON."""

    entry: re.Pattern[bytes]
    kind: re.Pattern[bytes]
    mark: bytes  # what follows every name
    comma: bytes
    fixed: int  # bytes of an entry outside the groups


def _spelling(colon: bytes, comma: bytes) -> _Spelling:
    mark = b'":' + colon[1:] + b'{"dtype"' + colon + b'"'
    between = b'"' + comma + b'"shape"' + colon + b"["
    offsets = b"]" + comma + b'"data_offsets"' + colon + b"["
    close = b"]}" + comma
    entry = b"".join(
        (
            rb'"([^"\\\x00-\x1f]*+)' + re.escape(mark),
            rb"([A-Z0-9_]*+" + re.escape(between) + rb"[0-9, ]*+)" + re.escape(offsets),
            b"(" + _INT + b")" + comma + b"(" + _INT + b")" + re.escape(close),
        )
    )
    dims = rb"((?:" + _INT + rb"(?:" + comma + _INT + rb")*+)?)"
    kind = possessive(rb"([A-Z0-9_]*+)" + re.escape(between) + dims)
    return _Spelling(possessive(entry), kind, mark, comma, len(b'"' + mark + offsets + comma + close))


_COMPACT = _spelling(b":", b",")
_spaced = cache(partial(_spelling, b": ", b", "))  # rare, so its patterns are compiled on first use
_FIRST_METADATA = re.compile(rb'\{"__metadata__": ?')
_AFTER_METADATA = re.compile(rb", ?")


# -- the quick path ----------------------------------------------------------------------------------------------------


def quick(text: bytes, *, path: str, offset: int = 8) -> Columns | None:
    """The columns of the header `text` if it is valid and spelled as the usual writers spell it; None if in doubt.

    offset: bytes from the start of the file to `text[0]`. Raises CorruptFile only for what neither path accepts: bad
    UTF-8, broken JSON inside a leading `__metadata__`.
    """
    end = len(text.rstrip(b" ")) - 1  # the closing brace
    if text[:1] != b"{" or text[end : end + 1] != b"}":
        return None

    check_utf8(text, path=path, offset=offset)
    metadata, at = _leading_metadata(text, path, offset)
    spelling = _COMPACT if text.find(_COMPACT.mark, at, at + NAME_LIMIT + 64) >= 0 else _spaced()
    if metadata is None or text.find(spelling.mark, at, at + NAME_LIMIT + 64) < 0:
        return None

    names: list[bytes] = []
    kinds: list[EntryKind] = []
    begins = array("Q")
    ends = array("Q")
    known: dict[bytes, EntryKind] = {}

    for block in _blocks(text, at, end, spelling):
        found = spelling.entry.findall(block)
        if not found:
            return None
        columns = tuple(zip(*found, strict=True))
        # `findall` skips what it can't match: the matches must cover the whole block.
        if sum(len(b"".join(column)) for column in columns) + spelling.fixed * len(found) != len(block):
            return None
        # A model has few distinct dtypes and shapes: each spelling is parsed once.
        for spelled in set(columns[1]).difference(known):
            kind = _kind(spelled, spelling)
            if kind is None:
                return None
            known[spelled] = kind
        names += columns[0]
        kinds += map(known.__getitem__, columns[1])
        first = len(begins)
        begins.extend(map(int, columns[2]))
        # Nearly always each tensor ends where the next begins: the same digits need not be parsed twice.
        if columns[3][:-1] == columns[2][1:]:
            ends.extend(begins[first + 1 :])
            ends.append(int(columns[3][-1]))
        else:
            ends.extend(map(int, columns[3]))

    if not _sound_names(names) or list(map(sub, ends, begins)) != [kind.nbytes for kind in kinds]:
        return None
    if not _tiles(begins, ends):
        return None
    return Columns(NameColumn.of(names), kinds, begins, max(ends), metadata)


def _leading_metadata(text: bytes, path: str, offset: int) -> tuple[dict[str, str] | None, int]:
    """Returns (metadata at the start of the header, index of the first entry). The metadata is {} if there is none at
    the start, and None if the strict path must judge it."""
    start = _FIRST_METADATA.match(text)
    if start is None:
        return {}, 1
    value, end = value_at(text, start.end(), path=path, offset=offset, place=pointer(METADATA))
    comma = _AFTER_METADATA.match(text, end)
    if comma is None or type(value) is not dict or not all(type(each) is str for each in value.values()):
        return None, end
    return value, comma.end()


def _blocks(text: bytes, at: int, end: int, spelling: _Spelling) -> Iterator[bytes]:
    """The entries between `at` and the closing brace in pieces of about 1 MiB, each entry closed by a comma."""
    boundary = b"]}" + spelling.comma + b'"'
    while end - at > _BLOCK:
        stop = text.rfind(boundary, at, at + _BLOCK)
        if stop < 0:
            break
        stop += len(boundary) - 1
        yield text[at:stop]
        at = stop
    yield text[at:end] + spelling.comma


def _kind(spelled: bytes, spelling: _Spelling) -> EntryKind | None:
    """Parses `BF16","shape":[2,3`; None if the rules do not allow it."""
    match = spelling.kind.fullmatch(spelled)
    if match is None or match[1].decode() not in SAFETENSORS_NAMES:
        return None
    dims = match[2].split(b",") if match[2] else []
    if len(dims) > RANK_LIMIT:
        return None
    shape = tuple(map(int, dims))
    dtype = DTYPES[match[1].decode()]
    bits = prod(shape) * dtype.bits
    if bits % 8 or any(dim >= NUMBER_LIMIT for dim in shape):
        return None
    return EntryKind(dtype, shape, bits // 8)


def _sound_names(names: Sequence[bytes]) -> bool:
    distinct = set(names)
    return (
        len(names) <= TENSOR_LIMIT
        and max(map(len, names)) <= NAME_LIMIT
        and len(distinct) == len(names)
        and METADATA.encode() not in distinct
    )


def _tiles(begins: array[int], ends: array[int]) -> bool:
    """Do the ranges, in some order, cover the bytes from 0 on without gap or overlap?"""
    # In header order, as writers write it: no sort is needed.
    if begins[0] == 0 and begins[1:] == ends[:-1]:
        return True
    at = 0
    for begin, end in sorted(zip(begins, ends, strict=True)):
        if begin != at:
            return False
        at = end
    return True


# -- the strict path ---------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One entry as read."""

    name: str
    kind: EntryKind
    begin: int
    end: int
    place: int  # bytes from the start of the file to its value


def warning_code(warning: str) -> str:
    """The code of the note that reports a warning: `N-header` for null metadata, which is how a library writes none,
    `W-header` for faults."""
    return "N-header" if warning == NULL_METADATA else "W-header"


def strict(text: bytes, *, path: str, offset: int = 8) -> Columns:
    """The columns of any header that follows the rules. `text` is the header without its padding.

    `__metadata__: null`, which mlx writes, is accepted with a warning, as the safetensors library does. Raises
    CorruptFile; all entries at fault are named at once.
    """
    entries: list[_Entry] = []
    metadata: dict[str, str] = {}
    warnings: list[str] = []
    faults: list[CorruptFile] = []

    for member in members(text, path=path, offset=offset, limit=ENTRY_VALUES):
        try:
            if member.key == METADATA:
                if member.value is None:
                    warnings.append(NULL_METADATA)
                else:
                    metadata = _metadata(member, path)
                continue
            entries.append(_entry(member, path, warnings))
        except CorruptFile as fault:
            faults.append(fault)
        if len(entries) + len(faults) > TENSOR_LIMIT:
            raise too_many(path)

    if faults:
        raise together(faults)

    filled = _check_tiles(entries, path)
    return Columns(
        NameColumn.of_text(entry.name for entry in entries),
        [entry.kind for entry in entries],
        array("Q", (entry.begin for entry in entries)),
        filled,
        metadata,
        tuple(warnings),
    )


def too_many(path: str) -> CorruptFile:
    """The error for a header with more tensors than any real file has. path: of the file."""
    return CorruptFile(
        f"more than {TENSOR_LIMIT} tensors in one file",
        code=LIMIT,
        path=path,
        offset=8,
        hint="no real checkpoint has as many: the header is not to be trusted",
    )


def _metadata(member: JsonMember, path: str) -> dict[str, str]:
    value = member.value
    if type(value) is not dict:
        raise CorruptFile(
            f"__metadata__ is {_what(value)}, want an object of strings",
            code=TYPE,
            path=path,
            offset=member.value_offset,
            place=pointer(METADATA),
            hint="the file was written by a faulty writer",
        )
    for key, text in value.items():
        if type(text) is not str:
            raise CorruptFile(
                f"the metadata value is {_what(text)}, want a string",
                code=TYPE,
                path=path,
                offset=member.value_offset,
                place=pointer(METADATA, key),
                hint="safetensors metadata maps strings to strings: write the value as text",
            )
    return value


def _entry(member: JsonMember, path: str, warnings: list[str]) -> _Entry:
    """Check one entry against every rule that concerns it alone."""
    name = member.key
    value = member.value

    def fault(code: str, message: str, *place: str | int, hint: str) -> CorruptFile:
        at = pointer(name, *place)
        return CorruptFile(
            message, code=code, path=path, offset=member.value_offset, place=at, key=name[:200], hint=hint
        )

    faulty_writer = "the file was written by a faulty writer or is damaged"
    if len(name.encode("utf-8")) > NAME_LIMIT:
        raise fault(LIMIT, f"a name of {len(name)} characters, want at most {NAME_LIMIT} bytes", hint=faulty_writer)
    if type(value) is not dict:
        raise fault(TYPE, f"the entry is {_what(value)}, want an object", hint=faulty_writer)
    for field in ("dtype", "shape", "data_offsets"):
        if field not in value:
            raise fault(TYPE, f"the entry has no {field}", field, hint=faulty_writer)
    dtype = value["dtype"]
    if type(dtype) is not str or dtype not in SAFETENSORS_NAMES:
        empty = "an empty dtype comes from a writer's bug with tied weights: save the model again without the alias"
        raise fault(
            DTYPE,
            f"unknown dtype {_what(dtype)}, known are {', '.join(sorted(SAFETENSORS_NAMES))}",
            "dtype",
            hint=empty if dtype == "" else "names are upper case; a newer version of this tool may know it",
        )
    for field in ("shape", "data_offsets"):
        _check_integers(value[field], field, fault)
    if extra := sorted(value.keys() - {"dtype", "shape", "data_offsets"}):
        warnings.append(f"tensor {name[:200]}: unknown field {', '.join(key[:50] for key in extra[:5])}, not copied")
    shape = tuple(value["shape"])
    begin, end = value["data_offsets"]
    if begin > end:
        raise fault(OFFSETS, f"begin {begin} is after end {end}", "data_offsets", hint=faulty_writer)
    bits = prod(shape) * DTYPES[dtype].bits
    if bits != 8 * (end - begin):
        need = f"{bits // 8} bytes" if bits % 8 == 0 else f"{bits} bits, no whole number of bytes"
        if bits >= 8 * NUMBER_LIMIT:
            need = f"2^{bits.bit_length() - 4} bytes or more: the product overflows"
        raise fault(
            SIZE,
            f"shape {_what(list(shape))} of {dtype} takes {need}, but its offsets span {end - begin}",
            "data_offsets",
            hint=faulty_writer,
        )
    return _Entry(name, EntryKind(DTYPES[dtype], shape, end - begin), begin, end, member.value_offset)


def _check_integers(value: Any, field: str, fault: Callable[..., CorruptFile]) -> None:
    """`value` must be a list of integers in [0, 2^63): two for offsets, at most 64 for a shape."""
    hint = "the file was written by a faulty writer or is damaged"
    if type(value) is not list:
        raise fault(TYPE, f"{field} is {_what(value)}, want a list of non-negative integers", field, hint=hint)
    if field == "data_offsets" and len(value) != 2:
        raise fault(TYPE, f"{len(value)} data_offsets, want 2: begin and end", field, hint=hint)
    if len(value) > RANK_LIMIT:
        raise fault(SHAPE, f"rank {len(value)}, the rank limit is {RANK_LIMIT}", field, hint=hint)
    for i, number in enumerate(value):
        if type(number) is not int or number < 0:
            raise fault(TYPE, f"{_what(number)}, want a non-negative integer", field, i, hint=hint)
        if number >= NUMBER_LIMIT:
            what = "dimension" if field == "shape" else "offset"
            raise fault(SHAPE, f"{what} {_what(number)} is out of range, want less than 2^63", field, i, hint=hint)


def _what(value: Any) -> str:
    """A JSON value in a message."""
    if value is None or type(value) is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is dict:
        return "an object"
    if type(value) is int and value.bit_length() > 512:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_tiles(entries: list[_Entry], path: str) -> int:
    """Raise unless the entries cover the bytes from 0 on without gap or overlap. Returns the end of the last one."""
    at = 0
    before = ""
    for entry in sorted(entries, key=lambda each: (each.begin, each.end)):
        if entry.begin != at:
            if entry.begin < at:
                fault = f"overlaps tensor {before[:200]!r}, which ends at {at}"
            else:
                fault = f"leaves a hole: bytes {at} to {entry.begin} of the data are not covered by a tensor"
            raise CorruptFile(
                f"tensor {entry.name[:200]!r} begins at {entry.begin} and {fault}",
                code=OVERLAP if entry.begin < at else HOLE,
                path=path,
                offset=entry.place,
                place=pointer(entry.name, "data_offsets"),
                key=entry.name[:200],
                hint="the tensors must be stored end to end: the file was made by a faulty writer, or to deceive",
            )
        at = entry.end
        before = entry.name
    return at
