"""Reading a DCP checkpoint: what `.metadata` lists, put into one catalog. `formats.dcp.format` is the specification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckpt_tool.core.catalog import Catalog, Note, mark_replicas
from ckpt_tool.core.faults import both, for_each
from ckpt_tool.core.hints import FileRanks, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.tensor import LogicalTensor, Path, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import InputError, UnknownFormat, UnsafeInput
from ckpt_tool.formats import checksums
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.containers.dcp_items import DATA, Items, ReadObject
from ckpt_tool.formats.containers.dcp_metadata import Listing, TensorEntry, check_files, read_listing
from ckpt_tool.formats.dcp import folders as dcp_folders
from ckpt_tool.formats.dcp.folders import Folders, Save
from ckpt_tool.formats.hf import files as hf_files
from ckpt_tool.formats.state_dict.paths import Leaf, name_leaves
from ckpt_tool.formats.state_dict.tree import SLOT, part
from ckpt_tool.storage import pickles
from ckpt_tool.storage.pickle_values import WrapperRef
from ckpt_tool.storage.source import Tree

DTENSOR = "E2607"


def read_tree(tree: Tree, options: ReadOptions) -> Catalog:
    """The catalog; see `format` for options and errors."""
    saves = dcp_folders.find(tree.listing())
    if not saves:
        raise UnknownFormat(
            "no .metadata and no __*_*.distcp: this is no DCP folder",
            code="E0393",
            path=tree.display(),
            hint="pass the folder that holds .metadata",
        )
    dcp_folders.check(saves, tree.display())
    listings = for_each(saves, lambda save: read_listing(tree, save.folder, save.metadata), file=id)
    for listing in listings:
        if not options.forced:
            dcp_folders.refuse(
                listing.tensors,
                listing.objects,
                tree.display(listing.folder),
                finished=tree.exists(f"{listing.folder}metadata.json"),
            )
    check_files(tree, listings, saves[0].folder + saves[0].metadata[0])
    catalog = _Reading(tree, saves, listings).catalog(required=options.require_checksums)
    catalog.check()
    return catalog


class _Reading:
    """One read: tensors and objects of all listings, put into one catalog."""

    def __init__(self, tree: Tree, saves: Sequence[Save], listings: Sequence[Listing]) -> None:
        self.tree = tree
        self.saves = saves
        self.listings = listings
        self.items = Items(tree)
        self.notes: list[Note] = []
        self.unsafe: list[str] = []
        self.leaves: list[Leaf] = []
        self.tensors: list[LogicalTensor] = []  # keys are given later
        self.extras = _Extras()

    def _items(self, listing: Listing) -> tuple[dict[str, list[StoredArray]], dict[str, ReadObject]]:
        """Where the pieces of a listing lie, and its objects; every file that does not read is named."""
        items, objects = self.items, list(listing.objects.values())
        return both(
            lambda: items.arrays(listing.tensors.values()),
            lambda: {read.entry.fqn: read for read in items.objects(objects)},
        )

    def catalog(self, *, required: bool) -> Catalog:
        for listing, (arrays, objects) in zip(
            self.listings, for_each(self.listings, self._items, file=id), strict=True
        ):
            for fqn, entry in listing.tensors.items():
                self._add(entry.path, _logical(entry, arrays.get(fqn, [])))
            for fqn in listing.objects:
                self._object(objects[fqn])
        extras = self.extras.finished()
        named = name_leaves(self.leaves, extras, path=self.tree.display(self._metadata()[0]))
        tensors = {
            key: LogicalTensor(key, tensor.shape, tensor.dtype, tensor.chunks, tensor.path)
            for key, tensor in zip(named.keys, self.tensors, strict=True)
        }
        files = [file for listing in self.listings for file in listing.files]
        mesh = _mesh(tensors.values())
        hints = Hints.of(
            named.roots,
            Globals.each(*(each.globals for each in self.listings), self.items.globals),
            FileRanks(_ranks(files, mesh)),
            Folders.each(save.folder.rstrip("/") for save in self.saves if save.folder),
        )
        return Catalog(
            "dcp",
            tensors,
            extras,
            mesh,
            (*self._metadata(), *files),
            tuple(name for name in self.tree.names() if hf_files.is_sidefile(name)),
            (*named.notes, *self._notes(files), *checksums.missing(self.tree, tensors.values(), required=required)),
            tuple(
                dict.fromkeys((*(u for each in self.listings for u in each.unsafe), *self.items.unsafe, *self.unsafe))
            ),
            hints,
            indexes=self._metadata(),
        )

    def _metadata(self) -> tuple[str, ...]:
        return tuple(save.folder + name for save in self.saves for name in save.metadata)

    def _add(self, path: Path, tensor: LogicalTensor) -> None:
        self.leaves.append(Leaf(path, tensor.shape))
        self.tensors.append(LogicalTensor(TensorKey(""), tensor.shape, tensor.dtype, tensor.chunks, path))
        self.extras.slot(path)

    def _object(self, read: ReadObject) -> None:
        """An object item: plain values into the extras; tensors inside it are tensors like others."""
        entry, value = read.entry, read.value
        shown = self.tree.display(entry.file)
        try:
            pickles.refuse_weight_bearing(value, shown)
        except UnsafeInput as e:
            self.unsafe.append(f"{e.message} (item {entry.fqn} of {shown})")
        parted = part(value, entry.path)
        self.unsafe += [f"{line} (item {entry.fqn} of {shown})" for line in parted.hanging]
        for path, ref in parted.leaves:
            if isinstance(ref, WrapperRef):
                raise InputError(
                    f"a {ref.name} was pickled whole into an object item",
                    code=DTENSOR,
                    path=shown,
                    offset=entry.at,
                    key=entry.fqn,
                    hint="save the state dict flattened (flatten_state_dict=True)",
                )
            self._add(path, simple_tensor(TensorKey(""), read.zip.array(ref)))
        if parted.extras is not SLOT and (parted.extras != {} or not parted.leaves):
            self.extras.put(entry.path, parted.extras)

    def _notes(self, files: Sequence[str]) -> Iterable[Note]:
        used = set(files)
        stray = [
            path
            for path in self.tree.listing()
            if path not in used
            and DATA.fullmatch(path.rpartition("/")[2])
            and any(path.startswith(save.folder) for save in self.saves)
        ]
        if stray:
            yield Note(
                "N-stray-files",
                f"{len(stray)} .distcp files belong to no item (left over from an older save): {', '.join(stray[:10])}",
            )
        for listing in self.listings:
            if listing.differing:
                yield Note(
                    "N-rank-objects",
                    f"{len(listing.differing)} objects were saved by every rank; rank 0's are taken, such as "
                    f"{listing.differing[0].fqn}",
                )
        beside = [
            name
            for name in self.tree.names()
            if name.startswith(("random_states", "scheduler", "sampler", "custom_checkpoint", "scaler"))
        ]
        if beside:
            yield Note("N-beside", f"beside the DCP folders, not read and not carried: {', '.join(beside[:20])}")


def _logical(entry: TensorEntry, arrays: Sequence[StoredArray]) -> LogicalTensor:
    chunks = entry.chunks(arrays)
    placed = mark_replicas(chunks) if len(chunks) > 1 else tuple(chunks)
    return LogicalTensor(TensorKey(""), entry.shape, entry.dtype, placed, entry.path)


class _List(dict[Any, Any]):
    """A list of the extras while its positions are met in any order."""


class _Extras:
    """The nested extras, built from paths whose integers are list positions."""

    def __init__(self) -> None:
        self.root: dict[Any, Any] = {}

    def put(self, path: Path, value: Any) -> None:
        node = self._node(path[:-1], path[-1])
        known = node.get(path[-1])
        if isinstance(known, dict) and isinstance(value, dict):
            known.update(value)
        else:
            node[path[-1]] = value

    def slot(self, path: Path) -> None:
        """A tensor lies at `path`: keep its place in the lists on the way."""
        last = max((i for i, step in enumerate(path) if type(step) is int), default=None)
        if last is not None:
            self._node(path[:last], path[last]).setdefault(path[last], SLOT)

    def _node(self, path: Path, step: str | int) -> dict[Any, Any]:
        node = self.root
        for here, below in zip(path, (*path[1:], step), strict=False):
            child = node.get(here)
            if not isinstance(child, dict):
                child = node[here] = _List() if type(below) is int else {}
            node = child
        return node

    def finished(self) -> dict[str, Any]:
        return {key: _finish(value) for key, value in self.root.items()}


def _finish(value: Any) -> Any:
    if type(value) is _List:
        positions = [step for step in value if type(step) is int]
        if len(positions) == len(value) and max(positions) < 2 * len(positions) + 1000:
            return [_finish(value.get(i)) for i in range(max(positions) + 1)]
    if isinstance(value, dict):
        return {key: _finish(item) for key, item in value.items()}
    return value


def _mesh(tensors: Iterable[LogicalTensor]) -> Mesh:
    """The degrees that the boxes show: cuts along dim 0 alone are data shards, cuts along other dims tensor
    parallel."""
    rows = columns = both = 1
    for tensor in tensors:
        if len(tensor.chunks) < 2 or not tensor.shape:
            continue
        cuts = [len({chunk.box.offset[d] for chunk in tensor.chunks}) for d in range(len(tensor.shape))]
        inner = max(cuts[1:], default=1)
        rows, columns = max(rows, cuts[0]), max(columns, inner)
        if inner > 1:
            both = max(both, cuts[0])
    if columns == 1:
        return Mesh.of(dp=rows)
    return Mesh.of(tp=columns, dp=both)


def _ranks(files: Iterable[str], mesh: Mesh) -> dict[str, dict[str, int]]:
    """Which rank wrote each file, as its name says; as a dp coordinate where dp is all there is."""
    dims = dict(mesh.dims)
    ranks = {file: int(found[1]) for file in files if (found := DATA.fullmatch(file.rpartition("/")[2]))}
    dim = "dp" if set(dims) == {"dp"} and max(ranks.values(), default=0) < dims["dp"] else "rank"
    return {file: {dim: rank} for file, rank in ranks.items()}
