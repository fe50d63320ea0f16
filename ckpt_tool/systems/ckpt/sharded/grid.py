"""Sizes and places of a `sharded` checkpoint, by classes of tensors and ranks, not box by box.

184,732 tensors on 2,048 ranks are 1.9 million boxes in 8,192 files, but few different things. Tensors of one shape and
cut have the same boxes (`core.cuts`: 15 of them); tensors of the same ranks form a *band* (272 a state); ranks that
hold the same bands have the same arrays at the same offsets (a *sheet*: 256). A file's size follows from lengths of
texts that need not be written:

    tp 8, pp 16, ep 16    rank tp03_pp07_ep11 holds the bands "dense, stage 7" and "experts of rank 11, stage 7";
                          its file has the arrays and the header length of sheet (7, 11), plus the digits of its own
                          boxes

What is asked for later (a file's head, a tensor's boxes) is then made for that file or tensor alone. The sizes here are
promises: `sharded.target` compares every head that it makes with them.

Cost: about 1.5 us a tensor and state; nothing a box.
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
from ckpt_tool.core.cuts import Cut, Cuts
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.layout import Held, Layout
from ckpt_tool.core.target import TargetArray, Wanted
from ckpt_tool.storage.safetensors_files.safetensors_entries import METADATA, NAME_LIMIT
from ckpt_tool.storage.safetensors_files.safetensors_file import ALIGNMENT, dtype_rank
from ckpt_tool.systems.ckpt.sharded.index import dumps

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


class _NameLengths(NamedTuple):
    """How many bytes names take, aligned with the names. All but the quotes at the ends of a JSON string."""

    in_header: list[int]
    in_boxes: list[int]  # in the text of `boxes`, which is itself a JSON string of the header


def _measure_names(names: Sequence[str]) -> _NameLengths:
    if are_plain(names):
        lengths = list(map(len, names))
        return _NameLengths(lengths, [length + 2 * _BOX_QUOTES for length in lengths])
    in_header = [len(json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")) - 2 for name in names]
    return _NameLengths(in_header, [len(json.dumps(json.dumps(name))) - 2 for name in names])


class Geometry:
    """A cut as the headers of the ranks' files state it."""

    def __init__(self, cut: Cut) -> None:
        # A rank whose box is empty gets no array, unless the whole tensor is empty.
        parts = [part for part in cut.parts if 0 not in part.shape or 0 in cut.shape]
        self.parts = {part.rank: part for part in parts}
        self.box_texts = {part.rank: _describe_box(part, cut.shape) for part in parts}

        # Characters of `:{"offset":[...],"shape":[...]}` inside a JSON string, where each quote takes two.
        self.entry_lengths = {rank: 1 + len(text) + text.count('"') for rank, text in self.box_texts.items()}

        ranks_by_extents: dict[Shape, list[int]] = {}
        for part in parts:
            ranks_by_extents.setdefault(part.shape, []).append(part.rank)
        self.extents = tuple((stored, tuple(ranks)) for stored, ranks in ranks_by_extents.items())


def _describe_box(part: Held, shape: Shape) -> str:
    """What `boxes` says of a part, as canonical JSON."""
    box: dict[str, Sequence[int]] = {"offset": part.box.offset, "shape": shape}
    if padded_shape(part):
        box["box"] = part.box.shape
    return dumps(box)


class GridBand:
    """Tensors that the same ranks hold in the same extents."""

    def __init__(self, base: int, ranks: tuple[int, ...]) -> None:
        self.base = base  # what `ranks` are counted from
        self.ranks = ranks
        self.rows: list[tuple[int, int]] = []  # (place in the sort order, kind number)
        self.geometries: Counter[Geometry] = Counter()

        # Bytes of all names, as `_NameLengths` counts them.
        self.names_in_header = 0
        self.names_in_boxes = 0

    def box_length(self, rank: int) -> int:
        """Characters of what the band adds to the text of `boxes` in the file of rank number `rank`."""
        entries = sum(count * geometry.entry_lengths[rank - self.base] for geometry, count in self.geometries.items())
        return entries + self.names_in_boxes


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
        self.starts = list(accumulate((kinds[kind].nbytes for _, kind in rows), initial=0))
        self.nbytes = self.starts[-1]

        # Every start is written twice, as an array's end and the next one's begin; the first and the last are not.
        digits = list(map(len, map(str, self.starts)))
        fixed = sum(kinds[kind].fixed for _, kind in rows) + sum(band.names_in_header for band in bands)
        self.entries = fixed + 2 * sum(digits) - digits[0] - digits[-1]  # characters of all entries

    @cached_property
    def begins(self) -> dict[int, int]:
        """Sorted place -> where the array begins, bytes from the start of the data."""
        return dict(zip(self.order, self.starts, strict=False))


class GridSlot(NamedTuple):
    """One file."""

    path: str
    state: str
    rank: int  # its number
    size: int  # bytes
    data_start: int  # bytes from the start of the file
    sheet: Sheet


class RankPart(NamedTuple):
    """An array of a rank's file."""

    tensor: int  # number of the wanted one
    held: Held
    box_text: str  # what `boxes` says of it
    begin: int  # bytes from the start of the data


class _Route(NamedTuple):
    """How a class of tensors is laid out."""

    group: int  # the number of its cut
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
        examples = dict(zip(keys, state.numbers, strict=True))
        routes = {key: self._find_route(grid, number) for key, number in examples.items()}
        self.groups = [routes[key].group for key in keys]

        bands_by_position = [routes[key].bands for key in keys]
        for place, position in enumerate(self.order):
            for band, kind in bands_by_position[position]:
                band.rows.append((place, kind))
        for key, count in Counter(keys).items():
            for band, _ in routes[key].bands:
                band.geometries[grid.geometries[routes[key].group][0]] += count

        lengths = _measure_names([state.names[position] for position in self.order])
        for band in self._bands.values():
            band.names_in_header = sum(lengths.in_header[place] for place, _ in band.rows)
            band.names_in_boxes = sum(lengths.in_boxes[place] for place, _ in band.rows)
        self.by_rank = self._build_sheets()

    def _find_route(self, grid: Grid, number: int) -> _Route:
        """How tensors of the class of wanted tensor number `number` are laid out; new kinds and bands are added."""
        dtype = grid.wanted.tensors[number].dtype
        group = grid.group_of(number)
        geometry, base = grid.geometries[group]
        bands = []
        for stored, ranks in geometry.extents:
            kind = self._kind_numbers.get((stored, dtype))
            if kind is None:
                kind = self._kind_numbers[stored, dtype] = len(self.kinds)
                fixed = _HEADER_ENTRY + len(dtype.name) + len(dumps(stored))
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
    """The whole layout. Raises nothing: what the format can't hold is refused by `sharded.target`."""

    def __init__(self, wanted: Wanted, layout: Layout) -> None:
        self.wanted = wanted
        self.layout = layout
        self.ranks = list(layout.mesh.ranks())
        self.geometries: list[tuple[Geometry, int]] = []  # by group: the boxes, and the base of their ranks
        self._cuts = Cuts(layout)
        self._geometry_by_cut: dict[int, Geometry] = {}  # by the id of a cut

        numbers: dict[str, list[int]] = {}
        for number, item in enumerate(wanted.tensors):
            numbers.setdefault(item.key.state, []).append(number)
        self.states = {state: GridState(self, state, state_numbers) for state, state_numbers in numbers.items()}
        self.sheets: dict[str, Sheets] = {}

        # States that are laid out the same (the moments of an optimizer) share their sheets.
        for name, state in self.states.items():
            twin = next((sheets for sheets in self.sheets.values() if sheets.state.same(state)), None)
            self.sheets[name] = twin or Sheets(self, state)

    def group_of(self, number: int) -> int:
        """The group of a wanted tensor: those of one group have the same boxes on the same ranks."""
        group = self._cuts.number(number, self.wanted.tensors[number].shape)
        for cut, first in self._cuts.placed[len(self.geometries) :]:
            geometry = self._geometry_by_cut.get(id(cut))
            if geometry is None:
                geometry = self._geometry_by_cut[id(cut)] = Geometry(cut)
            self.geometries.append((geometry, first))
        return group

    def list_parts(self, slot: GridSlot) -> list[RankPart]:
        """A file's arrays, as its header sorts them."""
        sheets = self.sheets[slot.state]
        numbers = self.states[slot.state].numbers
        parts = []
        for place, begin in zip(slot.sheet.order, slot.sheet.starts, strict=False):
            position = sheets.order[place]
            geometry, base = self.geometries[sheets.groups[position]]
            rank = slot.rank - base
            parts.append(RankPart(numbers[position], geometry.parts[rank], geometry.box_texts[rank], begin))
        return parts


def header_size(sheet: Sheet, metadata: int) -> int:
    """Bytes before the data. metadata: characters of `"__metadata__":{...}`."""
    return 8 + ceil_div(1 + metadata + 1 + sheet.entries, ALIGNMENT) * ALIGNMENT


class GridPlaces:
    """`core.target.Places` of a grid."""

    def __init__(self, grid: Grid, slots: Sequence[GridSlot], identity: Callable[[], str], *, listable: bool) -> None:
        """slots: the files in their order. identity: gives a hash of what decides the heads."""
        self.listable = listable
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
        return [part.box for part in geometry.parts.values()]

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
        for rank, part in geometry.parts.items():
            number = self._files[state, base + rank]
            slot = self.slots[number]
            offset = slot.data_start + slot.sheet.begins[place_by_position[position]]
            arrays.append((number, TargetArray(tensor, part.box, offset, padded_shape(part))))
        return sorted(arrays, key=lambda pair: pair[0])


def padded_shape(part: Held) -> Shape | None:
    """The stored shape where it is larger than the box."""
    return part.shape if part.shape != part.box.shape else None
