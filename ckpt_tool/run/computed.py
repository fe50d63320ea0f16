"""Computed tensors: values that are computed while they are read, presented as one more source of the plan.

A recipe makes one tensor, most often F32, from tensors of other sources, range by range of its row-major line.
`ComputedTree` is a tree whose files are such lines, so dequantising, folding an adapter and merging models are all
"move this tensor":

    class Doubled(Recipe):                                  # its one input's values, twice as large
        def values(self, read, start, stop):
            return read(0, start, stop).astype(np.float32) * np.float32(2)

    tree = ComputedTree("model/ (doubled)", [Doubled(tensor.key, tensor.shape, (Input(tensor, opened.tree),),
    "doubled")])
    tree.tensors[0]     # a LogicalTensor, F32, one array in the file "model/w" of that tree

Inputs are read through their chunks, whatever their files, sharding and layouts; replicas are compared on the way, and
the records that contain them are checked against their checksums at the end of the run (`late_faults`). The executor
rounds to the dtype that is written (and counts overflows). The identity of a computed file is a hash of the identities
of all files of its inputs and of `text`, so a run whose parameters or sources changed is never resumed. Cost: what
`values` costs, on the executor's threads, in ranges of at most a block (4 MiB) or a strip of a panel. What it does not
do: save recipes in a plan file (only this process knows them).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError, InternalError
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.checksum import ChecksummedRange
from ckpt_tool.run.compute import numpy_type
from ckpt_tool.run.records import CheckedRecords, record_faults
from ckpt_tool.run.scan import each_of, readable
from ckpt_tool.storage.source import Identity, Tree

Array = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Read = Callable[[int, int, int], Array]
Lend = Callable[[int, int, int], tuple[Array, str]]
_F32 = DTYPES["F32"]
_ROOM = 16  # descriptors that each thread keeps open


class Input(NamedTuple):
    """A tensor that a recipe reads, and the tree in which its arrays are stored."""

    tensor: LogicalTensor
    tree: Tree


@dataclass(frozen=True, eq=False)
class Recipe(ABC):
    """How one tensor is computed. Subclasses add their parameters as fields and implement `values`. Instances must not
    keep state, since several threads use them at once."""

    # key, shape: of the computed tensor
    key: TensorKey
    shape: tuple[int, ...]
    inputs: tuple[Input, ...]
    text: str  # everything that the values depend on apart from the inputs' bytes: part of the file's identity

    @abstractmethod
    def values(self, read: Read, start: int, stop: int) -> Floats:
        """Elements [start, stop) of the computed tensor's row-major line, 1-d. Called on several threads at once.

        Args:
            read: read(k, a, b) returns elements [a, b) of input k's row-major line, 1-d, of its own dtype's NumPy type
                (a copy that may be changed). For dtypes below 8 bits a and b count bytes, as uint8.
            start: any range may be requested; most often it is whole blocks of rows.
        """

    def compute_rounded(self, read: Read, lend: Lend, start: int, stop: int, out: tuple[Array, str]) -> bool:
        """Computes elements [start, stop) rounded to a dtype, in one pass of compiled code.

        Returns False if there is no such code, or if a value is or becomes infinite or NaN: the caller then uses
        `values` and a cast that counts overflows.

        Args:
            lend: lend(k, a, b) returns the bytes of elements [a, b) of input k and the name of its dtype; valid until
                input k is requested again.
            out: the array to fill, 1-d, of unsigned integers of the dtype's width, and the dtype's name.
        """
        return False

    @property
    def dtype(self) -> DType:
        """The dtype of the computed values."""
        return _F32

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes) of the computed tensor's row-major line, little-endian."""
        start = offset // 4
        stop = ceil_div(offset + nbytes, 4)
        values = self.values(read, start, stop)
        if values.dtype != np.float32 or values.shape != (stop - start,):
            raise InternalError(f"{self.key}: {values.dtype} {values.shape} for {stop - start} elements")
        line = np.ascontiguousarray(values, "<f4").view(np.uint8).data
        return line if len(line) == nbytes else line[offset - 4 * start : offset - 4 * start + nbytes]

    def fill(self, read: Read, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the line from byte `offset` on. Subclasses may compute them in place."""
        out[:] = self.line(read, offset, len(out))

    def late_faults(self, read: Read) -> Iterator[CkptError]:
        """Yields faults of the tensor that can be detected only after all of it has been computed."""
        return iter(())

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the computed values in bytes."""
        return self.dtype.nbytes(self.numel)

    @property
    def memory(self) -> int:
        """Bytes that a thread needs to compute the tensor, in addition to its blocks."""
        return 0


@dataclass(frozen=True, eq=False)
class ExactRecipe(Recipe):
    """How a tensor that is no F32 values but exact bytes is computed. Subclasses define `dtype` and `line`."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """Raises InternalError: there are only bytes (`line`)."""
        raise InternalError(f"{self.key} is made of bytes, and was asked for numbers")

    @abstractmethod
    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `Recipe.line`."""


class _Lines:
    """Reads the inputs of the recipe of `path`, for one thread."""

    def __init__(self, path: str, inputs: list[tuple[Move, BlockReader]]) -> None:
        self.path = path
        self.inputs = inputs
        # buffers are reused: page faults of a new array cost more than a pass over it
        self._lent: dict[int, Array] = {}

    def read(self, number: int, start: int, stop: int) -> Array:
        """Elements of an input's line, in a new array."""
        move, reader = self.inputs[number]
        block: Array = np.empty((stop - start) * move.item, np.uint8)
        reader.fill(move, block.data, start, stop, until=stop)
        return block if move.dtype.bits < 8 else block.view(numpy_type(move.dtype))

    def lend(self, number: int, start: int, stop: int) -> tuple[Array, str]:
        """(bytes of the elements, name of their dtype). The next call for this input overwrites the bytes."""
        move, reader = self.inputs[number]
        size = (stop - start) * move.item
        room = self._lent.get(number)
        if room is None or room.size != size:
            room = self._lent[number] = np.empty(size, np.uint8)
        reader.fill(move, room.data, start, stop, until=stop)
        return room, move.dtype.name


class ComputedTree(Tree):
    """A source whose files are computed tensors, one file each. Nothing of it is on disk: files have no descriptors and
    are read through `read`, `view` or `fill`."""

    local = False
    computed = True

    def __init__(self, shown: str, recipes: Iterable[Recipe]) -> None:
        """shown: the name in messages; must differ from that of every other tree of the run."""
        self._recipes = {f"{recipe.key.state}/{recipe.key.name}": recipe for recipe in recipes}
        first = next(iter(self._recipes.values()), None)
        if first is None or not all(recipe.inputs for recipe in self._recipes.values()):
            raise InternalError("a computed source without a recipe, or a recipe without an input")
        self.shown = shown
        self.bytes_read = 0
        self.root = first.inputs[0].tree.root
        self.single = None
        self._first_sight: dict[tuple[str, str], str] = {}
        self._of_thread = threading.local()
        self._readers: dict[BlockReader, Tree] = {}
        self._passed: dict[tuple[str, str], list[ChecksummedRange]] = {}  # (tree, file) -> CRCs of what was read
        self._guard = threading.Lock()
        self.tensors = tuple(
            simple_tensor(recipe.key, StoredArray(path, 0, recipe.dtype, recipe.shape))
            for path, recipe in self._recipes.items()
        )

    # -- the interface of a source, as `Tree` has it ------------------------------------------------------------------

    def listing(self) -> dict[str, int]:
        """Path -> size in bytes of every computed file."""
        return {path: recipe.nbytes for path, recipe in self._recipes.items()}

    def display(self, path: str = "") -> str:
        """The computed tensor of `path`, as messages show it."""
        recipe = self._recipes.get(path)
        return f"{self.shown}: {recipe.key}" if recipe else self.shown

    def size(self, path: str) -> int:
        """The size in bytes of a computed file."""
        return self._recipes[path].nbytes

    def identity(self, path: str) -> Identity:
        """The identity of a computed file, from those of its inputs' files. Each of these is looked up once and
        remembered: thousands of tensors share a few files."""

        def seen(tree: Tree, file: str) -> str:
            if (known := self._first_sight.get((tree.shown, file))) is None:
                known = self._first_sight[tree.shown, file] = _described(tree, file, tree.identity(file))
            return known

        return self._identity(path, seen)

    def identity_by_name(self, path: str) -> Identity:
        """The identity of a computed file, from its inputs' files as they are now."""
        return self._identity(path, lambda tree, file: _described(tree, file, tree.identity_by_name(file)))

    def identities_by_name(self, paths: Iterable[str]) -> list[Identity | None]:
        """As `Tree.identities_by_name`: each file of the inputs is looked up once."""
        now: dict[tuple[str, str], str] = {}
        files: dict[str, tuple[Tree, dict[str, None]]] = {}
        names = list(paths)
        for name in names:
            for each in self._recipes[name].inputs:
                _, wanted = files.setdefault(each.tree.shown, (each.tree, {}))
                wanted.update(dict.fromkeys(chunk.array.path for chunk in each.tensor.chunks))
        for shown, (tree, wanted) in files.items():
            for file, identity in zip(wanted, tree.identities_by_name(wanted), strict=True):
                now[shown, file] = "" if identity is None else _described(tree, file, identity)
        return [self._identity(name, lambda tree, file: now[tree.shown, file]) for name in names]

    def check_unchanged(self, *, pointers: bool = True) -> None:
        """As `Tree.check_unchanged`, of the trees that the values are computed from."""
        inputs = {id(each.tree): each.tree for recipe in self._recipes.values() for each in recipe.inputs}
        for tree in inputs.values():
            tree.check_unchanged(pointers=pointers)

    def _identity(self, path: str, of: Callable[[Tree, str], str]) -> Identity:
        recipe = self._recipes[path]

        # A hash in the form of an `Identity`: three of its numbers are 7 bytes of the hash each.
        found = blake2b(recipe.text.encode(), digest_size=24)
        for each in recipe.inputs:
            for file in dict.fromkeys(chunk.array.path for chunk in each.tensor.chunks):
                found.update(of(each.tree, file).encode())
            found.update(b";")
        a, b, c = (int.from_bytes(found.digest()[k : k + 7], "big") for k in (0, 8, 16))
        return Identity(0, a, recipe.nbytes, b, c)

    def open(self, path: str) -> int:
        """Raises InternalError: computed files have no descriptors."""
        raise InternalError(f"{path} is computed: it has no descriptor")

    def fd(self, path: str) -> int:
        """Raises InternalError, as `open`."""
        return self.open(path)

    def close(self) -> None:
        """Close the descriptors of all threads; the inputs' trees belong to whoever opened them."""
        for reader in [*self._readers]:
            self._close(reader)
        self._of_thread = threading.local()

    def files_behind(self, path: str) -> Iterator[tuple[Tree, str]]:
        """Yields the files of the recipe's inputs; the same file may come more than once."""
        for each in self._recipes[path].inputs:
            for file in dict.fromkeys(chunk.array.path for chunk in each.tensor.chunks):
                yield from each.tree.files_behind(file)

    def late_faults(self, paths: Iterable[str]) -> Iterator[CkptError]:
        """Yields the faults that the recipes of `paths` report, and damaged records of their inputs. Parts of those
        records that have not been read yet are read now."""
        names = list(paths)
        found = list[CkptError]()

        def settle(number: int) -> None:
            recipe = self._recipes[names[number]]
            found.extend(recipe.late_faults(self._lines_of(names[number], recipe).read))

        # Most recipes have no late faults: then no threads are started for them.
        if any(type(self._recipes[name]).late_faults is not Recipe.late_faults for name in names):
            each_of(len(names), settle)
        yield from sorted(found, key=lambda fault: fault.key or "")
        paths = names
        self.close()
        wanted: dict[str, dict[int, Input]] = {}
        for path in paths:
            for each in self._recipes[path].inputs:
                if isinstance(each.tree, ComputedTree) or any(chunk.array.crc for chunk in each.tensor.chunks):
                    wanted.setdefault(each.tree.shown, {})[id(each.tensor)] = each
        for shown, inputs in wanted.items():
            source = readable((each.tensor for each in inputs.values()), next(iter(inputs.values())).tree)
            passed = {
                number: self._passed.get((shown, file.path), ()) for number, file in enumerate(source.files.files)
            }
            yield from record_faults(source.records, source.files, passed)
            yield from source.files.late_faults()

    def bytes_of_inputs(self, path: str) -> int:
        """Bytes of the stored tensors from which the tensor at `path` is computed, through other computed ones too."""
        nbytes = 0
        for each in self._recipes[path].inputs:
            if isinstance(each.tree, ComputedTree):
                files = {chunk.array.path for chunk in each.tensor.chunks}
                nbytes += sum(map(each.tree.bytes_of_inputs, files))
            else:
                nbytes += each.tensor.nbytes
        return nbytes

    @property
    def memory(self) -> int:
        """The largest number of bytes that a thread needs for a recipe."""
        return max(recipe.memory for recipe in self._recipes.values())

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Bytes of the computed tensor's row-major line, little-endian."""
        return bytes(self.view(path, offset, nbytes))

    def view(self, path: str, offset: int, nbytes: int) -> memoryview:
        """As `read`, but without a copy of what the recipe returned."""
        recipe = self._recipe(path, offset, nbytes)
        return recipe.line(self._lines_of(path, recipe).read, offset, nbytes) if nbytes else memoryview(b"")

    def fill(self, path: str, offset: int, view: memoryview) -> None:
        """Fill all of `view` from byte `offset` of a computed file."""
        recipe = self._recipe(path, offset, len(view))
        if view:
            recipe.fill(self._lines_of(path, recipe).read, offset, view)

    def _recipe(self, path: str, offset: int, nbytes: int) -> Recipe:
        """The recipe of `path`. Raises InternalError for bytes outside the file."""
        recipe = self._recipes[path]
        if offset < 0 or nbytes < 0 or offset + nbytes > recipe.nbytes:
            raise InternalError(f"{path}: bytes {offset} to {offset + nbytes} of {recipe.nbytes}")
        return recipe

    def compute_rounded(self, path: str, start: int, dtype: DType, out: memoryview) -> bool:
        """See `Tree.compute_rounded`."""
        recipe = self._recipes[path]
        item = dtype.bits // 8
        lines = self._lines_of(path, recipe)
        made = np.frombuffer(out, f"u{item}")
        return recipe.compute_rounded(lines.read, lines.lend, start, start + len(out) // item, (made, dtype.name))

    def _lines_of(self, path: str, recipe: Recipe) -> _Lines:
        """This thread's open inputs of the recipe. Those of the last recipe are kept, since reads come in sequence."""
        last: _Lines | None = getattr(self._of_thread, "last", None)
        if last is None or last.path != path:
            self._forget()
            last = self._of_thread.last = _Lines(path, [self._line(each) for each in recipe.inputs])
        return last

    def _line(self, each: Input) -> tuple[Move, BlockReader]:
        source = readable([each.tensor], each.tree)
        reader = CheckedRecords(source.files, source.records).reader(_ROOM)
        with self._guard:
            self._readers[reader] = each.tree
        return source.moves[0], reader

    def _forget(self) -> None:
        """Close what this thread has open for its last recipe."""
        last: _Lines | None = getattr(self._of_thread, "last", None)
        self._of_thread.last = None
        for _, reader in last.inputs if last else ():
            self._close(reader)

    def _close(self, reader: BlockReader) -> None:
        with self._guard:
            tree = self._readers.pop(reader, None)
            if tree is not None:
                for number, pieces in reader.pieces.items():
                    self._passed.setdefault((tree.shown, reader.path(number)), []).extend(pieces.take())
        reader.close()


def _described(tree: Tree, file: str, identity: Identity) -> str:
    return repr((tree.shown, file, tuple(identity)))
