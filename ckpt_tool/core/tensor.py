"""The values a reader returns: where the bytes of each logical tensor are stored.

A Megatron SwiGLU shard `[gate_r; up_r]` of 8 rows is one stored array that feeds two chunks:

    array = StoredArray("mp_rank_00/model.pt", 4096, DTYPES["BF16"], (8, 16))
    gate = Chunk(Box((0, 0), (4, 16)), array, within=Box((0, 0), (4, 16)))
    up   = Chunk(Box((0, 0), (4, 16)), array, within=Box((4, 0), (4, 16)))

A flat ZeRO slice is a 1-d array whose `within` has as many elements as the n-d `box`, in row-major order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from operator import mul
from typing import NamedTuple, TypeVar, overload

from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.inner_path import base_of

Path = tuple[str | int, ...]  # of a value in a nested state dict: ("optim", "state", "w", "exp_avg")

MODEL = "model"
MASTER = "master"
EMA = "ema"
STEP = "step"
EXTRAS = "extras"
UNKNOWN = "unknown"  # of a tensor whose name is lost: only `inspect` of a broken checkpoint lists such
# States of the optimizer other than these are named as the optimizer names them (`exp_avg`, `momentum_buffer`, ...).


class TensorKey(NamedTuple):
    """Name and state. States follow their parameter: (`w`, `model`), (`w`, `exp_avg`) are one logical parameter.

    A tuple, because its hash is computed a dozen times for each tensor: in 0.06 us, where a dataclass takes 0.4.
    """

    name: str
    state: str = MODEL

    def __str__(self) -> str:
        return self.name if self.state == MODEL else f"{self.name} [{self.state}]"


class StoredArray(NamedTuple):
    """An array stored in a file: all that a reader says about bytes."""

    path: str  # relative to the checkpoint's root, with `/`
    offset: int  # bytes from the start of the file to element (0, 0, ...)
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # in elements; None means row-major without gaps
    # (offset, length, crc32) of the stored record that holds the array, in bytes, where the container has one
    crc: tuple[int, int, int] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the array."""
        return prod(self.shape)

    @property
    def file(self) -> str:
        """The real file, if `path` is a view of one (`storage.views`); else `path`."""
        return base_of(self.path)

    def view(
        self, start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, *, dtype: DType | None = None
    ) -> StoredArray:
        """Another array in the same bytes, which begins `start` elements after this one, regardless of its strides. It
        keeps the checksum of the record. Formats always make parts of an array in this way, so that the checksum is not
        lost.

        >>> from ckpt_tool.core.dtype import DTYPES
        >>> line = StoredArray("optim.pt", 704, DTYPES["F32"], (100,), crc=(704, 400, 0x1C291CA3))
        >>> view = line.view(64, (6, 6))
        >>> view.offset, view.crc == line.crc
        (960, True)
        """
        offset = self.offset + self.dtype.nbytes(start)
        return StoredArray(self.path, offset, dtype or self.dtype, shape, strides, self.crc)

    def below(self, leads: int) -> StoredArray:
        """The array without its first `leads` dims, of extent 1."""
        return self._replace(shape=self.shape[leads:], strides=self.strides and self.strides[leads:])


class Chunk(NamedTuple):
    """`within` of `array` holds `box` of the logical tensor. `replica` > 0: the same box is stored elsewhere too.

    `box.shape == within.shape`, or `array` is 1-d and `within` has as many elements as `box` (row-major).
    """

    box: Box
    array: StoredArray
    within: Box
    replica: int = 0

    def region(self) -> tuple[int, tuple[int, ...]]:
        """(offset, strides) in elements from `array.offset`: the place of box element 0, and a step along each dim."""
        strides = self.array.strides or contiguous_strides(self.array.shape)
        start = sum(map(mul, self.within.offset, strides)) if any(self.within.offset) else 0
        if self.within.shape == self.box.shape:
            return start, strides
        step = strides[0] if strides else 1
        return start, tuple(step * s for s in contiguous_strides(self.box.shape))


T = TypeVar("T")


class OnDemand(Sequence[T], ABC):
    """A sequence whose items are computed on each access."""

    __slots__ = ()

    @abstractmethod
    def make(self, rows: slice) -> Iterator[T]:
        """The items of those rows."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self.make(index))
        at = range(len(self))[index]
        return next(self.make(slice(at, at + 1)))

    def __iter__(self) -> Iterator[T]:
        return self.make(slice(None))


class ChunkColumns(OnDemand[Chunk]):
    """The chunks of a tensor, kept as columns: a chunk is made when it is accessed, and all are kept once all were.
    They equal the tuple of the chunks. No box is stored twice (every replica is 0), and every path is a file's own.

    Questions about a tensor of a million chunks that need not access them are methods here; `starts_of` and others
    below answer them for any chunks.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: tuple[Chunk, ...] | None = None

    @abstractmethod
    def starts(self) -> list[int]:
        """The number of different offsets that the boxes have along each dim."""

    @abstractmethod
    def lacks_crc(self) -> bool:
        """Is any chunk without a CRC?"""

    @abstractmethod
    def plainly_tile(self, shape: tuple[int, ...]) -> bool:
        """As `plainly_tile` below: are the boxes a grid?"""

    def _all(self) -> tuple[Chunk, ...]:
        if self._made is None:
            self._made = tuple(self.make(slice(None)))
        return self._made

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, tuple | ChunkColumns) and self._all() == tuple(other))

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def starts_of(chunks: Sequence[Chunk], dims: int) -> list[int]:
    """The number of different offsets that the boxes have along each of `dims` dims."""
    if isinstance(chunks, ChunkColumns):
        return chunks.starts()
    return [len({chunk.box.offset[d] for chunk in chunks}) for d in range(dims)]


def lacks_crc(chunks: Sequence[Chunk]) -> bool:
    """Is any of the chunks without a CRC?"""
    if isinstance(chunks, ChunkColumns):
        return chunks.lacks_crc()
    return any(chunk.array.crc is None for chunk in chunks)


def plainly_tile(chunks: Sequence[Chunk], shape: tuple[int, ...]) -> bool:
    """Do the chunks follow one another along dim 0, each as wide as the tensor of `shape`, up to its end?

    If so, they tile the tensor; most tensors of many ranks pass this quick test. False does not mean that they don't.
    """
    if not shape:
        return False
    if isinstance(chunks, ChunkColumns):
        return chunks.plainly_tile(shape)
    at = 0
    corner = (0,) * (len(shape) - 1)
    width = shape[1:]
    for box, _, _, replica in chunks:
        offset, extent = box
        if replica or offset[:1] != (at,) or offset[1:] != corner or extent[1:] != width or extent[:1] <= (0,):
            return False
        at += extent[0]
    return at == shape[0]


class LogicalTensor(NamedTuple):
    """A tensor of the model or the optimizer, regardless of how TP, PP, EP and DP distribute it over ranks.

    Code above the readers sees only these, so it does not need to know about parallelism.
    """

    key: TensorKey
    shape: tuple[int, ...]  # of the complete tensor
    dtype: DType
    chunks: Sequence[Chunk]  # those with replica 0 tile the tensor
    path: Path = ()  # its place in the source's nested dict, () if the source has no nesting

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, replicas not counted."""
        return self.dtype.nbytes(self.numel)


def first_rows(tensor: LogicalTensor, rows: int) -> LogicalTensor:
    """The tensor of the first `rows` rows along dim 0: a vocabulary without its padding, say.

    >>> from ckpt_tool.core.dtype import DTYPES
    >>> whole = simple_tensor(TensorKey("w"), StoredArray("f", 0, DTYPES["F32"], (8, 2)))
    >>> first_rows(whole, 5).chunks[0].within
    Box(offset=(0, 0), shape=(5, 2))
    """
    chunks = []
    for chunk in tensor.chunks:
        row_count = min(chunk.box.shape[0], rows - chunk.box.offset[0])
        if row_count <= 0:
            continue
        box = Box(chunk.box.offset, (row_count, *chunk.box.shape[1:]))
        within = chunk.within
        shape = box.shape if within.shape == chunk.box.shape else (box.numel,)  # a flat slice keeps its front
        chunks.append(chunk._replace(box=box, within=Box(within.offset, shape)))
    return tensor._replace(shape=(rows, *tensor.shape[1:]), chunks=tuple(chunks))


def first_replica(tensor: LogicalTensor) -> LogicalTensor:
    """The tensor with one copy of each box. The others are then neither read nor compared."""
    return tensor._replace(chunks=tuple(chunk for chunk in tensor.chunks if chunk.replica == 0))


def simple_tensor(key: TensorKey, array: StoredArray, path: Path = ()) -> LogicalTensor:
    """A logical tensor that is stored as a single array."""
    box = Box((0,) * len(array.shape), array.shape)
    return LogicalTensor(key, array.shape, array.dtype, (Chunk(box, array, box),), path)
