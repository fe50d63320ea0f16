"""Laying out a `sharded` checkpoint: which file holds which boxes, every head, the index with its holes.

Sizes come from `ckpt.sharded.grid`, by classes of tensors. Heads and arrays are made when somebody looks at them, which
a dry run does not: of all files at once and kept, up to `MANY` tensors times ranks; above that of one file, each time
again:

    184,732 tensors on 2,048 ranks: 8,192 files of known size in 0.4 s; their heads would be 400 MB of JSON

A head that is made is compared with the promised size. What the format can't hold is refused here, before anything is
written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import SAFETENSORS_NAMES, DType
from ckpt_tool.core.extras import to_json
from ckpt_tool.core.layout import Layout, Placement
from ckpt_tool.core.target import DIGEST_CHARS, Later, Patch, Target, TargetArray, TargetFile, Wanted
from ckpt_tool.errors import InternalError, UsageError
from ckpt_tool.storage.safetensors_files.safetensors_entries import METADATA, TENSOR_LIMIT
from ckpt_tool.storage.safetensors_files.safetensors_file import HEADER_LIMIT, build_header
from ckpt_tool.systems.ckpt.sharded.grid import (
    Grid,
    GridPlaces,
    GridSlot,
    GridState,
    RankPart,
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
MANY = 4_000_000  # tensors times ranks: above it the contents of the files are not kept


def sharded_target(wanted: Wanted, layout: Layout) -> Target:
    """Every file. Raises UsageError: E0245 for what safetensors or JSON can't hold, E0246 for names that collide or are
    too long."""
    _check_tensors(wanted)
    return _Files(wanted, layout).target()


class _RankFile(NamedTuple):
    """One file laid out, but for the save's id in its header."""

    slot: GridSlot
    parts: Sequence[RankPart]  # as the header sorts them
    arrays: list[tuple[str, DType, tuple[int, ...]]]  # (name, dtype, stored shape) of each part
    boxes: str  # `boxes` of the metadata
    boxes_hash: str


class _FileContent(NamedTuple):
    """What is kept of a file once all files were listed."""

    head: bytes
    arrays: Sequence[TargetArray]
    boxes_hash: str


class _Files:
    """The files of one output: sizes now, heads and arrays when somebody looks at them."""

    def __init__(self, wanted: Wanted, layout: Layout) -> None:
        self.wanted = wanted
        self.layout = layout
        self.grid = Grid(wanted, layout)
        self.slots = self._list_slots()
        _check_names(wanted, [slot.path for slot in self.slots])
        self.extras = _to_strict_json(wanted.extras, "extras")
        self._listable = len(wanted.tensors) * layout.mesh.size <= MANY
        self._sizes: dict[int, int] = {}  # bytes of tensors in the index, by the id of Sheets
        self._check_heads()

    def target(self) -> Target:
        """All files."""
        files = [self._build_target_file(number, slot) for number, slot in enumerate(self.slots)]
        files.extend(self.wanted.side_file_copies())

        build_index = cache(self._build_index_file) if self._listable else self._build_index_file
        literals = Later(lambda: build_index().literals)
        files.append(TargetFile(INDEX, self._index_size(), literals, patches=Later(lambda: build_index().patches)))

        places = GridPlaces(self.grid, self.slots, self.identity, listable=self._listable)
        return Target(FORMAT_NAME, tuple(files), places=places)

    def _build_target_file(self, number: int, slot: GridSlot) -> TargetFile:
        literals: Later[tuple[int, bytes]]
        arrays: Later[TargetArray]
        if self._listable:
            literals = Later(lambda: ((0, self._listed[number].head),))
            arrays = Later(lambda: self._listed[number].arrays)
        else:
            literals = Later(lambda: ((0, self._build_head(self._describe_file(slot), self._save)),))
            arrays = Later(lambda: self._list_arrays(self._describe_file(slot)))
        return TargetFile(slot.path, slot.size, literals, arrays)

    def _list_slots(self) -> list[GridSlot]:
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
                path = file_name(state, mesh, grid.ranks[rank])
                slots.append(GridSlot(path, state, rank, start + sheet.nbytes, start, sheet))
        return sorted(slots, key=attrgetter("path"))

    # -- the contents of the files --------------------------------------------------------------------------------

    @cached_property
    def _listed(self) -> list[_FileContent]:
        """The contents of every file."""
        files = [self._describe_file(slot) for slot in reversed(self.slots)]
        save = self._compute_save_id([file.boxes_hash for file in reversed(files)])
        contents = []
        while files:  # a description takes more memory than the content, so each is let go before the next head
            file = files.pop()
            contents.append(_FileContent(self._build_head(file, save), self._list_arrays(file), file.boxes_hash))
        return contents

    def _describe_file(self, slot: GridSlot) -> _RankFile:
        tensors = self.wanted.tensors
        parts = self.grid.list_parts(slot)
        arrays = [(tensors[part.tensor].key.name, tensors[part.tensor].dtype, part.held.shape) for part in parts]

        # Canonical JSON, put together from the texts that parts of one kind have in common.
        entries = sorted([(name, part.box_text) for (name, _, _), part in zip(arrays, parts, strict=True)])
        quoted = json.dumps([name for name, _ in entries], separators=("\n", ":"))[1:-1].split("\n")
        boxes = ",".join([f"{name}:{text}" for name, (_, text) in zip(quoted, entries, strict=True)])
        boxes = f"{{{boxes}}}"
        digest = boxes_hash(boxes, ((name, dtype.name, shape) for name, dtype, shape in arrays))
        return _RankFile(slot, parts, arrays, boxes, digest)

    def _build_head(self, file: _RankFile, save: str) -> bytes:
        slot = file.slot
        metadata = _header_metadata(self.layout, save, slot.state, self.grid.ranks[slot.rank], file.boxes)
        head, _, size = build_header(file.arrays, metadata)
        if (len(head), size) != (slot.data_start, slot.size):
            raise InternalError(
                f"a head of {len(head)} bytes in a file of {size} was planned as {slot.data_start} in {slot.size}",
                path=slot.path,
                hint="please report this; nothing was committed",
            )
        return head

    def _list_arrays(self, file: _RankFile) -> list[TargetArray]:
        start = file.slot.data_start
        return [
            TargetArray(tensor, held.box, start + begin, padded_shape(held))
            for tensor, held, _, begin in sorted(file.parts, key=attrgetter("tensor"))
        ]

    @cached_property
    def _hashes(self) -> list[str]:
        """The hash of each file's boxes."""
        if self._listable:
            return [content.boxes_hash for content in self._listed]
        return [self._describe_file(slot).boxes_hash for slot in self.slots]

    @cached_property
    def _save(self) -> str:
        return self._compute_save_id(self._hashes)

    def _compute_save_id(self, hashes: Sequence[str]) -> str:
        paths = [slot.path for slot in self.slots]
        return save_id(self.layout.mesh, self.extras, dict(zip(paths, hashes, strict=True)))

    # -- the index --------------------------------------------------------------------------------------------------

    def _build_index_file(self) -> TargetFile:
        """`ckpt.index.json` with its holes for the digests."""
        entries = [
            IndexFile(slot.path, slot.size, slot.state, self.grid.ranks[slot.rank], boxes)
            for slot, boxes in zip(self.slots, self._hashes, strict=True)
        ]
        text, holes = index_text(self._build_index(entries))
        patches = [Patch(holes[item.key], "digest", number) for number, item in enumerate(self.wanted.tensors)]
        return TargetFile(INDEX, len(text), ((0, text),), patches=tuple(patches))

    def _build_index(self, files: Sequence[IndexFile], *, bare: bool = False) -> ShardedIndex:
        """The index; bare: without its tensors."""
        wanted = self.wanted
        cuts = self._cuts
        tensors = {}
        if not bare:
            tensors = {
                item.key: IndexTensor(item.dtype, item.shape, cuts.number(placement), item.path)
                for item, placement in zip(wanted.tensors, self.layout.placements, strict=True)
            }
        origin = wanted.hints.get(Origin)
        return ShardedIndex(
            mesh=self.layout.mesh,
            files=tuple(files),
            tensors=tensors,
            placements=cuts.distinct,
            fallbacks=fallbacks_of([item.key for item in wanted.tensors], self.layout) if cuts.has_fallbacks else (),
            extras=self.extras,
            source_format=origin.format if origin else wanted.source_format,
            hints=_to_strict_json(wanted.hints.without(Origin).plain, "hints"),
            sidefiles=tuple(path for path, _ in wanted.sidefiles),
        )

    @cached_property
    def _cuts(self) -> _DistinctPlacements:
        return _DistinctPlacements(self.layout)

    @cached_property
    def _bare_index(self) -> bytes:
        return index_text(self._build_index((), bare=True))[0]

    def _index_size(self) -> int:
        """Bytes of the index: its text without files and tensors, and the lengths of theirs."""
        entry = IndexFile("", 0, "", {}, "0" * 32)
        fixed = len(dumps(file_json(entry))) - len('0{}""') + len(",\n")
        ranks = [len(dumps(rank)) for rank in self.grid.ranks]
        states = {state: len(dumps(state)) for state in self.grid.states}

        files = sum(
            fixed + len(slot.path) + len(str(slot.size)) + ranks[slot.rank] + states[slot.state] for slot in self.slots
        )
        if files:
            files += len("\n") - len(",\n")  # the list's brackets are on lines of their own
        tensors = sum(map(self._tensors_size, self.grid.states.values()))
        if tensors:
            tensors += len("},") * (len(states) - 1) + len("}")
        return len(self._bare_index) + files + tensors

    def _tensors_size(self, state: GridState) -> int:
        """Bytes of one state's tensors in the index."""
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
        is_plain = are_plain(state.names)  # then a name is written as it is, between two quotes
        size = sum(map(len, state.names)) if is_plain else sum(len(dumps(name)) - len('""') for name in state.names)
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

    def _check_heads(self) -> None:
        """Raise now what making a head would raise: UsageError E0200 for names that safetensors can't hold and for
        heads that are too large. Only where there could be such is any made."""
        names_are_plain = all(
            are_plain([name, *state.names]) and len(set(state.names)) == len(state.names)
            for name, state in self.grid.states.items()
        )
        heads_are_small = all(
            slot.data_start - 8 <= HEADER_LIMIT and len(slot.sheet.order) <= TENSOR_LIMIT for slot in self.slots
        )
        if names_are_plain and heads_are_small:
            return
        if self._listable:
            _ = self._listed
        else:
            for slot in self.slots:
                self._build_head(self._describe_file(slot), self._save)


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


class _DistinctPlacements:
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


def _count_characters(value: object) -> int:
    """Bytes of `value` as a header's JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))


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
