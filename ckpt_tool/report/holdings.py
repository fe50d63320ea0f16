"""Which rank stores which part of a checkpoint: bytes and tensors by state for each rank, and how each tensor is cut.

For a source this is computed from the chunks of its catalog, for an output from the arrays of its target. Both give the
same type, so that one picture shows the layout before and after:

    list_catalog_holdings(catalog, rank_of)
        Holdings(mesh={"tp": 2}, holders=(Holder("tp 0", ...), Holder("tp 1", ...)), ...)

A holder is a rank if the format's files can be assigned to ranks (`rank_of`), otherwise a file: ranks are never
guessed. A replica counts for each holder that stores it. Cost: 2 us per tensor, and 1 us for each of its boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.hints import FileRanks
from ckpt_tool.core.mesh import SLOWEST_FIRST
from ckpt_tool.core.target import Target, WantedTensor
from ckpt_tool.core.tensor import LogicalTensor

Coords = Mapping[str, int]
RankOf = Callable[[str], Coords | None]  # path of a file -> its rank, None if the name does not determine it
# The dimensions of ranks, slowest first, with the formats' own names: mp of DeepSpeed, shard and moe of Paddle.
_ORDER = ("rank", "mp", *SLOWEST_FIRST[:3], "shard", "moe_sharding", "moe", *SLOWEST_FIRST[3:])
Parts = Sequence[tuple[str, Box]]  # (file, box of the tensor that is stored in it)


class Holder(NamedTuple):
    """A rank, or a file that belongs to no known rank, with the amount of data that it stores."""

    name: str
    coords: Coords  # the coordinates of the rank, {} for a file
    files: tuple[str, ...]
    states: Mapping[str, tuple[int, int]]  # state -> (number of tensors of which it stores a part, bytes of the parts)

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(nbytes for _, nbytes in self.states.values())


class CutShown(NamedTuple):
    """How a tensor is cut: (number of the holder, box) for each part. Tensors that are cut alike share one."""

    shape: tuple[int, ...]
    parts: tuple[tuple[int, Box], ...]


class Holdings(NamedTuple):
    """All holders of a checkpoint, and the cut of each of its tensors."""

    mesh: Mapping[str, int]
    holders: tuple[Holder, ...]
    cuts: tuple[CutShown, ...]
    tensors: Sequence[int]  # the number of each tensor's cut, in the order in which they were given

    @property
    def of_ranks(self) -> bool:
        """Are the holders ranks?"""
        return any(holder.coords for holder in self.holders)


class Given(NamedTuple):
    """A tensor and its parts, as input of `holdings`."""

    state: str
    dtype: DType
    shape: tuple[int, ...]
    parts: Callable[[], Parts]
    alike: Hashable = None  # equal for tensors with equal parts, which are then computed once; None if unknown


class Tensor(NamedTuple):
    """A tensor as a report lists it."""

    name: str
    state: str
    dtype: DType
    shape: tuple[int, ...]


class Checkpoint(NamedTuple):
    """A checkpoint that a command opened."""

    path: str  # as its document names it
    catalog: Catalog
    rank_of: RankOf


class Rewriting(NamedTuple):
    """What a plan does: the tensors of the output, their holders before and after, and fallbacks by tensor number.

    Replicas that are only read for a comparison do not count as moved.
    """

    tensors: Sequence[Tensor]
    before: Holdings
    after: Holdings
    fallbacks: Mapping[int, str]


def nobody(path: str) -> None:
    """The `rank_of` of a format whose files belong to no rank."""


def whose(catalog: Catalog, rank_of: RankOf) -> RankOf:
    """A function from a file of the checkpoint to its rank, as the reader states it, else as the file name does."""
    stated = catalog.hints.get(FileRanks)
    coords = stated.coords if stated else {}
    return lambda path: coords.get(path) or rank_of(path)


def list_catalog_holdings(catalog: Catalog, rank_of: RankOf = nobody) -> Holdings:
    """The holdings of a checkpoint, in the order of its tensors. Empty chunks are ignored."""

    def rows() -> Iterator[Given]:
        """The catalog's tensors as input of `holdings`."""
        for tensor in catalog.tensors.values():
            yield Given(tensor.key.state, tensor.dtype, tensor.shape, partial(_parts, tensor))

    return holdings(rows(), catalog.mesh.to_json(), whose(catalog, rank_of))


def _parts(tensor: LogicalTensor) -> Parts:
    return [(chunk.array.file, chunk.box) for chunk in tensor.chunks]


def list_target_holdings(
    tensors: Sequence[WantedTensor], target: Target, mesh: Mapping[str, int], rank_of: RankOf = nobody
) -> Holdings:
    """The holdings of an output that is to be written, in the order of its tensors."""
    places = target.places
    files = target.files
    if places is None:
        parts: list[list[tuple[str, Box]]] = [[] for _ in tensors]
        for file in files:
            for array in file.arrays:
                parts[array.tensor].append((file.path, array.box))
        pairs = zip(tensors, parts, strict=True)
        return holdings((Given(t.key.state, t.dtype, t.shape, partial(list, own)) for t, own in pairs), mesh, rank_of)

    def of(number: int) -> Parts:
        """The parts of one tensor."""
        return [(files[file].path, array.box) for file, array in places.of(number)]

    has_many = (
        Given(t.key.state, t.dtype, t.shape, partial(of, number), (places.group(number), t.key.state))
        for number, t in enumerate(tensors)
    )
    return holdings(has_many, mesh, rank_of)


def holdings(rows: Iterable[Given], mesh: Mapping[str, int], rank_of: RankOf) -> Holdings:
    """The holdings of these tensors. Holders are sorted by rank, files without a rank come last."""
    book = _Book(rank_of)
    tensors = [book.entered(row) for row in rows]
    order = sorted(range(len(book.names)), key=lambda number: _place(book.coords[number], number))
    numbers = {old_number: new_number for new_number, old_number in enumerate(order)}
    holders = map(book.holder, order)
    cuts: list[CutShown] = []
    for shape, parts in book.cuts:
        cuts.append(CutShown(shape, tuple((numbers[holder], box) for holder, box in parts)))
    return Holdings(mesh, tuple(holders), tuple(cuts), tensors)


def rank_name(coords: Coords) -> str:
    """The name of a rank: `tp 1, pp 0`, or `rank 5` if only its number is known."""
    return ", ".join(f"{dim} {coordinate}" for dim, coordinate in coords.items())


def _place(coords: Coords, number: int) -> tuple[int, tuple[int, ...], int]:
    """The sort key of a holder: ranks by their coordinates with tp fastest, then files in the order of appearance."""
    return (0 if coords else 1, tuple(coords.get(dim, 0) for dim in _ORDER), number)


class _Book:
    """Collects holders and cuts while tensors are entered one by one."""

    def __init__(self, rank_of: RankOf) -> None:
        self.names: list[str] = []
        self.coords: list[Coords] = []
        self.files: list[dict[str, None]] = []
        self.states: list[dict[str, list[int]]] = []
        self.cuts: list[tuple[tuple[int, ...], tuple[tuple[int, Box], ...]]] = []
        self._rank_of = rank_of
        self._holders: dict[str, int] = {}  # by file
        self._by_name: dict[tuple[bool, str], int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._alike: dict[Hashable, int] = {}

    def holder(self, number: int) -> Holder:
        """The holder of this number, with what it stores of the tensors entered so far."""
        states = {state: (row[0], row[1]) for state, row in self.states[number].items()}
        return Holder(self.names[number], self.coords[number], tuple(self.files[number]), states)

    def entered(self, row: Given) -> int:
        """Add the tensor's parts to their holders, and return the number of its cut."""
        earlier_cut = None if row.alike is None else self._alike.get((row.alike, row.shape))
        if earlier_cut is None:
            parts = tuple([(self._holder(path), box) for path, box in row.parts() if 0 not in box.shape])
            key = (row.shape, parts)
            earlier_cut = self._numbers.setdefault(key, len(self.cuts))
            if earlier_cut == len(self.cuts):
                self.cuts.append(key)
            if row.alike is not None:
                self._alike[row.alike, row.shape] = earlier_cut
        for holder, box in self.cuts[earlier_cut][1]:
            self.states[holder].setdefault(row.state, [0, 0])[1] += row.dtype.nbytes(box.numel)
        for holder in {holder for holder, _ in self.cuts[earlier_cut][1]}:
            self.states[holder][row.state][0] += 1
        return earlier_cut

    def _holder(self, path: str) -> int:
        number = self._holders.get(path)
        if number is None:
            coords = self._rank_of(path) or {}
            name = (bool(coords), rank_name(coords) if coords else path)
            number = self._by_name.setdefault(name, len(self.names))
            if number == len(self.names):
                self.names.append(name[1])
                self.coords.append(coords)
                self.files.append({})
                self.states.append({})
            self.files[number][path] = None
            self._holders[path] = number
        return number
