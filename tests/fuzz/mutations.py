"""Edits of whole checkpoints by somebody who knows their formats: what is made is sound but for what was edited.

    mutated(random.Random(7), "gguf", {"model.gguf": ...})  ->  ({"model.gguf": ...}, ["gguf: dims of a.weight"])

Files are path -> bytes; a `Link` stands for a symbolic link, a `Pipe` for a FIFO. Of each kind of container what lies
below its checksums and lengths is edited, and these are made right again: pairs and tensors of GGUF, the rows and nodes
of an OCDBT database, frames of zstd, the indexes of zarr's shards, the tensors of a safetensors file, JSON wherever it
lies (in bytes of tensors too), pickles by `edits`. Some edits break what is around them instead.

Beside the values that no file can hold there are those that others have: the same number from another place.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import struct
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

import zstandard

HERE = pathlib.Path(__file__).parent


def _load(name: str, path: pathlib.Path) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


edits = _load("fuzz_edits", HERE / "edits.py")
orbax = _load("hostile_orbax_cases", HERE.parent / "hostile" / "orbax_cases.py")


class Link(NamedTuple):
    """A symbolic link."""

    to: str


class Pipe(NamedTuple):
    """A FIFO."""


Files = dict[str, bytes | Link | Pipe]

SIZES = (0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 64, 100, 127, 128, 255, 256, 1000, 4096, 65536, 10**6, 2**31 - 1, 2**31)
HUGE = (2**32 - 1, 2**32, 10**12, 2**48, 2**53, 2**61, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400)
TEXTS = (
    "",
    "0",
    "a",
    "..",
    "/",
    "../../secret",
    "/etc/passwd",
    "a/b",
    "a\0b",
    "\x1b[31m",
    "\u202e",
    "x" * 70_000,
    "re:(a+)+$",
    "re:(.*a){30}",
    "re:[",
    "re:" + "(" * 200,
    "9" * 5000,
    "1e999",
    "NaN",
    "nan",
    "auto",
    "\u00b2",
    "float8_e4m3fn",
    "int4",
    "<f4",
    ">f4",
    "bfloat16",
    "zstd",
)
RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"9" * 5000,
    b'"\\ud800"',
    b"[" * 100_000,
    b'{"a":' * 3000,
    b"[" * 60 + b"]" * 60,
    b"",
    b"tru",
    b"1.5",
    b"4.0",
    b"1e2",
    b'{"a":1,"a":2}',
)


def value(rng: Random) -> Any:
    """What stands in the place of another value of a JSON document."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(SIZES)
    if kind < 4:
        return rng.choice(HUGE)
    if kind < 5:
        return -rng.choice((*SIZES, *HUGE[:6]))
    if kind < 7:
        return rng.choice(TEXTS)
    return rng.choice((None, True, False, [], {}, 1.5, 4.0, 1e300, [[]], {"a": {}}, ["a"], [1, 2], [0], {"": 0}, -0.0))


# -- JSON --------------------------------------------------------------------------------------------------------------


class _Raw:
    """Bytes that are put there as they are."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


def dumped(document: Any) -> bytes:
    """Like json.dumps; `_Raw` values as they are."""
    found: list[bytes] = []

    def put(each: Any) -> Any:
        found.append(each.raw)
        return f"\x01raw{len(found) - 1}\x01"

    text = json.dumps(document, default=put).encode()
    for number, raw in enumerate(found):
        text = text.replace(b'"\\u0001raw%d\\u0001"' % number, raw)
    return text


def places(document: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place below the top."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, each in inner:
        yield (*trail, key)
        yield from places(each, (*trail, key))


def at(document: Any, trail: tuple[Any, ...]) -> Any:
    for key in trail:
        document = document[key]
    return document


def edit_json(rng: Random, document: Any, *, only: Callable[[tuple[Any, ...]], bool] | None = None) -> str:
    """One edit, in place. only: of which places. What was done."""
    found = [trail for trail in places(document) if only is None or only(trail)]
    if not found:
        return "nothing"
    trail = rng.choice(found[:50] if rng.random() < 0.5 else found)
    holder = at(document, trail[:-1])
    key = trail[-1]
    old = holder[key]
    kind = rng.randrange(14)
    shown = "/".join(map(str, trail))[:80]
    if kind < 4:
        holder[key] = value(rng)
        return f"{shown} = {str(holder[key])[:40]!r}"
    if kind < 6 and isinstance(old, int):
        holder[key] = rng.choice((old - 1, old + 1, old + 2, old + 8, -old, old * 2, float(old)))
        return f"{shown} = {holder[key]} for {old}"
    if kind < 7:
        holder[key] = _Raw(rng.choice(RAW))
        return f"{shown} = raw {holder[key].raw[:20]!r}"
    if kind < 8:
        del holder[key]
        return f"{shown} gone"
    if kind < 9:
        holder[key] = deepcopy(at(document, rng.choice(found))) if rng.random() < 0.5 else [old]
        return f"{shown} = another's"
    if kind < 10 and isinstance(holder, dict):
        new = rng.choice((*TEXTS, *map(str, holder), f"{key}x", str(key)[:-1]))
        holder[new] = holder.pop(key)
        return f"{shown} renamed {new[:40]!r}"
    if kind < 11 and isinstance(holder, dict):
        other = rng.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
        return f"{shown} <-> {str(other)[:40]}"
    if kind < 12 and isinstance(old, list):
        old += old[-1:] if rng.random() < 0.5 else [value(rng)]
        return f"{shown} longer"
    if kind < 13 and isinstance(old, list) and old:
        del old[rng.randrange(len(old))]
        return f"{shown} shorter"
    if isinstance(old, str) and old:
        cut = rng.randrange(len(old))
        holder[key] = old[:cut] + rng.choice(("", ".", "/", "\0", "9", "x")) + old[cut + 1 :]
        return f"{shown} = {holder[key][:40]!r}"
    holder[key] = {"a": old}
    return f"{shown} nested"


def as_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# -- safetensors -------------------------------------------------------------------------------------------------------

BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4, "C64": 64}
NUMBERS = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": None}
NOT_FINITE = {
    "F64": struct.pack("<d", float("nan")),
    "F32": struct.pack("<f", float("nan")),
    "F16": struct.pack("<e", float("nan")),
    "BF16": b"\xc0\x7f",
    "F8_E4M3": b"\x7f",
    "F8_E8M0": b"\xff",
    "U8": b"\xff",
}
INFINITE = {"F64": struct.pack("<d", float("inf")), "F32": struct.pack("<f", float("-inf")), "BF16": b"\x80\x7f"}
INFINITE |= {"F16": struct.pack("<e", float("inf"))}


class Model(NamedTuple):
    """A safetensors file. tensors: name -> [dtype, shape, bytes]."""

    metadata: Any
    tensors: dict[str, list[Any]]

    def file(self) -> bytes:
        head = {"__metadata__": self.metadata} if self.metadata else {}
        body = bytearray()
        for name, (dtype, shape, data) in self.tensors.items():
            head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
        text = dumped(head)
        return struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8) + bytes(body)


def model_of(data: bytes) -> Model | None:
    size = int.from_bytes(data[:8], "little")
    head = as_json(data[8 : 8 + size]) if 2 <= size <= len(data) - 8 and data[8:9] == b"{" else None
    if not isinstance(head, dict):
        return None
    metadata = head.pop("__metadata__", None)
    body = data[8 + size :]
    try:
        rows = {
            name: [row["dtype"], row["shape"], body[row["data_offsets"][0] : row["data_offsets"][1]]]
            for name, row in head.items()
        }
    except (KeyError, TypeError, IndexError):
        return None
    return Model(metadata, rows)


def edit_safetensors(rng: Random, data: bytes) -> tuple[bytes, str]:
    model = model_of(data)
    if model is None or not model.tensors:
        return edit_bytes(rng, data)
    if rng.random() < 0.12:
        return edit_part(rng, data)
    names = list(model.tensors)
    quantised = [name for name in names if model.tensors[name][0] not in ("F32", "BF16", "F16")]
    parts = [name for name in names if any(word in name for word in ("scale", "zero", "shape", "absmax", "quant", "g_idx", "SCB", "bias"))]  # fmt: skip  # noqa: E501
    name = rng.choice((parts or names) if rng.random() < 0.5 else (quantised or names) if rng.random() < 0.6 else names)
    row = model.tensors[name]
    kind = rng.randrange(15)
    dtype, shape, body = row
    done = f"{name}: "
    if kind == 0:  # as many bits under another dtype
        same = [other for other in BITS if BITS[other] == BITS.get(dtype)]
        row[0] = rng.choice(same or list(BITS))
        done += f"{dtype} as {row[0]}"
    elif kind == 1:  # another dtype, the shape made to fit
        row[0] = rng.choice(list(BITS))
        total = len(body) * 8
        row[1] = [*shape[:-1], total // BITS[row[0]] // max(1, _prod(shape[:-1]))]
        row[2] = body[: -(-_prod(row[1]) * BITS[row[0]] // 8)]
        done += f"{dtype} {shape} as {row[0]} {row[1]}"
    elif kind in (2, 3):  # as many elements in another shape
        numel = _prod(shape)
        row[1] = rng.choice(
            (
                [numel],
                [1, numel],
                [numel, 1],
                shape[::-1],
                [1, *shape],
                [*shape, 1],
                [],
                [*shape[:-2], _prod(shape[-2:])],
            )
        )
        if _prod(row[1]) != numel:
            row[1] = [numel]
        done += f"{shape} as {row[1]}"
    elif kind in (4, 5) and shape:  # fewer or more along a dim
        dim = rng.randrange(len(shape))
        row[1] = list(shape)
        row[1][dim] = max(0, rng.choice((0, 1, shape[dim] - 1, shape[dim] + 1, shape[dim] // 2, shape[dim] * 2)))
        want = -(-_prod(row[1]) * BITS.get(dtype, 8) // 8)
        row[2] = (body * (want // max(1, len(body)) + 1) or bytes(want))[:want] if want < 4 << 20 else body
        done += f"{shape} to {row[1]}"
    elif kind == 6:
        del model.tensors[name]
        done += "gone"
    elif kind == 7:
        ending = rng.choice(("x", ".weight", "_scale", "_scale_inv", "_packed", "_shape", ".absmax", "_zero_point", "_blocks", ".biases", "_g_idx", ".SCB", ".quant_map"))  # fmt: skip  # noqa: E501
        new = rng.choice(
            (name + ending, name.rpartition(".")[0] + ending, name.rpartition("_")[0] + ending, rng.choice(TEXTS))
        )
        model.tensors[new] = model.tensors.pop(name)
        done += f"renamed {new[:60]!r}"
    elif kind == 8:
        other = rng.choice(names)
        model.tensors[name], model.tensors[other] = model.tensors[other], model.tensors[name]
        done += f"<-> {other}"
    elif kind in (9, 10):  # values that are no numbers, or none at all
        table = rng.choice((NOT_FINITE, INFINITE))
        each = table.get(dtype)
        if each and len(body) >= len(each):
            step = len(each)
            where = rng.randrange(len(body) // step) * step
            row[2] = body[:where] + each + body[where + step :] if rng.random() < 0.6 else each * (len(body) // step)
            done += f"{each.hex()} at {where}"
        else:
            row[2] = bytes([rng.choice((0, 255, 127, 128))]) * len(body)
            done += "all one value"
    elif kind == 11 and (document := as_json(body)) is not None and isinstance(document, dict):
        done += edit_json(rng, document)
        row[2] = dumped(document)[: 4 << 20]
        row[1] = [len(row[2])]
    elif kind == 12:
        row[2] = edit_bytes(rng, body, same=True)[0]
        done += "bytes"
    elif kind == 13:
        model.tensors[f"{name}{rng.choice(('_copy', '2', '.1'))}"] = list(row)
        done += "twice"
    else:
        done += f"{len(body)} bytes one longer"
        row[2] = body + b"\0"
    return model.file(), done


def _prod(numbers: Any) -> int:
    out = 1
    for number in numbers:
        out *= number
    return out


# -- GGUF --------------------------------------------------------------------------------------------------------------

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class Gguf:
    """A GGUF file, field by field. pairs: [key, type and value as they lie]. tensors: [name, dims, type, offset]."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 4
        self.order = "<"
        (self.version,) = self.take("I")
        if self.version & 0xFFFF == 0:
            self.order = ">"
            self.at = 4
            (self.version,) = self.take("I")
        count, many = self.take("QQ")
        self.pairs = [[self.text(), self.value()] for _ in range(many)]
        self.tensors = []
        for _ in range(count):
            name = self.text()
            (dims,) = self.take("I")
            self.tensors.append([name, list(self.take(f"{dims}Q")), *self.take("IQ")])
        self.count = self.many = None
        self.alignment = 32
        self.values = data[self.at + -self.at % 32 :]

    def take(self, letters: str) -> tuple[Any, ...]:
        found = struct.unpack_from(self.order + letters, self.data, self.at)
        self.at += struct.calcsize(self.order + letters)
        return found

    def text(self) -> bytes:
        (size,) = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at]

    def value(self) -> bytes:
        begin = self.at
        (kind,) = self.take("I")
        self.skip(kind)
        return self.data[begin : self.at]

    def skip(self, kind: int) -> None:
        if kind == 8:
            self.text()
        elif kind == 9:
            inner, count = self.take("IQ")
            for _ in range(count):
                self.skip(inner)
        else:
            self.at += _WIDTHS[kind]

    def pack(self, letters: str, *numbers: int) -> bytes:
        widths = {"I": 32, "Q": 64}
        fitted = [n & ((1 << widths[letter]) - 1) for n, letter in zip(numbers, letters, strict=True)]
        return struct.pack(self.order + letters, *fitted)

    def file(self) -> bytes:
        out = b"GGUF" + self.pack(
            "IQQ",
            self.version,
            len(self.tensors) if self.count is None else self.count,
            len(self.pairs) if self.many is None else self.many,
        )
        for key, raw in self.pairs:
            out += self.pack("Q", len(key)) + key + raw
        for name, dims, kind, offset in self.tensors:
            out += self.pack("Q", len(name)) + name + self.pack("I", len(dims))
            out += b"".join(self.pack("Q", each) for each in dims) + self.pack("IQ", kind, offset)
        return out + bytes(-len(out) % self.alignment) + self.values

    def string(self, text: bytes) -> bytes:
        return self.pack("IQ", 8, len(text)) + text

    def array(self, kind: int, count: int, rest: bytes = b"") -> bytes:
        return self.pack("IIQ", 9, kind, count) + rest

    def odd_value(self, rng: Random) -> bytes:
        """Type and value of a pair."""
        kind = rng.randrange(9)
        if kind == 0:
            return self.string(rng.choice(TEXTS).encode("utf-8", "surrogatepass"))
        if kind == 1:
            width = rng.choice(list(_WIDTHS))
            return self.pack("I", width) + bytes([rng.choice((0, 1, 127, 255))]) * _WIDTHS[width]
        if kind == 2:
            return self.array(rng.choice((0, 4, 6, 8, 9, 77)), rng.choice((*SIZES, *HUGE[:8])))
        if kind == 3:
            deep = rng.choice((1, 2, 3, 4, 5, 900))
            return self.array(9, 1) + self.pack("IQ", 9, 1) * deep + self.pack("IQ", 4, 0)
        if kind == 4:
            many = rng.choice((0, 1, 63, 64, 65, 3000))
            return self.array(4, many, self.pack("I", rng.choice((0, 1, 7, 2**32 - 1))) * many)
        if kind == 5:
            many = rng.choice((0, 1, 64, 65, 3000))
            return self.array(8, many, (self.pack("Q", 2) + rng.choice((b"ab", b"\xff\xfe"))) * many)
        if kind == 6:
            many = rng.choice((1, 3, 70))
            return self.array(9, many, self.pack("IQ", 9, 0) * many)
        if kind == 7:
            return self.pack("I", rng.choice((13, 77, 2**32 - 1))) + bytes(8)
        return self.pack("I", 6) + struct.pack(self.order + "f", rng.choice((float("nan"), float("inf"), -0.0, 1e-45)))


def edit_gguf(rng: Random, data: bytes) -> tuple[bytes, str]:
    try:
        file = Gguf(data)
    except (struct.error, KeyError):
        return edit_bytes(rng, data)
    kind = rng.randrange(18)
    pair = rng.choice(file.pairs) if file.pairs else [b"a", file.string(b"b")]
    row = rng.choice(file.tensors) if file.tensors else [b"a", [1], 0, 0]
    shown = row[0][:50].decode("latin-1")
    done = ""
    if kind < 4:
        pair[1] = file.odd_value(rng)
        done = f"value of {pair[0][:50]!r} {pair[1][:12].hex()}"
    elif kind == 4 and file.pairs:
        file.pairs.remove(pair)
        done = f"{pair[0][:50]!r} gone"
    elif kind == 5:
        new = rng.choice((rng.choice(file.pairs)[0] if file.pairs else b"", *(each.encode() for each in TEXTS[:8])))
        done, pair[0] = f"{pair[0][:50]!r} named {new[:40]!r}", new
    elif kind == 6:
        key = rng.choice(
            (b"general.alignment", b"split.no", b"split.count", b"split.tensors.count", b"general.file_type")
        )
        number = rng.choice((0, 1, 2, 3, 8, 16, 32, 64, 4096, 1 << 20, 1 << 21, 24, 2**31))
        file.pairs.append([key, file.pack("II", 4, number)])
        if key == b"general.alignment" and 0 < number <= 1 << 20 and rng.random() < 0.7:
            file.alignment = number
        done = f"{key.decode()} = {number}"
    elif kind == 7:
        row[2] = rng.choice((*range(45), 99, 2**32 - 1))
        done = f"type of {shown} = {row[2]}"
    elif kind == 8 and row[1]:
        dim = rng.randrange(len(row[1]))
        old = row[1][dim]
        row[1][dim] = rng.choice((*SIZES, *HUGE[:9], old + 1, old * 2, old // 2))
        done = f"dims of {shown} = {row[1]}"
    elif kind == 9:
        numel = _prod(row[1])
        row[1] = rng.choice(
            ([], [numel], [numel, 1], [1, numel], row[1][::-1], [*row[1], 1, 1, 1, 1], [1] * 64 + row[1], [0])
        )
        done = f"dims of {shown} = {row[1][:6]}"
    elif kind in (10, 11):
        other = rng.choice(file.tensors)[3] if file.tensors else 0
        row[3] = rng.choice((other, 0, row[3] + 32, row[3] + 1, row[3] - 32, len(file.values), *HUGE[:9], 2**64 - 32))
        done = f"offset of {shown} = {row[3]}"
    elif kind == 12:
        new = rng.choice((rng.choice(file.tensors)[0] if file.tensors else b"", *(each.encode() for each in TEXTS)))
        done, row[0] = f"{shown} named {new[:40]!r}", new
    elif kind == 13 and file.tensors:
        file.tensors.remove(row)
        done = f"{shown} gone"
    elif kind == 14:
        file.tensors.append([row[0] + rng.choice((b"", b"2", b".1")), list(row[1]), row[2], row[3]])
        done = f"{shown} twice"
    elif kind == 15:
        file.version = rng.choice((0, 1, 2, 3, 4, 65536, 2**32 - 1, 0x03000000))
        done = f"version {file.version}"
    elif kind == 16:
        if rng.random() < 0.5:
            file.count = rng.choice((*SIZES, *HUGE[:9]))
        else:
            file.many = rng.choice((*SIZES, *HUGE[:9]))
        done = f"counts {file.count} {file.many}"
    else:
        file.values = edit_bytes(rng, file.values)[0]
        done = "values"
    return file.file(), done


def split_gguf(rng: Random, data: bytes) -> tuple[Files, str]:
    """Two or three files of a split that need not agree."""
    try:
        whole = Gguf(data)
    except (struct.error, KeyError):
        return {"model.gguf": data}, "no split"
    parts = rng.choice((2, 3))
    out: Files = {}
    for number in range(parts):
        own = Gguf(data)
        rows = whole.tensors[number::parts]
        own.pairs = own.pairs if number == 0 or rng.random() < 0.2 else []
        own.tensors = []
        own.values = b""
        bounds = sorted({each[3] for each in whole.tensors} | {len(whole.values)})
        for name, dims, kind, offset in rows:
            stop = bounds[bounds.index(offset) + 1]
            own.tensors.append([name, dims, kind, len(own.values)])
            own.values += whole.values[offset:stop] + bytes(-len(whole.values[offset:stop]) % 32)
        stated = [number, parts, len(whole.tensors)]
        if rng.random() < 0.4:
            stated[rng.randrange(3)] = rng.choice((0, 1, 2, 3, 65535))
        if rng.random() < 0.2 and own.tensors:
            own.tensors[0][0] = whole.tensors[0][0]
        for key, kind, letter, each in zip(
            (b"split.no", b"split.count", b"split.tensors.count"), (2, 2, 5), "HHi", stated, strict=True
        ):
            if rng.random() > 0.06:
                own.pairs.append([key, own.pack("I", kind) + struct.pack(own.order + letter, each)])
        out[f"m-{number + 1:05d}-of-{parts:05d}.gguf"] = own.file()
    if rng.random() < 0.1:
        out.pop(rng.choice(list(out)))
    return out, f"split in {parts}"


# -- Orbax -------------------------------------------------------------------------------------------------------------


def edit_zstd(rng: Random, data: bytes) -> tuple[bytes, str]:
    """What a frame holds, packed again."""
    try:
        whole = zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 22)
    except zstandard.ZstdError:
        return edit_bytes(rng, data)
    kind = rng.randrange(7)
    if kind == 0:
        return zstandard.ZstdCompressor(write_content_size=False).compress(whole[: len(whole) // 2]), "a short frame"
    if kind == 1:
        return zstandard.ZstdCompressor(level=19).compress(bytes(rng.choice((64, 300)) << 20)), "a bomb"
    if kind == 2:
        frame = zstandard.ZstdCompressor().compress
        return frame(whole[:5]) + frame(whole[5:]), "two frames"
    if kind == 3:
        return zstandard.ZstdCompressor(write_content_size=False).compress(whole + b"\0"), "a long frame"
    if kind == 4:
        size = rng.choice((len(whole) + 1, 1 << 40, 0))
        return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + data[6:], "another content size"
    if kind == 5:
        return edit_bytes(rng, data)
    return zstandard.ZstdCompressor().compress(edit_bytes(rng, whole, same=True)[0]), "other values"


def edit_ocdbt(rng: Random, files: Files) -> tuple[Files, str] | None:
    """A database with other rows, put together anew below `d/`; None where there is none."""
    manifests = [path for path in files if path.rpartition("/")[2] == "manifest.ocdbt" and "ocdbt.process" not in path]
    if not manifests:
        return None
    folder = manifests[0].removesuffix("manifest.ocdbt")
    from ckpt_tool.storage.arrays.ocdbt import read_keys

    tree = _load("fuzz_targets", HERE / "targets.py").Files({p: d for p, d in files.items() if isinstance(d, bytes)})
    try:
        found = read_keys(tree, folder)
    except Exception:
        return None
    tables = sorted({row.path.removeprefix(folder) for row in found.values() if "//" not in row.path})
    rows: list[tuple[str, Any]] = []
    for key, row in found.items():
        here = "//" in row.path or (row.nbytes < 2000 and key.rpartition("/")[2] in (".zarray", "zarr.json"))
        inner = (
            tree.read(row.path, row.offset, row.nbytes)
            if here
            else (tables.index(row.path.removeprefix(folder)), row.offset, row.nbytes)
        )
        rows.append((key, inner))
    number = rng.randrange(len(rows))
    key, inner = rows[number]
    kind = rng.randrange(12)
    done = key[:60]
    headers = [i for i, row in enumerate(rows) if row[0].rpartition("/")[2] in (".zarray", "zarr.json")]
    if kind < 5 and headers:
        number = rng.choice(headers)
        key, inner = rows[number]
        if not isinstance(inner, bytes):
            inner = tree.read(folder + tables[inner[0]], *inner[1:])
        if (document := as_json(inner)) is None:
            return None
        done = f"{key[:60]}: {edit_json(rng, document)}"
        rows[number] = (key, dumped(document)[:1_500_000])
    elif kind == 5 and isinstance(inner, tuple):
        file, offset, size = inner
        numbers = [file, offset, size]
        numbers[rng.randrange(3)] = rng.choice(
            (0, 1, offset + 1, size - 1, size + 1, 7, 2**40, 2**63, 2**64 - 1, -1 & 2**64 - 1)
        )
        rows[number] = (key, tuple(numbers))
        done += f" at {numbers}"
    elif kind == 6:
        del rows[number]
        done += " gone"
    elif kind == 7:
        rows[number] = (rng.choice((key + "x", key[:-1], rng.choice(rows)[0], "", "a" * 70_000)), inner)
        done += " renamed"
    elif kind == 8:
        other = rng.randrange(len(rows))
        rows[number], rows[other] = (key, rows[other][1]), (rows[other][0], inner)
        done += f" <-> {rows[other][0][:60]}"
    elif kind == 9 and isinstance(inner, bytes):
        rows[number] = (
            key,
            edit_zstd(rng, inner)[0] if inner[:4] == b"\x28\xb5\x2f\xfd" else edit_bytes(rng, inner)[0],
        )
        done += " bytes"
    elif kind == 10 and tables:
        spot = rng.randrange(len(tables))
        tables[spot] = rng.choice(
            ("../../secret", "/etc/passwd", "d/..", "", tables[0], "manifest.ocdbt", "d/" + "c" * 32)
        )
        done = f"table: {tables[spot]}"
    if rng.random() < 0.9:
        rows.sort(key=lambda row: row[0].encode("utf-8", "surrogateescape"))
    try:
        body = orbax.leaf(rows, *tables)
    except (UnicodeEncodeError, TypeError):
        return None
    if kind == 11:
        body, how = edit_bytes(rng, body)
        done = f"body of the node: {how}"
    packed = rng.random() < 0.3
    node = orbax.framed(
        orbax.NODE, zstandard.ZstdCompressor().compress(body) if packed else body, compression=int(packed)
    )
    out = dict(files)
    top = orbax.manifest(len(node))
    if rng.random() < 0.06:
        top, how = edit_bytes(rng, top)
        done = f"body of the manifest: {how}"
    out[f"{folder}{orbax.NODES}"] = node
    out[manifests[0]] = orbax.framed(orbax.MANIFEST, top)
    return out, f"ocdbt: {done}"


def edit_shard(rng: Random, data: bytes) -> tuple[bytes, str]:
    """The index at the end of a shard of zarr 3, with its checksum."""
    count = rng.choice((1, 2, 4, 8))
    size = 16 * count + 4
    if len(data) < size:
        return edit_bytes(rng, data)
    index = list(struct.unpack(f"<{2 * count}Q", data[-size:-4]))
    index[rng.randrange(2 * count)] = rng.choice((0, 1, len(data), 2**40, 2**63, 2**64 - 1, index[0], index[-1] + 1))
    raw = struct.pack(f"<{2 * count}Q", *index)
    return data[:-size] + raw + struct.pack("<I", orbax.crc32c(raw)), f"index of {count} chunks"


# -- anything ----------------------------------------------------------------------------------------------------------


def edit_bytes(rng: Random, data: bytes, *, same: bool = False) -> tuple[bytes, str]:
    """Bytes of no meaning. same: of the same length."""
    if not data:
        return b"\0" * 9, "nine zeros"
    begin = rng.randrange(len(data))
    kind = rng.randrange(2 if same else 7)
    if kind == 0:
        out = bytearray(data)
        out[begin] ^= 1 << rng.randrange(8)
        return bytes(out), f"bit at {begin}"
    if kind == 1:
        size = min(rng.choice((1, 2, 4, 8, 100)), len(data) - begin)
        return data[:begin] + bytes([rng.choice((0, 255, 127))]) * size + data[begin + size :], f"{size} at {begin}"
    if kind == 2:
        return data[:begin], f"cut at {begin}"
    if kind == 3:
        return data[:begin] + rng.randbytes(rng.choice((1, 8, 60))) + data[begin:], f"more at {begin}"
    if kind == 4:
        return data[:begin] + data[begin + rng.choice((1, 4, 8, 60)) :], f"less at {begin}"
    if kind == 5:
        return data + bytes(rng.choice((1, 8, 4096))), "zeros behind"
    return data[begin:] + data[:begin], f"turned by {begin}"


def edit_part(rng: Random, data: bytes) -> tuple[bytes, str]:
    """JSON and pickles: values of the document; the container around it is right."""
    part = edits.part_of(data)
    if part is None:
        return edit_bytes(rng, data)
    if part.kind == "json" and (document := as_json(part.data)) is not None:
        done = edit_json(rng, document)
        new = dumped(document)
        if rng.random() < 0.1:
            new = dumped(document)[:-1] + b',"a":1,"a":1}'
        return part.file(new[: 8 << 20]), done
    try:
        numbers = edits.numbers(part) + edits.texts(part)
    except ValueError:  # a number of very many digits, of an edit before
        return edit_bytes(rng, data)
    if not numbers or part.kind == "text":
        return edit_bytes(rng, data)
    number = rng.choice(numbers)
    new = rng.choice((*SIZES, *HUGE[:9], -1, -2, True, None, 1.5, *TEXTS[:12], rng.choice(numbers).value))
    try:
        return part.file(
            edits.with_number(part, number, new)
        ), f"{number.field} {str(number.value)[:30]} = {str(new)[:30]}"
    except (OverflowError, ValueError):
        return edit_bytes(rng, data)


def edit_file(rng: Random, path: str, data: bytes) -> tuple[bytes, str]:
    """One file, by what it is."""
    if rng.random() < 0.06:
        return edit_bytes(rng, data)
    if data[:4] == b"GGUF":
        return edit_gguf(rng, data)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return edit_zstd(rng, data)
    if "/c/" in path and rng.random() < 0.5:
        return edit_shard(rng, data)
    if data[8:9] == b"{":
        return edit_safetensors(rng, data)
    return edit_part(rng, data)


def edit_names(rng: Random, files: Files) -> str:
    """The folder: files gone, twice, exchanged, links, pipes."""
    path = rng.choice(list(files))
    other = rng.choice(list(files))
    kind = rng.randrange(8)
    if kind == 0:
        del files[path]
        return f"{path} gone"
    if kind == 1:
        files[path], files[other] = files[other], files[path]
        return f"{path} <-> {other}"
    if kind == 2:
        files[f"{path}{rng.choice(('2', '.gguf', '.json', '.safetensors', '.bak'))}"] = files[path]
        return f"{path} twice"
    if kind in (3, 4):
        files[path] = Link(
            rng.choice(("../secret", "/dev/zero", path.rpartition("/")[2], "nowhere", ".", "/etc/passwd", other))
        )
        return f"{path} -> {files[path].to}"
    if kind == 5:
        files[path] = Pipe()
        return f"{path} a pipe"
    if kind == 6:
        files[path] = b""
        return f"{path} empty"
    files[f"{path}/x"] = files.pop(path)
    return f"{path} a folder"


def mutated(rng: Random, files: Files) -> tuple[Files, list[str]]:
    """The files with one to three edits, and what these are."""
    files = dict(files)
    done = list[str]()
    if len(files) == 1 and rng.random() < 0.08:
        (path,) = files
        if path.endswith(".gguf"):
            files, how = split_gguf(rng, files[path])
            done.append(how)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        plain = [path for path, data in files.items() if isinstance(data, bytes)]
        if not plain:
            break
        try:
            files, how = _edited(rng, files, plain)
        except Exception:  # an edit before has left no container, or a document that is no JSON any more
            path = rng.choice(plain)
            files[path], how = edit_bytes(rng, files[path])
        done.append(how)
    return files, done


def _edited(rng: Random, files: Files, plain: list[str]) -> tuple[Files, str]:
    """One edit. plain: the files that are no links."""
    if len(files) > 1 and rng.random() < 0.07:
        return files, edit_names(rng, files)
    if rng.random() < 0.5 and (found := edit_ocdbt(rng, files)) is not None:
        return found
    telling = [path for path in plain if path.endswith((".json", "_METADATA", ".zarray", ".gguf", ".model"))]
    path = rng.choice(telling if telling and rng.random() < 0.5 else plain)
    document = as_json(files[path]) if path.endswith("config.json") and rng.random() < 0.7 else None
    if isinstance(document, dict) and b"quant" in files[path]:
        how = edit_json(rng, document, only=_of_quantisation)
        files[path] = dumped(document)
    else:
        files[path], how = edit_file(rng, path, files[path])
    return files, f"{path}: {how}"


def _of_quantisation(trail: tuple[Any, ...]) -> bool:
    return (len(trail) > 1 and "quant" in str(trail[0])) or (len(trail) > 2 and "quant" in str(trail[1]))
