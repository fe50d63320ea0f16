"""The index of a `sharded` checkpoint: its text with the holes for digests, and its strict reading.

The text is JSON with sorted keys, in ASCII, one line a tensor and a file; nothing in it depends on time, host or path,
so equal checkpoints have equal indexes. Only the digests are unknown while a run is planned: each is 32 zeros whose
byte offset is known, because `digest` sorts first in a tensor's entry:

    "model":{
    "w":{"digest":"00000000000000000000000000000000","dtype":"F32","placement":0,"shape":[2,3]}
                   ^ offset = start of the line + len('"w":{"digest":"')

Reading checks every field's type and range and names the JSON pointer of the first that is wrong. It does not look at
any other file: `systems.ckpt.sharded.read` compares the index with the headers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

from ckpt_tool.core.dtype import DTYPES, SAFETENSORS_NAMES, DType
from ckpt_tool.core.fallback import Choice
from ckpt_tool.core.hints import Hint
from ckpt_tool.core.layout import Layout, Placement
from ckpt_tool.core.mesh import DIMS, Coords, Mesh
from ckpt_tool.core.target import DIGEST_CHARS
from ckpt_tool.core.tensor import Path, TensorKey
from ckpt_tool.errors import CorruptFile, UnknownFormat

INDEX = "ckpt.index.json"
VERSION = 1  # of the layout of the files and of the index
Case = tuple[tuple[tuple[object, ...], tuple[type, ...]], ...]
NO_DIGEST = "0" * DIGEST_CHARS
RANK_LIMIT = 64  # dims of a tensor
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NOT_TAKEN = "-" * DIGEST_CHARS  # what `--verify off` leaves in a hole


class IndexFile(NamedTuple):
    """One rank's file of one state."""

    path: str
    size: int  # bytes
    state: str
    rank: dict[str, int]
    boxes: str  # hash of what the file holds (see `boxes_hash`)


class IndexTensor(NamedTuple):
    """One logical tensor."""

    dtype: DType
    shape: tuple[int, ...]
    placement: int  # number in the index's list
    path: Path = ()
    digest: str = NO_DIGEST  # `NO_DIGEST` where it is not known

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Origin(Hint):
    """The format that the checkpoint came from first."""

    KEY: ClassVar[str] = "source_format"
    format: str

    def plain(self) -> str:
        """The hint as a plain value, for the index."""
        return self.format

    @classmethod
    def read(cls, plain: Any) -> Origin | None:
        """The hint from its plain value, None where that is no string."""
        return cls(plain) if isinstance(plain, str) else None


@dataclass(frozen=True, slots=True)
class ShardedIndex:
    """The whole index."""

    mesh: Mesh
    files: tuple[IndexFile, ...]
    tensors: Mapping[TensorKey, IndexTensor]
    placements: tuple[Placement, ...]
    fallbacks: tuple[dict[str, Any], ...] = ()
    extras: Any = None  # in the JSON form of `core.extras`
    source_format: str = ""
    hints: Any = None  # in the JSON form of `core.extras`
    sidefiles: tuple[str, ...] = ()

    @property
    def save(self) -> str:
        """The save's id."""
        return save_id(self.mesh, self.extras, {file.path: file.boxes for file in self.files})


def file_name(state: str, mesh: Mesh, rank: Coords) -> str:
    """The name of a rank's file of a state.

    >>> file_name("exp_avg", Mesh.of(tp=2, dp=2), {"tp": 1, "dp": 0})
    'exp_avg.tp01_dp00.safetensors'
    >>> file_name("a.b/c", Mesh(), {})
    'a%2Eb%2Fc.safetensors'
    """
    text = state.encode("utf-8", "surrogatepass")
    stem = "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02X}" for byte in text)
    label = mesh.label(rank)
    return f"{stem}.{label}.safetensors" if label else f"{stem}.safetensors"


def save_id(mesh: Mesh, extras: object, boxes: Mapping[str, str]) -> str:
    """The save's id, 32 hex digits: of the mesh, the extras (the iteration is among them) and the boxes of every file.

    boxes: `boxes_hash` by file name.
    """
    return hash_of(dumps([mesh.to_json(), extras, boxes]))


def dumps(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def hash_of(text: str) -> str:
    """32 hex digits. It ties files to their save; it is no protection against a forger."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def boxes_hash(boxes: str, arrays: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    """The hash of what a file holds. boxes: the metadata's text. arrays: (name, dtype name, stored shape), any
    order."""
    return hash_of(boxes + dumps(sorted([name, dtype, list(shape)] for name, dtype, shape in arrays)))


def fallbacks_of(tensors: Sequence[TensorKey], layout: Layout) -> tuple[dict[str, Any], ...]:
    """The distinct fallbacks taken, each with its tensors by state: `{requested, used, reason, ...}`."""
    names_by_choice: dict[Choice, dict[str, set[str]]] = {}
    for key, placement in zip(tensors, layout.placements, strict=True):
        for choice in placement.choices:
            if choice.reason != "even":
                names_by_choice.setdefault(choice, {}).setdefault(key.state, set()).add(key.name)

    rows = []
    for choice, names_by_state in names_by_choice.items():
        row = {
            "requested": list(choice.requested),
            "used": list(choice.used),
            "reason": choice.reason,
            "better": list(choice.better),
            "tensors": {state: sorted(names) for state, names in names_by_state.items()},
        }
        rows.append(row)
    return tuple(sorted(rows, key=dumps))


# -- writing ------------------------------------------------------------------------------------------------------


def index_text(index: ShardedIndex) -> tuple[bytes, dict[TensorKey, int]]:
    """The index's bytes, and the offset in bytes of every tensor's digest in them."""
    head = [
        f'{{"ckpt_format":"sharded",\n"ckpt_version":{VERSION},\n',
        f'"extras":{dumps(index.extras)},\n',
        f'"fallbacks":{_join_lines(map(dumps, index.fallbacks), "[]")},\n',
        f'"files":{_join_lines((dumps(file_json(f)) for f in sorted(index.files, key=lambda f: f.path)), "[]")},\n',
        f'"mesh":{dumps(index.mesh.to_json())},\n',
        f'"placements":{_join_lines((dumps(_placement_json(p)) for p in index.placements), "[]")},\n',
        f'"save":"{index.save}",\n',
        '"schema_version":1,\n',
        f'"sidefiles":{dumps(sorted(index.sidefiles))},\n',
        f'"source":{dumps({"format": index.source_format, "hints": index.hints})},\n',
        '"tensors":{',
    ]

    # The text is ASCII, so that characters are bytes and the offsets of digests follow from lengths.
    parts = head
    holes = {}
    offset = sum(map(len, parts))

    state: str | None = None
    for key in sorted(index.tensors, key=lambda key: (key.state, key.name)):
        opening = ",\n" if key.state == state else f"{'' if state is None else '},'}\n{dumps(key.state)}:{{\n"
        state = key.state

        before, after = tensor_text(key.name, index.tensors[key])
        holes[key] = offset + len(opening) + len(before)
        parts.append(opening + before + index.tensors[key].digest + after)
        offset += len(parts[-1])
    parts.append("}}}\n" if state is not None else "}}\n")
    return "".join(parts).encode("ascii"), holes


def _join_lines(items: Iterable[str], brackets: str) -> str:
    body = ",\n".join(items)
    return f"{brackets[0]}\n{body}{brackets[1]}" if body else brackets


def tensor_text(name: str, tensor: IndexTensor) -> tuple[str, str]:
    """The entry's text before and after the 32 digits of the digest."""
    rest: dict[str, Any] = {"dtype": tensor.dtype.name, "placement": tensor.placement, "shape": list(tensor.shape)}
    if tensor.path:
        rest["path"] = list(tensor.path)
    return f'{dumps(name)}:{{"digest":"', '",' + dumps(rest)[1:]


def file_json(entry: IndexFile) -> dict[str, Any]:
    """A file's row in the index."""
    return {"path": entry.path, "size": entry.size, "state": entry.state, "rank": entry.rank, "boxes": entry.boxes}


def _placement_json(placement: Placement) -> dict[str, Any]:
    out: dict[str, Any] = {"shard": [[dim, list(names)] for dim, names in placement.shard]}
    if placement.at:
        out["at"] = dict(placement.at)
    if placement.padded:
        out["padded"] = list(placement.padded)
    if placement.uneven:
        out["uneven"] = list(placement.uneven)
    if placement.granules:
        out["granules"] = [list(pair) for pair in placement.granules]
    return out


# -- reading ------------------------------------------------------------------------------------------------------


class Fields:
    """A JSON value with its pointer: typed access that names the place of what is wrong (CorruptFile E0386)."""

    __slots__ = ("_at", "_within", "path", "value")

    def __init__(self, value: object, path: str, at: str = "", within: Fields | None = None) -> None:
        """at: the pointer, or the name of one step where `within` is the container."""
        self.value = value
        self.path = path
        self._at = at
        self._within = within

    @property
    def pointer(self) -> str:
        """The JSON pointer, put together only when someone asks."""
        if self._within is None:
            return self._at
        return f"{self._within.pointer}/{self._at.replace('~', '~0').replace('/', '~1')}"

    def fault(self, wanted: str) -> CorruptFile:
        """The error for this place. wanted: what should be here."""
        shown = json.dumps(self.value, default=str)[:80]
        return CorruptFile(
            f"found {shown}, want {wanted}",
            code="E0386",
            path=self.path,
            place=self.pointer or "/",
            hint="the index or a header was edited or damaged: take them from the original save",
        )

    def __getitem__(self, name: str) -> Fields:
        if type(self.value) is not dict:
            raise self.fault("an object")
        if name not in self.value:
            raise Fields(None, self.path, name, self).fault("a value here")
        return Fields(self.value[name], self.path, name, self)

    def get(self, name: str, default: object) -> Fields:
        """A field that may be missing."""
        if type(self.value) is dict and name not in self.value:
            return Fields(default, self.path, name, self)
        return self[name]

    def items(self) -> Iterable[tuple[str, Fields]]:
        """The fields of an object."""
        if type(self.value) is not dict:
            raise self.fault("an object")
        return [(name, self[name]) for name in self.value]

    def each(self) -> list[Fields]:
        """The items of an array."""
        if type(self.value) is not list:
            raise self.fault("an array")
        return [Fields(item, self.path, str(i), self) for i, item in enumerate(self.value)]

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self.fault("a string")
        return self.value

    def hex32(self) -> str:
        """A hash of 32 hexadecimal digits."""
        if not _HEX.fullmatch(self.text()):
            raise self.fault("32 hexadecimal digits")
        return self.text()

    def whole(self, least: int = 0) -> int:
        """A whole number >= `least` that fits a signed 64-bit integer."""
        if type(self.value) is not int or not least <= self.value < 1 << 63:
            raise self.fault(f"a whole number of at least {least}")
        return self.value

    def shape(self) -> tuple[int, ...]:
        """Extents or offsets: at most `RANK_LIMIT` whole numbers whose product is below 2^60."""
        if type(self.value) is not list or len(self.value) > RANK_LIMIT:
            raise self.fault(f"an array of at most {RANK_LIMIT} numbers")
        numel = 1
        for i, size in enumerate(self.value):
            if type(size) is not int or size < 0:
                raise Fields(size, self.path, str(i), self).fault("a whole number of at least 0")
            numel *= size or 1
        if numel >= 1 << 60:
            raise self.fault("a shape whose product is below 2^60")
        return tuple(self.value)

    def coords(self, mesh: Mesh | None = None) -> dict[str, int]:
        """Sizes by mesh dim, or coordinates inside `mesh`."""
        coords = {}
        for name, item in self.items():
            if name not in DIMS:
                raise self.fault(f"mesh dims only ({', '.join(DIMS)})")
            coords[name] = item.whole(0 if mesh else 1)
            if mesh and coords[name] >= mesh[name]:
                raise item.fault(f"a coordinate below {mesh[name]}")
        return coords


def parse_index(document: object, path: str) -> ShardedIndex:
    """The index from its parsed JSON. Raises CorruptFile E0386 with the JSON pointer, UnknownFormat E2602 when a newer
    version wrote it, CorruptFile E0388 when it does not match its own save id."""
    top = Fields(document, path)
    if top["ckpt_format"].text() != "sharded":
        raise top["ckpt_format"].fault('"sharded"')

    version = top["ckpt_version"].whole(1)
    if version > VERSION:
        raise UnknownFormat(
            f"the index has version {version}, this ckpt reads up to {VERSION}",
            code="E2602",
            path=path,
            place="/ckpt_version",
            hint="update ckpt",
        )

    mesh = Mesh.of(**top["mesh"].coords())
    placements = tuple(_parse_placement(item, mesh) for item in top["placements"].each())
    tensor_by_case: dict[Case, IndexTensor] = {}
    files = tuple(_parse_file(item, mesh) for item in top["files"].each())
    tensors = {
        TensorKey(name, state): _parse_tensor(item, len(placements), tensor_by_case)
        for state, names in top["tensors"].items()
        for name, item in names.items()
    }
    fallbacks = tuple(_plain_object(item) for item in top["fallbacks"].each())

    index = ShardedIndex(
        mesh=mesh,
        files=files,
        tensors=tensors,
        placements=placements,
        fallbacks=fallbacks,
        extras=top["extras"].value,
        source_format=top["source"]["format"].text(),
        hints=top["source"]["hints"].value,
        sidefiles=tuple(item.text() for item in top["sidefiles"].each()),
    )
    if index.save != top["save"].hex32():
        raise CorruptFile(
            f"the mesh, extras and files give the save id {index.save}, but the index states {top['save'].text()}",
            code="E0388",
            path=path,
            place="/save",
            hint="the index was edited or damaged: take it from the original save",
        )

    return index


def _plain_object(item: Fields) -> dict[str, Any]:
    return {name: part.value for name, part in item.items()}


def _parse_placement(item: Fields, mesh: Mesh) -> Placement:
    shard = []
    for pair in item["shard"].each():
        dim, names = pair.each() if len(pair.each()) == 2 else (pair, pair)
        shard.append((dim.whole(), tuple(name.text() for name in names.each())))
        if any(name not in DIMS for name in shard[-1][1]):
            raise names.fault(f"mesh dims only ({', '.join(DIMS)})")
    return Placement(
        shard=tuple(shard),
        at=tuple(item.get("at", {}).coords(mesh).items()),
        padded=item.get("padded", []).shape(),
        uneven=item.get("uneven", []).shape(),
        granules=tuple(_parse_granule(pair) for pair in item.get("granules", []).each()),
    )


def _parse_granule(item: Fields) -> tuple[int, int]:
    numbers = item.shape()
    if len(numbers) != 2:
        raise item.fault("two numbers: a tensor dim and a granule")
    return numbers[0], numbers[1]


def _parse_file(item: Fields, mesh: Mesh) -> IndexFile:
    return IndexFile(
        item["path"].text(),
        item["size"].whole(8),
        item["state"].text(),
        item["rank"].coords(mesh),
        item["boxes"].hex32(),
    )


def case_of(*lists: Any) -> Case | None:
    """A key for a value that was checked, so that layers, which repeat, are checked once. None for values that can't be
    compared."""
    try:
        case = tuple((tuple(part), tuple(map(type, part))) for part in lists)
        hash(case)
    except TypeError:
        return None
    return case


def _parse_tensor(item: Fields, placements: int, tensor_by_case: dict[Case, IndexTensor]) -> IndexTensor:
    value = item.value if type(item.value) is dict else {}
    case = case_of((value.get("dtype"), value.get("placement")), value.get("shape"))
    checked = tensor_by_case.get(case) if case else None
    digest = value.get("digest")
    if checked is not None and "path" not in value and type(digest) is str and _HEX.fullmatch(digest):
        return checked._replace(digest=digest)

    dtype = item["dtype"].text()
    if dtype not in SAFETENSORS_NAMES:
        raise item["dtype"].fault(f"one of {', '.join(sorted(SAFETENSORS_NAMES))}")

    number = item["placement"].whole()
    if number >= placements:
        raise item["placement"].fault(f"a number below {placements}")

    path = []
    for part in item.get("path", []).each():
        path.append(part.value if type(part.value) is int else part.text())

    entry = IndexTensor(DTYPES[dtype], item["shape"].shape(), number)
    if case is not None:
        tensor_by_case[case] = entry
    stated = NO_DIGEST if digest == _NOT_TAKEN else item["digest"].hex32()
    return entry._replace(path=tuple(path), digest=stated)
