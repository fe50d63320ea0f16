"""Laying out `sharded` for very many ranks: by classes of tensors and ranks, not box by box.

The one idea: 184,732 tensors on 2,048 ranks are 1.9 million boxes in 8,192 files, but few different things. Tensors of
one shape and cut have the same boxes (a *geometry*: 15 of them); tensors that live on the same ranks form a *band* (272
a state); ranks that hold the same bands have the same arrays at the same offsets (a *sheet*: 256). A file's size
follows from lengths of texts that need not be written:

    tp 8, pp 16, ep 16    rank tp03_pp07_ep11 holds the bands "dense, stage 7" and "experts of rank 11, stage 7";
                          its file has the arrays and the header length of sheet (7, 11), plus the digits of its own
                          boxes

What is asked for later (a file's head, a tensor's boxes) is then made for that file or tensor alone. The sizes here are
promises: `sharded` holds every head that it makes against them, and the tests compare both ways.

Cost: about 1.5 us a tensor and state; nothing a box. Knows names of plain ASCII only (`plain`); others take the long
road.
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


def plain(names: Iterable[str]) -> bool:
    """Are all names what JSON writes as they are, in any number of layers?"""
    known = list(names)
    joined = "".join(known)
    return (
        joined.isascii()
        and joined.isprintable()
        and '"' not in joined
        and "\\" not in joined
        and METADATA not in known
        and max(map(len, known), default=0) <= NAME_LIMIT
    )


def json_length(value: object) -> int:
    """Characters of `value` as compact JSON."""
    return len(json.dumps(value, separators=(",", ":"), sort_keys=True))


class Geometry:
    """The boxes of tensors of one shape under one cut. ranks: those that hold something, counted from a base."""

    def __init__(self, shape: Shape, parts: Sequence[tuple[int, Held]]) -> None:
        parts = [(rank, each) for rank, each in parts if 0 not in each.shape or 0 in shape]
        self.ranks = tuple(rank for rank, _ in parts)
        self.held = dict(parts)
        self.entry_length = {rank: self._entry(shape, each) for rank, each in parts}
        by_extents: dict[Shape, list[int]] = {}
        for rank, each in parts:
            by_extents.setdefault(each.shape, []).append(rank)
        self.extents = tuple((stored, tuple(ranks)) for stored, ranks in by_extents.items())

    @staticmethod
    def _entry(shape: Shape, each: Held) -> int:
        """Characters of `:{"offset":[...],"shape":[...]}` inside a JSON string, where each quote takes two."""
        box: dict[str, Sequence[int]] = {"offset": each.box.offset, "shape": shape}
        if each.shape != each.box.shape:
            box["box"] = each.box.shape
        return json_length(box) + 2 * len(box) + 1


class GridBand:
    """Tensors that the same ranks hold in the same extents. rows: (place in the sort order, kind number)."""

    def __init__(self, base: int, ranks: tuple[int, ...]) -> None:
        self.base = base
        self.ranks = ranks
        self.rows: list[tuple[int, int]] = []
        self.geometries: Counter[Geometry] = Counter()
        self.names = 0  # characters of all names

    def box_length(self, rank: int) -> int:
        """Characters of what the band adds to the text of `boxes` in the file of rank number `rank`."""
        own = sum(count * geometry.entry_length[rank - self.base] for geometry, count in self.geometries.items())
        return own + self.names + 2 * _BOX_QUOTES * len(self.rows)


class ArrayKind(NamedTuple):
    """nbytes: of one array. fixed: characters of its entry but for its name and offsets."""

    nbytes: int
    fixed: int


class Sheet:
    """What ranks with the same bands have in common. begins: bytes from the start of the data, by sorted place."""

    def __init__(self, bands: Sequence[GridBand], kinds: Sequence[ArrayKind]) -> None:
        rows = bands[0].rows if len(bands) == 1 else sorted(row for band in bands for row in band.rows)
        self.bands = bands
        self.order = [place for place, _ in rows]
        self._starts = list(accumulate((kinds[kind].nbytes for _, kind in rows), initial=0))
        self.nbytes = self._starts[-1]
        digits = list(map(len, map(str, self._starts)))
        fixed = sum(kinds[kind].fixed for _, kind in rows) + sum(band.names for band in bands)
        self.entries = fixed + 2 * sum(digits) - digits[0] - digits[-1]  # characters of all entries

    @cached_property
    def begins(self) -> dict[int, int]:
        return dict(zip(self.order, self._starts, strict=False))


class GridSlot(NamedTuple):
    """One file."""

    state: str
    rank: int  # its number
    # size, data_start: bytes
    size: int
    data_start: int
    sheet: Sheet


class _Route(NamedTuple):
    """How a class of tensors is laid out: its group, and for each band the kind of its array."""

    group: int
    bands: tuple[tuple[GridBand, int], ...]


class GridState:
    """One state's tensors. numbers: of the wanted tensors. order: positions, sorted as headers are."""

    def __init__(self, grid: Grid, state: str, numbers: list[int]) -> None:
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
        self.order = _header_order(state)
        keys = list(zip(map(id, state.placements), state.shapes, map(id, state.dtypes), strict=True))
        tensors = dict(zip(keys, zip(state.placements, state.shapes, state.dtypes, strict=True), strict=True))
        routes = {key: self._route(grid, *tensor) for key, tensor in tensors.items()}
        self.groups = [routes[key].group for key in keys]
        every = [routes[key].bands for key in keys]
        for place, position in enumerate(self.order):
            for band, kind in every[position]:
                band.rows.append((place, kind))
        for key, count in Counter(keys).items():
            for band, _ in routes[key].bands:
                band.geometries[grid.geometries[routes[key].group][0]] += count
        lengths = [len(state.names[position]) for position in self.order]
        for band in self._bands.values():
            band.names = sum(lengths[place] for place, _ in band.rows)
        self.by_rank = self._sheets()

    def _route(self, grid: Grid, placement: Placement, shape: Shape, dtype: DType) -> _Route:
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

    def _sheets(self) -> dict[int, Sheet]:
        """Rank number -> its sheet, for the ranks that hold something."""
        held: dict[int, list[GridBand]] = {}
        for band in self._bands.values():
            for rank in band.ranks:
                held.setdefault(band.base + rank, []).append(band)
        sheets: dict[tuple[int, ...], Sheet] = {}
        found = {}
        for rank in sorted(held):
            key = tuple(map(id, held[rank]))
            if key not in sheets:
                sheets[key] = Sheet(held[rank], self.kinds)
            found[rank] = sheets[key]
        return found


def _header_order(state: GridState) -> list[int]:
    """Positions as a header sorts its entries: wide dtypes first, then by name."""
    names = state.names
    dtypes = state.dtypes
    if all(dtype is dtypes[0] for dtype in dtypes):
        return sorted(range(len(names)), key=names.__getitem__)
    return sorted(range(len(names)), key=lambda i: (dtype_rank(dtypes[i]), names[i]))


class Grid:
    """The whole layout. Raises nothing: what can't be held was checked before."""

    def __init__(self, wanted: Wanted, layout: Layout) -> None:
        self.wanted = wanted
        self.layout = layout
        self.mesh = layout.mesh
        self.ranks = list(layout.mesh.ranks())
        self._strides = _strides(layout.mesh)
        self.geometries: list[tuple[Geometry, int]] = []  # by group: the boxes, and the base of their ranks
        self._groups: dict[tuple[int, Shape], int] = {}
        self._known: dict[tuple[object, ...], Geometry] = {}
        numbers: dict[str, list[int]] = {}
        for number, item in enumerate(wanted.tensors):
            numbers.setdefault(item.key.state, []).append(number)
        self.states = {state: GridState(self, state, found) for state, found in numbers.items()}
        self.sheets: dict[str, Sheets] = {}
        for name, state in self.states.items():
            twin = next((each for each in self.sheets.values() if each.state.same(state)), None)
            self.sheets[name] = twin or Sheets(self, state)

    def group_of(self, placement: Placement, shape: Shape) -> int:
        """The group of tensors of one placement (the same object) and shape."""
        group = self._groups.get((id(placement), shape))
        if group is None:
            group = self._groups[id(placement), shape] = len(self.geometries)
            self.geometries.append(self._geometry(placement, shape))
        return group

    def _geometry(self, placement: Placement, shape: Shape) -> tuple[Geometry, int]:
        fixed = {name: index for name, index in placement.at if name in self._strides}
        base = sum(index * self._strides[name] for name, index in fixed.items())
        cut = (shape, placement.shard, placement.padded, placement.uneven, placement.granules, tuple(fixed))
        if cut not in self._known:
            parts = [
                (sum(c * self._strides[name] for name, c in each.coords.items()) - base, each)
                for each in held(shape, placement, self.mesh)
            ]
            self._known[cut] = Geometry(shape, parts)
        return self._known[cut], base

    def parts(self, state: str, rank: int) -> list[tuple[int, Held]]:
        """(number of the wanted tensor, what the rank holds of it) of a file's arrays, as its header sorts them."""
        sheets = self.sheets[state]
        numbers = self.states[state].numbers
        found = []
        for place in sheets.by_rank[rank].order:
            position = sheets.order[place]
            geometry, base = self.geometries[sheets.groups[position]]
            found.append((numbers[position], geometry.held[rank - base]))
        return found

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
    """`core.target.Places` of a grid. slots: the files in their order. identity: gives a hash of what decides the
    heads."""

    listable = False

    def __init__(self, grid: Grid, slots: Sequence[GridSlot], identity: Callable[[], str]) -> None:
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
        return self._identity()

    def group(self, tensor: int) -> int:
        state, position = self._home[tensor]
        return self.grid.sheets[state].groups[position]

    def groups(self) -> Mapping[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for name, state in self.grid.states.items():
            groups = self.grid.sheets[name].groups
            examples = dict(zip(groups, state.numbers, strict=True))
            for group, count in Counter(groups).items():
                found[group] = (found.get(group, (0, 0))[0] + count, examples[group])
        return found

    def boxes(self, group: int) -> Sequence[Box]:
        return [each.box for each in self.grid.geometries[group][0].held.values()]

    def of(self, tensor: int) -> Sequence[tuple[int, TargetArray]]:
        state, position = self._home[tensor]
        sheets = self.grid.sheets[state]
        places = self._sorted.get(id(sheets))
        if places is None:
            places = self._sorted[id(sheets)] = sorted(range(len(sheets.order)), key=sheets.order.__getitem__)
        geometry, base = self.grid.geometries[sheets.groups[position]]
        found = []
        for rank, each in geometry.held.items():
            number = self._files[state, base + rank]
            slot = self.slots[number]
            offset = slot.data_start + slot.sheet.begins[places[position]]
            found.append((number, TargetArray(tensor, each.box, offset, padded(each))))
        return sorted(found, key=lambda pair: pair[0])


def padded(each: Held) -> Shape | None:
    """The stored shape where it is larger than the box."""
    return each.shape if each.shape != each.box.shape else None
