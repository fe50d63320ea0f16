"""Plans the `.distcp` files of a new save: the inverse of `dcp_container.dcp_items`.

The one idea: a zip is planned once for each dtype and shape and only shifted to its offset, and the boxes of a tensor
are analysed once for all tensors with the same sharding (experts, layers): for each of these only the offsets of its
items are computed. The content of a file is listed when it is accessed, which a dry run never does:

    96 experts in 8 boxes each   -> 96 `TensorShare`s of one cut; 768 numbers; sizes of files; `.metadata`
    a file's literals, arrays    -> listed at the first access, and kept

Items begin at multiples of 64 bytes, so that storages are aligned in the file too (torch's do not; offsets are read
from the metadata). They follow one another and each holds its array (`_ItemKind`), so no two overlap.

Source: as in `dcp_container.dcp_items`. Cost: 0.5 us a box, 2 us more where it is listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import add, sub
from typing import NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.target import LazySequence, Patch, TargetArray, TargetFile, WantedTensor
from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import InternalError, UsageError
from ckpt_tool.formats.dcp_container.dcp_metadata import ObjectEntry, PieceBand, Tail, WrittenTensor
from ckpt_tool.formats.state_dict.composer import TorchComposer
from ckpt_tool.storage.pickles.pickle_writer import dumps, stored
from ckpt_tool.storage.torch_files.zip_plan import ZipPlan, plan_zip

ROOT = "archive"  # the top folder in an item's zip, as torch.save to a buffer names it
ALIGNMENT = 64  # bytes between written items


class StoredItem(NamedTuple):
    """`box` of a wanted tensor is stored at `offset` of the stored tensor, in `shape`, both without leading dims, by
    rank number `rank`, counted from the first that holds the tensor. A box of as many dims that is smaller than `shape`
    is filled up with zeros at the end of each dim; with no elements it is zeros alone."""

    box: Box
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int


class TensorShare(NamedTuple):
    """The part of a stored tensor that one wanted tensor fills."""

    tensor: int  # index of the wanted tensor
    cut: tuple[StoredItem, ...]  # its items; the same object for all tensors with the same sharding
    # its position in the leading dims of the stored tensor, () if the stored tensor is this one alone
    lead: tuple[int, ...] = ()
    first: int = 0  # added to the ranks of the items


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
    """A `.distcp` file in the making. The lists are filled when somebody looks at them."""

    path: str
    size: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    arrays: list[TargetArray] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)

    def append(self, size: int) -> int:
        """Reserve `size` bytes for an item at the end of the file; returns the aligned offset at which it begins."""
        base = ceil_div(self.size, ALIGNMENT) * ALIGNMENT
        self.size = base + size
        return base

    def hold(self, base: int, made: TargetFile) -> None:
        """Add the content of a torch file as the item at `base`."""
        self.literals += [(base + at, data) for at, data in made.literals]
        before = len(self.arrays)
        self.arrays += [array._replace(offset=base + array.offset) for array in made.arrays]
        for patch in made.patches:
            span = patch.span and (base + patch.span[0], patch.span[1])
            of = patch.of if patch.of < 0 else before + patch.of
            self.patches.append(patch._replace(offset=base + patch.offset, of=of, span=span))


class _ItemKind:
    """What items of one zip hold of boxes of one shape, counted from where the item begins. held: any element, or
    zeros alone? padded: the stored shape where it is larger. holes: of the CRCs, () for an item without elements."""

    __slots__ = ("at", "held", "holes", "literals", "nbytes", "padded", "size")

    def __init__(self, plan: ZipPlan, dtype: DType, extents: tuple[int, ...], box: Box) -> None:
        self.size = plan.size
        self.literals = plan.literals
        self.at = plan.offsets[0]
        self.nbytes = dtype.nbytes(prod(extents))
        self.held = 0 not in extents and box.numel > 0
        self.holes = () if 0 in extents else plan.crcs[0]
        self.padded = extents if box.numel != prod(extents) else None
        if self.at + self.nbytes > self.size or (box.numel > prod(extents)):
            raise InternalError(f"{dtype.name} {list(box.shape)} does not fit an item of {self.size} bytes")

    def put(self, file: _File, base: int, tensor: int, box: Box) -> None:
        """The item at `base` of a file."""
        file.literals += [(base + at, data) for at, data in self.literals]
        if self.held:
            of = len(file.arrays)
            file.patches += [Patch(base + hole, "crc32", of) for hole in self.holes]
            file.arrays.append(TargetArray(tensor, box, base + self.at, self.padded))
        elif self.holes:
            span = (base + self.at, self.nbytes)
            file.patches += [Patch(base + hole, "crc32", -1, span) for hole in self.holes]


class _Lot(NamedTuple):
    """What shares of one cut, dtype and first rank have in common, item by item."""

    tails: tuple[Tail, ...]
    paths: tuple[str, ...]
    files: tuple[_File, ...]
    kinds: tuple[_ItemKind, ...]
    cut: tuple[StoredItem, ...]

    def begins(self, count: int) -> list[list[int]]:
        """Reserve the items of `count` shares at the ends of the files; returns the offsets of each share's items.

        The distance between consecutive shares is constant, so only the first two are computed one by one.
        """
        pairs = [*zip(self.files, self.kinds, strict=True)]
        rows = [[file.append(kind.size) for file, kind in pairs] for _ in range(min(count, 2))]
        if count > 2:
            steps = [*map(sub, rows[1], rows[0])]
            for _ in range(count - 2):
                rows.append([*map(add, rows[-1], steps)])
            for (file, kind), base in zip(pairs, rows[-1], strict=True):
                file.size = base + kind.size
        return rows


class _ShareRun(NamedTuple):
    """Shares of one lot that follow one another."""

    lot: _Lot
    tensors: list[int]
    at: list[list[int]]  # the bytes where the items of each begin


class _Whole(NamedTuple):
    """A torch file as an item at byte `at`."""

    file: _File
    at: int
    made: TargetFile


class ItemFiles:
    """The `.distcp` files of a save that is being planned. entries: their content by key, for the metadata."""

    def __init__(self, tensors: Sequence[WantedTensor]) -> None:
        self.tensors = tensors
        self.entries: dict[str, WrittenTensor | ObjectEntry] = {}
        self._files: dict[tuple[str, int], _File] = {}
        self._zips: dict[tuple[DType, tuple[int, ...]], ZipPlan] = {}
        self._laid: list[_ShareRun | _Whole] = []
        self._unlisted = self._laid
        self._lots: dict[tuple[int, DType, str, int, int], _Lot] = {}  # which keep their cuts
        self._alike: dict[tuple[int, DType, int], tuple[tuple[Tail, ...], tuple[_ItemKind, ...]]] = {}

    def tensor(
        self, fqn: str, path: Path, shape: tuple[int, ...], shares: Iterable[TensorShare], folder: str = ""
    ) -> None:
        """A stored tensor of `shape` and its shares, at least one: an item a box, in its rank's file. Raises UsageError
        E0242."""
        given = list(shares)
        bands = list[PieceBand]()
        runs = list[_ShareRun]()
        dtype = torch_dtype(self.tensors[given[0].tensor])
        lots = dict[tuple[int, int], _Lot]()  # of this dtype and folder
        last = None
        for tensor, cut, lead, first in given:
            lot = lots.get((id(cut), first))
            if lot is None:
                lot = lots[id(cut), first] = self._lot(cut, dtype, folder, first, len(lead))
            if lot is not last:
                runs.append(_ShareRun(lot, [], []))
                last = lot
            runs[-1].tensors.append(tensor)
        leads = iter(given)
        for run in runs:
            run.at.extend(run.lot.begins(len(run.tensors)))
            tails = run.lot.tails
            paths = run.lot.paths
            bands += [PieceBand(next(leads).lead, tails, paths, at) for at in run.at]
        self._laid += runs
        self.entries[fqn] = WrittenTensor(fqn, path, dtype, shape, bands)

    def _lot(self, cut: tuple[StoredItem, ...], dtype: DType, folder: str, first: int, leads: int) -> _Lot:
        known = id(cut), dtype, folder, first, leads
        lot = self._lots.get(known)
        if lot is None:
            alike = self._alike.get((id(cut), dtype, leads))
            if alike is None:
                alike = self._alike[id(cut), dtype, leads] = self._kinds(cut, dtype, leads)
            files = tuple([self._file(folder, first + item.rank) for item in cut])
            lot = self._lots[known] = _Lot(alike[0], tuple([file.path for file in files]), files, alike[1], cut)
        return lot

    def _kinds(
        self, cut: tuple[StoredItem, ...], dtype: DType, leads: int
    ) -> tuple[tuple[Tail, ...], tuple[_ItemKind, ...]]:
        one = (1,) * leads
        found = dict[tuple[object, ...], _ItemKind]()
        shapes = [(*one, *item.shape) for item in cut]
        for shape, item in zip(shapes, cut, strict=True):
            if (shape, item.box.shape) not in found:
                found[shape, item.box.shape] = _ItemKind(self._zip(dtype, shape), dtype, shape, item.box)
        kinds = tuple([found[shape, item.box.shape] for shape, item in zip(shapes, cut, strict=True)])
        rows = zip(shapes, cut, kinds, strict=True)
        return tuple([Tail(item.offset, shape, kind.size) for shape, item, kind in rows]), kinds

    def _zip(self, dtype: DType, shape: tuple[int, ...]) -> ZipPlan:
        plan = self._zips.get((dtype, shape))
        if plan is None:
            ref = stored("0", shape, dtype)
            plan = self._zips[dtype, shape] = plan_zip(ROOT, dumps(ref), [("0", ref.storage.nbytes)])
        return plan

    def object(self, fqn: str, path: Path, made: TargetFile, folder: str = "") -> None:
        """A torch file as an item of rank 0's file."""
        file = self._file(folder, 0)
        base = file.append(made.size)
        self._laid.append(_Whole(file, base, made))
        self.entries[fqn] = ObjectEntry(fqn, path, file.path, base, made.size)

    def known(self, fqn: str, path: Path, shape: tuple[int, ...], dtype: DType, data: bytes, folder: str = "") -> None:
        """A tensor whose bytes are known, as an item of rank 0's file."""
        composer = TorchComposer()
        self.object(fqn, path, composer.file("", composer.value(shape, dtype, data)), folder)
        entry = self.entries[fqn]
        if isinstance(entry, ObjectEntry):
            tails = (Tail((0,) * len(shape), shape, entry.length),)
            self.entries[fqn] = WrittenTensor(
                fqn, path, dtype, shape, [PieceBand((), tails, (entry.file,), [entry.at])]
            )

    def finished(self) -> list[TargetFile]:
        """The files, by folder and rank. Nothing is added to them any more."""

        return [self._finished(file) for _, file in sorted(self._files.items())]

    def _finished(self, file: _File) -> TargetFile:
        literals = LazySequence(lambda: self._listed(file).literals)
        arrays = LazySequence(lambda: self._listed(file).arrays)
        return TargetFile(file.path, file.size, literals, arrays, LazySequence(lambda: self._listed(file).patches))

    def _listed(self, file: _File) -> _File:
        """The file with its content listed. The first call lists the contents of all files."""
        laid = self._unlisted
        self._unlisted = []
        for each in laid:
            if isinstance(each, _Whole):
                each.file.hold(each.at, each.made)
                continue
            (_, _, files, kinds, cut), tensors, rows = each
            for tensor, at in zip(tensors, rows, strict=True):
                for item, there, kind, base in zip(cut, files, kinds, at, strict=True):
                    kind.put(there, base, tensor, item.box)
        return file

    def _file(self, folder: str, rank: int) -> _File:
        found = self._files.get((folder, rank))
        if found is None:
            found = self._files[folder, rank] = _File(f"{folder}__{rank}_0.distcp")
        return found

    def places(self, files: Sequence[TargetFile]) -> ItemPlaces:
        """The locations of all tensors. files: all files of the target, including the ones planned here."""
        cuts: dict[int, tuple[tuple[StoredItem, ...], ...]] = {}
        whole: dict[int, TargetFile] = {}
        for each in self._laid:
            if isinstance(each, _Whole):
                whole[id(each.made)] = each.made
                continue
            alone = (each.lot.cut,)
            for tensor in each.tensors:
                cuts[tensor] = (*cuts[tensor], *alone) if tensor in cuts else alone
        own = {file.path for file in self._files.values()}
        apart: dict[int, tuple[Box, ...]] = {}  # boxes in objects, and in files of other kinds
        for made in (*whole.values(), *(file for file in files if file.path not in own)):
            for array in made.arrays:
                apart[array.tensor] = (*apart.get(array.tensor, ()), array.box)
        return ItemPlaces(self.tensors, files, cuts, apart)


class ItemPlaces:
    """`core.target.Places` of such files."""

    listable = True

    def __init__(
        self,
        tensors: Sequence[WantedTensor],
        files: Sequence[TargetFile],
        cuts: Mapping[int, tuple[tuple[StoredItem, ...], ...]],
        apart: Mapping[int, tuple[Box, ...]],
    ) -> None:
        self._tensors = tensors
        self._files = files
        numbers: dict[tuple[object, ...], int] = {}
        self._groups: list[int] = []
        self._boxes: list[list[Box]] = []
        known: dict[tuple[int, int], int] = {}  # by the cuts, which shares of one run have in common, and the shape
        for number, tensor in enumerate(tensors):
            mine = cuts.get(number, ())
            others = apart.get(number, ())
            group = None if others else known.get((id(mine), id(tensor.shape)))
            if group is None:
                key = (tensor.shape, others, *map(id, mine))
                group = numbers.setdefault(key, len(numbers))
                if group == len(self._boxes):
                    self._boxes.append([*(item.box for cut in mine for item in cut), *others])
                if not others:
                    known[id(mine), id(tensor.shape)] = group
            self._groups.append(group)
        last = dict(zip(self._groups, range(len(tensors)), strict=True))
        self._members = {group: (count, last[group]) for group, count in Counter(self._groups).items()}

    def group(self, tensor: int) -> int:
        """The group of a wanted tensor: all its members are split into the same boxes."""
        return self._groups[tensor]

    def groups(self) -> Mapping[int, tuple[int, int]]:
        """Group -> (number of its tensors, index of the last of them)."""
        return self._members

    def boxes(self, group: int) -> Sequence[Box]:
        """The boxes into which each tensor of a group is split."""
        return self._boxes[group]

    @cached_property
    def _placed(self) -> list[list[tuple[int, TargetArray]]]:
        placed: list[list[tuple[int, TargetArray]]] = [[] for _ in self._tensors]
        for number, file in enumerate(self._files):
            for array in file.arrays:
                placed[array.tensor].append((number, array))
        return placed

    def of(self, tensor: int) -> Sequence[tuple[int, TargetArray]]:
        """(index of the file, array) for each stored array of a wanted tensor."""
        return self._placed[tensor]

    def identity(self) -> str:
        """A digest of the paths, sizes, literal bytes and patches of all files."""
        from hashlib import blake2b  # as in `Plan.identifier`

        digest = blake2b(digest_size=16)
        for file in self._files:
            said = repr((file.path, file.size, list(file.literals), list(file.patches)))
            digest.update(said.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
