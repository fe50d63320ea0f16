"""HeaderTable: the tensors of many safetensors headers as one mapping that makes a `LogicalTensor` when asked.

The one idea: `inspect` wants names, shapes and sizes of 92,000 tensors in a quarter of a second; only a plan wants
chunks, and it can wait for them. So the table keeps the headers' columns (71 bytes a tensor) and nothing else; the
first look-up by key builds a dict (110 bytes a tensor), `rows`, `values` and `items` never need it.

Every tensor is one whole array of one file. Order: the headers' order, then each header's own.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import accumulate

from ckpt_tool.core.catalog import CatalogRow
from ckpt_tool.core.listing import RowBlock
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader


class HeaderTable(Mapping[TensorKey, LogicalTensor]):
    """Keys: `TensorKey(name, state)` with one state for all. The headers' names must be disjoint (`first_twice`)."""

    def __init__(self, headers: Iterable[SafetensorsHeader], state: str = MODEL) -> None:
        self.headers = tuple(headers)
        self.state = state
        self._starts = [0, *accumulate(map(len, self.headers))]
        self._where: dict[str, tuple[SafetensorsHeader, int]] | None = None

    def rows(self) -> Iterator[CatalogRow]:
        """Every tensor as `inspect` lists it."""
        state = self.state
        for header in self.headers:
            for name, kind in zip(header.names, header.kinds, strict=True):
                yield CatalogRow(name, state, kind.dtype, kind.shape, kind.nbytes)

    def blocks(self) -> Iterator[RowBlock]:
        """The tensors as columns, one block a header."""
        return (RowBlock(self.state, header.names.encoded, header.kinds) for header in self.headers)

    def parted(self) -> Iterator[LogicalTensor]:
        """Yields nothing: every tensor is stored in one piece under its own name."""
        return iter(())

    def header_of(self, name: str) -> tuple[SafetensorsHeader, int]:
        """The header that holds tensor `name`, and its row there. Raises KeyError."""
        if self._where is None:
            self._where = {name: (header, row) for header in self.headers for row, name in enumerate(header.names)}
        return self._where[name]

    def __getitem__(self, key: TensorKey) -> LogicalTensor:
        if key.state != self.state:
            raise KeyError(key)
        try:
            header, row = self.header_of(key.name)
        except KeyError:
            raise KeyError(key) from None
        return simple_tensor(key, header.stored(row))

    def __iter__(self) -> Iterator[TensorKey]:
        for header in self.headers:
            for name in header.names:
                yield TensorKey(name, self.state)

    def __len__(self) -> int:
        return self._starts[-1]

    def values(self) -> ValuesView[LogicalTensor]:
        return _Values(self)

    def items(self) -> ItemsView[TensorKey, LogicalTensor]:
        return _Items(self)

    def made(self) -> Iterator[LogicalTensor]:
        """Every tensor in order, made one by one."""
        for header in self.headers:
            for row, name in enumerate(header.names):
                yield simple_tensor(TensorKey(name, self.state), header.stored(row))


class _Values(ValuesView[LogicalTensor]):
    """Values in order, without a look-up for each."""

    def __init__(self, table: HeaderTable) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[LogicalTensor]:
        return self._table.made()


class _Items(ItemsView[TensorKey, LogicalTensor]):
    """Items in order, without a look-up for each."""

    def __init__(self, table: HeaderTable) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[tuple[TensorKey, LogicalTensor]]:
        return ((tensor.key, tensor) for tensor in self._table.made())


def first_twice(headers: Iterable[SafetensorsHeader]) -> tuple[str, str, str] | None:
    """(name, file, other file) of a tensor that is in two headers; None if all names are disjoint.

    Equal names have equal hashes: sorted hashes without a pair prove the names disjoint in 8 bytes a name, and the
    names themselves are compared only if there is a pair.
    """
    several = [header for header in headers if len(header)]
    if len(several) < 2:
        return None
    hashes = sorted(hash(name) for header in several for name in header.names.encoded())
    if all(map(int.__ne__, hashes, hashes[1:])):
        return None
    seen: dict[str, str] = {}
    for header in several:
        for name in header.names:
            if name in seen:
                return name, seen[name], header.path
            seen[name] = header.path
    return None
