"""Reading a DCP checkpoint: what `.metadata` lists, put into one catalog. `systems.torch.dcp.format` is the
specification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.hints import FileRanks, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.tensor import LogicalTensor, starts_of
from ckpt_tool.errors import UnknownFormat
from ckpt_tool.formats import checksums
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.dcp_container.dcp_items import DATA
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpListing, check_files, read_listing
from ckpt_tool.formats.dcp_container.dcp_state import State
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.state_dict.paths import Leaf, name_leaves
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.torch.dcp import folders as dcp_folders
from ckpt_tool.systems.torch.dcp.folders import DcpSave, Folders

_OF_ACCELERATE = ("random_states", "scheduler", "sampler", "custom_checkpoint", "scaler")

_PICKLES = (".pt", ".pth", ".pkl", ".bin")


def read_tree(tree: Tree, options: ReadOptions) -> Catalog:
    """Read the DCP saves of a tree into one catalog.

    Options and errors are those of `systems.torch.dcp.format`'s `read`.
    """
    saves = dcp_folders.find(tree.listing())
    if not saves:
        raise UnknownFormat(
            "no .metadata and no __*_*.distcp: this is no DCP folder",
            code="E0393",
            path=tree.display(),
            hint="pass the folder that holds .metadata",
        )
    dcp_folders.check(saves, tree.display())
    listings = read_each(saves, lambda save: read_listing(tree, save.folder, save.metadata), file=id)

    # Another system's keys are refused before the data files are looked for: the message is the more useful one.
    for listing in listings:
        if not options.forced:
            dcp_folders.refuse(
                listing.tensors,
                listing.objects,
                tree.display(listing.folder),
                finished=tree.exists(f"{listing.folder}metadata.json"),
            )
    check_files(tree, listings, saves[0].folder + saves[0].metadata[0])
    catalog = _DcpReading(tree, saves, listings).catalog(options)
    catalog.check()
    return catalog


class _DcpReading:
    """One read: tensors and objects of all listings, put into one catalog."""

    def __init__(self, tree: Tree, saves: Sequence[DcpSave], listings: Sequence[DcpListing]) -> None:
        self.tree = tree
        self.saves = saves
        self.state = State(tree, listings)

    def catalog(self, options: ReadOptions) -> Catalog:
        """The catalog of all saves."""
        state = self.state
        listings = self.state.listings
        extras = state.extras.finished()
        leaves = [Leaf(tensor.path, tensor.shape) for tensor in state.tensors]
        named = name_leaves(leaves, extras, path=self.tree.display(self._metadata()[0]), prefer=options.prefer)

        # A tensor whose state can't be named is listed as unread, so that the others remain readable.
        tensors, unread = set_apart(
            {
                key: LogicalTensor(key, tensor.shape, tensor.dtype, tensor.chunks, tensor.path)
                for key, tensor in zip(named.keys, state.tensors, strict=True)
            },
            named.faults,
        )
        files = state.files
        mesh = _mesh(tensors.values())
        hints = Hints.of(
            named.roots,
            Globals.each(*(each.globals for each in listings), state.items.globals),
            FileRanks(_ranks(files, mesh)),
            Folders.each(save.folder.rstrip("/") for save in self.saves if save.folder),
        )

        return Catalog(
            "dcp",
            tensors=tensors,
            extras=extras,
            mesh=mesh,
            files=(*self._metadata(), *files),
            sidefiles=(*hf_files.side_files(self.tree), *self._marker()),
            notes=(
                *named.notes,
                *state.notes(),
                *notes_of(unread),
                *self._beside(),
                *checksums.missing(self.tree, tensors.values(), required=options.require_checksums),
            ),
            unsafe=state.all_unsafe(),
            hints=hints,
            indexes=self._metadata(),
            unread=unread,
        )

    def _metadata(self) -> tuple[str, ...]:
        return tuple(save.folder + name for save in self.saves for name in save.metadata)

    def _marker(self) -> tuple[str, ...]:
        """Lightning's `meta.pt`, if it is there and safe to copy.

        Without it Lightning does not recognise the folder as a sharded checkpoint. It is not copied if its pickle names
        code, which must not reach an output.
        """
        if self.tree.single is not None or not self.tree.exists(dcp_folders.MARKER):
            return ()
        from ckpt_tool.storage.pickles.survey import unsafe_names

        return () if unsafe_names(self.tree, (dcp_folders.MARKER,)) else (dcp_folders.MARKER,)

    def _beside(self) -> Iterable[Note]:
        """Notes on a trainer's pickles that are not part of the saves.

        They are at the root and in folders of their own (`train/rank0.pt`, `dataloader/`, `extra_state/`).
        """
        taken = set(self.state.files)
        marker = dcp_folders.MARKER
        if self.tree.single is None and self.tree.exists(marker):
            taken.add(marker)
            known = "Lightning knows its sharded checkpoints by it"
            text = f"{marker} names code in its pickle, and is not carried: copy it into the output, {known}"
            if self._marker():
                text = f"{marker} is copied as it is where the output is a DCP folder: {known}"
            yield Note("N-beside", text, marker)
        beside = [
            name
            for name in self.tree.listing()
            if name not in taken and (name.endswith(_PICKLES) or ("/" not in name and name.startswith(_OF_ACCELERATE)))
        ]
        if beside:
            more = f" and {len(beside) - 20} more" if len(beside) > 20 else ""
            shown = f"{', '.join(beside[:20])}{more}"
            yield Note("N-beside", f"next to the DCP folders, not read and not carried: {shown}")


def _mesh(tensors: Iterable[LogicalTensor]) -> Mesh:
    """The parallel degrees that the boxes suggest; `.metadata` does not state a mesh.

    Tensors that are cut along dim 0 alone count as data parallel shards, cuts along any other dim as tensor parallel.
    """
    rows = columns = both = 1  # `both`: cuts along dim 0 of the tensors that are cut along another dim too
    for tensor in tensors:
        if len(tensor.chunks) < 2 or not tensor.shape:
            continue
        cuts = starts_of(tensor.chunks, len(tensor.shape))
        inner = max(cuts[1:], default=1)
        rows = max(rows, cuts[0])
        columns = max(columns, inner)
        if inner > 1:
            both = max(both, cuts[0])
    if columns == 1:
        return Mesh.of(dp=rows)
    return Mesh.of(tp=columns, dp=both)


def _ranks(files: Iterable[str], mesh: Mesh) -> dict[str, dict[str, int]]:
    """The rank that wrote each file, from its name: a dp coordinate if dp is the only degree, else the bare rank."""
    dims = dict(mesh.dims)
    ranks: dict[str, int] = {}
    for file in files:
        match = DATA.fullmatch(file.rpartition("/")[2])
        if match:
            ranks[file] = int(match[1])
    dim = "dp" if set(dims) == {"dp"} and max(ranks.values(), default=0) < dims["dp"] else "rank"
    return {file: {dim: rank} for file, rank in ranks.items()}
