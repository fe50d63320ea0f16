"""Per-rank safetensors shards of torch's distributed checkpoint: boxes of tensors, with their offsets in the metadata.

`HuggingFaceStorageWriter(save_distributed=True)` writes `shard-{rank + 1:05d}-model-{file:05d}-of-{n:05d}.safetensors`.
Each has in `__metadata__`, beside `format` and `DCP_VERSION`, a JSON text

    DCP_SHARDING_INFO = {"layers.0.w1.weight": {"saved_offsets": [7, 0]}, ...}

where its part of each tensor begins, in elements; the entry's own shape is the part's shape. A file without the
text holds whole tensors. Nothing states the tensors' global shapes: they are the largest end of any part, so a tensor
whose last part is missing reads as a smaller one. The reader can't see that but in the file names' counts, checks
what it can (names, cover, overlap) and says so in a note.

Source: torch 2.13 `distributed/checkpoint/{hf_storage,_hf_utils,filesystem}.py`; a rank that holds nothing writes no
file, parts of replicated tensors are written by one rank alone. Cost: a few hundred bytes a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Note, Row, mark_replicas
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint
from ckpt_tool.storage.safetensors_file import Header
from ckpt_tool.storage.strict_json import parse, pointer

INFO = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
LAYOUT_KEYS = frozenset({INFO, "DCP_VERSION", "format"})  # metadata that says how, not what
BAD_INFO, DISAGREE = "E0339", "E0384"
NUMBER_LIMIT = 1 << 63


class Part(NamedTuple):
    """Row `row` of `header` holds the box at `offset` (elements) of its tensor."""

    header: Header
    row: int
    offset: tuple[int, ...]


class PartTable(Mapping[TensorKey, LogicalTensor]):
    """Tensors in parts; a `LogicalTensor` is made when asked. Order: by name."""

    def __init__(self, parts: Mapping[str, list[Part]]) -> None:
        self._parts = {name: parts[name] for name in sorted(parts)}
        self._shapes = {name: _global_shape(name, found) for name, found in self._parts.items()}

    def rows(self) -> Iterator[Row]:
        for name, shape in self._shapes.items():
            dtype = self._dtype(name)
            yield Row(name, MODEL, dtype, shape, dtype.nbytes(whole(shape).numel))

    def _dtype(self, name: str) -> DType:
        first = self._parts[name][0]
        return first.header.kinds[first.row].dtype

    def __getitem__(self, key: TensorKey) -> LogicalTensor:
        if key.state != MODEL or key.name not in self._parts:
            raise KeyError(key)
        chunks = []
        for part in self._parts[key.name]:
            array = part.header.stored(part.row)
            chunks.append(Chunk(Box(part.offset, array.shape), array, whole(array.shape)))
        chunks.sort(key=lambda chunk: (chunk.box.offset, chunk.box.shape, chunk.array.path))
        return LogicalTensor(key, self._shapes[key.name], self._dtype(key.name), mark_replicas(chunks))

    def __iter__(self) -> Iterator[TensorKey]:
        return (TensorKey(name) for name in self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def gather(headers: Iterable[Header], shown: Mapping[str, str]) -> tuple[PartTable, tuple[Note, ...]]:
    """The tensors of all shards. shown: what messages call each file.

    Raises CorruptFile (E0339) for sharding information that is wrong, InconsistentCheckpoint (E0384) for parts that
    disagree on dtype or rank. Cover and overlap are `Catalog.check`'s.
    """
    parts: dict[str, list[Part]] = {}
    notes = []
    for header in headers:
        offsets = _offsets(header, shown[header.path])
        for row, name in enumerate(header.names):
            rank = len(header.kinds[row].shape)
            parts.setdefault(name, []).append(Part(header, row, _offset_of(name, rank, offsets, shown[header.path])))
        strangers = set(offsets or ()).difference(header.names)
        if strangers:
            some = ", ".join(sorted(strangers)[:5])
            notes.append(Note("W-sharding-info", f"{INFO} names tensors that are not in the file: {some}", header.path))
    return PartTable(parts), tuple(notes)


def _offsets(header: Header, path: str) -> dict[str, object] | None:
    """DCP_SHARDING_INFO as parsed; None where the file has none (its tensors are whole)."""
    text = header.metadata.get(INFO)
    if text is None:
        return None
    value = parse(text.encode("utf-8"), path=path, place=pointer("__metadata__", INFO))
    if type(value) is not dict:
        raise _bad(f"{INFO} is not an object", path)
    return value


def _offset_of(name: str, rank: int, offsets: dict[str, object] | None, path: str) -> tuple[int, ...]:
    """Where the file's part of `name` begins, in elements; checked against the part's own rank."""
    if offsets is None:
        return (0,) * rank
    entry = offsets.get(name)
    found = entry.get(OFFSETS) if isinstance(entry, dict) else None
    if type(found) is not list or len(found) != rank:
        raise _bad(f"want {rank} {OFFSETS}, found {str(found)[:80]}", path, name)
    for number in found:
        if type(number) is not int or not 0 <= number < NUMBER_LIMIT:
            raise _bad(f"an offset of {str(number)[:40]}, want an integer in [0, 2^63)", path, name)
    return tuple(found)


def _bad(message: str, path: str, name: str | None = None) -> CorruptFile:
    place = pointer("__metadata__", INFO) + (pointer(name, OFFSETS) if name is not None else "")
    return CorruptFile(
        message, code=BAD_INFO, path=path, place=place, key=name and name[:200],
        hint="the file's metadata was lost or edited: this shard can't be placed",
    )  # fmt: skip


def _global_shape(name: str, parts: list[Part]) -> tuple[int, ...]:
    """The largest end of any part, in elements. Raises InconsistentCheckpoint where parts disagree on dtype or rank."""
    first = parts[0]
    dtype, shape = first.header.kinds[first.row].dtype, [0] * len(first.offset)
    for part in parts:
        kind = part.header.kinds[part.row]
        if kind.dtype != dtype or len(kind.shape) != len(shape):
            raise InconsistentCheckpoint(
                f"{first.header.path} holds a part of {dtype.name} and rank {len(shape)},"
                f" {part.header.path} one of {kind.dtype.name} and rank {len(kind.shape)}",
                code=DISAGREE, path=part.header.path, key=name[:200],
                hint="the files come from two saves: remove the older one's",
            )  # fmt: skip
        shape = [max(have, at + extent) for have, at, extent in zip(shape, part.offset, kind.shape, strict=True)]
    return tuple(shape)
