"""Stores the boxes of a DCP save of very many ranks as columns, from the rows of `.metadata` to the catalog.

The one idea: the checks of a million boxes (does each have an item, is each item a twin, do they tile the tensor) are
array operations; a `DcpPiece`, a `StoredArray` or a `Chunk` is only created when it is accessed.

    rows of storage_data  -> Places     where the items of each tensor are stored
    rows of chunks        -> Pieces     with those: a sequence of Piece
    items (dcp_compared)  -> Arrays     a sequence of StoredArray
    Pieces, Arrays        -> Columns    the chunks of a LogicalTensor

`dcp_metadata` and `dcp_items` have the implementation with objects, which handles everything that is not regular here:
this module reports no faults, it raises Irregular or returns None. Numbers are int64, as `pickle_rows` reads them.

Cost: 0.3 us and 60 bytes a box. It needs NumPy, so it is only imported where columns were found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.tensor import Chunk, ChunkColumns, OnDemand, StoredArray
from ckpt_tool.formats.dcp_container.dcp_pieces import RANK_LIMIT, DcpPiece
from ckpt_tool.storage.pickles.pickle_values import Irregular, RowRun

if TYPE_CHECKING:
    from ckpt_tool.formats.dcp_container.dcp_items import Twin

Ints = np.ndarray[Any, np.dtype[Any]]  # one number a row, or a row of as many numbers as a tensor has dims
LARGEST = (1 << 63) - 1
_CODES = {"text": ("ids", np.int32), "int": ("ints", np.int64)}


# -- columns of rows ---------------------------------------------------------------------------------------------------


def _column(run: RowRun, name: str) -> Ints:
    """A column of numbers, or of the ids of texts. Raises Irregular for rows without it."""
    kind, place, count = run.columns.get(name, ("", 0, 0))
    if kind not in _CODES:
        raise Irregular
    field, code = _CODES[kind]
    return np.frombuffer(getattr(run.taken, field), code)[place::count]


def _sizes(run: RowRun, name: str) -> Iterator[tuple[int, Ints, Ints]]:
    """A column of sizes, by their dims: (dims, numbers of the rows that have so many, their sizes)."""
    kind, place, count = run.columns.get(name, ("", 0, 0))
    if kind != "size":
        raise Irregular
    dims = np.frombuffer(run.taken.dims, np.uint8)
    numbers = np.frombuffer(run.taken.sizes, np.int64)
    if len(dims) and (dims == dims[0]).all():
        yield int(dims[0]), np.arange(run.taken.rows), numbers.reshape(run.taken.rows, count, dims[0])[:, place]
        return
    starts = (np.cumsum(dims, dtype=np.int64) - dims)[place::count]
    dims = dims[place::count]
    for each in np.flatnonzero(np.bincount(dims)).tolist():
        rows = np.flatnonzero(dims == each)
        yield each, rows, numbers[starts[rows, None] + np.arange(each)]


def _same_rows(a: Ints, b: Ints) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _kept_once(rows: Ints) -> Ints:
    """The rows, one for all where they are equal."""
    return np.broadcast_to(rows[0], rows.shape) if len(rows) and (rows == rows[0]).all() else rows


def _ordered(rows: Ints) -> Ints:
    """Numbers of the rows in ascending order."""
    return np.lexsort(rows.T[::-1]) if rows.shape[1] else np.arange(len(rows))


class PieceLocations:
    """The locations of all tensors' items.

    number: gives the id of a text, by which rows refer to it. paths: the path of each file, by its id.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        self._number = number
        self.paths: dict[int, str] = {}
        self._blocks: defaultdict[int, list[list[Ints]]] = defaultdict(list)  # by dims
        self._rows: defaultdict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
        self._of: dict[tuple[int, int], tuple[Ints, Ints]] = {}  # by dims and fqn

    def row(self, fqn: str, corner: tuple[int, ...], file: str, where: tuple[str, int, int]) -> None:
        """Add one item that is not part of a run of rows. Raises Irregular for numbers that do not fit a column.

        where: (path of the file, byte, length).
        """
        (path, at, length), number = where, self._number(file)
        if max(at, length) > LARGEST:
            raise Irregular
        self.paths[number] = path
        self._rows[len(corner)].append(((self._number(fqn), number, at, length), corner))

    def run(self, run: RowRun) -> list[tuple[int, int]]:
        """Items of a run; (id of a file, id of the tensor) of the files that are new."""
        fqn, file, at, length = (_column(run, name) for name in ("fqn", "file", "at", "length"))
        for dims, rows, corners in _sizes(run, "corner"):
            self._flush(dims)
            self._blocks[dims].append([fqn[rows], file[rows], at[rows], length[rows], corners])
        ids = file.tolist()
        return [(number, int(fqn[ids.index(number)])) for number in dict.fromkeys(ids) if number not in self.paths]

    @staticmethod
    def objects(run: RowRun) -> Iterator[tuple[str, str, int, int]] | None:
        """(fqn, file, byte, length) of each row of a run of objects, which have no corner; None for tensors' items."""
        if "corner" in run.columns:
            return None
        fqn, file, at, length = (_column(run, name).tolist() for name in ("fqn", "file", "at", "length"))
        names, files = ([run.texts[each] for each in ids] for ids in (fqn, file))
        return zip(names, files, at, length, strict=True)

    def _flush(self, dims: int) -> None:
        rows = self._rows.pop(dims, None)
        if rows:
            numbers = np.array([numbers for numbers, _ in rows], np.int64)
            corners = np.array([corner for _, corner in rows], np.int64).reshape(len(rows), dims)
            self._blocks[dims].append([*numbers[:, :2].astype(np.int32).T, *numbers[:, 2:].T, corners])

    def finished(self) -> None:
        """All items were met: sort them by tensors."""
        for dims in {*self._rows, *self._blocks}:
            self._flush(dims)
            fqn, *places, corners = (np.concatenate(parts) for parts in zip(*self._blocks.pop(dims), strict=True))
            order = np.argsort(fqn, kind="stable")
            fqn = fqn[order]
            corners = corners[order]
            table = np.stack([column[order] for column in places], axis=1)
            starts = np.flatnonzero(np.concatenate(([True], fqn[1:] != fqn[:-1])))
            for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(fqn)], strict=True):
                self._of[dims, int(fqn[start])] = corners[start:stop], table[start:stop]

    def of(self, fqn: str) -> dict[tuple[int, ...] | None, tuple[str, int, int]]:
        """The items of a tensor in the form of the implementation with objects: offset -> (file, byte, length)."""
        keys = [(dims, self._number(fqn)) for dims in range(RANK_LIMIT + 1)]
        return {
            tuple(corner): (self.paths[file], at, length)
            for corners, table in (self._of[key] for key in keys if key in self._of)
            for corner, (file, at, length) in zip(corners.tolist(), table.tolist(), strict=True)
        }

    def pieces(self, fqn: str, shape: tuple[int, ...], boxes: tuple[Ints, Ints] | None) -> Pieces | None:
        """The pieces of a tensor's boxes. None if a box leaves the tensor, occurs twice or has no item. Raises
        Irregular for two items of one box."""
        dims, (corners, table) = len(shape), self._of.get((len(shape), self._number(fqn)), (None, None))
        if boxes is None or corners is None or table is None:
            return None

        order = _ordered(corners)
        ascending = corners[order]
        if len(order) > 1 and (not dims or (ascending[1:] == ascending[:-1]).all(axis=1).any()):
            raise Irregular

        offsets, extents = boxes
        limits = np.array(shape, np.int64)
        if (offsets > limits - extents).any():
            return None

        if 0 not in shape:
            there = (extents != 0).all(axis=1)  # not of a rank whose shard is empty
            if not there.all():
                offsets = offsets[there]
                extents = extents[there]

        if _same_rows(offsets, corners):
            offsets = corners  # kept once
        else:
            mine = _ordered(offsets)
            if not _same_rows(offsets[mine], ascending):
                return None
            found = np.empty(len(mine), np.int64)
            found[mine] = order
            table = table[found]

        return Pieces(offsets, _kept_once(extents), table, self.paths)


def boxes_of(chunks: Iterable[Any], dims: int, row: Any) -> tuple[tuple[Ints, Ints] | None, int]:
    """((offsets, extents) of a tensor's boxes, None where one has other dims; how many rows of runs were met). row:
    gives the two of an object."""
    parts: list[tuple[Ints, Ints]] = []
    alone: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    met = 0
    fits = True

    def flush() -> None:
        if alone:
            both = np.array(alone, np.int64).reshape(len(alone), 2, dims)
            parts.append((both[:, 0], both[:, 1]))
            alone.clear()

    for chunk in chunks:
        if isinstance(chunk, RowRun):
            met += chunk.taken.rows
            flush()
            offsets, extents = ([*_sizes(chunk, name)] for name in ("offset", "extent"))
            if all(len(of) == 1 and of[0][0] == dims for of in (offsets, extents)):
                parts.append((offsets[0][2], extents[0][2]))
            else:
                fits = False
            continue
        both = row(chunk)
        if len(both[0]) == len(both[1]) == dims:
            alone.append(both)
        else:
            fits = False
    flush()
    if not fits or not parts:
        return None, met
    offsets_, extents_ = (np.concatenate(each) for each in zip(*parts, strict=True))
    return (offsets_, extents_), met


def sizes_of(run: RowRun) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extent) of each box of a run."""
    rows: list[list[tuple[int, ...]]] = []
    for name in ("offset", "extent"):
        column: list[tuple[int, ...]] = [()] * run.taken.rows
        for _, places, sizes in _sizes(run, name):
            for place, size in zip(places.tolist(), sizes.tolist(), strict=True):
                column[place] = tuple(size)
        rows.append(column)
    return zip(*rows, strict=True)


# -- sequences ---------------------------------------------------------------------------------------------------------


class Pieces(OnDemand[DcpPiece]):
    """The pieces of a tensor as columns. No box occurs twice.

    offsets, extents: of shape (pieces, dims). table: of shape (pieces, 3), with the id of the file (its path is in
    `paths`), the byte and the length.
    """

    __slots__ = ("extents", "offsets", "paths", "table")

    def __init__(self, offsets: Ints, extents: Ints, table: Ints, paths: Mapping[int, str]) -> None:
        self.offsets = offsets
        self.extents = extents
        self.table = table
        self.paths = paths

    def __len__(self) -> int:
        return len(self.table)

    def make(self, rows: slice) -> Iterator[DcpPiece]:
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        columns = (column[rows].tolist() for column in (self.offsets, self.extents, self.table))
        for offset, extent, (file, at, length) in zip(*columns, strict=True):
            shape = tuple(extent)
            yield DcpPiece(tuple(offset), known.setdefault(shape, shape), self.paths[file], at, length)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | Pieces) and list(self) == list(other))

    __hash__ = None  # type: ignore[assignment]  # as a list


class PieceTable(NamedTuple):
    """The stored locations of a tensor's pieces, a row per piece."""

    files: Ints
    starts: Ints
    crcs: Ints
    twins: Ints  # the index of each piece's twin, -1 if it has none


class Arrays(OnDemand[StoredArray]):
    """The stored arrays of a tensor's pieces as columns.

    names: of the files. twins: by their index. others: the arrays of pieces without a twin, by index of the piece.
    leads: how many first dims, of extent 1, are removed from the arrays' shapes.
    """

    __slots__ = ("leads", "names", "others", "table", "twins")

    def __init__(
        self,
        table: PieceTable,
        names: Sequence[str],
        twins: Sequence[Twin],
        others: Mapping[int, StoredArray],
        leads: int = 0,
    ) -> None:
        self.table = table
        self.names = names
        self.twins = twins
        self.others = others
        self.leads = leads

    def __len__(self) -> int:
        return len(self.table.twins)

    def make(self, rows: slice) -> Iterator[StoredArray]:
        numbers = range(len(self))[rows]
        columns = (column[rows].tolist() for column in self.table)
        for number, file, at, crc, twin in zip(numbers, *columns, strict=True):
            array = self.twins[twin].at(self.names[file], at, crc) if twin >= 0 else self.others[number]
            yield array.below(self.leads) if self.leads else array

    def some(self, rows: Ints, leads: int) -> Arrays:
        """Those of some rows, without so many more first dims."""
        others = dict[int, StoredArray]()
        if self.others:
            others = {new: self.others[old] for new, old in enumerate(rows.tolist()) if old in self.others}
        table = PieceTable(*(column[rows] for column in self.table))
        return Arrays(table, self.names, self.twins, others, self.leads + leads)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | Arrays) and list(self) == list(other))

    __hash__ = None  # type: ignore[assignment]  # as a list


class DcpColumns(ChunkColumns):
    """The chunks of a tensor: the boxes of its pieces and their arrays."""

    __slots__ = ("arrays", "pieces")

    def __init__(self, pieces: Pieces, arrays: Arrays) -> None:
        super().__init__()
        self.pieces = pieces
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.pieces)

    def make(self, rows: slice) -> Iterator[Chunk]:
        within: dict[tuple[int, ...], Box] = {}
        columns = (column[rows].tolist() for column in (self.pieces.offsets, self.pieces.extents))
        for offset, extent, array in zip(*columns, self.arrays.make(rows), strict=True):
            shape = tuple(extent)
            inner = within.get(shape) or within.setdefault(shape, whole(shape))
            yield Chunk(Box(tuple(offset), inner.shape), array, inner)

    def apart(self, leads: int) -> Iterator[tuple[tuple[int, ...], DcpColumns]] | None:
        """The chunks at each position of the first `leads` dims, without these; None where a box covers several."""
        offsets = self.pieces.offsets
        extents = self.pieces.extents
        return None if (extents[:, :leads] != 1).any() else self._at_positions(leads, _ordered(offsets[:, :leads]))

    def _at_positions(self, leads: int, order: Ints) -> Iterator[tuple[tuple[int, ...], DcpColumns]]:
        at = self.pieces.offsets[order, :leads]
        firsts = np.concatenate(([True], (at[1:] != at[:-1]).any(axis=1)))[: len(at)]
        for rows in np.split(order, np.flatnonzero(firsts)[1:]) if len(order) else ():
            offsets, extents, table = (
                column[rows] for column in (self.pieces.offsets, self.pieces.extents, self.pieces.table)
            )
            pieces = Pieces(offsets[:, leads:], _kept_once(extents[:, leads:]), table, self.pieces.paths)
            yield tuple(offsets[0, :leads].tolist()), DcpColumns(pieces, self.arrays.some(rows, leads))

    def starts(self) -> list[int]:
        """The number of different offsets along each dim."""
        return [len(np.unique(along)) for along in self.pieces.offsets.T]

    def lacks_crc(self) -> bool:
        """Is any piece stored without a CRC-32?"""
        table = self.arrays.table
        without = (table.crcs == 0) & (table.twins >= 0)
        return bool(without.any()) or any(array.crc is None for array in self.arrays.others.values())

    def plainly_tile(self, shape: tuple[int, ...]) -> bool:
        """Do the boxes form a regular grid that fills `shape`? False is no fault: boxes can tile in other ways."""
        offsets = self.pieces.offsets
        extents = self.pieces.extents
        cells = 1
        for along, widths, n in zip(offsets.T, extents.T, shape, strict=True):
            starts = np.unique(along)
            sides = np.diff(starts, append=n)
            if starts[0] or (sides <= 0).any() or (sides[np.searchsorted(starts, along)] != widths).any():
                return False
            cells *= len(starts)
        return cells == len(self)  # the boxes form a grid, and no box occurs twice, so they tile the tensor

    def records(self) -> Records:
        """The stored records that hold the arrays."""
        arrays = self.arrays
        table = self.arrays.table
        sizes = np.array([*(twin.nbytes for twin in arrays.twins), 0], np.int64)
        nbytes = sizes[table.twins]
        crcs = table.crcs.astype(np.int64)
        within = np.zeros(len(arrays), np.int64)
        nbytes[crcs == 0] = -1
        for number, array in arrays.others.items():
            start, nbytes[number], crcs[number] = array.crc or (array.offset, -1, 0)
            within[number] = array.offset - start
        return Records(nbytes, crcs, within, table.files, arrays.names)


def joined(parts: Sequence[tuple[DcpColumns, int]]) -> DcpColumns | None:
    """The chunks of several tensors of one save as those of one, each so many rows further down than it was. None where
    they have no rows."""
    columns = [part for part, _ in parts]
    pieces = [part.pieces for part in columns]
    arrays = [part.arrays for part in columns]
    first = arrays[0]
    if not pieces[0].offsets.shape[1] or any(of.names is not first.names or of.leads != first.leads for of in arrays):
        return None
    offsets = [of.offsets.copy() for of in pieces]
    for moved, (_, rows) in zip(offsets, parts, strict=True):
        moved[:, 0] += rows
    others = dict[int, StoredArray]()
    start = 0
    for of in arrays:
        others |= {start + number: array for number, array in of.others.items()}
        start += len(of)
    extents, table = (np.concatenate(each) for each in zip(*((of.extents, of.table) for of in pieces), strict=True))
    whole_table = PieceTable(*(np.concatenate(each) for each in zip(*(of.table for of in arrays), strict=True)))
    return DcpColumns(
        Pieces(np.concatenate(offsets), _kept_once(extents), table, pieces[0].paths),
        Arrays(whole_table, first.names, first.twins, others, first.leads),
    )


class Records(NamedTuple):
    """A row for each chunk of a tensor."""

    # nbytes, crcs: of the record that holds its array, -1 and 0 without one
    nbytes: Ints
    crcs: Ints
    within: Ints  # bytes from its start to the array
    files: Ints  # numbers in `names`
    names: Sequence[str]
