"""Finds the arrays of a DCP save of very many pieces: one compiled call compares all items of a file with their twins.

`dcp_items` defines twins, and reads all other items. The one idea: pieces are rows of one table, tensor after tensor;
the results of a call are written into the file's rows, and a tensor's `Arrays` are a slice of the table.

Cost: 1 us an item, most of it the pread. It needs NumPy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.inner_path import is_view
from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.formats.dcp_container.dcp_columns import LARGEST, Arrays, Ints, Pieces, PieceTable
from ckpt_tool.formats.dcp_container.dcp_pieces import DcpItem

if TYPE_CHECKING:
    from ckpt_tool.compiled.twins import Compare, TwinKind
    from ckpt_tool.formats.dcp_container.dcp_items import DcpItems, Twin
    from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry

LARGEST_END = 1 << 20  # bytes of a head or an end that are compared with others in one call


class _TwinKind(NamedTuple):
    """What twins have in common, as the metadata says it."""

    dtype: DType
    shape: tuple[int, ...]
    length: int


def compared(items: DcpItems, tensors: Sequence[DcpTensorEntry], compare: Compare) -> dict[str, Sequence[StoredArray]]:
    """What `DcpItems.arrays` gives."""
    return _Comparing(items, sorted(tensors, key=lambda tensor: tensor.fqn), compare).arrays()


class _Comparing:
    """files, at, lengths, of: of each row its file, bytes in it and kind, by number. starts: of each tensor's rows, and
    the end. crcs, twins: what was found of each row, twins -1 where it is none; others: the arrays of those, by tensor
    and number of the piece. numbers: of tensors, by id."""

    def __init__(self, items: DcpItems, tensors: Sequence[DcpTensorEntry], compare: Compare) -> None:
        self.items = items
        self.tensors = tensors
        self.compare = compare
        self.kinds: dict[_TwinKind, int] = {}
        self.met: list[Twin] = []
        self.compared: list[TwinKind] = []  # the same for a call
        self.twin_of: dict[int, int] = {}  # number of a kind -> number of its twin
        self.others: list[dict[int, StoredArray]] = [{} for _ in tensors]
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        met = _FileNumbers()
        parts = [_columns(tensor, met) for tensor in tensors]
        self.names = sorted(met.numbers)
        order = {name: number for number, name in enumerate(self.names)}
        files, self.at, self.lengths = (
            np.concatenate(column) for column in zip(*(part[1:] for part in parts), strict=True)
        )
        self.files = np.array([order[name] for name in met.numbers], np.int32)[files]
        self.starts = np.cumsum([0, *(len(tensor.pieces) for tensor in tensors)])
        self.of = np.concatenate([self._kinds(t, part[0], part[3]) for t, part in zip(tensors, parts, strict=True)])
        self.crcs = np.zeros(len(files), np.uint32)
        self.twins = np.full(len(files), -1, np.int32)

    def arrays(self) -> dict[str, Sequence[StoredArray]]:
        order = np.argsort(self.files, kind="stable")
        stops = np.searchsorted(self.files[order], np.arange(len(self.names) + 1))

        def read(number: int) -> None:
            rows = order[stops[number] : stops[number + 1]]
            self._in_file(self.names[number], rows[np.argsort(self.at[rows], kind="stable")])

        read_each(range(len(self.names)), read)
        found: dict[str, Sequence[StoredArray]] = {}
        for number, tensor in enumerate(self.tensors):
            rows = slice(*self.starts[number : number + 2].tolist())
            if tensor.fqn not in self.items.odd and rows.start < rows.stop:
                table = PieceTable(self.files[rows], self.at[rows], self.crcs[rows], self.twins[rows])
                found[tensor.fqn] = Arrays(table, self.names, self.met, self.others[number])
        return found

    def _kinds(self, tensor: DcpTensorEntry, extents: Ints, lengths: Ints) -> Ints:
        """The kinds of a tensor's pieces."""
        rows = np.column_stack((extents, lengths))
        if len(rows) and (rows == rows[0]).all():
            different = rows[:1]
            inverse = np.zeros(len(rows), np.int64)
        else:
            different, inverse = np.unique(rows, axis=0, return_inverse=True)
        kinds = (_TwinKind(tensor.dtype, tuple(shape), length) for *shape, length in different.tolist())
        numbers = [self.kinds.setdefault(kind, len(self.kinds)) for kind in kinds]
        return np.array(numbers, np.int32)[inverse.reshape(-1)]

    def _in_file(self, file: str, rows: Ints) -> None:
        """Find the arrays of a file's rows, which are sorted by their offset in the file."""
        left = rows
        if not self.items.in_safetensors(file) and not is_view(file):
            left = rows[~self._compared(file, rows)]
        if not len(left):
            return
        tensors = np.searchsorted(self.starts, left, side="right") - 1
        columns = (each.tolist() for each in (self.at[left], tensors, left - self.starts[tensors], self.lengths[left]))
        items = [
            DcpItem(at, self.tensors[tensor].fqn, number, self.tensors[tensor], length)
            for at, tensor, number, length in zip(*columns, strict=True)
        ]
        for item, found in self.items.in_file(file, items):
            self.others[self.numbers[id(item.tensor)]][item.number] = found

    def _compared(self, file: str, rows: Ints) -> Ints:
        """Which of the rows are twins: their CRCs are known then."""
        number_of = np.full(len(self.kinds), -1, np.int32)
        for kind, number in self.kinds.items():
            number_of[number] = self._twin(kind, number)
        twins = number_of[self.of[rows]]
        tree = self.items.tree
        same: Ints = (twins >= 0) & (self.at[rows] <= tree.size(file) - self.lengths[rows])
        if not same.any():
            return same
        crcs, nbytes = self.compare(tree.fd(file), self.at[rows[same]], twins[same], self.compared)
        tree.count(nbytes)
        same[same] = crcs >= 0
        good = rows[same]
        self.crcs[good], self.twins[good] = crcs[crcs >= 0], twins[same]
        tree.met.several(file, array("q", self.at[good].tobytes()), array("q", self.lengths[good].tobytes()))
        return same

    def _twin(self, kind: _TwinKind, number: int) -> int:
        """The number of a kind's twin, -1 while there is none."""
        if number not in self.twin_of:
            twin = self.items.twin(*kind)
            if twin is None or max(len(twin.head), twin.end) > LARGEST_END:
                return -1
            self.twin_of[number] = len(self.met)
            self.met.append(twin)
            self.compared.append(twin.kind())
        return self.twin_of[number]


class _FileNumbers:
    """Files, numbered as they are met."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._of: dict[int, Ints] = {}

    def of(self, pieces: Pieces) -> Ints:
        """The numbers of the pieces' files."""
        paths = pieces.paths
        if id(paths) not in self._of:
            found = self._of[id(paths)] = np.zeros(max(paths, default=0) + 1, np.int64)
            for each, path in paths.items():
                found[each] = self.numbers.setdefault(path, len(self.numbers))
        return self._of[id(paths)][pieces.table[:, 0]]


def _columns(tensor: DcpTensorEntry, names: _FileNumbers) -> tuple[Ints, Ints, Ints, Ints]:
    """(extents, files, first bytes, lengths) of a tensor's pieces."""
    pieces = tensor.pieces
    if isinstance(pieces, Pieces):
        return pieces.extents, names.of(pieces), pieces.table[:, 1], pieces.table[:, 2]
    extents = np.array([piece.shape for piece in pieces], np.int64).reshape(len(pieces), len(tensor.shape))
    numbers = names.numbers
    rows = [
        (numbers.setdefault(piece.file, len(numbers)), min(piece.at, LARGEST), min(piece.length, LARGEST))
        for piece in pieces  # what leaves every file is no twin, and is read by the piece itself
    ]
    return extents, *np.array(rows, np.int64).reshape(len(pieces), 3).T
