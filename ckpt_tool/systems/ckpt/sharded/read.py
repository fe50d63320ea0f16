"""Reading a `sharded` checkpoint: the index first, then every header, each compared with the other.

The index makes claims and the headers are the evidence. A rank's file states its own mesh, rank, boxes and save id; the
index states all files and tensors and one hash a file. So a file that is missing, cut short, of another save, swapped
with another rank's or edited is reported by name, all such files at once:

    index: 4 files, save 5f..      model.tp00 ok    model.tp01 missing    exp_avg.tp00 save 77.. (another run)

Cost: one read of the index, two small reads a file, and O(boxes). Values are not read; `verify` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import Catalog, Note, mark_replicas
from ckpt_tool.core.extras import from_json
from ckpt_tool.core.faults import together
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.mesh import DIMS
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.hub_folder.model_files import side_files
from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader, read_header
from ckpt_tool.storage.source import Tree, safe_relative
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.systems.ckpt.sharded.index import (
    INDEX,
    NO_DIGEST,
    Case,
    Fields,
    IndexFile,
    Origin,
    ShardedIndex,
    boxes_hash,
    case_of,
    file_name,
    parse_index,
)

INDEX_LIMIT = 256 << 20  # bytes; DeepSeek-V3 with its optimizer's states has 55 MB
INDEX_VALUES = 20_000_000  # JSON values in it
METADATA = "/__metadata__"

_ChunksByKey = dict[TensorKey, list[Chunk]]


def read_catalog(tree: Tree, *, lenient: bool = False) -> Catalog:
    """The catalog of the tree.

    Raises:
        Incomplete: E0385 (no index), E0301 (files missing, all of them named).
        CorruptFile: E2605 (a file of another size), E0386 (a field of the index or of a header's metadata), E0388
            (index and headers contradict each other).
        InconsistentCheckpoint: E0384 (files of another save).
        UnknownFormat: E2602 (a newer version).
        UnsafeInput: E0410 (a path that leaves the folder).
        CkptError: what `read_header` and `strict_json.parse` raise.
    """
    if not tree.exists(INDEX):
        raise Incomplete(
            f"{INDEX} is missing: it is written last, so this save was not finished",
            code="E0385",
            path=tree.display(INDEX),
            hint="run the command that wrote it again, or copy the index too if this is a copy",
        )

    shown = tree.display(INDEX)
    text = tree.read_whole(INDEX, limit=INDEX_LIMIT)
    index = parse_index(strict_json.parse(text, path=shown, limit=INDEX_VALUES), shown)
    sidefiles = _check_files(tree, index)

    # All damaged files are reported at once.
    chunks_by_key: _ChunksByKey = {}
    faults: list[CkptError] = []
    for entry in index.files:
        if is_collecting() and not tree.exists(entry.path):
            continue
        try:
            _read_file(tree, entry, index, chunks_by_key, lenient=lenient)
        except (CorruptFile, InconsistentCheckpoint) as fault:
            faults.append(fault)
    if faults:
        raise together(faults)

    _check_all_found(index, chunks_by_key, shown)
    known_paths = {INDEX, *sidefiles, *(entry.path for entry in index.files)}
    tensors = {
        key: LogicalTensor(key, entry.shape, entry.dtype, mark_replicas(chunks_by_key.get(key, ())), entry.path)
        for key, entry in index.tensors.items()
    }

    # What missing files held is collected for the report, tensor by tensor.
    if is_collecting():
        Catalog("sharded", tensors).check()

    return Catalog(
        format="sharded",
        tensors=tensors,
        extras=_parse_values(index.extras, shown, "/extras"),
        mesh=index.mesh,
        files=(INDEX, *(entry.path for entry in index.files)),
        sidefiles=tuple(path for path in sidefiles if tree.exists(path)),
        notes=tuple(_list_notes(tree, known_paths)),
        hints=Hints(_parse_values(index.hints, shown, "/source/hints")).having(Origin(index.source_format)),
        digests={key: entry.digest for key, entry in index.tensors.items() if entry.digest != NO_DIGEST},
    )


def _parse_values(form: Any, shown: str, pointer: str) -> dict[Any, Any]:
    """Extras or hints from their JSON form."""
    try:
        values = from_json(form)
    except CorruptFile as e:
        raise CorruptFile(e.message, code=e.code, path=shown, place=pointer, hint=e.hint) from e
    if not isinstance(values, dict):
        raise Fields(form, shown, pointer).fault("an object")
    return values


# -- the index against the folder ---------------------------------------------------------------------------------


def _check_files(tree: Tree, index: ShardedIndex) -> tuple[str, ...]:
    """Every file under its one possible name, there, and of its size.

    Returns the side files' names: those that the save knew and those that people put next to a model (config.json).
    """
    shown = tree.display(INDEX)
    names: set[str] = set()
    for number, entry in enumerate(index.files):
        place = f"/files/{number}/path"
        safe_relative(entry.path, named_in=shown, place=place)
        expected = file_name(entry.state, index.mesh, entry.rank)
        if entry.path != expected:
            raise Fields(entry.path, shown, place).fault(f"{expected}, the name of that state and rank")
        if entry.path in names:
            raise Fields(entry.path, shown, place).fault("every file once")
        names.add(entry.path)

    for number, path in enumerate(index.sidefiles):
        safe_relative(path, named_in=shown, place=f"/sidefiles/{number}")

    listing = tree.listing()
    missing = [entry for entry in index.files if entry.path not in listing]
    if missing:
        names_shown = _join_some(entry.path for entry in missing)
        fault = Incomplete(
            f"{len(missing)} of {len(index.files)} rank files are missing: {names_shown}",
            code="E0301",
            path=tree.display(missing[0].path),
            hint="copy them from where the save was written; every rank's file is needed",
            faults=[f"missing: {_describe_rank(entry)}" for entry in missing],
        )
        report_missing(
            fault,
            files=[entry.path for entry in missing],
            file_bytes={entry.path: entry.size for entry in missing},
        )

    wrong_sizes = [
        CorruptFile(
            f"{entry.path} has {listing[entry.path]} bytes, the index says {entry.size}",
            code="E2605",
            path=tree.display(entry.path),
            offset=min(listing[entry.path], entry.size),
            hint="the file was cut short, or comes from another save: copy it again",
        )
        for entry in index.files
        if entry.path in listing
        and listing[entry.path] not in (entry.size, -1)  # no regular file: opening it says what it is
    ]
    if wrong_sizes:
        raise together(wrong_sizes)

    return tuple(sorted({*index.sidefiles, *side_files(tree)}))


def _list_notes(tree: Tree, known: set[str]) -> Iterable[Note]:
    for path in tree.listing():
        if path not in known:
            yield Note("W-ignored", f"{path} is no part of the checkpoint: not read", tree.display(path))
    for path in sorted(known):
        if not tree.exists(path):
            yield Note("W-side-file-gone", f"{path} was saved next to the checkpoint and is gone", tree.display(path))


def _join_some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _describe_rank(entry: IndexFile) -> str:
    coords = " ".join(f"{name} {entry.rank[name]}" for name in DIMS if name in entry.rank)
    return f"{entry.path} (state {entry.state}{', rank ' + coords if coords else ''})"


# -- the index against the headers --------------------------------------------------------------------------------


def _read_file(tree: Tree, entry: IndexFile, index: ShardedIndex, found: _ChunksByKey, *, lenient: bool) -> None:
    """Check one file's header against the index, and add its boxes to `found`."""
    header = read_header(tree, entry.path, lenient=lenient)
    shown = tree.display(entry.path)
    _check_claims(header, entry, index, shown)
    boxes = _parse_metadata(header, "boxes", shown)

    names = list(header.names)
    place_by_case = dict[Case, _Place]()
    box_by_name = {} if not isinstance(boxes.value, dict) else boxes.value
    if set(names) != set(box_by_name):
        unpaired = sorted(set(names) ^ set(box_by_name))
        raise _contradiction_error(
            f"tensors with a box and tensors in the file differ: {_join_some(unpaired)}",
            shown,
            f"{METADATA}/boxes",
            key=unpaired[0],
        )

    computed_hash = boxes_hash(
        header.metadata["boxes"],
        ((name, kind.dtype.name, kind.shape) for name, kind in zip(names, header.kinds, strict=True)),
    )
    if computed_hash != entry.boxes:
        raise _contradiction_error("its boxes are not those that the index states", shown, f"{METADATA}/boxes")

    for row, name in enumerate(names):
        key = TensorKey(name, entry.state)
        chunk = _read_chunk(header, row, boxes[name], index, key, shown, place_by_case)
        if chunk is not None:
            found.setdefault(key, []).append(chunk)


def _check_claims(header: SafetensorsHeader, entry: IndexFile, index: ShardedIndex, shown: str) -> None:
    """What the file states of its save, mesh, state and rank must be what the index states."""
    metadata = header.metadata
    save = metadata.get("save")
    if save != index.save:
        what = "states no save id" if save is None else f"belongs to save {save[:40]}"
        raise InconsistentCheckpoint(
            f"{entry.path} {what}, the index of save {index.save}: files of two saves are in one folder",
            code="E0384",
            path=shown,
            place=f"{METADATA}/save",
            hint="copy every file of one save, with its index",
        )

    claims: tuple[tuple[str, object, Callable[[], object]], ...] = (
        ("state", entry.state, lambda: metadata.get("state")),
        ("mesh", index.mesh.to_json(), lambda: _parse_metadata(header, "mesh", shown).value),
        ("rank", entry.rank, lambda: _parse_metadata(header, "rank", shown).value),
    )
    for name, expected, read_claim in claims:
        if read_claim() != expected:
            raise _contradiction_error(
                f"its {name} is {read_claim()!r}, the index says {expected!r}", shown, f"{METADATA}/{name}"
            )


def _parse_metadata(header: SafetensorsHeader, name: str, shown: str) -> Fields:
    """A metadata string that holds JSON."""
    pointer = f"{METADATA}/{name}"
    text = header.metadata.get(name)
    if text is None:
        raise Fields(None, shown, pointer).fault("a string of JSON")
    return Fields(strict_json.parse(text.encode("utf-8"), path=shown, place=pointer), shown, pointer)


class _Place(NamedTuple):
    """A box that was checked: the tensor's shape, the box in it, and the same extents in the array."""

    shape: tuple[int, ...]
    box: Box
    within: Box


def _read_chunk(
    header: SafetensorsHeader,
    row: int,
    item: Fields,
    index: ShardedIndex,
    key: TensorKey,
    shown: str,
    place_by_case: dict[Case, _Place],
) -> Chunk | None:
    """The chunk of one array; None where it holds only padding. place_by_case: boxes that were checked before."""
    array = header.stored(row)
    entry = index.tensors.get(key)
    if entry is None:
        raise _contradiction_error("the index does not know this tensor", shown, item.pointer, key=str(key))

    value = item.value if type(item.value) is dict else {}
    case = case_of(value.get("offset"), value.get("shape"), value.get("box", ()), array.shape)
    place = place_by_case.get(case) if case else None
    if place is None:
        place = _read_place(item, array, shown, key)
        if case is not None:
            place_by_case[case] = place

    if (place.shape, array.dtype) != (entry.shape, entry.dtype):
        stored_form = f"{array.dtype.name} {list(place.shape)}"
        stated_form = f"{entry.dtype.name} {list(entry.shape)}"
        raise _contradiction_error(
            f"it is {stored_form} in all, the index says {stated_form}", shown, item.pointer, key=str(key)
        )
    return Chunk(place.box, array, place.within) if place.box.numel or not entry.numel else None


def _read_place(item: Fields, array: StoredArray, shown: str, key: TensorKey) -> _Place:
    """One entry of `boxes`, which must fit its array and its tensor."""
    shape = item["shape"].shape()
    offset = item["offset"].shape()
    extents = item.get("box", list(array.shape)).shape()
    box = Box(offset, extents)
    within = Box((0,) * len(array.shape), extents)
    if len(offset) != len(shape) or not box.inside(shape) or not within.inside(array.shape):
        raise _contradiction_error(
            f"the box at {list(offset)} of {list(extents)} fits neither an array of {list(array.shape)} nor a tensor of"
            f" {list(shape)}",
            shown,
            item.pointer,
            key=str(key),
        )
    return _Place(shape, box, within)


def _check_all_found(index: ShardedIndex, chunks_by_key: _ChunksByKey, shown: str) -> None:
    missing = sorted(str(key) for key in index.tensors.keys() - chunks_by_key.keys())
    if missing and not is_collecting():
        raise _contradiction_error(
            f"{len(missing)} tensors of the index are in no file: {_join_some(missing)}",
            shown,
            "/tensors",
            key=missing[0],
        )


def _contradiction_error(message: str, path: str, place: str, *, key: str | None = None) -> CorruptFile:
    return CorruptFile(
        message,
        code="E0388",
        path=path,
        place=place,
        key=key,
        hint="the index or the file was edited or damaged: copy both again from the original save",
    )
