"""Target: a complete output as values, known before the first byte is written.

A format turns `Wanted` and a `Layout` into files: their sizes, the literal bytes of their heads, and where each box
of each tensor goes. Numbers that only exist once the values have moved (a zip record's CRC, a tensor's digest) are
`Patch`es: fixed-size holes that the executor fills at the end. So a plan is data.

    TargetFile("model.safetensors", size=8 + 96 + 24, literals=((0, head),),
               arrays=(TargetArray(tensor=0, box=whole((2, 3)), offset=104),))

Two million boxes on thousands of ranks are not listed just to be counted: a format that knows sizes without making
heads gives `Later`s in their place, and `Places`, which answer for one tensor at a time. Sequences that a run accesses
again and again are `LazySequence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.hints import Degrees, Hints
from ckpt_tool.core.tensor import Path, TensorKey

DIGEST_CHARS = 32  # hex digits of a digest, the size of its hole in an index
PATCH_BYTES = {"crc32": 4, "digest": DIGEST_CHARS, "sha256": 64}  # kind of a patch -> bytes of its hole
T = TypeVar("T")

G = TypeVar("G")


class Later(Sequence[T]):
    """A sequence that is computed again for each access and never cached. The values are always the same."""

    def __init__(self, make: Callable[[], Sequence[T]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return len(self._make())

    def __iter__(self) -> Iterator[T]:
        return iter(self._make())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._make()[index]


class LazySequence(Later[T]):
    """A sequence that is computed on first access and kept from then on."""

    def __init__(self, make: Callable[[], Sequence[T]]) -> None:
        super().__init__(cache(make))


class TargetArray(NamedTuple):
    """`box` of tensor number `tensor` is stored row-major at `offset` (bytes) of the file."""

    tensor: int
    box: Box
    offset: int
    # the stored array's shape where it is larger than the box (padding, filled with zeros at the end of each dim);
    # None: the box's own
    shape: tuple[int, ...] | None = None
    # elements between neighbours along each dim of the box, if the array is not stored row-major (a transposed matrix)
    # but still without gaps; None: row-major
    strides: tuple[int, ...] | None = None


class Patch(NamedTuple):
    """A hole at `offset` (bytes) of the file, filled when all values have moved.

    kind `crc32`: 4 bytes little-endian, the CRC of array number `of` of this file (as stored, padding included), or of
    the bytes `span` (offset, length) of this file: a record that several arrays and zeros make up.
    kind `digest`: 32 hex digits in ASCII, the digest of tensor number `of`.
    kind `sha256`: 64 hex digits in ASCII, of file number `of` of the target, whole, its own holes filled.
    """

    offset: int
    kind: Literal["crc32", "digest", "sha256"]
    of: int
    span: tuple[int, int] | None = None


class TargetFile(NamedTuple):
    """One output file. `literals`: (offset in bytes, bytes), disjoint from the arrays; what neither covers is zero."""

    path: str
    size: int
    literals: Sequence[tuple[int, bytes]] = ()
    arrays: Sequence[TargetArray] = ()
    patches: Sequence[Patch] = ()
    # the file is a byte-for-byte copy of this file of the source (then it has no literals or arrays)
    copy_of: str | None = None


class Places(Protocol):
    """The places of a target's tensors, if its arrays are not listed. Tensors of one group have the same boxes."""

    @property
    def listable(self) -> bool:
        """May the files' arrays be listed all the same, for a run? False: there are too many of them."""
        ...

    def group(self, tensor: int) -> int:
        """The number of the group of wanted tensor number `tensor`."""
        ...

    def groups(self) -> Mapping[int, tuple[int, int]]:
        """Every group: (how many tensors it has, the number of one of them)."""
        ...

    def boxes(self, group: int) -> Sequence[Box]:
        """The boxes of each tensor of the group, a box for every rank that holds it."""
        ...

    def of(self, tensor: int) -> Sequence[tuple[int, TargetArray]]:
        """(number of the target's file, array) of the tensor, in the order of the files."""
        ...

    def identity(self) -> str:
        """A hash of all that decides the bytes of the files' heads."""
        ...


class Target(NamedTuple):
    """Every file of the output."""

    format: str
    files: tuple[TargetFile, ...]
    single: str | None = None  # the output is one file of this name, not a folder
    notes: tuple[str, ...] = ()
    # Given if the files' arrays are `Later`s: the same answers, tensor by tensor. With it, a plan that is only shown is
    # summed by groups.
    places: Places | None = None
    by_size: bool = False  # files end where `Wanted.shard_size` says

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the target."""
        return sum(file.size for file in self.files)

    def noted(self, *lines: str) -> Target:
        """The target with more notes for the report."""
        return self._replace(notes=(*self.notes, *lines)) if lines else self


class WantedTensor(NamedTuple):
    """A tensor of the output: `dtype` is the output's."""

    key: TensorKey
    shape: tuple[int, ...]
    dtype: DType
    path: Path = ()  # where the source's nested dict held it, () if nowhere

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as it is written."""
        return self.dtype.nbytes(prod(self.shape))


def pick_group(values: Iterable[Any], group: type[G]) -> G:
    """The value of a group of options among those of several groups, with defaults where it is not there."""
    return next((value for value in values if isinstance(value, group)), group())


class LayoutWish(NamedTuple):
    """The user's wishes for a format with a layout of its own (`formats.base.Holds.own_layout`)."""

    degrees: Degrees = Degrees()  # the parallel degrees, as far as they are known
    zero: int | None = None  # the ZeRO stage, 0 to 3
    pp_split: tuple[int, ...] = ()  # layers of each stage, () for even ones
    config: Mapping[str, Any] | None = None  # the model's
    vocab_size: int | None = None
    removed: frozenset[TensorKey] = frozenset()  # the keys that were removed by pattern
    cast: bool = False  # has the model's dtype been chosen (`--dtype`)?
    of_systems: tuple[Any, ...] = ()  # options of single systems, one value for each group that was given

    def of(self, group: type[G]) -> G:
        """The options of one system, by their group; defaults if none were given."""
        return pick_group(self.of_systems, group)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The contents of the output, before a format has chosen files and offsets."""

    tensors: tuple[WantedTensor, ...]
    # extras, hints: the source catalog's (see `core.catalog`), less what was dropped by name
    extras: Mapping[str, Any] = field(default_factory=dict)
    hints: Hints = Hints()
    # a format may write its own kind back more faithfully (key prefixes) than a foreign one
    source_format: str = ""
    # (path, size in bytes) of the source's side files to copy as they are
    sidefiles: tuple[tuple[str, int], ...] = ()
    # the output's file name where the user asked for one file (`OUT.pt`), None for a folder
    single: str | None = None
    shard_size: int = 5_000_000_000  # `--max-shard-size` in bytes
    wish: LayoutWish = LayoutWish()

    def side_file_copies(self) -> tuple[TargetFile, ...]:
        """The source's side files as files of the output, copied as they are."""
        return tuple(TargetFile(path, size, copy_of=path) for path, size in self.sidefiles)


def whole_file(path: str, data: bytes) -> TargetFile:
    """A file of literal bytes alone."""
    return TargetFile(path, len(data), ((0, data),) if data else ())
