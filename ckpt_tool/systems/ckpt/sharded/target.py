"""Laying out a `sharded` checkpoint: which file holds which boxes, every head, the index with its holes.

Two ways to the same bytes. A usual target is laid out box by box, heads and all. Where tensors times ranks pass
`MANY`, sizes come from `ckpt.sharded.grid` by classes, and a head is made when the run writes it, or never, as in a dry
run:

    184,732 tensors on 2,048 ranks: 8,192 files of known size in 0.4 s; their heads would be 400 MB of JSON

A head made later is compared with the promised size. What the format can't hold is refused here, before anything is
written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import SAFETENSORS_NAMES, DType
from ckpt_tool.core.extras import to_json
from ckpt_tool.core.layout import Held, Layout, Placement, held
from ckpt_tool.core.target import DIGEST_CHARS, Later, Patch, Target, TargetArray, TargetFile, Wanted
from ckpt_tool.errors import InternalError, UsageError
from ckpt_tool.storage.safetensors_files.safetensors_entries import METADATA
from ckpt_tool.storage.safetensors_files.safetensors_file import build_header
from ckpt_tool.systems.ckpt.sharded.grid import (
    Grid,
    GridPlaces,
    GridSlot,
    GridState,
    are_plain,
    header_size,
    padded_shape,
)
from ckpt_tool.systems.ckpt.sharded.index import (
    INDEX,
    VERSION,
    IndexFile,
    IndexTensor,
    Origin,
    ShardedIndex,
    boxes_hash,
    dumps,
    fallbacks_of,
    file_json,
    file_name,
    hash_of,
    index_text,
    save_id,
    tensor_text,
)

FORMAT_NAME = "sharded"
MANY = 4_000_000  # tensors times ranks


class _RankPart(NamedTuple):
    """What a rank's file holds of one tensor: number `tensor` of the wanted ones."""

    tensor: int
    held: Held


class _RankFile(NamedTuple):
    """One file laid out, but for the save's id in its header."""

    state: str
    rank: dict[str, int]
    parts: list[_RankPart]


def sharded_target(wanted: Wanted, layout: Layout) -> Target:
    """Every file. Raises UsageError: E0245 for what safetensors or JSON can't hold, E0246 for names that collide or are
    too long."""
    _check_tensors(wanted)
    if len(wanted.tensors) * layout.mesh.size > MANY and are_plain({item.key.name for item in wanted.tensors}):
        return _Large(wanted, layout).target()

    files = _lay_out(wanted, layout)
    _check_names(wanted, files)
    extras = _to_strict_json(wanted.extras, "extras")

    # Headers state the save's id, which follows from the boxes of all files: so boxes come first.
    boxes = {path: dumps(_describe_boxes(wanted, file)) for path, file in files.items()}
    rows = {path: _list_arrays(wanted, file) for path, file in files.items()}
    hashes = {path: _hash_boxes(boxes[path], rows[path]) for path in files}
    save = save_id(layout.mesh, extras, hashes)

    target_files = []
    entries = []
    for path, file in files.items():
        head, offsets, size = build_header(
            rows[path], _header_metadata(layout, save, file.state, file.rank, boxes[path])
        )

        arrays = tuple(
            TargetArray(part.tensor, part.held.box, offset, padded_shape(part.held))
            for part, offset in zip(file.parts, offsets, strict=True)
        )
        target_files.append(TargetFile(path, size, ((0, head),), arrays))
        entries.append(IndexFile(path, size, file.state, file.rank, hashes[path]))

    target_files.extend(wanted.side_file_copies())
    target_files.append(_build_index_file(wanted, layout, extras, entries))
    return Target(FORMAT_NAME, tuple(target_files))


def _header_metadata(layout: Layout, save: str, state: str, rank: Mapping[str, int], boxes: str) -> dict[str, str]:
    """`__metadata__` of a rank's file."""
    return {
        "format": "pt",
        "ckpt_format": "sharded",
        "ckpt_version": str(VERSION),
        "mesh": dumps(layout.mesh.to_json()),
        "save": save,
        "state": state,
        "rank": dumps(rank),
        "boxes": boxes,
    }


def _lay_out(wanted: Wanted, layout: Layout) -> dict[str, _RankFile]:
    """The files by name, sorted."""
    mesh = layout.mesh
    parts_by_case: dict[tuple[Placement, tuple[int, ...]], tuple[Held, ...]] = {}  # layers repeat: decide once a case
    names: dict[tuple[str, str], str] = {}
    files: dict[str, _RankFile] = {}
    for number, (item, placement) in enumerate(zip(wanted.tensors, layout.placements, strict=True)):
        case = (placement, item.shape)
        if case not in parts_by_case:
            parts = held(item.shape, placement, mesh)
            parts_by_case[case] = tuple(part for part in parts if _holds_something(part, item.shape))
        for part in parts_by_case[case]:
            label = (item.key.state, mesh.label(part.coords))
            if label not in names:
                names[label] = file_name(item.key.state, mesh, part.coords)
                files[names[label]] = _RankFile(item.key.state, part.coords, [])
            files[names[label]].parts.append(_RankPart(number, part))
    return dict(sorted(files.items()))


def _holds_something(part: Held, shape: tuple[int, ...]) -> bool:
    """False for an empty box of a tensor that is not empty, unless padding fills it."""
    return 0 not in part.shape or 0 in shape


def _describe_boxes(wanted: Wanted, file: _RankFile) -> dict[str, dict[str, list[int]]]:
    """`boxes` of the file's metadata."""
    out = {}
    for number, part in file.parts:
        item = wanted.tensors[number]
        box = {"offset": list(part.box.offset), "shape": list(item.shape)}
        if padded_shape(part):
            box["box"] = list(part.box.shape)
        out[item.key.name] = box
    return out


def _list_arrays(wanted: Wanted, file: _RankFile) -> list[tuple[str, DType, tuple[int, ...]]]:
    """(name, dtype, stored shape) of the file's arrays."""
    tensors = wanted.tensors
    return [(tensors[number].key.name, tensors[number].dtype, part.shape) for number, part in file.parts]


def _hash_boxes(boxes: str, rows: Iterable[tuple[str, DType, tuple[int, ...]]]) -> str:
    return boxes_hash(boxes, ((name, dtype.name, shape) for name, dtype, shape in rows))


def _build_index_file(wanted: Wanted, layout: Layout, extras: object, files: list[IndexFile]) -> TargetFile:
    """`ckpt.index.json` with its holes for the digests."""
    text, holes = index_text(_build_index(wanted, layout, extras, files))
    patches = tuple(Patch(holes[item.key], "digest", number) for number, item in enumerate(wanted.tensors))
    return TargetFile(INDEX, len(text), ((0, text),), patches=patches)


def _build_index(
    wanted: Wanted, layout: Layout, extras: object, files: Sequence[IndexFile], *, bare: bool = False
) -> ShardedIndex:
    """The index; bare: without its tensors."""
    cuts = _Cuts(layout)
    tensors = {}
    if not bare:
        tensors = {
            item.key: IndexTensor(item.dtype, item.shape, cuts.number(placement), item.path)
            for item, placement in zip(wanted.tensors, layout.placements, strict=True)
        }
    origin = wanted.hints.get(Origin)
    return ShardedIndex(
        mesh=layout.mesh,
        files=tuple(files),
        tensors=tensors,
        placements=cuts.distinct,
        fallbacks=fallbacks_of([item.key for item in wanted.tensors], layout) if cuts.has_fallbacks else (),
        extras=extras,
        source_format=origin.format if origin else wanted.source_format,
        hints=_to_strict_json(wanted.hints.without(Origin).plain, "hints"),
        sidefiles=tuple(path for path, _ in wanted.sidefiles),
    )


class _Cuts:
    """The distinct placements without their reasons, numbered."""

    def __init__(self, layout: Layout) -> None:
        objects = {id(placement): placement for placement in layout.placements}
        bare = {number: placement._replace(choices=()) for number, placement in objects.items()}
        self.distinct = tuple(sorted(set(bare.values()), key=repr))
        numbers = {placement: number for number, placement in enumerate(self.distinct)}
        self._numbers = {number: numbers[placement] for number, placement in bare.items()}
        self.has_fallbacks = any(
            choice.reason != "even" for placement in objects.values() for choice in placement.choices
        )

    def number(self, placement: Placement) -> int:
        """placement: one of the layout's own objects."""
        return self._numbers[id(placement)]


# -- very many ranks ------------------------------------------------------------------------------------------------


class _Large:
    """A target of very many tensors and ranks: sizes now, heads when they are written."""

    def __init__(self, wanted: Wanted, layout: Layout) -> None:
        self.wanted = wanted
        self.layout = layout
        self.extras = _to_strict_json(wanted.extras, "extras")
        self.grid = Grid(wanted, layout)
        self._sizes: dict[int, int] = {}  # bytes of tensors in the index, by the id of Sheets
        self.slots, self.paths = self._slots()
        _check_names(wanted, self.paths)

    def target(self) -> Target:
        """All files, with heads and arrays that are made on demand."""
        files = [
            TargetFile(path, slot.size, Later(lambda s=slot: self._head(s)), Later(lambda s=slot: self._arrays(s)))  # type: ignore[misc]
            for path, slot in zip(self.paths, self.slots, strict=True)
        ]
        files.extend(self.wanted.side_file_copies())
        index = Later(lambda: self._build_index_file().literals)
        files.append(
            TargetFile(INDEX, self._index_size(), index, patches=Later(lambda: self._build_index_file().patches))
        )
        return Target(FORMAT_NAME, tuple(files), places=GridPlaces(self.grid, self.slots, self.identity))

    def _slots(self) -> tuple[list[GridSlot], list[str]]:
        """Every file in the order of its path."""
        grid = self.grid
        mesh = self.layout.mesh
        blank = _header_metadata(self.layout, "0" * 32, "", {}, "")
        fixed = _count_characters({METADATA: dict(sorted(blank.items()))}) - 2 - _count_characters("{}")
        ranks = [_count_characters(dumps(rank)) for rank in grid.ranks]

        # The metadata of all files has the same length, but for the state, the rank and the boxes.
        slots = []
        for state, sheets in grid.sheets.items():
            for rank, sheet in sheets.by_rank.items():
                boxes = 1 + len(sheet.order) + sum(band.box_length(rank) for band in sheet.bands)
                start = header_size(sheet, fixed + _count_characters(state) - 2 + ranks[rank] + boxes)
                slot = GridSlot(state, rank, start + sheet.nbytes, start, sheet)
                slots.append((file_name(state, mesh, grid.ranks[rank]), slot))
        slots.sort(key=lambda pair: pair[0])
        return [slot for _, slot in slots], [path for path, _ in slots]

    def _file(self, slot: GridSlot) -> _RankFile:
        parts = [
            _RankPart(number, each)
            for number, each in sorted(self.grid.parts(slot.state, slot.rank), key=_tensor_number)
        ]
        return _RankFile(slot.state, self.grid.ranks[slot.rank], parts)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        return {path: self._hash_file(slot) for path, slot in zip(self.paths, self.slots, strict=True)}

    def _hash_file(self, slot: GridSlot) -> str:
        file = self._file(slot)
        return _hash_boxes(dumps(_describe_boxes(self.wanted, file)), _list_arrays(self.wanted, file))

    def _head(self, slot: GridSlot) -> tuple[tuple[int, bytes]]:
        file = self._file(slot)
        save = save_id(self.layout.mesh, self.extras, self._hashes)
        boxes = dumps(_describe_boxes(self.wanted, file))
        metadata = _header_metadata(self.layout, save, file.state, file.rank, boxes)
        head, _, size = build_header(_list_arrays(self.wanted, file), metadata)
        if (len(head), size) != (slot.data_start, slot.size):
            raise InternalError(
                f"a head of {len(head)} bytes in a file of {size} was planned as {slot.data_start} in {slot.size}",
                path=file_name(file.state, self.layout.mesh, file.rank),
                hint="please report this; nothing was committed",
            )
        return ((0, head),)

    def _arrays(self, slot: GridSlot) -> tuple[TargetArray, ...]:
        places = self.grid.places(slot)
        return tuple(
            TargetArray(part.tensor, part.held.box, places[part.tensor], padded_shape(part.held))
            for part in self._file(slot).parts
        )

    def _build_index_file(self) -> TargetFile:
        entries = [
            IndexFile(path, slot.size, slot.state, self.grid.ranks[slot.rank], self._hashes[path])
            for path, slot in zip(self.paths, self.slots, strict=True)
        ]
        return _build_index_file(self.wanted, self.layout, self.extras, entries)

    @cached_property
    def _cuts(self) -> _Cuts:
        return _Cuts(self.layout)

    @cached_property
    def _bare_index(self) -> bytes:
        return index_text(_build_index(self.wanted, self.layout, self.extras, (), bare=True))[0]

    def _index_size(self) -> int:
        """Bytes of the index: its text without files and tensors, and the lengths of theirs."""
        entry = IndexFile("", 0, "", {}, "0" * 32)
        fixed = len(dumps(file_json(entry))) - len('0{}""') + len(",\n")
        ranks = [len(dumps(rank)) for rank in self.grid.ranks]
        states = {state: len(dumps(state)) for state in self.grid.states}

        files = sum(
            fixed + len(path) + len(str(slot.size)) + ranks[slot.rank] + states[slot.state]
            for path, slot in zip(self.paths, self.slots, strict=True)
        )
        tensors = sum(map(self._tensors_size, self.grid.states.values())) + len("},") * (len(states) - 1)
        return len(self._bare_index) + len("\n") + files - len(",\n") + tensors + len("}")

    def _tensors_size(self, state: GridState) -> int:
        """Bytes of one state's tensors in the index. Their names are plain, so they take two quotes more."""
        opening = len(dumps(state.state)) + len("\n:{\n") - len(",\n")
        sheets_id = id(self.grid.sheets[state.state])
        paths = [self.wanted.tensors[number].path for number in state.numbers]
        has_no_paths = not any(paths)
        if has_no_paths and sheets_id in self._sizes:  # a state that is laid out as another was
            return opening + self._sizes[sheets_id]

        # Entries of one shape, dtype, placement and path differ in their names alone.
        keys = list(zip(state.shapes, map(id, state.dtypes), map(id, state.placements), paths, strict=True))
        tensor_by_key = dict(
            zip(keys, zip(state.shapes, state.dtypes, state.placements, paths, strict=True), strict=True)
        )
        size = sum(map(len, state.names))
        for key, count in Counter(keys).items():
            shape, dtype, placement, path = tensor_by_key[key]
            before, after = tensor_text("", IndexTensor(dtype, shape, self._cuts.number(placement), path))
            size += count * (len(before) + DIGEST_CHARS + len(after) + len(",\n"))

        if has_no_paths:
            self._sizes[sheets_id] = size
        return opening + size

    def identity(self) -> str:
        """A hash of all that decides the heads: the index without files and digests, and every tensor."""
        columns = [
            [
                state.state,
                state.names,
                state.shapes,
                [dtype.name for dtype in state.dtypes],
                list(map(self._cuts.number, state.placements)),
                [self.wanted.tensors[i].path for i in state.numbers],
            ]
            for state in self.grid.states.values()
        ]
        return hash_of(dumps([self._bare_index.decode("ascii"), self.wanted.sidefiles, columns]))


def _tensor_number(part: tuple[int, Held]) -> int:
    return part[0]


def _count_characters(value: object) -> int:
    """Bytes of `value` as a header's JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8"))


# -- what the format can't hold -----------------------------------------------------------------------------------


def _to_strict_json(values: Mapping[str, Any], what: str) -> Any:
    """The JSON form. Raises UsageError E0245 where strict JSON can't hold it."""
    json_form = to_json(dict(values))
    try:
        json.dumps(json_form, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the {what} hold a string that is no Unicode text ({error.reason})",
            code="E0245",
            hint="leave the extras out: --drop extras",
        ) from error
    return json_form


def _check_tensors(wanted: Wanted) -> None:
    """Raise UsageError E0258 for all tensors at once that safetensors has no dtype for."""
    faults = [
        (str(item.key), f"safetensors has no dtype {item.dtype.name}")
        for item in wanted.tensors
        if item.dtype.name not in SAFETENSORS_NAMES
    ]
    if faults:
        raise UsageError(
            faults[0][1],
            code="E0258",
            key=faults[0][0],
            faults=[f"{key}: {why}" for key, why in faults[1:]],
            hint="give another type with --dtype, drop the tensor with --remove-keys, or choose another format",
        )


def _check_names(wanted: Wanted, files: Iterable[str]) -> None:
    """Raise UsageError E0246 for names that do not fit a file system or differ by case alone; side files may not have
    one of ours."""
    path_by_folded = {INDEX.casefold(): INDEX}
    for path in (*files, *(path for path, _ in wanted.sidefiles)):
        if len(path.rsplit("/", 1)[-1].encode("utf-8", "surrogateescape")) > 255:
            raise UsageError(
                f"the file name {path[:60]!r}... has more than 255 bytes",
                code="E0246",
                hint="a state has a very long name",
            )
        if path.casefold() in path_by_folded:
            raise UsageError(
                f"two files of the output would be {path_by_folded[path.casefold()]!r} and {path!r}",
                code="E0246",
                path=path,
                hint="rename the side file, or leave the state out with --state",
            )
        path_by_folded[path.casefold()] = path
