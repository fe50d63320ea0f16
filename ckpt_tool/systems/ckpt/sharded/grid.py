"""Laying out `sharded` for very many ranks: by classes of tensors and ranks, not box by box.

184,732 tensors on 2,048 ranks are 1.9 million boxes in 8,192 files, but few different things. Tensors of one shape and
cut have the same boxes (a *geometry*: 15 of them); tensors of the same ranks form a *band* (272 a state); ranks that
hold the same bands have the same arrays at the same offsets (a *sheet*: 256). A file's size follows from lengths of
texts that need not be written:

    tp 8, pp 16, ep 16    rank tp03_pp07_ep11 holds the bands "dense, stage 7" and "experts of rank 11, stage 7";
                          its file has the arrays and the header length of sheet (7, 11), plus the digits of its own
                          boxes

What is asked for later (a file's head, a tensor's boxes) is then made for that file or tensor alone. The sizes here are
promises: `sharded` compares every head that it makes with them, and the tests compare both ways.

Cost: about 1.5 us a tensor and state; nothing a box. Names must be plain ASCII (`are_plain`); a target
with others is laid out box by box.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.layout import Held, Layout, Placement, held
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import TargetArray, Wanted
from ckpt_tool.storage.safetensors_files.safetensors_entries import METADATA, NAME_LIMIT
from ckpt_tool.storage.safetensors_files.safetensors_file import ALIGNMENT, dtype_rank

Shape = tuple[int, ...]
_HEADER_ENTRY = len('"":{"dtype":"","shape":,"data_offsets":[,]},')  # bytes of an entry that are not its own
_BOX_QUOTES = 2  # an ASCII name's quotes, each escaped once more in the text of `boxes`


def are_plain(names: Iterable[str]) -> bool:
    """Does JSON write all names as they are, however often JSON text is put into a JSON string?"""
    all_names = list(names)
    joined = "".join(all_names)
    return (
        joined.isascii()
        and joined.isprintable()
        and '"' not in joined
        and "\\" not in joined
        and METADATA not in all_names
        and max(map(len, all_names), default=0) <= NAME_LIMIT
    )


def json_length(value: object) -> int:
    """Characters of `value` as compact JSON."""
    return len(json.dumps(value, separators=(",", ":"), sort_keys=True))


class Geometry:
    """The boxes of tensors of one shape under one cut."""

    def __init__(self, shape: Shape, parts: Sequence[tuple[int, Held]]) -> None:
        """parts: what each rank holds; ranks are counted from a base, so that tensors elsewhere share the geometry."""
        # A rank whose box is empty gets no array, unless the whole tensor is empty.
        parts = [(rank, part) for rank, part in parts if 0 not in part.shape or 0 in shape]
        self.ranks = tuple(rank for rank, _ in parts)
        self.held = dict(parts)
        self.entry_length = {rank: self._count_entry_characters(shape, part) for rank, part in parts}

        ranks_by_extents: dict[Shape, list[int]] = {}
        for rank, part in parts:
            ranks_by_extents.setdefault(part.shape, []).append(rank)
        self.extents = tuple((stored, tuple(ranks)) for stored, ranks in ranks_by_extents.items())

    @staticmethod
    def _count_entry_characters(shape: Shape, part: Held) -> int:
        """Characters of `:{"offset":[...],"shape":[...]}` inside a JSON string, where each quote takes two."""
        box: dict[str, Sequence[int]] = {"offset": part.box.offset, "shape": shape}
        if part.shape != part.box.shape:
            box["box"] = part.box.shape
        return json_length(box) + 2 * len(box) + 1


class GridBand:
    """Tensors that the same ranks hold in the same extents."""

    def __init__(self, base: int, ranks: tuple[int, ...]) -> None:
        self.base = base  # what `ranks` are counted from
        self.ranks = ranks
        self.rows: list[tuple[int, int]] = []  # (place in the sort order, kind number)
        self.geometries: Counter[Geometry] = Counter()
        self.names = 0  # characters of all names

    def box_length(self, rank: int) -> int:
        """Characters of what the band adds to the text of `boxes` in the file of rank number `rank`."""
        entries = sum(count * geometry.entry_length[rank - self.base] for geometry, count in self.geometries.items())
        return entries + self.names + 2 * _BOX_QUOTES * len(self.rows)


class ArrayKind(NamedTuple):
    """Arrays that take the same bytes of a file."""

    nbytes: int  # of one array
    fixed: int  # characters of its header entry but for its name and offsets


class Sheet:
    """What the files of ranks with the same bands have in common."""

    def __init__(self, bands: Sequence[GridBand], kinds: Sequence[ArrayKind]) -> None:
        # One band is sorted already, by far the most common case.
        rows = bands[0].rows if len(bands) == 1 else sorted(row for band in bands for row in band.rows)
        self.bands = bands
        self.order = [place for place, _ in rows]
        self._starts = list(accumulate((kinds[kind].nbytes for _, kind in rows), initial=0))
        self.nbytes = self._starts[-1]

        # Every start is written twice, as an array's end and the next one's begin; the first and the last are not.
        digits = list(map(len, map(str, self._starts)))
        fixed = sum(kinds[kind].fixed for _, kind in rows) + sum(band.names for band in bands)
        self.entries = fixed + 2 * sum(digits) - digits[0] - digits[-1]  # characters of all entries

    @cached_property
    def begins(self) -> dict[int, int]:
        """Sorted place -> where the array begins, bytes from the start of the data."""
        return dict(zip(self.order, self._starts, strict=False))


class GridSlot(NamedTuple):
    """One file."""

    state: str
    rank: int  # its number
    size: int  # bytes
    data_start: int  # bytes from the start of the file
    sheet: Sheet


class _Route(NamedTuple):
    """How a class of tensors is laid out."""

    group: int
    bands: tuple[tuple[GridBand, int], ...]  # with the kind of the array in each band


class GridState:
    """One state's tensors."""

    def __init__(self, grid: Grid, state: str, numbers: list[int]) -> None:
        """numbers: of the wanted tensors that belong to the state."""
        tensors = grid.wanted.tensors
        placements = grid.layout.placements
        self.state = state
        self.numbers = numbers
        self.names = [tensors[i].key.name for i in numbers]
        self.shapes = [tensors[i].shape for i in numbers]
        self.dtypes = [tensors[i].dtype for i in numbers]
        self.placements = [placements[i] for i in numbers]

    def same(self, other: GridState) -> bool:
        """Is the other laid out the same in every byte but the values?"""
        return (
            self.names == other.names
            and self.shapes == other.shapes
            and self.dtypes == other.dtypes
            and all(a is b for a, b in zip(self.placements, other.placements, strict=True))
        )


class Sheets:
    """The bands and sheets of a state, or of several that are laid out the same."""

    def __init__(self, grid: Grid, state: GridState) -> None:
        self.state = state
        self.kinds: list[ArrayKind] = []
        self._kind_numbers: dict[tuple[Shape, DType], int] = {}
        self._bands: dict[tuple[int, tuple[int, ...]], GridBand] = {}
        self.order = _sort_as_headers(state)  # place -> position among the state's tensors

        # Layers repeat: decide once for tensors of one placement, shape and dtype. Objects are compared by identity,
        # because hashing a placement for each of a million tensors would dominate.
        keys = list(zip(map(id, state.placements), state.shapes, map(id, state.dtypes), strict=True))
        tensors = dict(zip(keys, zip(state.placements, state.shapes, state.dtypes, strict=True), strict=True))
        routes = {key: self._find_route(grid, *tensor) for key, tensor in tensors.items()}
        self.groups = [routes[key].group for key in keys]

        bands_by_position = [routes[key].bands for key in keys]
        for place, position in enumerate(self.order):
            for band, kind in bands_by_position[position]:
                band.rows.append((place, kind))
        for key, count in Counter(keys).items():
            for band, _ in routes[key].bands:
                band.geometries[grid.geometries[routes[key].group][0]] += count

        name_lengths = [len(state.names[position]) for position in self.order]
        for band in self._bands.values():
            band.names = sum(name_lengths[place] for place, _ in band.rows)
        self.by_rank = self._build_sheets()

    def _find_route(self, grid: Grid, placement: Placement, shape: Shape, dtype: DType) -> _Route:
        """How tensors of this class are laid out; new kinds and bands are added."""
        group = grid.group_of(placement, shape)
        geometry, base = grid.geometries[group]
        bands = []
        for stored, ranks in geometry.extents:
            kind = self._kind_numbers.get((stored, dtype))
            if kind is None:
                kind = self._kind_numbers[stored, dtype] = len(self.kinds)
                fixed = _HEADER_ENTRY + len(dtype.name) + json_length(stored)
                self.kinds.append(ArrayKind(dtype.nbytes(prod(stored)), fixed))
            band = self._bands.get((base, ranks))
            if band is None:
                band = self._bands[base, ranks] = GridBand(base, ranks)
            bands.append((band, kind))
        return _Route(group, tuple(bands))

    def _build_sheets(self) -> dict[int, Sheet]:
        """Rank number -> its sheet, for the ranks that hold something."""
        bands_by_rank: dict[int, list[GridBand]] = {}
        for band in self._bands.values():
            for rank in band.ranks:
                bands_by_rank.setdefault(band.base + rank, []).append(band)

        sheets: dict[tuple[int, ...], Sheet] = {}
        sheet_by_rank = {}
        for rank in sorted(bands_by_rank):
            key = tuple(map(id, bands_by_rank[rank]))
            if key not in sheets:
                sheets[key] = Sheet(bands_by_rank[rank], self.kinds)
            sheet_by_rank[rank] = sheets[key]
        return sheet_by_rank


def _sort_as_headers(state: GridState) -> list[int]:
    """Positions as a header sorts its entries: wide dtypes first, then by name."""
    names = state.names
    dtypes = state.dtypes
    if all(dtype is dtypes[0] for dtype in dtypes):
        return sorted(range(len(names)), key=names.__getitem__)
    return sorted(range(len(names)), key=lambda i: (dtype_rank(dtypes[i]), names[i]))


class Grid:
    """The whole layout. Raises nothing: what the format can't hold was refused before."""

    def __init__(self, wanted: Wanted, layout: Layout) -> None:
        self.wanted = wanted
        self.layout = layout
        self.mesh = layout.mesh
        self.ranks = list(layout.mesh.ranks())
        self._strides = _strides(layout.mesh)
        self.geometries: list[tuple[Geometry, int]] = []  # by group: the boxes, and the base of their ranks
        self._groups: dict[tuple[int, Shape], int] = {}
        self._geometry_by_cut: dict[tuple[object, ...], Geometry] = {}

        numbers: dict[str, list[int]] = {}
        for number, item in enumerate(wanted.tensors):
            numbers.setdefault(item.key.state, []).append(number)
        self.states = {state: GridState(self, state, state_numbers) for state, state_numbers in numbers.items()}
        self.sheets: dict[str, Sheets] = {}

        # States that are laid out the same (the moments of an optimizer) share their sheets.
        for name, state in self.states.items():
            twin = next((sheets for sheets in self.sheets.values() if sheets.state.same(state)), None)
            self.sheets[name] = twin or Sheets(self, state)

    def group_of(self, placement: Placement, shape: Shape) -> int:
        """The group of tensors of one placement (the same object) and shape."""
        group = self._groups.get((id(placement), shape))
        if group is None:
            group = self._groups[id(placement), shape] = len(self.geometries)
            self.geometries.append(self._build_geometry(placement, shape))
        return group

    def _build_geometry(self, placement: Placement, shape: Shape) -> tuple[Geometry, int]:
        fixed = {name: index for name, index in placement.at if name in self._strides}
        base = sum(index * self._strides[name] for name, index in fixed.items())
        cut = (shape, placement.shard, placement.padded, placement.uneven, placement.granules, tuple(fixed))
        if cut not in self._geometry_by_cut:
            parts = []
            for part in held(shape, placement, self.mesh):
                rank = sum(coordinate * self._strides[name] for name, coordinate in part.coords.items())
                parts.append((rank - base, part))
            self._geometry_by_cut[cut] = Geometry(shape, parts)
        return self._geometry_by_cut[cut], base

    def parts(self, state: str, rank: int) -> list[tuple[int, Held]]:
        """(number of the wanted tensor, what the rank holds of it) of a file's arrays, as its header sorts them."""
        sheets = self.sheets[state]
        numbers = self.states[state].numbers
        parts = []
        for place in sheets.by_rank[rank].order:
            position = sheets.order[place]
            geometry, base = self.geometries[sheets.groups[position]]
            parts.append((numbers[position], geometry.held[rank - base]))
        return parts

    def places(self, slot: GridSlot) -> dict[int, int]:
        """Number of the wanted tensor -> where its array begins, bytes from the start of the file."""
        order = self.sheets[slot.state].order
        numbers = self.states[slot.state].numbers
        return {numbers[order[place]]: slot.data_start + begin for place, begin in slot.sheet.begins.items()}


def _strides(mesh: Mesh) -> dict[str, int]:
    """Mesh dim -> how many ranks apart its neighbours are."""
    names = list(next(mesh.ranks()))  # slowest first
    return {name: prod(mesh[faster] for faster in names[i + 1 :]) for i, name in enumerate(names)}


def header_size(sheet: Sheet, metadata: int) -> int:
    """Bytes before the data. metadata: characters of `"__metadata__":{...}`."""
    return 8 + ceil_div(1 + metadata + 1 + sheet.entries, ALIGNMENT) * ALIGNMENT


class GridPlaces:
    """`core.target.Places` of a grid."""

    listable = False

    def __init__(self, grid: Grid, slots: Sequence[GridSlot], identity: Callable[[], str]) -> None:
        """slots: the files in their order. identity: gives a hash of what decides the heads."""
        self.grid = grid
        self.slots = slots
        self._identity = identity
        self._files = {(slot.state, slot.rank): number for number, slot in enumerate(slots)}
        self._home: list[tuple[str, int]] = [("", 0)] * len(grid.wanted.tensors)  # state, position
        for state in grid.states.values():
            for position, number in enumerate(state.numbers):
                self._home[number] = (state.state, position)
        self._sorted: dict[int, list[int]] = {}  # by the id of Sheets: position -> place

    def identity(self) -> str:
        """A hash of what decides the heads."""
        return self._identity()

    def group(self, tensor: int) -> int:
        """The group of a wanted tensor: those of one group have the same boxes."""
        state, position = self._home[tensor]
        return self.grid.sheets[state].groups[position]

    def groups(self) -> Mapping[int, tuple[int, int]]:
        """Group -> (number of its tensors, one of them)."""
        groups_seen: dict[int, tuple[int, int]] = {}
        for name, state in self.grid.states.items():
            groups = self.grid.sheets[name].groups
            examples = dict(zip(groups, state.numbers, strict=True))
            for group, count in Counter(groups).items():
                groups_seen[group] = (groups_seen.get(group, (0, 0))[0] + count, examples[group])
        return groups_seen

    def boxes(self, group: int) -> Sequence[Box]:
        """The boxes of the tensors of a group, one for each rank that holds something."""
        geometry, _ = self.grid.geometries[group]
        return [part.box for part in geometry.held.values()]

    def of(self, tensor: int) -> Sequence[tuple[int, TargetArray]]:
        """Where a wanted tensor is written: (number of the file, array)."""
        state, position = self._home[tensor]
        sheets = self.grid.sheets[state]

        place_by_position = self._sorted.get(id(sheets))
        if place_by_position is None:
            place_by_position = self._sorted[id(sheets)] = sorted(
                range(len(sheets.order)), key=sheets.order.__getitem__
            )
        geometry, base = self.grid.geometries[sheets.groups[position]]

        arrays = []
        for rank, part in geometry.held.items():
            number = self._files[state, base + rank]
            slot = self.slots[number]
            offset = slot.data_start + slot.sheet.begins[place_by_position[position]]
            arrays.append((number, TargetArray(tensor, part.box, offset, padded_shape(part))))
        return sorted(arrays, key=lambda pair: pair[0])


def padded_shape(part: Held) -> Shape | None:
    """The stored shape where it is larger than the box."""
    return part.shape if part.shape != part.box.shape else None
