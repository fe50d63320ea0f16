"""Table A of the threat list: safetensors files that are wrong, or look wrong and are not.

`CASES`: (row, make(folder) -> path to pass as SRC, exit code, words that the message must hold). An exit code may be a
dict of verb -> code with "*" for the rest. Rows with code 0 must be read; their words are not looked for.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[[Path], Path]
CASES: list[tuple[str, Make, int | dict[str, int], tuple[str, ...]]] = []


def entry(dtype: Any = "U8", shape: Any = (3,), offsets: Any = (0, 3), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def text_of(header: Any) -> bytes:
    return header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = text_of(header)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def add(row: str, content: bytes | Callable[[], bytes], want: int | dict[str, int], *words: str) -> None:
    """A row whose source is one file of this content."""

    def make(folder: Path) -> Path:
        path = folder / "model.safetensors"
        path.write_bytes(content if isinstance(content, bytes) else content())
        return path

    CASES.append((row, make, want, words))


def add_header(row: str, header: Any, data: bytes, want: int | dict[str, int], *words: str) -> None:
    add(row, file_of(header, data), want, *words)


def zip_of(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


PICKLE = pickle.dumps({"weight": [1, 2, 3]}, protocol=2)
TWO = {"a": entry("F32", [2], [0, 8]), "b": entry("F32", [3], [8, 20])}
TWO_DATA = bytes(range(20))
SOUND = file_of(TWO, TWO_DATA)


# A1 - A6: the length
add("A1", b"", 3, "empty", "need 8 bytes at 0")
add("A2", b"\x10\0\0\0\0\0\0", 3, "truncated header length")
add("A3", b"\xff" * 8 + b"{}", 3, "18446744073709551615", "limit", "file")


def _sparse(folder: Path) -> Path:
    path = folder / "model.safetensors"
    with path.open("wb") as f:
        f.write((101_000_000).to_bytes(8, "little") + b"{")
        f.truncate(101_000_100)
    return path


CASES.append(("A4", _sparse, 3, ("101000000", "limit of 100000000")))
add("A5", (100_000_000).to_bytes(8, "little") + b'{"a":       ', 3, "100000008", "20 bytes")
add("A6", bytes(8) + b"{}", 3, "empty header")
add("A6-one", file_of(b"{"), 3, "length is 1")

# A7 - A14: the JSON
add_header("A7", b'{"\xff":' + text_of(entry()) + b"}", b"abc", 3, "utf-8", '"offset": 10')
add_header("A7-cut", b'{"\xc3":' + text_of(entry()) + b"}", b"abc", 3, "utf-8", '"offset": 10')
add_header("A8", b"not json at all", b"", 3, "must begin with '{'")
add_header("A8-inside", b'{"a":' + text_of(entry()) + b',"b" 1}', b"abc", 3, "want a key")
add_header("A8-array", b"[1, 2, 3]", b"", 3, "must begin with '{'")
add_header("A8-string", b'"header"', b"", 3, "must begin with '{'")
add_header("A8-trailing", text_of(TWO) + b"}", TWO_DATA, 3, "ends, but")
add_header("A9-space", b" " + text_of(TWO), TWO_DATA, 3, "must begin with '{' at byte 8")
add_header("A9-tab", b"\t" + text_of(TWO), TWO_DATA, 3, "must begin with '{' at byte 8")
add_header("A9-bom", b"\xef\xbb\xbf" + text_of(TWO), TWO_DATA, 3, "must begin with '{' at byte 8")
add_header("A10", text_of(TWO) + bytes(5), TWO_DATA, 3, "bad padding")
_a = text_of(entry("U8", [4], [0, 4]))
add_header("A11", b'{"a":' + _a + b',"a":' + _a + b"}", b"abcd", 3, "duplicate key", "bytes 9 and")
_none = text_of(entry("U8", [0], [0, 0]))
add_header("A11-empty", b'{"a":' + _none + b',"a":' + _none + b"}", b"", 3, "duplicate key")
add_header("A12", b'{"a":' + _a + b',"a":' + text_of(entry("F32", [1], [0, 4])) + b"}", b"abcd", 3, "duplicate key")
add_header("A12-escaped", b'{"a":' + _a + b',"\\u0061":' + _a + b"}", b"abcd", 3, "duplicate key")
add_header("A13-field", b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a", 3, "duplicate key")
add_header("A13-metadata", b'{"__metadata__":{"k":"1","k":"2"}}', b"", 3, "duplicate key", "/__metadata__/k")
add_header("A13-two", b'{"__metadata__":{"k":"1"},"__metadata__":{"k":"1"}}', b"", 3, "duplicate key")
add_header("A13-two-last", text_of(TWO)[:-1] + b',"__metadata__":{},"__metadata__":{}}', TWO_DATA, 3, "duplicate key")
add_header("A14", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", 3, "nested more than 64 deep")
add_header("A14-open", b'{"a":' * 100_000, b"", 3, "nested more than 64 deep")

# A15 - A20: numbers
for name, word in {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "1e3": "1000.0",
    "1.0": "1.0",
    "-1": "-1",
    "true": "true",
    '"1"': "'1'",
    "null": "null",
    "-0": "-0.0",
    "[1]": "[1]",
}.items():
    shape = b'{"a":{"dtype":"U8","shape":[' + name.encode() + b'],"data_offsets":[0,1]}}'
    offset = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,' + name.encode() + b"]}}"
    json_fault = name in ("NaN", "Infinity")
    add_header(
        f"A15-dim-{name}", shape, b"a", 3, word, "/a/shape/0", "not json" if json_fault else "non-negative integer"
    )
    add_header(f"A15-offset-{name}", offset, b"a", 3, word, "/a/data_offsets/1")
add_header("A15-leading-zero", b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}', b"a", 3, "begins with a zero")
add_header("A16", {"a": entry("U8", [10**30], [0, 0])}, b"", 3, "out of range", "/a/shape/0")
add_header(
    "A16-digits", b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}', b"", 3, "5000 digits"
)
add_header("A17", {"a": entry("F32", [2**32, 2**32], [0, 0])}, b"", 3, "overflows", "offsets span 0")
add_header("A17-f64", {"a": entry("F64", [2**61], [0, 0])}, b"", 3, "overflows", "offsets span 0")
add_header("A18", {"a": entry("U8", [0, 2**63], [0, 0])}, b"", 3, "dimension", "out of range", "/a/shape/1")
add_header("A19", {"a": entry("U8", [1] * 10_000, [0, 1])}, b"a", 3, "rank 10000", "limit is 64")
add_header("A20-begin", {"a": entry("U8", [3], [3, 0])}, b"abc", 3, "begin 3 is after end 0")
add_header("A20-end", {"a": entry("U8", [30], [0, 30])}, b"abc", 3, "last offset is 30", "3 of data")

# A21 - A25: how the tensors lie
add_header("A21", {"a": entry("U8", [3], [0, 3]), "b": entry("U8", [3], [2, 5])}, b"abcde", 3, "'b'", "'a'", "overlaps")
add_header("A21-same", {"a": entry("U8", [3], [0, 3]), "b": entry("I8", [3], [0, 3])}, b"abc", 3, "overlaps")
add_header("A21-empty-inside", {"a": entry("U8", [3], [0, 3]), "b": entry("U8", [0], [1, 1])}, b"abc", 3, "overlaps")
add_header("A22", {"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [3, 5])}, b"abcde", 3, "not covered", "2 to 3")
add_header("A22-start", {"a": entry("U8", [2], [1, 3])}, b"abc", 3, "not covered", "0 to 1")
add("A23", SOUND + b"tail", 3, "not covered", "4 bytes")
add("A23-zip", SOUND + zip_of(PICKLE), 4, "also parses as zip")
add("A24-one", SOUND[:-1], 3, "cut short", f"{len(SOUND)} bytes", f"{len(SOUND) - 1}", "1 of 2 tensors are intact")
add("A24-half", SOUND[:-15], 3, "cut short", "0 of 2 tensors are intact")
add("A24-header", SOUND[:40], 3, "40 bytes")
add_header("A25-short", {"a": entry("F32", [1], [0, 2])}, b"ab", 3, "takes 4 bytes", "offsets span 2")
add_header("A25-odd-f4", {"a": entry("F4", [3], [0, 2])}, b"ab", 3, "12 bits")
add_header("A25-scalar", {"a": entry("F32", [], [0, 0])}, b"", 3, "takes 4 bytes", "offsets span 0")

# A26 - A29: dtypes, metadata, counts, names
add_header("A26", {"a": entry("F33", [1], [0, 4])}, b"abcd", 3, "unknown dtype", "F33", "BF16")
add_header("A26-lower", {"a": entry("f32", [1], [0, 4])}, b"abcd", 3, "unknown dtype", "f32")
add_header("A26-empty", {"a": entry("", [1], [0, 4])}, b"abcd", 3, "unknown dtype", "tied weights")
add_header("A26-c128", {"a": entry("C128", [1], [0, 16])}, bytes(16), 3, "unknown dtype", "C128")
add_header("A27-number", {"__metadata__": {"k": 1}}, b"", 3, "/__metadata__/k", "want a string")
add_header("A27-inner-null", {"__metadata__": {"k": None}}, b"", 3, "/__metadata__/k", "null")
add_header("A27-null", {"__metadata__": None, "a": entry("U8", [3], [0, 3])}, b"abc", 0)  # mlx writes it
add_header("A27-list", {"__metadata__": []}, b"", 3, "/__metadata__", "want an object")
add_header("A27-as-tensor", {"a": entry(), "__metadata__": entry("U8", [0], [3, 3])}, b"abc", 3, "/__metadata__/shape")
add_header("A27-entry", {"a": 1}, b"", 3, "/a", "want an object")
add_header("A27-field", {"a": {"dtype": "U8", "shape": []}}, b"", 3, "no data_offsets")


def many(count: int) -> bytes:
    one = b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return b"{" + b",".join(b'"t%d%s' % (i, one) for i in range(count)) + b"}"


add("A28-cap", lambda: file_of(many(1_000_001)), 3, "more than 1000000 tensors")
add("A28-many", lambda: file_of(many(5_000)), 0)
add("A29-surrogate", file_of(b'{"\\ud800":' + text_of(entry()) + b"}", b"abc"), 3, "lone surrogate")
add("A29-long", file_of({"n" * (1 << 20): entry()}, b"abc"), 3, "4096 bytes")
for label, name in {
    "empty": "",
    "nul": "a\0b",
    "escape": "\x1b[31mred\x1b[0m",
    "bidi": "a\u202eb",
    "path": "../../etc/x",
}.items():
    add(f"A29-{label}", file_of({name: entry()}, b"abc"), 0)

# A30 - A32: what else the bytes might be
add("A30", file_of(text_of(TWO).ljust(0x480), TWO_DATA), 0)  # the length's bytes are 80 04: a pickle's first opcode
add("A31-html", b"<!DOCTYPE html><html><head><title>404</title></head></html>", 3, "HTML")
add(
    "A31-lfs",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    3,
    "Git LFS pointer",
    "git lfs pull",
)
add("A31-gzip", gzip.compress(SOUND, mtime=0), 3, "gzip")
add("A31-json", json.dumps({"error": "Repository not found"}).encode(), 3, "JSON text")
add("A31-zeros", bytes(4096), 3, "zeros")


def _shard_is(content: bytes) -> Make:
    """A model of two files, of which the second is something else."""

    def make(folder: Path) -> Path:
        (folder / "model-00001-of-00002.safetensors").write_bytes(file_of({"a": entry()}, b"abc"))
        (folder / "model-00002-of-00002.safetensors").write_bytes(content)
        weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return make


CASES.append(("A31-zip", _shard_is(zip_of(PICKLE)), {"*": 3, "verify": 1}, ("zip archive",)))
CASES.append(("A31-pickle", _shard_is(PICKLE), {"*": 3, "verify": 1}, ("pickle",)))
add_header("A32-bool", {"a": entry("BOOL", [3], [0, 3])}, b"\0\1\7", {"*": 0, "verify": 1})
add_header("A32-odd-offset", {"a": entry("U8", [1], [0, 1]), "b": entry("F32", [1], [1, 5])}, b"abcde", 0)
