"""Writing a DCP folder: `__{rank}_0.distcp` with one torch.save zip an item, and `.metadata`.

The one idea: an item's zip depends on nothing but dtype and shape, so it is laid out once for each such pair and moved
to where it belongs; of a checkpoint with 100,000 boxes only a few hundred heads are ever made.

    model.w F32 (4, 2) on dp 2   ->  __0_0.distcp: [objects][zip of rows 0-1]   __1_0.distcp: [zip of rows 2-3]
    .metadata: model.w: chunks [(0, 0) (2, 2), (2, 0) (2, 2)], items (__0_0.distcp, ...), (__1_0.distcp, 0, 1577)

As torch 2.13 writes it (`filesystem.py`, `default_planner.py`, `_traverse.py`): objects before tensors, objects in rank
0's file; each box once, by the rank that holds its first replica; the number in a file's name is the rank's place in
the mesh (tp fastest); no file for a rank that has nothing; metadata of protocol 4, `version` "1.0.0", `planner_data`
always. Not as torch: items begin at multiples of 64 bytes, so that storages are aligned in the file too; `save_id` and
`checkpoint_id` are None, so that equal input gives equal bytes. Empty dicts leave nothing, as with torch itself.

A checkpoint of accelerate keeps its two folders, each with its own `.metadata`; one more at the root lists both, so
that torch loads the whole by one call. Cost: a few us a box. What it does not do: padding, replicas, compression.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.layout import Layout, Placement
from ckpt_tool.core.target import Patch, Target, TargetArray, TargetFile, Wanted, WantedTensor, whole_file
from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.dcp.folders import METADATA, is_pair
from ckpt_tool.formats.dcp.metadata_pickle import MetadataPickle
from ckpt_tool.formats.state_dict.nesting import nest
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.storage.pickle_writer import dumps, stored
from ckpt_tool.storage.zip_plan import ZipPlan, plan_zip

ROOT = "archive"  # the top folder in an item's zip, as torch.save to a buffer names it
ALIGNMENT = 64  # bytes between items


class _Slot(NamedTuple):
    """Tensor `number` of the wanted ones."""

    number: int


class _Item(NamedTuple):
    """An item that lies: its key, the box's offset (None: an object), file, byte, bytes."""

    fqn: str
    offset: tuple[int, ...] | None
    file: str
    at: int
    nbytes: int
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class _File:
    """A `.distcp` file in the making."""

    path: str
    size: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    arrays: list[TargetArray] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)

    def add(self, plan: ZipPlan, arrays: list[tuple[int, Box]]) -> int:
        """Append an item with these storages; returns the byte where it begins."""
        base = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.literals += [(base + at, piece) for at, piece in plan.literals]
        for (tensor, box), offset, holes in zip(arrays, plan.offsets, plan.crcs, strict=True):
            if box.numel == 0:
                continue
            self.patches += [Patch(base + hole, "crc32", len(self.arrays)) for hole in holes]
            self.arrays.append(TargetArray(tensor, box, base + offset))
        self.size = base + plan.size
        return base

    def finished(self) -> TargetFile:
        return TargetFile(self.path, self.size, tuple(self.literals), tuple(self.arrays), tuple(self.patches))


def dcp_target(wanted: Wanted, layout: Layout) -> Target:
    """The folder. Raises UsageError E0240 (two keys flatten to one), E0241, E0242 (a dtype torch lacks)."""
    nested = nest(wanted, [_Slot(i) for i in range(len(wanted.tensors))], whole_numbers=False)
    folders = _folders(wanted.hints)
    leaves: dict[str, tuple[Path, Any]] = {}
    for path, value in flatten(nested.tree):
        key = dotted(path)
        if key in leaves:
            raise UsageError(
                f"{leaves[key][0]} and {path} both flatten to {key!r}",
                code="E0240",
                key=key,
                hint="DCP joins keys by dots: rename one of them, or write another format",
            )
        leaves[key] = (path, value)
    writer = _Writer(wanted, layout, folders)
    for key, (path, value) in leaves.items():  # objects first, as torch orders a file
        if not isinstance(value, _Slot):
            writer.object(key, path, value)
    for key, (path, value) in leaves.items():
        if isinstance(value, _Slot):
            writer.tensor(key, path, value.number)
    files = writer.finished(leaves)
    copies = tuple(TargetFile(name, size, copy_of=name) for name, size in wanted.sidefiles)
    empty = list(_empty_dicts(nested.tree))
    lost = [f"empty dicts leave no trace in a DCP: {', '.join(empty[:20])}"] if empty else []
    return Target("dcp", (*files, *copies), notes=(*nested.notes, *lost))


def _empty_dicts(value: Any, path: Path = ()) -> Iterator[str]:
    if isinstance(value, Mapping):
        if not value and path:
            yield dotted(path)
        for key, item in value.items():
            yield from _empty_dicts(item, (*path, str(key)))
    elif isinstance(value, list) and not _terminal(value):
        for i, item in enumerate(value):
            yield from _empty_dicts(item, (*path, i))


def _folders(hints: Mapping[str, Any]) -> dict[str, str]:
    """accelerate's folders: first step of a path -> folder with a slash. {} for a plain checkpoint."""
    said = hints.get("folders", ())
    names = [str(name) for name in said] if isinstance(said, list | tuple) else []
    if len(names) != 2 or not is_pair(names) or any("/" in name for name in names):
        return {}
    optimizer = next(name for name in names if name.startswith("optim"))
    model = next(name for name in names if name != optimizer)
    return {"model": model + "/", "optimizer": optimizer + "/"}


def flatten(tree: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a nested state by torch's rule: dicts always flatten, lists when a tensor, a dict or such a list is
    in them, tuples never. Paths hold text for keys and integers for list positions."""
    for key, value in tree.items():
        yield from _flatten(value, (*path, str(key)))


def _flatten(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        yield from flatten(value, path)
    elif isinstance(value, list) and not _terminal(value):
        for i, item in enumerate(value):
            yield from _flatten(item, (*path, i))
    else:
        yield path, value


def _terminal(value: list[Any]) -> bool:
    return not any(
        isinstance(item, _Slot | Mapping) or isinstance(item, list) and not _terminal(item) for item in value
    )


class _Writer:
    """Lays items into files, and remembers where."""

    def __init__(self, wanted: Wanted, layout: Layout, folders: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.layout = layout
        self.folders = folders
        self.files: dict[str, _File] = {}
        self.items: dict[str, list[_Item]] = {}
        self._zips: dict[tuple[DType, tuple[int, ...]], ZipPlan] = {}
        self._boxes: dict[tuple[Placement, tuple[int, ...]], list[tuple[int, Box]]] = {}

    def _file(self, rank: int, path: Path) -> _File:
        folder = self.folders.get(str(path[0]), next(iter(self.folders.values()), ""))
        name = f"{folder}__{rank}_0.distcp"
        return self.files.setdefault(name, _File(name))

    def object(self, key: str, path: Path, value: Any) -> None:
        """An object item, in rank 0's file; tensors inside it (in a tuple) lie in the item's zip, whole."""
        inside: list[int] = []
        pickle = dumps(self._filled(value, inside))
        tensors = [self.wanted.tensors[i] for i in inside]
        plan = plan_zip(ROOT, pickle, [(str(n), tensor.nbytes) for n, tensor in enumerate(tensors)])
        file = self._file(0, path)
        at = file.add(plan, [(i, whole(self.wanted.tensors[i].shape)) for i in inside])
        self.items[key] = [_Item(key, None, file.path, at, plan.size)]

    def _filled(self, value: Any, inside: list[int]) -> Any:
        if isinstance(value, _Slot):
            tensor = self.wanted.tensors[value.number]
            inside.append(value.number)
            return stored(str(len(inside) - 1), tensor.shape, _held(tensor))
        if isinstance(value, tuple):
            return tuple(self._filled(item, inside) for item in value)
        if isinstance(value, list):
            return [self._filled(item, inside) for item in value]
        if isinstance(value, Mapping):
            return {key: self._filled(item, inside) for key, item in value.items()}
        return value

    def tensor(self, key: str, path: Path, index: int) -> None:
        tensor = self.wanted.tensors[index]
        dtype = _held(tensor)
        placed = []
        for rank, box in self._held(index, tensor):
            file = self._file(rank, path)
            at = file.add(self._zip(dtype, box.shape), [(index, box)])
            placed.append(_Item(key, box.offset, file.path, at, self._zip(dtype, box.shape).size, box.shape))
        self.items[key] = placed

    def _zip(self, dtype: DType, shape: tuple[int, ...]) -> ZipPlan:
        plan = self._zips.get((dtype, shape))
        if plan is None:
            ref = stored("0", shape, dtype)
            plan = self._zips[dtype, shape] = plan_zip(ROOT, dumps(ref), [("0", ref.storage.nbytes)])
        return plan

    def _held(self, index: int, tensor: WantedTensor) -> list[tuple[int, Box]]:
        """(rank, box) of each box that is written: the first replica, empty boxes only of an empty tensor."""
        known = (self.layout.placements[index], tensor.shape)
        found = self._boxes.get(known)
        if found is None:
            numbers = {tuple(coords.items()): rank for rank, coords in enumerate(self.layout.mesh.ranks())}
            boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, Box]] = {}
            for held in self.layout.held(index, tensor.shape):
                if held.replica == 0 and (held.box.numel or 0 in tensor.shape):
                    rank = numbers[tuple(held.coords.items())]
                    boxes.setdefault((held.box.offset, held.box.shape), (rank, held.box))
            found = list(boxes.values())
            if 0 in tensor.shape:
                found = [(found[0][0] if found else 0, whole(tensor.shape))]
            self._boxes[known] = found
        return found

    def finished(self, leaves: Mapping[str, tuple[Path, Any]]) -> list[TargetFile]:
        out = [self.files[name].finished() for name in sorted(self.files, key=_by_rank)]
        for folder in self.folders.values():
            below = {
                key: leaf for key, leaf in leaves.items() if any(i.file.startswith(folder) for i in self.items[key])
            }
            if below:
                out.append(whole_file(folder + METADATA, self._metadata(below, folder)))
        out.append(whole_file(METADATA, self._metadata(leaves, "")))
        return out

    def _metadata(self, leaves: Mapping[str, tuple[Path, Any]], folder: str) -> bytes:
        """`.metadata` of these leaves, file names relative to `folder`."""
        writer = MetadataPickle()
        for key, (_, value) in leaves.items():
            if isinstance(value, _Slot):
                tensor = self.wanted.tensors[value.number]
                boxes = ((item.offset or (), item.shape) for item in self.items[key])
                writer.tensor(key, tensor.dtype, tensor.shape, boxes)
            else:
                writer.obj(key)
        items = (
            (key, item.offset, None if item.offset is None else number, item.file[len(folder) :], item.at, item.nbytes)
            for key in leaves
            for number, item in enumerate(self.items[key])
        )
        return writer.close({key: path for key, (path, _) in leaves.items()}, items)


def _held(tensor: WantedTensor) -> DType:
    if tensor.dtype.torch is None:
        raise UsageError(
            f"torch has no {tensor.dtype.name}",
            code="E0242",
            key=str(tensor.key),
            hint="cast it with --dtype, or write safetensors",
        )
    return tensor.dtype


def _by_rank(name: str) -> tuple[str, int]:
    folder, _, file = name.rpartition("/")
    return folder, int(file.split("_")[2])
