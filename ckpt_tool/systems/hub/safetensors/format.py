"""Format `safetensors`: a Hugging Face model, one file or many, with or without an index.

Specification
-------------
One file: `model.safetensors`; its bytes are specified in `safetensors_files.safetensors_file`.
Many files: `model-00001-of-00003.safetensors`, ... and `model.safetensors.index.json` (see `formats.hub_folder.index`);
any stem is read (`diffusion_pytorch_model`, ...). A tensor lies whole in one file. Each file's `__metadata__` is
`{"format": "pt"}`, without which transformers refuses to load it; torchao states its tensors there
(`formats.hub_folder.subclasses`). Packing: tensors in the model's order; a file is closed when the next tensor
would push it over the limit; a tensor larger than the limit gets a file of its own, and the file that was open stays
open (so it is numbered after it). With tied embeddings the alias is not on disk. Source: transformers 5.23.0
`modeling_utils.save_pretrained`; huggingface_hub 2.4.0 `serialization/_base.py`; safetensors 0.8.0 `tensor.rs`.

Also read: numbered files without an index (all must be there); folders of plain safetensors files (their union); the
per-rank shards of torch's `HuggingFaceStorageWriter` (`systems.hub.safetensors.shards`), also those in `sharded/` where
the consolidated files were never written.

Example: a folder with `config.json`, the index and two files of 10 tensors gives a catalog of 20 tensors of state
`model`, `sidefiles == ("config.json",)`, and `files` the index and the two.

Cost: one open and two preads a file, 1 us and 70 bytes a tensor. Holds the model alone: no optimizer, no extras.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog, Note, Unread, faults_of
from ckpt_tool.core.faults import read_each, together
from ckpt_tool.core.gc_pause import gc_paused
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError, InternalError, UnknownFormat
from ckpt_tool.formats.base import AS_IS, Evidence, Holds, ReadOptions, Specificity
from ckpt_tool.formats.beside import of_a_trainer
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.hub_folder.averages import has_average, sort_averages_out
from ckpt_tool.formats.hub_folder.index import DELTA, Index, read_index, write_index
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
from ckpt_tool.formats.hub_folder.modules import module_files, modules_note
from ckpt_tool.formats.hub_folder.packing import pack
from ckpt_tool.formats.hub_folder.saved_by import MLX, SavedBy
from ckpt_tool.formats.two_models import refuse_file_next_to_index, refuse_file_next_to_numbered
from ckpt_tool.storage.safetensors_files.safetensors_entries import warning_code
from ckpt_tool.storage.safetensors_files.safetensors_file import (
    SafetensorsHeader,
    build_header,
    looks_like_header,
    read_header,
)
from ckpt_tool.storage.safetensors_files.safetensors_table import HeaderTable, first_twice
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.hub.safetensors import shards as hf_shards

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import Target, TargetFile, Wanted, WantedTensor

METADATA = {"format": "pt"}
HEAD = 4 << 10  # bytes that `detect` looks at in a single file

NOT_READ = "E1640"
MISSING_SHARDS = "E0380"
NOT_IN_SHARD = "E0381"
NOT_IN_INDEX = "E0382"
TWICE = "E0383"
NO_GLOBAL_SHAPE = "W-no-global-shape"
TOTAL_SIZE = "W-total-size"
EXTRA = "W-extra-tensors"


class HfSafetensors:
    """The format object. Options of `read`: `lenient` (bool): white space before a header and tensors that the index
    does not name are noted instead of refused; `prefer` (str): the index to read by, the one file beside it, or
    `files`: the files without the index."""

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
        """By the names in a folder; by the first bytes of a single file, a damaged one by its name."""
        chosen = _choose(tree, None)
        if chosen is None:
            return None
        named = chosen.kind in ("index", "numbered", "ranks") or chosen.files == (STEM + SUFFIX,)
        if tree.single is not None:
            named = chosen.why != BY_NAME
        return Evidence(
            chosen.why,
            Specificity.NAMES if named else Specificity.CONTAINER,
            hf_files.claimed(chosen, tree.names()),
            loader="transformers" if named and chosen.kind != "ranks" else "",
        )

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog from headers alone. Raises InputError / UnsafeInput; all files at fault are named at once."""
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
        catalog = _read(tree, chosen, lenient=options.lenient, forced=options.forced)
        if not prefer and BIN_INDEX in tree.listing():
            _agree(tree, catalog)
        if tree.single is None and of_a_trainer(tree.names()):
            from ckpt_tool.formats.state_dict.beside_model import with_optimizer

            catalog = with_optimizer(tree, catalog, options, in_order=False)
        return _with_ignored(tree, catalog)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The whole output: one file where it fits `shard_size` (or one is asked for), else files and their index.
        Raises UsageError E3015 for names that a reader takes for averages."""
        return _target(wanted)


FORMAT = HfSafetensors()
BIN_INDEX = "pytorch_model.bin.index.json"
BY_NAME = "its name"  # all that speaks for a single file
_NO_SHAPES = Note(
    NO_GLOBAL_SHAPE, "the shards record no global shapes: a tensor whose last part is missing reads as a smaller one"
)


def _agree(tree: Tree, catalog: Catalog) -> None:
    """The old `.bin` index beside the safetensors must name the same tensors, or one of the two is of another save."""
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


# -- reading ----------------------------------------------------------------------------------------------------------


def _choose(tree: Tree, prefer: str | None) -> FileSet | None:
    if tree.single is None:
        return hf_files.choose(tree.listing(), prefer=prefer)
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


def read_of(tree: Tree, files: Sequence[str], options: ReadOptions = AS_IS) -> Catalog:
    """The catalog of these files (safetensors and perhaps their index) of a folder, whatever else lies there."""
    chosen = hf_files.choose(files)
    if chosen is None:
        raise InternalError(f"no safetensors among {files}")
    return _with_ignored(tree, _read(tree, chosen, lenient=options.lenient, forced=options.forced))


def _with_ignored(tree: Tree, catalog: Catalog) -> Catalog:
    """The catalog with a note on what else lies in the folder."""
    listing = [] if tree.single else tree.seen(tree.listing())
    notes = (*hf_files.ignored(listing, (*catalog.files, *catalog.sidefiles)), *modules_note(tree))
    return replace(catalog, notes=(*catalog.notes, *notes)) if notes else catalog


@gc_paused()
def _read(tree: Tree, chosen: FileSet, *, lenient: bool, forced: bool) -> Catalog:
    hf_files.check(chosen, path=tree.display())
    notes = list(chosen.notes)
    if chosen.index is not None:
        headers, found = _read_indexed(tree, chosen.index, lenient=lenient, forced=forced)
        notes += found
    else:
        headers = _read_headers(tree, chosen.files, lenient=lenient)

    notes += [Note(warning_code(warning), warning, header.path) for header in headers for warning in header.warnings]
    tensors: Mapping[TensorKey, LogicalTensor]
    unread: tuple[Unread, ...] = ()

    if chosen.kind == "ranks" or any(hf_shards.INFO in header.metadata for header in headers):
        tensors, found = _gather(tree, headers, lenient=lenient)
        notes += found
        if chosen.index is None:
            notes.append(_NO_SHAPES)
    else:
        if chosen.index is None:  # an index names each tensor once, and its files hold just what it names
            _refuse_twice(tree, headers)
        tensors = HeaderTable(headers)
        if has_average(headers):
            tensors, unread, found = sort_averages_out(tensors)
            notes += found

    files = ((chosen.index,) if chosen.index else ()) + tuple(header.path for header in headers)
    sidefiles = _sidefiles(tree, chosen)
    stems = {name for name in STEMS[1:] if files and files[-1].startswith(name)}
    return Catalog(
        FORMAT.name,
        tensors,
        extras=_extras(headers),
        files=files,
        sidefiles=sidefiles,
        notes=tuple(notes),
        unread=unread,
        hints=Hints.of(*map(Stem, stems), *_saved_by(headers)),
    )


def _read_headers(tree: Tree, files: Sequence[str], *, lenient: bool) -> list[SafetensorsHeader]:
    """Every header; all files at fault are named at once."""
    return read_each(files, lambda file: read_header(tree, file, lenient=lenient))


def _delta(tree: Tree, path: str) -> UnknownFormat:
    """A folder of slime's `weight_vNNNNNN`: compressed differences to the version before, under the model's names."""
    return UnknownFormat(
        "the changes since another version of the model (slime's disk deltas), not a model",
        code=NOT_READ,
        path=tree.display(path),
        place=f"/metadata/{DELTA}",
        hint=f"ckpt patch BASE {tree.display()} OUT applies it; pass the base or a whole version",
    )


def _read_indexed(tree: Tree, path: str, *, lenient: bool, forced: bool) -> tuple[list[SafetensorsHeader], list[Note]]:
    """The headers of every file that the index at `path` names, and what is odd about them.

    Raises Incomplete (E0380) when files are missing, (E0381) when tensors are; InconsistentCheckpoint (E0383) for a
    tensor in two files, (E0382) for one that the index does not name.
    """
    index = read_index(tree, path)
    if DELTA in index.metadata and not forced:
        raise _delta(tree, path)

    missing = _refuse_missing(tree, index)
    shards = dict(index.shards)
    metadata = index.metadata
    total = len(index)
    for file in missing:
        del shards[file]

    del index  # its names go file by file as the headers' come, so that both never lie in memory whole
    headers: list[SafetensorsHeader] = []
    faults: list[CkptError] = []
    absent: list[tuple[str, str]] = []  # (tensor, file that should hold it)
    strangers: list[tuple[str, str]] = []  # (tensor, file that holds it unasked)
    tree.expect((file, 0, min(tree.size(file), 64 << 10)) for file in sorted(shards))

    for file in sorted(shards):
        column = shards.pop(file)
        try:
            header = read_header(tree, file, lenient=lenient)
        except InputError as fault:
            faults.append(fault)
            continue
        headers.append(header)
        have = header.names.encoded()
        if column.same(sorted(have)):  # indexes are sorted, and headers hold sorted runs
            continue
        wanted = set(column.encoded())
        if len(wanted) != len(have) or not wanted.issuperset(have):
            absent += [(name.decode(), file) for name in sorted(wanted.difference(have))]
            strangers += [(name.decode(), file) for name in have if name not in wanted]
            headers[-1] = header.keep(name in wanted for name in have)

    if faults:
        raise together(faults)
    if absent:
        report_missing(_absent(tree, absent, total), tensors={TensorKey(name): None for name, _ in absent})

    complete = not strangers and not missing and not absent
    notes = _total_size(path, metadata.get("total_size"), headers, whole=complete)
    if strangers:
        notes.append(_strangers(tree, path, strangers, lenient=lenient))
    return headers, notes


def _refuse_one_beside(tree: Tree, path: str) -> None:
    """Raise InconsistentCheckpoint E2874 where the file of the index's stem is next to it and no part of it."""
    one = path.removesuffix(INDEX_SUFFIX) + SUFFIX
    if one in tree.names():
        refuse_file_next_to_index(tree, one, path, read_index(tree, path).shards, most=SHOWN)


def _find_all_in_others(tree: Tree, index: Index) -> str:
    """What to say where the index names files that are missing and the folder's other files hold all of its tensors."""
    others = hf_files.choose(tree.names(), prefer=WITHOUT_INDEX) if tree.single is None else None
    if others is None or not others.files:
        return ""
    try:
        hf_files.check(others, path=tree.display())
        held = {str(name) for file in others.files for name in read_header(tree, file).names}
    except InputError:
        return ""
    wanted = {str(name) for names in index.shards.values() for name in names}
    return (
        f"the {len(others.files)} files here hold all {len(wanted)} tensors of the index, which names files of another "
        f"save: --prefer {WITHOUT_INDEX} reads them without it"
        if wanted <= held
        else ""
    )


def _refuse_missing(tree: Tree, index: Index) -> list[str]:
    """Raise Incomplete (E0380) that names every file of the index that is not there; return them where they are only
    reported."""
    listed = () if tree.single else tree.listing()
    missing = []
    for file, names in sorted(index.shards.items()):
        if file in listed:
            continue
        try:
            tree.size(file)  # not listed: missing, or a folder, which is refused here
        except Incomplete:
            missing.append((file, len(names)))
    if missing:
        lost = sum(count for _, count in missing)
        some = ", ".join(file for file, _ in missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
        fault = Incomplete(
            f"{len(missing)} of {len(index.shards)} files are missing: {some};"
            f" they hold {lost} of {len(index)} tensors",
            code=MISSING_SHARDS,
            path=tree.display(index.path),
            faults=(f"missing: {file} ({count} tensors)" for file, count in missing[1:100]),
            hint=_find_all_in_others(tree, index) or "fetch the missing files into this folder",
        )
        tensors = {TensorKey(str(name)): None for file, _ in missing for name in index.shards[file]}
        report_missing(fault, files=dict(missing), tensors=tensors)
    return [file for file, _ in missing]


def _absent(tree: Tree, absent: list[tuple[str, str]], total: int) -> Incomplete:
    name, file = absent[0]
    return Incomplete(
        f"{len(absent)} of {total} tensors of the index are not in their files; the first: {name[:200]} not in {file}",
        code=NOT_IN_SHARD,
        path=tree.display(file),
        key=name[:200],
        faults=(f"{name[:200]} not in {file}" for name, file in absent[1:100]),
        hint="index and files come from two saves: fetch both again; or, if the index has a name too many, "
        f"--prefer {WITHOUT_INDEX} reads the files without it",
    )


def _strangers(tree: Tree, path: str, strangers: list[tuple[str, str]], *, lenient: bool) -> Note:
    """A note where leniency allows it, else raises."""
    home = {name: file for file, names in read_index(tree, path).shards.items() for name in names}
    twice = [(name, file) for name, file in strangers if name in home]
    name, file = (twice or strangers)[0]
    if twice:
        message = f"tensor {name[:200]} is in {home[name]} and in {file}"
        hint = "two files claim the same tensor: remove the one of the older save"
    else:
        message = f"{len(strangers)} tensors are in the index's files, but not in the index; the first: {name[:200]}"
        hint = "index and files come from two saves, or the index was cut: fetch both again"
    if lenient:
        return Note(EXTRA, f"{message}; not read", file, name)
    raise InconsistentCheckpoint(
        message,
        code=TWICE if twice else NOT_IN_INDEX,
        path=tree.display(file),
        key=name[:200],
        hint=hint,
        faults=(f"{name[:200]} in {file}" for name, file in (twice or strangers)[1:100]),
    )


def _total_size(path: str, stated: object, headers: Sequence[SafetensorsHeader], *, whole: bool) -> list[Note]:
    """A note where the index states another size than the files have (`verify` makes it a finding). whole: the headers
    have all tensors of their files."""
    if whole:  # tensors tile a file's data
        actual = sum(header.nbytes for header in headers)
    else:
        actual = sum(kind.nbytes for header in headers for kind in header.kinds)
    if stated is None or stated == actual:
        return []
    return [Note(TOTAL_SIZE, f"the index states total_size {str(stated)[:40]}, the tensors have {actual} bytes", path)]


def _refuse_twice(tree: Tree, headers: Sequence[SafetensorsHeader]) -> None:
    twice = first_twice(headers)
    if twice is not None:
        name, file, other = twice
        raise InconsistentCheckpoint(
            f"tensor {name[:200]} is in {file} and in {other}",
            code=TWICE,
            path=tree.display(other),
            key=name[:200],
            hint="files of two models or two saves are mixed (or each is a rank's shard without its offsets):"
            " pass one of them",
        )


def _gather(
    tree: Tree, headers: Sequence[SafetensorsHeader], *, lenient: bool
) -> tuple[hf_shards.PartTable, list[Note]]:
    """DCP shards as one table, its cover checked here because no global shape says what it should be."""
    tensors, found = hf_shards.gather(headers, {h.path: tree.display(h.path) for h in headers}, lenient=lenient)
    if is_collecting():
        Catalog(FORMAT.name, tensors).check()
        return tensors, list(found)
    faults = list(faults_of(tensors.values()))
    if faults:
        faults[0].path = faults[0].path or tree.display()
        raise together(faults)
    return tensors, list(found)


def _saved_by(headers: Sequence[SafetensorsHeader]) -> list[SavedBy]:
    """The library that the files name as their own (`format`), where it is not one of those that save as torch does."""
    names = {header.metadata.get("format", "") for header in headers}
    return [SavedBy(MLX)] if MLX in names else []


def _extras(headers: Sequence[SafetensorsHeader]) -> dict[str, Any]:
    """What `__metadata__` says beyond its layout: what all files agree on, and by file where they differ."""
    common: dict[str, str] = {}
    differing: set[str] = set()
    for header in headers:
        for key, value in header.metadata.items():
            if key not in hf_shards.LAYOUT_KEYS and common.setdefault(key, value) != value:
                differing.add(key)
    if not common:
        return {}
    extras: dict[str, Any] = {"metadata": {key: common[key] for key in common if key not in differing}}
    if differing:
        by_file = {h.path: {key: h.metadata[key] for key in sorted(differing) if key in h.metadata} for h in headers}
        extras["metadata_by_file"] = {path: found for path, found in by_file.items() if found}
    return extras


def _sidefiles(tree: Tree, chosen: FileSet) -> tuple[str, ...]:
    if tree.single is None:
        return tuple(dict.fromkeys((*hf_files.side_files(tree), *module_files(tree))))
    if chosen.kind != "index":
        return ()
    found = []
    for name in hf_files.SIDEFILES_BY_NAME:
        try:
            tree.size(name)
        except Incomplete:
            continue
        found.append(name)
    return tuple(found)


# -- writing ----------------------------------------------------------------------------------------------------------


def _target(wanted: Wanted) -> Target:
    from ckpt_tool.core.target import Target, whole_file
    from ckpt_tool.formats.hub_folder.subclasses import Subclasses, header_of
    from ckpt_tool.formats.state_dict.averages import refuse_taken_for_averages

    if any(tensor.key.state != "model" for tensor in wanted.tensors):
        raise InternalError("a model-only format was asked for training state")
    refuse_taken_for_averages(wanted.tensors)
    said = METADATA | header_of(wanted.hints.get(Subclasses), (tensor.key.name for tensor in wanted.tensors))
    if wanted.single is not None:
        everything = range(len(wanted.tensors))
        return Target(FORMAT.name, (_file(wanted.single, wanted.tensors, everything, said),), single=wanted.single)
    own = wanted.hints.get(Stem)
    stem = own.name if own is not None and own.name in STEMS else STEM
    bins = pack([tensor.nbytes for tensor in wanted.tensors], wanted.shard_size)
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
