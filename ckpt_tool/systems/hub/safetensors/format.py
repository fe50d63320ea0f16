"""Format `safetensors`: a Hugging Face model, one file or many, with or without an index.

Specification
-------------
One file: `model.safetensors`; its bytes are specified in `safetensors_files.safetensors_file`.
Many files: `model-00001-of-00003.safetensors`, ... and `model.safetensors.index.json` (see `formats.hub_folder.index`);
any stem is read (`diffusion_pytorch_model`, ...). A tensor is never split between files. Each file's `__metadata__` is
`{"format": "pt"}`, without which transformers refuses to load it; torchao states its tensors there
(`formats.hub_folder.subclasses`). Packing: tensors in the model's order; a file is closed when the next tensor
would push it over the limit; a tensor larger than the limit gets a file of its own, and the file that was open stays
open (so it is numbered after it). With tied embeddings the alias is not on disk. Source: transformers 5.23.0
`modeling_utils.save_pretrained`; huggingface_hub 2.4.0 `serialization/_base.py`; safetensors 0.8.0 `tensor.rs`.

Also read: numbered files without an index (all must be there); folders of plain safetensors files (their union); the
per-rank shards of torch's `HuggingFaceStorageWriter` (`formats.hub_folder.shards`), also those in `sharded/` where
the consolidated files were never written.

Example: a folder with `config.json`, the index and two files of 10 tensors gives a catalog of 20 tensors of state
`model`, `sidefiles == ("config.json",)`, and `files` the index and the two.

Cost: one open and two preads a file, 1 us and 70 bytes a tensor. Holds the model alone: no optimizer, no extras.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import InconsistentCheckpoint, InternalError, UnknownFormat
from ckpt_tool.formats.adapters.lone import CONFIG
from ckpt_tool.formats.base import AS_IS, Evidence, Holds, ReadOptions, Specificity
from ckpt_tool.formats.beside import of_a_trainer
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.hub_folder.index import read_index, write_index
from ckpt_tool.formats.hub_folder.model_files import (
    INDEX_SUFFIX,
    SHOWN,
    STEM,
    STEMS,
    SUFFIX,
    WITHOUT_INDEX,
    FileSet,
    Stem,
)
from ckpt_tool.formats.hub_folder.packing import pack
from ckpt_tool.formats.hub_folder.read import note_ignored, read_files
from ckpt_tool.formats.two_models import refuse_file_next_to_index, refuse_file_next_to_numbered
from ckpt_tool.storage.safetensors_files.safetensors_file import (
    build_header,
    looks_like_header,
)
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import Target, TargetFile, Wanted, WantedTensor

METADATA = {"format": "pt"}
HEAD = 4 << 10  # bytes that `detect` looks at in a single file


class HfSafetensors:
    """The format `safetensors`.

    Options of `read`: `lenient` (bool): white space before a header and tensors that the index does not name are noted
    instead of refused; `prefer` (str): the index to read by, the single file next to it, or `files`: the files without
    the index.
    """

    name = "safetensors"
    holds = Holds(
        all_states=False,
        extras=False,
        single=(".safetensors",),
        dialect="hf",
        dtypes=frozenset({"C128"}),
        uses_options=frozenset({"max-shard-size", "quantize", "repack"}),
        safetensors=True,
        lone_shards=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim a folder by its file names, and a single file by its first bytes; a damaged one by its name."""
        chosen = _choose(tree, None)
        if chosen is None:
            return None
        named = chosen.kind in ("index", "numbered", "ranks") or chosen.files == (STEM + SUFFIX,)
        if tree.single is not None:
            named = chosen.why != BY_NAME
        return Evidence(
            chosen.why,
            # Files with names of their own may be part of another format that uses safetensors.
            Specificity.NAMES if named else Specificity.CONTAINER,
            hf_files.claimed(chosen, tree.names()),
            loader="transformers" if named and chosen.kind != "ranks" else "",
        )

    def named(self, tree: Tree) -> frozenset[str]:
        """The claimed files, without an index that has no file of its stem next to it (`model-best...` of a user)."""
        evidence = self.detect(tree)
        files = evidence.files if evidence else frozenset[str]()
        alone = {
            path
            for path in files
            if path.endswith(INDEX_SUFFIX)
            and not any(other.startswith(f"{path.removesuffix(INDEX_SUFFIX)}-") for other in files)
        }
        return files - alone

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from headers alone. Raises InputError or UnsafeInput, which lists all faulty files at once."""
        prefer = options.prefer
        chosen = _choose(tree, prefer if isinstance(prefer, str) else None)
        if chosen is None and tree.single is not None:  # asked for by name: the header's fault says what it is
            chosen = hf_files.one_file(tree.single, "asked for")
        if chosen is None:
            raise UnknownFormat(
                "no safetensors files here", code="E0393", path=tree.display(), hint="pass the folder that holds them"
            )
        if chosen.index is not None and tree.single is None and prefer not in hf_files.names_of_index(chosen.index):
            _refuse_one_beside(tree, chosen.index)
        whole_file = hf_files.find_one_beside_numbered(chosen)
        if whole_file is not None and prefer != WITHOUT_INDEX:
            refuse_file_next_to_numbered(tree, whole_file, chosen.files, WITHOUT_INDEX, most=SHOWN)
        catalog = read_files(tree, chosen, self.name, lenient=options.lenient, forced=options.forced)
        # Some repositories have the model twice; transformers would silently take the safetensors.
        if not prefer and BIN_INDEX in tree.listing():
            _agree(tree, catalog)
        if tree.single is None and of_a_trainer(tree.names()):
            from ckpt_tool.formats.state_dict.beside_model import with_optimizer

            catalog = with_optimizer(tree, catalog, options, in_order=False)
        return note_ignored(tree, catalog)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output: one file if it fits `shard_size` (or is asked for), else several and their index.

        Raises UsageError E3015 for names that a reader takes for averages (EMA).
        """
        return _target(wanted)


FORMAT = HfSafetensors()
BIN_INDEX = "pytorch_model.bin.index.json"
BY_NAME = "its name"  # the reason if only its name shows that a single file is safetensors


def _agree(tree: Tree, catalog: Catalog) -> None:
    """Raise InconsistentCheckpoint E2604 if an old `.bin` index next to the safetensors lists other tensors.

    Then one of the two models is from another save.
    """
    theirs = {str(name) for names in read_index(tree, BIN_INDEX).shards.values() for name in names}
    if any(key.state != MODEL for key in catalog.tensors):  # averages, which have the names of their weights here
        return
    mine = {key.name for key in catalog.tensors}
    if theirs != mine:
        odd = sorted(theirs ^ mine)
        raise InconsistentCheckpoint(
            f"{BIN_INDEX} and the safetensors files name different tensors, {len(odd)} of them, such as {odd[0]}",
            code="E2604",
            path=tree.display(BIN_INDEX),
            hint="say which is right: --prefer safetensors, or --from torch",
            faults=odd[1:50],
        )


def _choose(tree: Tree, prefer: str | None) -> FileSet | None:
    """The files to read, None if this is not safetensors."""
    if tree.single is None:
        listing: Collection[str] = tree.listing()
        if CONFIG in listing:  # several files next to an adapter, and their index, are read with it
            from ckpt_tool.formats.adapters.beside import is_of_trained

            listing = [path for path in listing if not is_of_trained(path)]
        return hf_files.choose(listing, prefer=prefer)
    name = tree.single
    head = tree.head(name, HEAD)
    if looks_like_header(head, tree.size(name)):
        return hf_files.one_file(name, "a safetensors header")
    mapped = b'"weight_map"' in head and b'.safetensors"' in head
    if head.lstrip()[:1] == b"{" and (mapped or name.endswith(INDEX_SUFFIX)):
        return FileSet("index", "an index of safetensors files", index=name)
    if name.endswith(
        SUFFIX
    ):  # damaged, but by its name ours to say so; what is another format's by content is more specific
        return hf_files.one_file(name, BY_NAME)
    return None


def _refuse_one_beside(tree: Tree, path: str) -> None:
    """Raise InconsistentCheckpoint E2874 if a single file with the index's stem is next to it and not listed in it."""
    one = path.removesuffix(INDEX_SUFFIX) + SUFFIX
    if one in tree.names():
        refuse_file_next_to_index(tree, one, path, read_index(tree, path).shards, most=SHOWN)


# -- writing ----------------------------------------------------------------------------------------------------------


def _target(wanted: Wanted) -> Target:
    from ckpt_tool.core.target import Target, whole_file
    from ckpt_tool.formats.hub_folder.saved_by import SavedBy
    from ckpt_tool.formats.hub_folder.subclasses import Subclasses, header_of
    from ckpt_tool.formats.state_dict.averages import refuse_taken_for_averages

    if any(tensor.key.state != "model" for tensor in wanted.tensors):
        raise InternalError("a model-only format was asked for training state")
    refuse_taken_for_averages(wanted.tensors)
    said = METADATA | header_of(wanted.hints.get(Subclasses), (tensor.key.name for tensor in wanted.tensors))
    saved_by = wanted.hints.get(SavedBy)
    if saved_by is not None:  # the names are still those of that library: the next reader has to know
        said |= {"format": saved_by.name}
    if wanted.single is not None:
        everything = range(len(wanted.tensors))
        return Target(FORMAT.name, (_file(wanted.single, wanted.tensors, everything, said),), single=wanted.single)
    own = wanted.hints.get(Stem)
    stem = own.name if own is not None and own.name in STEMS else STEM
    bins = pack([tensor.nbytes for tensor in wanted.tensors], wanted.shard_size)  # indexes of tensors, by file
    copies = wanted.side_file_copies()
    if len(bins) < 2:
        one = bins[0] if bins else ()
        return Target(FORMAT.name, (_file(stem + SUFFIX, wanted.tensors, one, said), *copies), by_size=True)
    names = [f"{stem}-{number:05d}-of-{len(bins):05d}{SUFFIX}" for number in range(1, len(bins) + 1)]
    files = tuple(_file(name, wanted.tensors, rows, said) for name, rows in zip(names, bins, strict=True))
    weight_map = {wanted.tensors[row].key.name: name for name, rows in zip(names, bins, strict=True) for row in rows}
    index = write_index(
        weight_map,
        total_parameters=sum(prod(tensor.shape) for tensor in wanted.tensors),
        total_size=sum(tensor.nbytes for tensor in wanted.tensors),
    )
    return Target(FORMAT.name, (*files, whole_file(stem + INDEX_SUFFIX, index), *copies), by_size=True)


def _file(path: str, tensors: Sequence[WantedTensor], rows: Sequence[int], metadata: Mapping[str, str]) -> TargetFile:
    from ckpt_tool.core.target import TargetArray, TargetFile

    chosen = [tensors[row] for row in rows]
    head, offsets, size = build_header([(each.key.name, each.dtype, each.shape) for each in chosen], metadata)
    arrays = (
        TargetArray(row, whole(each.shape), offset) for row, each, offset in zip(rows, chosen, offsets, strict=True)
    )
    return TargetFile(path, size, ((0, head),), tuple(arrays))
