"""The `.distcp` files of a new save: the mirror of `containers.dcp_items`.

The one idea: a zip is laid out once for each dtype and shape and moved to where it belongs. Items begin at multiples of
64 bytes, so that storages are aligned in the file too (torch's do not; offsets are read from the metadata).

Source: as in `containers.dcp_items`. Cost: a few us a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import Patch, TargetArray, TargetFile, WantedTensor
from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.containers.dcp_metadata import ObjectEntry, Piece, TensorEntry
from ckpt_tool.formats.torch.composer import TorchComposer
from ckpt_tool.storage.pickle_writer import dumps, stored
from ckpt_tool.storage.zip_plan import ZipPlan, plan_zip

ROOT = "archive"  # the top folder in an item's zip, as torch.save to a buffer names it
ALIGNMENT = 64  # bytes between written items


class Placed(NamedTuple):
    """`box` of wanted tensor number `tensor` is stored at `offset` of the stored tensor, in `shape` (both have leading
    dims where several tensors are one stored tensor), by rank number `rank`. A box of as many dims that is smaller than
    `shape` is filled up with zeros at the end of each dim; with no elements it is zeros alone."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: int
    box: Box
    rank: int


def torch_dtype(tensor: WantedTensor) -> DType:
    """The tensor's dtype. Raises UsageError E0242 for one that torch lacks."""
    if tensor.dtype.torch is None:
        raise UsageError(
            f"torch has no {tensor.dtype.name}",
            code="E0242",
            key=str(tensor.key),
            hint="cast it with --dtype, or write safetensors",
        )
    return tensor.dtype


@dataclass(slots=True)
class _File:
    """A `.distcp` file in the making. items: where each begins, and its literals from there."""

    path: str
    size: int = 0
    items: list[tuple[int, Sequence[tuple[int, bytes]]]] = field(default_factory=list)
    arrays: list[TargetArray] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)

    def append(self, size: int, literals: Sequence[tuple[int, bytes]]) -> int:
        """The byte where an item of `size` bytes begins that now lies at the end."""
        base = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.items.append((base, literals))
        self.size = base + size
        return base

    def finished(self) -> TargetFile:
        literals = tuple([(base + at, data) for base, literals in self.items for at, data in literals])
        return TargetFile(self.path, self.size, literals, tuple(self.arrays), tuple(self.patches))


class _Kind:
    """What items of one zip hold of boxes of one shape, counted from where the item begins. held: any element, or
    zeros alone? padded: the stored shape where it is larger. holes: of the CRCs, () for an item without elements."""

    __slots__ = ("at", "held", "holes", "literals", "padded", "size")

    def __init__(self, plan: ZipPlan, extents: tuple[int, ...], box: Box) -> None:
        self.size, self.literals, self.at = plan.size, plan.literals, plan.offsets[0]
        self.held = 0 not in extents and box.numel > 0
        self.holes = () if 0 in extents else plan.crcs[0]
        self.padded = extents if box.numel != prod(extents) else None


class ItemFiles:
    """The `.distcp` files of a save in the making. entries: what lies in them, for the metadata; by key."""

    def __init__(self, tensors: Sequence[WantedTensor]) -> None:
        self.tensors = tensors
        self.entries: dict[str, TensorEntry | ObjectEntry] = {}
        self._files: dict[tuple[str, int], _File] = {}
        self._zips: dict[tuple[DType, tuple[int, ...]], ZipPlan] = {}

    def tensor(self, fqn: str, path: Path, shape: tuple[int, ...], boxes: Iterable[Placed], folder: str = "") -> None:
        """A stored tensor of `shape` and its boxes, at least one: an item a box, in its rank's file. Raises UsageError
        E0242."""
        placed, pieces = list(boxes), list[Piece]()
        dtype = torch_dtype(self.tensors[placed[0].tensor])
        kinds, files = dict[tuple[object, ...], _Kind](), dict[int, _File]()  # of this dtype and folder
        for offset, extents, number, box, rank in placed:
            kind = kinds.get((extents, box.shape))
            if kind is None:
                kind = kinds[extents, box.shape] = _Kind(self._zip(dtype, extents), extents, box)
            file = files.get(rank)
            if file is None:
                file = files[rank] = self._file(folder, rank)
            base = file.append(kind.size, kind.literals)
            if kind.held:
                of = len(file.arrays)
                file.patches += [Patch(base + hole, "crc32", of) for hole in kind.holes]
                file.arrays.append(TargetArray(number, box, base + kind.at, kind.padded))
            elif kind.holes:
                span = (base + kind.at, dtype.nbytes(prod(extents)))
                file.patches += [Patch(base + hole, "crc32", -1, span) for hole in kind.holes]
            pieces.append(Piece(offset, extents, file.path, base, kind.size))
        self.entries[fqn] = TensorEntry(fqn, path, dtype, shape, pieces)

    def _zip(self, dtype: DType, shape: tuple[int, ...]) -> ZipPlan:
        plan = self._zips.get((dtype, shape))
        if plan is None:
            ref = stored("0", shape, dtype)
            plan = self._zips[dtype, shape] = plan_zip(ROOT, dumps(ref), [("0", ref.storage.nbytes)])
        return plan

    def object(self, fqn: str, path: Path, made: TargetFile, folder: str = "") -> None:
        """A torch file as an item of rank 0's file."""
        file = self._file(folder, 0)
        base, before = file.append(made.size, made.literals), len(file.arrays)
        file.arrays += [array._replace(offset=base + array.offset) for array in made.arrays]
        for patch in made.patches:
            span = patch.span and (base + patch.span[0], patch.span[1])
            of = patch.of if patch.of < 0 else before + patch.of
            file.patches.append(patch._replace(offset=base + patch.offset, of=of, span=span))
        self.entries[fqn] = ObjectEntry(fqn, path, file.path, base, made.size)

    def known(self, fqn: str, path: Path, shape: tuple[int, ...], dtype: DType, data: bytes, folder: str = "") -> None:
        """A tensor whose bytes are known, as an item of rank 0's file."""
        composer = TorchComposer()
        self.object(fqn, path, composer.file("", composer.value(shape, dtype, data)), folder)
        entry = self.entries[fqn]
        if isinstance(entry, ObjectEntry):
            piece = Piece((0,) * len(shape), shape, entry.file, entry.at, entry.length)
            self.entries[fqn] = TensorEntry(fqn, path, dtype, shape, [piece])

    def finished(self) -> list[TargetFile]:
        """The files, by folder and rank."""
        return [file.finished() for _, file in sorted(self._files.items())]

    def _file(self, folder: str, rank: int) -> _File:
        found = self._files.get((folder, rank))
        if found is None:
            found = self._files[folder, rank] = _File(f"{folder}__{rank}_0.distcp")
        return found
