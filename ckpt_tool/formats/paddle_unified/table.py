"""UnifiedTable: the tensors of a unified checkpoint as one mapping that makes a `LogicalTensor` when asked.

The one idea: an entry is a header, a row, a dtype and whether the matrix lies transposed; names, shapes and sizes are known
without making a chunk. A transposed matrix is a stored array with swapped strides, so no byte moves for its layout:

    file [48, 32] "pt"   ->   shape (32, 48), strides (1, 32)

Tensors that ranks hold in parts (`paddle_unified.ranks`) are made already. Cost: 250 bytes a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckpt_tool.core.catalog import Row
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.storage.safetensors_file import Header


class Lying(NamedTuple):
    """A whole tensor in a file. dtype: what its bits are. flip: does it lie transposed?"""

    header: Header
    row: int
    dtype: DType
    flip: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """In Paddle's layout."""
        shape = self.header.kinds[self.row].shape
        return shape[::-1] if self.flip else shape

    def array(self) -> StoredArray:
        stored = self.header.stored(self.row)
        strides = (1, stored.shape[1]) if self.flip else None
        return stored.view(0, self.shape, strides, dtype=self.dtype)


class UnifiedTable(Mapping[TensorKey, LogicalTensor]):
    """Order: as given."""

    def __init__(self, entries: Mapping[TensorKey, Lying | LogicalTensor]) -> None:
        self._entries = entries

    def rows(self) -> Iterator[Row]:
        for (name, state), entry in self._entries.items():
            if isinstance(entry, Lying):
                yield Row(name, state, entry.dtype, entry.shape, entry.header.kinds[entry.row].nbytes)
            else:
                yield Row(name, state, entry.dtype, entry.shape, entry.nbytes)

    def parted(self) -> Iterator[LogicalTensor]:
        """The tensors that ranks hold in parts, or several times."""
        return (entry for entry in self._entries.values() if not isinstance(entry, Lying))

    def __getitem__(self, key: TensorKey) -> LogicalTensor:
        entry = self._entries[key]
        return simple_tensor(key, entry.array()) if isinstance(entry, Lying) else entry

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[TensorKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
