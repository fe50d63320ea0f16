"""Table B of the threat list: indexes that lie, and folders whose entries are not what they seem.

`CASES` as in `safetensors_cases`. `NOT_HERE`: rows that are not about an index of safetensors files, and where they
are.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[[Path], Path]
CASES: list[tuple[str, Make, int | dict[str, int], tuple[str, ...]]] = []
NOT_HERE = {
    "B16": "integrity.json is not written or read by any format yet",
    "B17": "`latest` is resolved by the commands (`sources.opening`) and the DeepSpeed formats",
}

ONE = "model-00001-of-00002.safetensors"
TWO = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def shard(*names: str) -> bytes:
    """A sound file of U8 tensors of 3 elements."""
    head = {name: {"dtype": "U8", "shape": [3], "data_offsets": [3 * i, 3 * i + 3]} for i, name in enumerate(names)}
    text = json.dumps(head, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(3 * len(names)))


def write_index(folder: Path, index: Any) -> None:
    text = index if isinstance(index, bytes) else json.dumps(index, indent=2, sort_keys=True).encode()
    (folder / INDEX).write_bytes(text)


def model(folder: Path, weight_map: Any = None, **metadata: Any) -> Path:
    """A sound model of tensors a (file 1) and b (file 2); `weight_map` entries replace the sound ones."""
    (folder / ONE).write_bytes(shard("a"))
    (folder / TWO).write_bytes(shard("b"))
    write_index(folder, {"metadata": metadata, "weight_map": {"a": ONE, "b": TWO, **(weight_map or {})}})
    return folder


def add(row: str, want: int | dict[str, int], *words: str) -> Callable[[Make], Make]:
    """Register the function below as the row's maker."""

    def register(make: Make) -> Make:
        CASES.append((row, make, want, words))
        return make

    return register


def add_path(row: str, value: str, *words: str) -> None:
    """A row whose index says that tensor b lies at `value`."""
    CASES.append((row, lambda folder: model(folder, {"b": value}), 4, ("/weight_map/b", *words)))


@add("B0-sound", 0)
def _(folder: Path) -> Path:
    return model(folder, total_size=6)


add_path("B1", "/etc/passwd", "is absolute")


@add("B2", 4, "'..'", "/weight_map/b")
def _(folder: Path) -> Path:
    other = folder / "other"
    source = folder / "source"
    other.mkdir()
    source.mkdir()
    (other / "model.safetensors").write_bytes(shard("b"))
    return model(source, {"b": "../other/model.safetensors"})


for label, value in {
    "inner": "a/../../x",
    "backslash": "..\\x",
    "drive": "C:\\x",
    "drive-slash": "C:/x",
    "unc": "//host/x",
    "nul": "x\0y",
    "file-url": "file:///x",
    "http-url": "http://x/y.safetensors",
    "empty": "",
    "dot": ".",
    "trailing-dot": "x.",
    "trailing-slash": "x/",
    "newline": "x\ny",
    "long": "x" * 300,
}.items():
    add_path(f"B3-{label}", value)

for label, wrong in {"int": 7, "list": [ONE], "null": None, "object": {"file": ONE}, "true": True}.items():
    CASES.append((f"B4-{label}", lambda f, wrong=wrong: model(f, {"b": wrong}), 3, ("/weight_map/b", "want a string")))


def _index_text(row: str, text: bytes, *words: str) -> None:
    def make(folder: Path) -> Path:
        model(folder)
        write_index(folder, text)
        return folder

    CASES.append((row, make, 3, words))


_index_text("B4-no-map", b'{"metadata": {}}', "no weight_map")
_index_text("B4-map-list", b'{"weight_map": ["a"]}', "/weight_map", "a list")
_index_text("B4-root", b"[1]", "a list", "want an object")
_index_text("B4-empty-map", b'{"weight_map": {}}', "names no tensor")
_index_text("B4-cut", b'{"weight_map": {"a": "x', "not closed")
_index_text("B4-empty", b"", "want a value")
_index_text("B4-utf8", b'{"weight_map": {"\xff": "x.safetensors"}}', "utf-8")
_index_text("B4-depth", b'{"weight_map": ' + b"[" * 100_000, "nested more than 64 deep")
for label, inside in {
    "": f'"weight_map": {{"a": "{ONE}", "b": "{TWO}", "a": "{TWO}"}}',
    "-same": f'"weight_map": {{"a": "{ONE}", "a": "{ONE}", "b": "{TWO}"}}',
    "-escaped": f'"weight_map": {{"a": "{ONE}", "b": "{TWO}", "\\u0061": "{ONE}"}}',
    "-metadata": f'"metadata": {{"x": 1, "x": 2}}, "weight_map": {{"a": "{ONE}"}}',
    "-twice": f'"weight_map": {{"a": "{ONE}"}}, "weight_map": {{"b": "{TWO}"}}',
}.items():
    _index_text(f"B8{label}", f"{{{inside}}}".encode(), "duplicate key")


@add("B5", 3, "2 of 4 files are missing", "model-3.safetensors", "model-4.safetensors", "3 of 5 tensors")
def _(folder: Path) -> Path:
    return model(folder, {"c": "model-3.safetensors", "d": "model-4.safetensors", "e": "model-4.safetensors"})


@add("B5-numbered", 3, "missing", "model-00002")
def _(folder: Path) -> Path:
    model(folder)
    (folder / INDEX).unlink()
    (folder / TWO).unlink()
    return folder


@add("B6-in-index", 3, "c", "not in model-00002", "1 of 3 tensors")
def _(folder: Path) -> Path:
    return model(folder, {"c": TWO})


@add("B6-renamed", 3, "not in model-00002", "1 of 2 tensors")
def _(folder: Path) -> Path:
    model(folder)
    (folder / TWO).write_bytes(shard("c"))
    return folder


@add("B6-in-shard", 3, "not in the index", "extra")
def _(folder: Path) -> Path:
    model(folder)
    (folder / TWO).write_bytes(shard("b", "extra"))
    return folder


@add("B7", 3, ONE, TWO, "is in")
def _(folder: Path) -> Path:
    model(folder)
    (folder / TWO).write_bytes(shard("b", "a"))
    return folder


@add("B7-numbered", 3, ONE, TWO, "is in")
def _(folder: Path) -> Path:
    model(folder)
    (folder / INDEX).unlink()
    (folder / TWO).write_bytes(shard("b", "a"))
    return folder


@add("B9", {"*": 0, "verify": 1})
def _(folder: Path) -> Path:
    return model(folder, total_size=999)


def _replaced(row: str, want: int, replace: Callable[[Path], object], *words: str) -> None:
    """A row whose second file is replaced by something else of the same name."""

    def make(folder: Path) -> Path:
        model(folder)
        (folder / TWO).unlink()
        replace(folder / TWO)
        return folder

    CASES.append((row, make, want, words))


def _link_to_sibling(path: Path) -> None:
    (path.parent / "real").write_bytes(shard("b"))
    path.symlink_to("real")


def _link_to_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "fifo")
    path.symlink_to("fifo")


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is at most 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


_replaced("B10-out", 4, lambda path: path.symlink_to("/etc/passwd"), "link", TWO)
_replaced("B10-sibling", 0, _link_to_sibling)
_replaced("B10-fifo", 4, _link_to_fifo, "link", TWO)
_replaced("B10-zero", 4, lambda path: path.symlink_to("/dev/zero"), "link", TWO)
_replaced("B10-loop", 4, lambda path: path.symlink_to(path.name), "link", TWO)
_replaced("B11-folder", 4, lambda path: path.mkdir(), "not a regular file", TWO)
_replaced("B11-fifo", 4, os.mkfifo, "not a regular file", TWO)
_replaced("B11-socket", 4, _socket, TWO)


@add("B10-no-index", 4, "link")
def _(folder: Path) -> Path:
    (folder / "model.safetensors").symlink_to("/dev/zero")
    return folder


@add("B12", 0)
def _(folder: Path) -> Path:
    cache = folder / "models--someone--tiny"
    snapshot = cache / "snapshots" / ("0123456789abcdef" * 3)[:40]
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    model(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = cache / "blobs" / f"{number:064x}"
        path.rename(blob)
        path.symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@add("B13-bytes", 3, "64000000")
def _(folder: Path) -> Path:
    model(folder)
    write_index(folder, json.dumps({"weight_map": {"a": ONE, "n" * 65_000_000: TWO}}).encode())
    return folder


@add("B13-entries", 3, "1000000")
def _(folder: Path) -> Path:
    model(folder)
    pairs = ",".join(f'"{i}":"{ONE}"' for i in range(1_000_001))
    write_index(folder, f'{{"weight_map":{{{pairs}}}}}'.encode())
    return folder


@add("B15-bytes", 0)
def _(folder: Path) -> Path:
    """A file name that is no UTF-8, named by nothing, beside a sound model."""
    model(folder)
    (Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt"))).write_bytes(b"x")
    return folder


@add("B15-case", 3, "differ only in case")
def _(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(shard("a"))
    (folder / "Model.safetensors").write_bytes(shard("a"))
    return folder


@add("B15-case-index", 3, "differ only in case")
def _(folder: Path) -> Path:
    model(folder, {"c": TWO.upper()})
    (folder / TWO.upper()).write_bytes(shard("c"))
    return folder


# Per-rank shards of torch's writer: what only their names can show.


def dcp_shard(name: str, offset: Any, count: int = 3) -> bytes:
    info = json.dumps({name: {"saved_offsets": offset}} if offset is not None else {})
    head = {
        "__metadata__": {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"},
        name: {"dtype": "U8", "shape": [count], "data_offsets": [0, count]},
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(count))


def _dcp(row: str, shards: dict[str, bytes], want: int, *words: str) -> None:
    def make(folder: Path) -> Path:
        for name, content in shards.items():
            (folder / f"shard-{name}.safetensors").write_bytes(content)
        return folder

    CASES.append((row, make, want, words))


def ranks(*offsets: int, numbers: tuple[int, ...] = (1, 2), of: int = 1) -> dict[str, bytes]:
    """Shards of the ranks `numbers`, each with 3 elements of tensor a at its offset."""
    return {
        f"{number:05d}-model-00001-of-{of:05d}": dcp_shard("a", [offset])
        for number, offset in zip(numbers, offsets, strict=True)
    }


_dcp("DCP-sound", ranks(0, 3), 0)
_dcp("DCP-rank", ranks(0, 6, numbers=(1, 3)), 3, "missing", "shard-00002")
_dcp("DCP-file", ranks(0, 3, of=2), 3, "missing", "model-00002")
_dcp("DCP-gap", ranks(0, 4), 3, "in no file")
_dcp("DCP-overlap", ranks(0, 2), 3, "overlap")
for label, offset in {
    "negative": [-1],
    "rank": [0, 0],
    "float": [0.0],
    "huge": [2**63],
    "none": None,
    "text": "0",
}.items():
    _dcp(f"DCP-offset-{label}", {"00001-model-00001-of-00001": dcp_shard("a", offset)}, 3, "dcp_sharding_info")
