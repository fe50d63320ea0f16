"""Per-rank safetensors shards of torch's distributed checkpoint: boxes of tensors, with their offsets in the metadata.

`HuggingFaceStorageWriter(save_distributed=True)` writes `shard-{rank + 1:05d}-model-{file:05d}-of-{n:05d}.safetensors`.
Each has in `__metadata__`, in addition to `format` and `DCP_VERSION`, a JSON text

    DCP_SHARDING_INFO = {"layers.0.w1.weight": {"saved_offsets": [7, 0]}, ...}

where its part of each tensor begins, in elements; the entry's own shape is the part's shape. A file without the
text holds whole tensors. Nothing states the tensors' global shapes: they are the largest end of any part, so a tensor
whose last part is missing reads as a smaller one. The reader checks what it can (file names' counts, cover, overlap)
and says in a note where a rank's file seems to be missing.

Source: torch 2.13 `distributed/checkpoint/{hf_storage,_hf_utils,filesystem}.py`; a rank that holds nothing writes no
file, parts of replicated tensors are written by one rank alone. Cost: a few hundred bytes a part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import CatalogRow, Note, mark_replicas
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint
from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader
from ckpt_tool.storage.texts.strict_json import parse, pointer

INFO = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
LAYOUT_KEYS = frozenset({INFO, "DCP_VERSION", "format"})  # metadata that says how, not what
BAD_INFO = "E0339"
DISAGREE = "E0384"
HELD_TWICE = "E1631"
NUMBER_LIMIT = 1 << 63
SHARD = re.compile(r"shard-(\d{1,7})-model-(\d{1,7})-of-\d{1,7}\.safetensors$")
SHOWN = 50


class ShardRow(NamedTuple):
    """Row `row` of `header` holds the box at `offset` (elements) of its tensor."""

    header: SafetensorsHeader
    row: int
    offset: tuple[int, ...]


class PartTable(Mapping[TensorKey, LogicalTensor]):
    """Tensors in parts; a `LogicalTensor` is made when asked. Order: by name."""

    def __init__(self, parts: Mapping[str, list[ShardRow]]) -> None:
        self._parts = {name: parts[name] for name in sorted(parts)}
        self._shapes = {name: _global_shape(name, found) for name, found in self._parts.items()}

    def rows(self) -> Iterator[CatalogRow]:
        for name, shape in self._shapes.items():
            dtype = self._dtype(name)
            yield CatalogRow(name, MODEL, dtype, shape, dtype.nbytes(whole(shape).numel))

    def parted(self) -> Iterator[LogicalTensor]:
        """The tensors that are stored in parts."""
        return iter(self.values())

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


def gather(
    headers: Iterable[SafetensorsHeader], shown: Mapping[str, str], *, lenient: bool = False
) -> tuple[PartTable, tuple[Note, ...]]:
    """The tensors of all shards.

    Args:
        shown: the name of each file in messages.
        lenient: may a part be stored in two files?

    Raises CorruptFile (E0339) for sharding information that is wrong, InconsistentCheckpoint (E0384) for parts that
    disagree on dtype or rank, (E1631) for files that hold another's parts. Cover and overlap are `Catalog.check`'s.
    """
    parts: dict[str, list[ShardRow]] = {}
    notes = []
    for header in headers:
        offsets = _offsets(header, shown[header.path])
        for row, name in enumerate(header.names):
            rank = len(header.kinds[row].shape)
            parts.setdefault(name, []).append(
                ShardRow(header, row, _offset_of(name, rank, offsets, shown[header.path]))
            )
        strangers = set(offsets or ()).difference(header.names)
        if strangers:
            some = ", ".join(sorted(strangers)[:5])
            notes.append(Note("W-sharding-info", f"{INFO} names tensors that are not in the file: {some}", header.path))

    again = list(_held_twice(parts))
    if again and not lenient:
        name, path, what = again[0]
        raise InconsistentCheckpoint(
            what,
            code=HELD_TWICE,
            path=shown[path],
            key=name[:200],
            faults=[line for _, _, line in again[1:SHOWN]],
            hint="one file was copied over another, whose parts are lost: fetch both again; if the parts were "
            "saved twice on"
            " purpose, --lenient",
        )

    notes += [Note("N-copied-file", line, path, name) for name, path, line in again]
    return PartTable(parts), (*notes, *_maybe_missing(parts))


def _held_twice(parts: Mapping[str, list[ShardRow]]) -> Iterator[tuple[str, str, str]]:
    """(tensor, file, what is wrong), at most once a pair of files: torch writes each part once, and all parts of a
    tensor to files of one number. A file in another's place would go unseen otherwise: without its last part a tensor
    reads as a smaller one."""
    reported: set[tuple[str, str]] = set()
    for name, found in parts.items():
        first: dict[tuple[int, ...], str] = {}
        number = ""
        home = ""
        for part in found:
            path = part.header.path
            match = SHARD.search(path)
            if match is None:
                continue
            other = first.setdefault(part.offset, path)
            if other != path and (other, path) not in reported:
                reported.add((other, path))
                yield name, path, f"{other} and {path} hold the same part of {name[:200]}, at {list(part.offset)}"
            if number and match[2] != number and (home, path) not in reported:
                reported.add((home, path))
                yield (
                    name,
                    path,
                    f"{home} and {path} hold parts of {name[:200]}, though their names say that no tensor is in both",
                )
            number = number or match[2]
            home = home or path


def _maybe_missing(parts: Mapping[str, list[ShardRow]]) -> Iterator[Note]:
    """A note for each file that a rank seems to lack: it has others, and tensors of that file end where the bands of so
    many ranks would not (torch cuts a dim of n over w ranks in bands of ceil(n / w)). A save in which several ranks
    share their parts (HSDP) can look the same, so it is no error."""
    named: dict[str, re.Match[str]] = {}
    for path in {part.header.path: None for rows in parts.values() for part in rows}:
        match = SHARD.search(path)
        if match:
            named[path] = match
    ranks = {int(match[1]) for match in named.values()}
    files: dict[int, set[int]] = {}
    for match in named.values():
        files.setdefault(int(match[2]), set()).add(int(match[1]))
    for number, have in sorted(files.items()):
        for rank in sorted(ranks - have):
            cut = [name for name, found in parts.items() if _ends_early(found, number, max(ranks))]
            if cut:
                yield Note(
                    "W-rank-file-missing",
                    f"rank {rank} wrote no file {number}, but others: {len(cut)} tensors may lack its part, "
                    "and nothing in"
                    f" the files says their shapes: {', '.join(cut[:5])}",
                    next(path for path, match in named.items() if int(match[2]) == number),
                )


def _ends_early(found: Sequence[ShardRow], number: int, ranks: int) -> bool:
    """Do the parts, all in files of `number`, end where bands over `ranks` ranks along one dim would not?"""
    if len(found) < 2 or any(_file_number(part.header.path) != number for part in found):
        return False
    shapes = [part.header.kinds[part.row].shape for part in found]
    dims = {d for part in found for d, at in enumerate(part.offset) if at}
    if len(dims) != 1:
        return False
    dim = dims.pop()
    total = max(part.offset[dim] + shape[dim] for part, shape in zip(found, shapes, strict=True))
    return max(shape[dim] for shape in shapes) != ceil_div(total, ranks)


def _file_number(path: str) -> int | None:
    """Which of its rank's files it is; None for another file's name."""
    match = SHARD.search(path)
    return int(match[2]) if match else None


def _offsets(header: SafetensorsHeader, path: str) -> dict[str, object] | None:
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
        message,
        code=BAD_INFO,
        path=path,
        place=place,
        key=name and name[:200],
        hint="the file's metadata was lost or edited: this shard can't be placed",
    )


def _global_shape(name: str, parts: list[ShardRow]) -> tuple[int, ...]:
    """The largest end of any part, in elements. Raises InconsistentCheckpoint where parts disagree on dtype or rank."""
    first = parts[0]
    dtype = first.header.kinds[first.row].dtype
    shape = [0] * len(first.offset)
    for part in parts:
        kind = part.header.kinds[part.row]
        if kind.dtype != dtype or len(kind.shape) != len(shape):
            raise InconsistentCheckpoint(
                f"{first.header.path} holds a part of {dtype.name} and rank {len(shape)},"
                f" {part.header.path} one of {kind.dtype.name} and rank {len(kind.shape)}",
                code=DISAGREE,
                path=part.header.path,
                key=name[:200],
                hint="the files come from two saves: remove the older one's",
            )
        shape = [max(have, at + extent) for have, at, extent in zip(shape, part.offset, kind.shape, strict=True)]
    return tuple(shape)
