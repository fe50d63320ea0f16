"""The Python face of a catalog: lazy tensors that read only the bytes a slice asks for.

cat = open_catalog("checkpoint/")
cat["model.layers.0.mlp.down_proj.weight"][:, :4].numpy()   # reads four columns of every row, nothing else
cat.state("exp_avg")["model.layers.0.mlp.down_proj.weight"].shape
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.run.compute import Bytes, numpy_type
from ckpt_tool.run.records import Checked, raise_all
from ckpt_tool.run.scan import readable
from ckpt_tool.storage.source import Tree

Index = Any  # what NumPy's basic slicing takes: integers, slices, Ellipsis, tuples of them


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor, or a box of one, that has not been read. `shape` and `dtype` (the house's name) are known."""

    _tree: Tree
    _tensor: LogicalTensor
    _box: Box
    _steps: tuple[int, ...]
    _drop: tuple[int, ...]

    @property
    def key(self) -> TensorKey:
        return self._tensor.key

    @property
    def dtype(self) -> str:
        return self._tensor.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        full = [-(-n // abs(step)) for n, step in zip(self._box.shape, self._steps, strict=True)]
        return tuple(n for d, n in enumerate(full) if d not in self._drop)

    def __getitem__(self, index: Index) -> LazyTensor:
        """Basic slicing of a whole tensor (integers, slices with steps, Ellipsis). Raises UsageError E0269."""
        if self._drop or any(step != 1 for step in self._steps):
            raise UsageError("slice once: a slice of a slice is not lazy", code="E0269", hint="combine the two slices")
        items = index if isinstance(index, tuple) else (index,)
        if items.count(Ellipsis) > 1 or len(items) - items.count(Ellipsis) > len(self._box.shape):
            raise UsageError(f"{len(items)} indexes for a tensor of rank {len(self._box.shape)}", code="E0269")
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items = (*items[:at], *(slice(None),) * (len(self._box.shape) - len(items) + 1), *items[at + 1 :])
        items = (*items, *(slice(None),) * (len(self._box.shape) - len(items)))
        offset, shape, steps, drop = [], [], [], []
        for d, (item, low, n) in enumerate(zip(items, self._box.offset, self._box.shape, strict=True)):
            start, count, step = _bounds(item, n)
            if not isinstance(item, slice):
                drop.append(d)
            offset.append(low + start)
            shape.append(count)
            steps.append(step)
        return replace(self, _box=Box(tuple(offset), tuple(shape)), _steps=tuple(steps), _drop=tuple(drop))

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The values as a NumPy array of the right type (ml_dtypes for bf16 and fp8), read now."""
        data = self._read()
        kind = numpy_type(self._tensor.dtype)
        values = data.view(kind).reshape(self._box.shape)
        picked = values[tuple(slice(None, None, step) for step in self._steps)]
        return picked.reshape(self.shape)

    def torch(self) -> Any:
        """The values as a torch tensor; needs torch installed. The only place of this floor that asks for it."""
        from ckpt_tool.run.compute import as_torch

        return as_torch(np.ascontiguousarray(self.numpy()), self._tensor.dtype)

    def _read(self) -> Bytes:
        """The box's bytes, row-major, gathered from the chunks that hold a part of it.

        Raises CorruptFile (E0351) for a damaged record that was read whole on the way. A record of which a part was
        wanted is not checked, for that would read the rest, nor one that lies transposed.
        """
        chunks = [part for chunk in self._tensor.chunks if (part := part_within(chunk, self._box)) is not None]
        source = readable([self._tensor._replace(shape=self._box.shape, chunks=tuple(chunks))], self._tree)
        block: Bytes = np.empty(self._tensor.dtype.nbytes(prod(self._box.shape)), np.uint8)
        checked = Checked(source.files, source.records)
        reader = checked.reader(16)
        try:
            reader.expect([(source.moves[0], 0, source.moves[0].numel)])
            reader.fill(source.moves[0], block.data, 0, source.moves[0].numel)
        finally:
            checked.done(reader)
        raise_all(checked.faults(unread=False))
        return block


def _bounds(item: Any, n: int) -> tuple[int, int, int]:
    """(start, elements spanned, step) of one index of a dim of `n`; negative steps span forwards and flip later."""
    if isinstance(item, slice):
        start, stop, step = item.indices(n)
        count = len(range(start, stop, step))
        if not count:
            return 0, 0, 1
        low = start if step > 0 else start + (count - 1) * step
        return low, (count - 1) * abs(step) + 1, step
    if not isinstance(item, int | np.integer) or not -n <= item < n:
        raise UsageError(f"index {item!r} is out of range for a dim of {n}", code="E0269")
    return int(item) % n, 1, 1


def part_within(chunk: Chunk, box: Box) -> Chunk | None:
    """The part of a chunk inside `box`, in the box's own coordinates; flat chunks are cut by rows of their box."""
    shared = chunk.box & box
    if shared is None:
        return None
    start, strides = chunk.region()
    first = start + sum((o - c) * s for o, c, s in zip(shared.offset, chunk.box.offset, strides, strict=True))
    array = chunk.array.view(first, shared.shape, strides)
    moved = shared.translate(box.offset, sign=-1)
    return Chunk(moved, array, Box((0,) * len(shared.shape), shared.shape), chunk.replica)


class OpenCatalog(Mapping[str, LazyTensor]):
    """A checkpoint of any format: tensors of the model by name, other states by `state(name)`."""

    def __init__(self, tree: Tree, catalog: Catalog, state: str = MODEL) -> None:
        self._tree, self.catalog, self._state = tree, catalog, state

    def __getitem__(self, name: str) -> LazyTensor:
        key = TensorKey(name, self._state)
        tensor = self.catalog.tensors.get(key)
        if tensor is None:
            near = near_misses(name, list(self))
            raise KeyError(f"no tensor {name!r} in state {self._state}" + (f"; {near}" if near else ""))
        rank = len(tensor.shape)
        return LazyTensor(self._tree, tensor, Box((0,) * rank, tensor.shape), (1,) * rank, ())

    def __iter__(self) -> Iterator[str]:
        return (key.name for key in self.catalog.tensors if key.state == self._state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def state(self, name: str) -> OpenCatalog:
        """The same checkpoint seen through another state: `exp_avg`, `master`, `ema`, ..."""
        return OpenCatalog(self._tree, self.catalog, name)

    @property
    def states(self) -> tuple[str, ...]:
        return self.catalog.states()

    @property
    def extras(self) -> Mapping[str, Any]:
        return self.catalog.extras
