"""Edits of a checkpoint's files that leave their containers sound: what a stranger would write who knows the formats.

    zip of torch          the pickle inside it is edited, and the zip made anew with the right CRC and lengths
    safetensors           the JSON header is edited, its length made right
    pickle, JSON, text    as they are; the frames of a pickle keep their lengths right

`part_of` gives the editable bytes of a file and the way back, `numbers` every number that stands in them, `with_number`
the bytes with another number there. The tests of `tests/test_numbers.py` and the fuzz targets share them.
What it does not do: edit the bytes of tensors.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import warnings
import zipfile
from functools import lru_cache
from typing import NamedTuple

_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"|(?<!\d)-?(?:0|[1-9]\d*)(?!\d)(?:\.\d+)?(?:[eE][+-]?\d+)?')
_FLAGS = {"NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT"}
_TEXTS = {op.name for op in pickletools.opcodes if "UNICODE" in op.name}
_VALUES = {*_NUMBERS, *_TEXTS, *_FLAGS}


class Part(NamedTuple):
    """What of a file is edited: kind `json`, `pickle` or `text`. The bytes before and behind it, or the zip's
    members."""

    kind: str
    data: bytes
    before: bytes = b""
    behind: bytes = b""
    members: tuple[tuple[str, bytes], ...] = ()
    at: int = 0  # of the member that is `data`

    def file(self, data: bytes) -> bytes:
        """The whole file with `data` in the place of the part's own."""
        if self.members:
            return zipped([(name, data if i == self.at else old) for i, (name, old) in enumerate(self.members)])
        if self.before:  # the header of a safetensors file
            return struct.pack("<Q", len(data)) + data + self.behind
        return data + self.behind


class Number(NamedTuple):
    """A number (or a text) in a part: where it stands, what it is; field: the key before it, "" where there is none."""

    start: int
    end: int
    value: object
    field: str


def part_of(data: bytes) -> Part | None:
    """The editable part of a file, None for one that is bytes of tensors alone."""
    if data[:4] == b"PK\x03\x04":
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = tuple((info.filename, archive.read(info)) for info in archive.infolist())
        except (zipfile.BadZipFile, NotImplementedError):
            return None
        at = next((i for i, (name, _) in enumerate(members) if name.endswith("/data.pkl")), None)
        return None if at is None else Part("pickle", members[at][1], members=members, at=at)
    size = int.from_bytes(data[:8], "little")
    if len(data) >= 10 and 2 <= size <= len(data) - 8 and data[8:9] == b"{":
        return Part("json", data[8 : 8 + size], data[:8], data[8 + size :])
    if data[:1] in b"{[" and data:
        return Part("json", data)
    if data[:1] == b"\x80":
        end = _end(data)
        return Part("pickle", data[:end], behind=data[end:])
    return Part("text", data) if len(data) < 200 and data.isascii() else None


def zipped(members: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore")  # names that stand twice
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def _end(data: bytes) -> int:
    """Where the last of the pickles that follow one another ends."""
    stream = io.BytesIO(data)
    end = 0
    try:
        while stream.tell() < len(data) and data[stream.tell() : stream.tell() + 1] == b"\x80":
            for _ in pickletools.genops(stream):
                pass
            end = stream.tell()
    except Exception:  # what follows is no pickle
        pass
    return end or len(data)


def numbers(part: Part) -> list[Number]:
    """Every number (and flag) in the part, in its order."""
    return list(_in_pickle(part.data) if part.kind == "pickle" else _in_text(part.data))


def _in_text(data: bytes):
    field = ""
    for match in _JSON.finditer(data):
        if match[0][:1] == b'"':
            if data[match.end() : match.end() + 3].lstrip()[:1] == b":":
                field = match[0][1:-1].decode("utf-8", "replace")
            continue
        raw = match[0]
        yield Number(match.start(), match.end(), int(raw) if raw.isdigit() else json.loads(raw), field)


def _in_pickle(data: bytes):
    field = ""
    for found in _opcodes(data):
        if isinstance(found.value, str):
            field = found.value
        else:
            yield found._replace(field=field)


@lru_cache(maxsize=2)  # the numbers and the texts of a part are looked for one after the other
def _opcodes(data: bytes) -> list[Number]:
    """The numbers, flags and texts that the opcodes of the pickles push."""
    stream = io.BytesIO(data)
    found = list[Number]()
    try:
        while stream.tell() < len(data):
            # an opcode that counts, until the next shows where it ends
            one = list[Number]()
            begun = None
            for op, argument, start in pickletools.genops(stream):
                if begun:
                    one.append(Number(begun[0], start, begun[1], ""))
                begun = (start, _FLAGS.get(op.name, argument)) if op.name in _VALUES else None
            found += one
    except Exception:  # cut short by an edit before: what was seen stands
        pass
    return found


def texts(part: Part) -> list[Number]:
    """Every text in the part (`value`), where it stands, in its order; keys of JSON objects too."""
    if part.kind == "pickle":
        return [found for found in _opcodes(part.data) if isinstance(found.value, str)]
    found = (match for match in _JSON.finditer(part.data) if match[0][:1] == b'"')
    return [Number(match.start(), match.end(), _plain(match[0]), "") for match in found]


def _plain(raw: bytes) -> str:
    inside = raw[1:-1]
    if inside.isascii() and b"\\" not in inside and (text := inside.decode("ascii")).isprintable():
        return text  # as nearly all are: no parser is needed
    try:
        return json.loads(raw)
    except ValueError:
        return ""


def with_number(part: Part, number: Number, value: object) -> bytes:
    """The part's bytes with another value there: a number, a flag, a text, None."""
    if part.kind != "pickle":
        return part.data[: number.start] + _as_json(value) + part.data[number.end :]
    return spliced(part.data, number.start, number.end, as_opcode(value))


def _as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def as_opcode(value: object) -> bytes:
    """A plain value as opcodes that push it."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def spliced(data: bytes, start: int, end: int, new: bytes) -> bytes:
    """The pickle with other bytes at [start, end); the frame around them gets its new length."""
    out = bytearray(data[:start] + new + data[end:])
    at = 0
    while (at := data.find(b"\x95", at, start)) >= 0:
        size = int.from_bytes(data[at + 1 : at + 9], "little")
        if at + 9 <= start < at + 9 + size <= len(data) and (at < 3 or _is_frame(data, at)):
            out[at + 1 : at + 9] = struct.pack("<Q", size + len(new) - (end - start))
        at += 1
    return bytes(out)


def _is_frame(data: bytes, at: int) -> bool:
    """Is the byte there the opcode FRAME, not part of an argument?"""
    try:
        return any(op.name == "FRAME" and pos == at for op, _, pos in pickletools.genops(data))
    except Exception:
        return False
