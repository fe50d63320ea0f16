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
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.run.compute import Bytes, numpy_type
from ckpt_tool.run.records import CheckedRecords, raise_all
from ckpt_tool.run.scan import readable
from ckpt_tool.storage.source import Tree

Index = Any  # what NumPy's basic slicing takes: integers, slices, Ellipsis, tuples of them


@dataclass(frozen=True, slots=True, repr=False)
class LazyTensor:
    """A tensor of a checkpoint, or a slice of one, that has not been read.

        weight = ckpt.open("runs/7")["lm_head.weight"]
        weight                    # LazyTensor('lm_head.weight', BF16, (32000, 4096))
        weight[:16].numpy()       # reads the bytes of these rows
        weight.torch()            # reads all of it

    Name, state, dtype and shape are known without reading. A slice is lazy too; it is taken once: `weight[:16, 0]`, not
    `weight[:16][0]`.
    """

    _tree: Tree
    _tensor: LogicalTensor
    _box: Box
    _steps: tuple[int, ...]
    _drop: tuple[int, ...]

    def __repr__(self) -> str:
        """Short: no values are read. Other states than the model's are named."""
        state = "" if self.state == MODEL else f", state={self.state!r}"
        return f"LazyTensor({self.name!r}{state}, {self.dtype}, {self.shape})"

    @property
    def key(self) -> TensorKey:
        """Name and state together."""
        return self._tensor.key

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self._tensor.key.name

    @property
    def state(self) -> str:
        """The state that it belongs to: `model`, `exp_avg`, ..."""
        return self._tensor.key.state

    @property
    def dtype(self) -> str:
        """The stored dtype, as safetensors names it: `F32`, `BF16`, `F8_E4M3`."""
        return self._tensor.dtype.name

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim, after slicing."""
        full = [ceil_div(n, abs(step)) for n, step in zip(self._box.shape, self._steps, strict=True)]
        return tuple(n for d, n in enumerate(full) if d not in self._drop)

    def __getitem__(self, index: Index) -> LazyTensor:
        """A slice that is not read yet, by NumPy's basic slicing.

        Args:
            index: integers, slices (with steps too), `...`, or a tuple of them.

        Raises:
            UsageError: E0269, an index is out of range, or this is a slice already.
        """
        # A box describes neither steps nor dropped dims, so a slice can't be narrowed further.
        if self._drop or any(step != 1 for step in self._steps):
            raise UsageError("slice once: a slice of a slice is not lazy", code="E0269", hint="combine the two slices")
        items = index if isinstance(index, tuple) else (index,)
        if items.count(Ellipsis) > 1 or len(items) - items.count(Ellipsis) > len(self._box.shape):
            raise UsageError(f"{len(items)} indexes for a tensor of rank {len(self._box.shape)}", code="E0269")
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items = (*items[:at], *(slice(None),) * (len(self._box.shape) - len(items) + 1), *items[at + 1 :])
        items = (*items, *(slice(None),) * (len(self._box.shape) - len(items)))
        offset = []
        shape = []
        steps = []
        drop = []
        for d, (item, low, n) in enumerate(zip(items, self._box.offset, self._box.shape, strict=True)):
            start, count, step = _bounds(item, n)
            if not isinstance(item, slice):
                drop.append(d)
            offset.append(low + start)
            shape.append(count)
            steps.append(step)
        return replace(self, _box=Box(tuple(offset), tuple(shape)), _steps=tuple(steps), _drop=tuple(drop))

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Read the values.

        Returns:
            A NumPy array of the stored dtype; bf16 and fp8 have the dtypes of `ml_dtypes`.

        Raises:
            CorruptFile: a record that was read whole does not have its checksum.
            SourceChanged: the file is not what it was when the checkpoint was opened.
            StorageError: the disk or the store refused.
        """
        # Steps are applied after reading: what they skip is read and dropped.
        data = self._read()
        kind = numpy_type(self._tensor.dtype)
        values = data.view(kind).reshape(self._box.shape)
        picked = values[tuple(slice(None, None, step) for step in self._steps)]
        return picked.reshape(self.shape)

    def torch(self) -> Any:
        """Read the values into a torch tensor. Only this method imports torch.

        Returns:
            A tensor on the CPU, of the stored dtype.

        Raises:
            CorruptFile, SourceChanged, StorageError: as `numpy`.
        """
        from ckpt_tool.run.compute import as_torch

        return as_torch(np.ascontiguousarray(self.numpy()), self._tensor.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Reads the values, for `np.asarray(tensor)`: without it NumPy would make an array of one Python object."""
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __len__(self) -> int:
        """The size of the first dim."""
        if not self.shape:
            raise TypeError(f"{self!r} has no dims, and so no length")
        return self.shape[0]

    def _read(self) -> Bytes:
        """The box's bytes, row-major, gathered from the chunks that hold a part of it.

        Raises CorruptFile (E0351) for a damaged record that was read completely. A record is not checked if only a part
        of it was needed (checking would have to read the rest), nor if it is stored transposed.
        """
        parts = (part_within(chunk, self._box) for chunk in self._tensor.chunks)
        chunks = [part for part in parts if part is not None]
        source = readable([self._tensor._replace(shape=self._box.shape, chunks=tuple(chunks))], self._tree)
        block: Bytes = np.empty(self._tensor.dtype.nbytes(prod(self._box.shape)), np.uint8)
        checked = CheckedRecords(source.files, source.records)
        reader = checked.reader(16)
        try:
            reader.expect([(source.moves[0], 0, source.moves[0].numel)])
            reader.fill(source.moves[0], block.data, 0, source.moves[0].numel)
        finally:
            checked.done(reader)
        raise_all(checked.faults(unread=False))
        return block


def _bounds(item: Any, n: int) -> tuple[int, int, int]:
    """(start, elements spanned, step) of one index into a dim of `n`. For a negative step the span is read forwards,
    and reversed afterwards."""
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
    """An open checkpoint of any format: a mapping of names to lazy tensors.

        checkpoint = ckpt.open("runs/7")
        checkpoint.states                                # ('model', 'exp_avg', ...)
        checkpoint["lm_head.weight"].numpy()
        checkpoint.state("exp_avg")["lm_head.weight"]

    It has the tensors of one state, the model's at first; `state` gives it with those of another.
    """

    def __init__(self, tree: Tree, catalog: Catalog, state: str = MODEL) -> None:
        self._tree = tree
        self.catalog = catalog
        self._state = state

    def __repr__(self) -> str:
        """Short: no names of tensors, no values."""
        return f"OpenCatalog({self.catalog.format}, {self._state!r}: {len(self)} tensors, states {self.states})"

    def __getitem__(self, name: str) -> LazyTensor:
        """The tensor of this name in this state.

        Raises:
            KeyError: there is none; the message has the nearest names, or the states that have this one.
        """
        tensor = self.catalog.tensors.get(TensorKey(name, self._state))
        if tensor is None:
            raise KeyError(self._say_what_is_near(name))
        rank = len(tensor.shape)
        return LazyTensor(self._tree, tensor, Box((0,) * rank, tensor.shape), (1,) * rank, ())

    def __contains__(self, name: object) -> bool:
        """Is there a tensor of this name? Cheap, where `__getitem__` looks for names that are near."""
        return isinstance(name, str) and TensorKey(name, self._state) in self.catalog.tensors

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of this name, `default` where there is none."""
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        return (key.name for key in self.catalog.tensors if key.state == self._state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def state(self, name: str) -> OpenCatalog:
        """The same checkpoint with the tensors of another state.

        Args:
            name: one of `states`: `exp_avg`, `exp_avg_sq`, `master`, `ema`, ...

        Raises:
            KeyError: the checkpoint has no such state; the message has those that it has.
        """
        if name != MODEL and name not in self.states:
            near = near_misses(name, self.states)
            raise KeyError(f"no state {name!r}; {near or f'there are {self._listed_states()}'}")
        return OpenCatalog(self._tree, self.catalog, name)

    @property
    def states(self) -> tuple[str, ...]:
        """The states that the checkpoint has, the model first."""
        return self.catalog.states()

    @property
    def extras(self) -> Mapping[str, Any]:
        """What is no tensor: the iteration, arguments of the job, random states, ..."""
        return self.catalog.extras

    def _listed_states(self) -> str:
        return ", ".join(self.states) or "none"

    def _say_what_is_near(self, name: str) -> str:
        """The message of a KeyError."""
        message = f"no tensor {name!r} in state {self._state}"
        others = [state for state in self.states if TensorKey(name, state) in self.catalog.tensors]
        if others:
            return f"{message}; it is in {', '.join(others)}: use state({others[0]!r})"

        names = list(self)
        if not names:
            return f"{message}, which has none; there are {self._listed_states()}"
        near = near_misses(name, names)
        if not near:
            within = [known for known in names if name in known][:3]
            near = f"did you mean {', '.join(within)}?" if within else ""
        return f"{message}; {near}" if near else message
