"""The index of a sharded Hugging Face model: which file holds which tensor.

    {"metadata": {"total_parameters": 2, "total_size": 4},
     "weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}}

The one idea: an index of 92,000 tensors is 9 MB of JSON that says 163 file names over and over, so it is read in
pieces of 256 KiB straight into one column of names a file; anything but the plain spelling (escapes, other members, a
name twice) goes to the strict JSON parser, which decides. File names are data: each passes `safe_relative` before
anyone opens it.

`pytorch_model.bin.index.json` has the same form. Source: transformers 5.23 `modeling_utils.py` (`save_pretrained`:
2 spaces, sorted, a line feed at the end), huggingface_hub 2.4 `serialization/_base.py`; torch 2.13 writes it too
(`hf_storage.py`). Cost: 0.4 us a tensor, 55 bytes of memory a tensor.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint
from ckpt_tool.storage.possessive import possessive
from ckpt_tool.storage.safetensors_files.name_column import NameColumn
from ckpt_tool.storage.source import Tree, safe_relative
from ckpt_tool.storage.texts import strict_json

DELTA = "delta_encoding"  # slime `utils/disk_delta.py`: in the metadata of its index
INDEX_LIMIT = 64_000_000  # bytes
TENSOR_LIMIT = 1_000_000
PIECE = 1 << 18  # bytes read at a time

FORM = "E0336"
TOO_BIG = "E0337"
NOT_A_NAME = "E0338"
COLLISION = "E0387"

_WS = rb"[ \t\n\r]*+"
_TEXT = rb'[^"\\\x00-\x1f]*+'
_OBJECT = rb"(\{[^{}]*+\})"
_ODD = bytes(byte >= 0x20 and byte != 0x5C for byte in range(256))  # zero for what no plain text holds, as in _TEXT
_START = possessive(
    _WS + rb"\{" + _WS + rb'(?:"metadata"' + _WS + rb":" + _WS + _OBJECT + _WS + rb"," + _WS + rb")?"
    rb'"weight_map"' + _WS + rb":" + _WS + rb"\{" + _WS
)
# name, the colon as it is spaced, file, what closes the pair as it is spaced
_PAIR = possessive(
    rb'"(' + _TEXT + rb')"(' + _WS + rb":" + _WS + rb')"(' + _TEXT + rb')"(' + _WS + rb")([,}])(" + _WS + rb")"
)
_END = possessive(rb"(?:," + _WS + rb'"metadata"' + _WS + rb":" + _WS + _OBJECT + _WS + rb")?\}" + _WS)


@dataclass(frozen=True, slots=True)
class Index:
    """shards: file -> its tensors, in order of first mention. metadata: as stated, {} where the index has none."""

    path: str
    shards: Mapping[str, NameColumn]
    metadata: Mapping[str, Any]

    def __len__(self) -> int:
        """Tensors."""
        return sum(map(len, self.shards.values()))


def read_index(tree: Tree, path: str) -> Index:
    """The index at `path`, every file name in it checked.

    Raises CorruptFile (E0336 form, E0337 size, E0338 a value that is no text, E0319-E0324 JSON), UnsafeInput (E0410)
    for a file name that leaves the folder, InconsistentCheckpoint (E0387) for file names that differ by case alone.
    """
    shown = tree.display(path)
    index = _quick(tree, path, _check_size(tree, path)) or _strict(tree, path, shown)
    _check_count(len(index), shown)
    _check_names({file: names.first() for file, names in index.shards.items()}, shown)
    return index


def read_value(tree: Tree, path: str, *, lacking: bool = False) -> dict[str, Any]:
    """The index at `path` as a JSON value, with the same checks: for keys other than `weight_map`, and an empty map.

    lacking: may `weight_map` be missing?
    """
    _check_size(tree, path)
    shown = tree.display(path)
    value = _value(tree, path, shown, lacking=lacking)
    weight_map: dict[str, str] = value.get("weight_map", {})
    _check_count(len(weight_map), shown)
    _check_names({file: name for name, file in reversed(weight_map.items())}, shown)
    return value


def _check_size(tree: Tree, path: str) -> int:
    """Bytes of the index."""
    size = tree.size(path)
    if size > INDEX_LIMIT:
        raise CorruptFile(
            f"an index of {size} bytes, want at most {INDEX_LIMIT}",
            code=TOO_BIG,
            path=tree.display(path),
            hint="no real index is this large",
        )
    return size


def _check_count(count: int, shown: str) -> None:
    if count > TENSOR_LIMIT:
        raise CorruptFile(
            f"an index of {count} tensors, want at most {TENSOR_LIMIT}",
            code=TOO_BIG,
            path=shown,
            hint="no real checkpoint has as many",
        )


def write_index(weight_map: Mapping[str, str], *, total_parameters: int, total_size: int) -> bytes:
    """The index as transformers writes it. total_size: bytes."""
    index = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_size},
        "weight_map": dict(weight_map),
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("ascii")


def _check_names(files: Mapping[str, str], shown: str) -> None:
    """files: file -> a tensor of it."""
    folded: dict[str, str] = {}
    for file, name in files.items():
        place = strict_json.pointer("weight_map", name)
        safe_relative(file, named_in=shown, place=place)
        other = folded.setdefault(file.casefold(), file)
        if other != file:
            raise InconsistentCheckpoint(
                f"the index names {other!r} and {file!r}, which differ only in case",
                code=COLLISION,
                path=shown,
                place=place,
                hint="rename one of them, in the index too",
            )


# -- the quick path ----------------------------------------------------------------------------------------------------


def _quick(tree: Tree, path: str, size: int) -> Index | None:
    """The index where it is spelled plainly; None in any doubt."""
    text = tree.read(path, 0, min(size, PIECE))
    start = _START.match(text)
    first = _PAIR.match(text, start.end()) if start else None
    if start is None or first is None:
        return None
    comma = first[4] + b"," + first[6] if first[5] == b"," else b""
    collected = _Collected(colon=first[2], comma=comma)
    rest = _take_all(tree, path, size, text, start.end(), collected)
    last = _PAIR.match(rest) if rest is not None else None
    end = _END.fullmatch(rest, last.end()) if rest and last else None
    if rest is None or last is None or end is None or last[5] != b"}" or not rest.isascii():
        return None
    collected.rising = collected.rising and collected.last < last[1]
    collected.add([(last[1], last[3])])
    _check_count(sum(collected.counts.values()), tree.display(path))
    if not collected.names_differ() or (start[1] and end[1]):
        return None
    metadata: dict[str, Any] = {}
    for found, offset in ((start[1], start.start(1)), (end[1], size - len(rest) + end.start(1))):
        if found is not None:
            metadata = strict_json.parse(found, path=tree.display(path), offset=offset, place="/metadata")
    return Index(path, collected.shards(), metadata)


def _take_all(tree: Tree, path: str, size: int, text: bytes, at: int, collected: _Collected) -> bytes | None:
    """Take every pair but the last out of the file, whose first piece is `text`; what is left, None in doubt."""
    rest = text[at:]
    done = len(text)
    boundary = collected.comma + b'"'
    while True:
        cut = rest.rfind(boundary) if collected.comma else -1
        if cut >= 0:
            cut += len(collected.comma)
            if not collected.take(rest[:cut]):
                return None
            rest = rest[cut:]
        if done == size:
            return rest
        if len(rest) > 8 * PIECE:
            return None
        piece = tree.read(path, done, min(PIECE, size - done))
        rest = rest + piece
        done = done + len(piece)


class _Collected:
    """Names by file, as the pieces give them. colon, comma: how this index separates; no comma: it has one pair."""

    def __init__(self, *, colon: bytes, comma: bytes) -> None:
        self.colon = colon
        self.comma = comma
        self.odd = (colon + comma).translate(_ODD).count(0)  # of one pair
        self.joined: dict[bytes, bytearray] = {}
        self.counts: dict[bytes, int] = {}
        self.last = b""
        self.rising = True  # each name so far is greater than the one before, so none occurs twice

    def take(self, text: bytes) -> bool:
        """Take whole pairs, each closed by the comma; False where `text` is anything else."""
        if not text.isascii():
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                return False
        parts = text.split(b'"')  # "", then name, colon, file, comma, again and again
        names = parts[1::4]
        files = parts[3::4]
        count = len(names)
        if not count or parts[0] or len(parts) != 4 * count + 1 or text.translate(_ODD).count(0) != count * self.odd:
            return False
        if not parts[2::4].count(self.colon) == count == parts[4::4].count(self.comma):
            return False
        self.rising = self.rising and self.last < names[0] and all(map(bytes.__lt__, names, names[1:]))
        self.last = names[-1]
        self.add(zip(names, files, strict=True))
        return True

    def add(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        by_file: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for name, file in pairs:
            by_file[file].append(name)
        for file, names in by_file.items():
            count = self.counts.get(file, 0)
            column = self.joined.setdefault(file, bytearray())
            column += (b"\n" if count else b"") + b"\n".join(names)
            self.counts[file] = count + len(names)

    def names_differ(self) -> bool:
        """Is it certain that no name occurs twice? Proof is that names are in rising order (as transformers writes
        them), or else that sorted hashes contain no pair, since equal names have equal hashes."""
        if self.rising:
            return True
        hashes = sorted(hash(name) for joined in self.joined.values() for name in bytes(joined).split(b"\n"))
        return all(map(int.__ne__, hashes, hashes[1:]))

    def shards(self) -> dict[str, NameColumn]:
        """The columns. This consumes what was collected, so that it is never in memory twice."""
        found = {}
        for file in list(self.joined):
            found[file.decode("utf-8")] = NameColumn(bytes(self.joined.pop(file)), self.counts[file])
        return found


# -- the strict path ---------------------------------------------------------------------------------------------------


def _fault(shown: str, code: str, message: str, *place: str | int) -> CorruptFile:
    return CorruptFile(
        message,
        code=code,
        path=shown,
        place=strict_json.pointer(*place) or None,
        hint="an index is an object with `weight_map`: tensor name -> file name; get it from the source again",
    )


def _value(tree: Tree, path: str, shown: str, *, lacking: bool = False) -> dict[str, Any]:
    """An object whose `weight_map` is one of texts."""
    value = strict_json.parse(tree.read_whole(path, limit=INDEX_LIMIT), path=shown)
    if type(value) is not dict:
        raise _fault(shown, FORM, f"the index is {_kind(value)}, want an object")
    if lacking and "weight_map" not in value:
        return value
    weight_map = value.get("weight_map")
    if type(weight_map) is not dict:
        what = f"weight_map is {_kind(weight_map)}" if "weight_map" in value else "the index has no weight_map"
        raise _fault(shown, FORM, f"{what}, want an object", "weight_map")
    wrong = [
        _fault(shown, NOT_A_NAME, f"the file name is {_kind(file)}, want a string", "weight_map", name)
        for name, file in weight_map.items()
        if type(file) is not str
    ]
    if wrong:
        wrong[0].faults = tuple(f"{each.message} ({each.place})" for each in wrong[1:100])
        raise wrong[0]
    return value


def _strict(tree: Tree, path: str, shown: str) -> Index:
    """Any index that keeps the rules."""
    value = _value(tree, path, shown)
    weight_map = value["weight_map"]
    metadata = value.get("metadata", {})
    if metadata is not None and type(metadata) is not dict:
        raise _fault(shown, FORM, f"metadata is {_kind(metadata)}, want an object", "metadata")
    if not weight_map:
        raise _fault(shown, FORM, "weight_map is empty: the index names no tensor", "weight_map")
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(file, []).append(name)
    return Index(path, {file: NameColumn.of_text(names) for file, names in shards.items()}, metadata or {})


def _kind(value: Any) -> str:
    """What a JSON value is, in a message."""
    if value is None or type(value) is bool:
        return str(value).lower() if value is not None else "null"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names[type(value)]
