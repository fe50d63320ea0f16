"""Safetensors files of a folder as a catalog: by an index, by numbers, as ranks' shards, or all that are there.

What the files are is `formats.hub_folder.model_files`' answer, and the specification that of the format `safetensors`;
Mistral AI's consolidated files are read so too. Cost: one open and two preads a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.catalog import Catalog, Note, Unread, faults_of
from ckpt_tool.core.faults import read_each, together
from ckpt_tool.core.gc_pause import gc_paused
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError, InternalError, UnknownFormat
from ckpt_tool.formats.base import AS_IS, ReadOptions
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.hub_folder import shards as hf_shards
from ckpt_tool.formats.hub_folder.averages import has_average, sort_averages_out
from ckpt_tool.formats.hub_folder.index import DELTA, Index, read_index
from ckpt_tool.formats.hub_folder.model_files import (
    SHOWN,
    STEMS,
    WITHOUT_INDEX,
    FileSet,
    Stem,
)
from ckpt_tool.formats.hub_folder.modules import module_files, modules_note
from ckpt_tool.formats.hub_folder.saved_by import MLX, SavedBy
from ckpt_tool.storage.safetensors_files.safetensors_entries import warning_code
from ckpt_tool.storage.safetensors_files.safetensors_file import (
    SafetensorsHeader,
    read_header,
)
from ckpt_tool.storage.safetensors_files.safetensors_table import HeaderTable, first_twice
from ckpt_tool.storage.source import Tree

NOT_READ = "E1640"
MISSING_SHARDS = "E0380"
NOT_IN_SHARD = "E0381"
NOT_IN_INDEX = "E0382"
TWICE = "E0383"
NO_GLOBAL_SHAPE = "W-no-global-shape"
TOTAL_SIZE = "W-total-size"
EXTRA = "W-extra-tensors"
_NO_SHAPES = Note(
    NO_GLOBAL_SHAPE, "the shards record no global shapes: a tensor whose last part is missing reads as a smaller one"
)


def read_of(tree: Tree, files: Sequence[str], name: str, options: ReadOptions = AS_IS) -> Catalog:
    """The catalog of these files (safetensors and perhaps their index) of a folder, whatever else is there.

    name: the format's, for the catalog."""
    chosen = hf_files.choose(files)
    if chosen is None:
        raise InternalError(f"no safetensors among {files}")
    return note_ignored(tree, read_files(tree, chosen, name, lenient=options.lenient, forced=options.forced))


def note_ignored(tree: Tree, catalog: Catalog) -> Catalog:
    """The catalog with notes on files in the folder that are not read."""
    listing = [] if tree.single else tree.seen(tree.listing())
    notes = (*hf_files.ignored(listing, (*catalog.files, *catalog.sidefiles)), *modules_note(tree))
    return replace(catalog, notes=(*catalog.notes, *notes)) if notes else catalog


@gc_paused()
def read_files(tree: Tree, chosen: FileSet, name: str, *, lenient: bool, forced: bool) -> Catalog:
    """The catalog of the files that were chosen. name: the format's. forced: the user named it."""
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
        tensors, found = _gather(tree, headers, name, lenient=lenient)
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
        name,
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

    del index  # its names are released file by file as headers are read, so that both are never in memory completely
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
    tree: Tree, headers: Sequence[SafetensorsHeader], name: str, *, lenient: bool
) -> tuple[hf_shards.PartTable, list[Note]]:
    """DCP shards as one table, its cover checked here because no global shape says what it should be."""
    tensors, found = hf_shards.gather(headers, {h.path: tree.display(h.path) for h in headers}, lenient=lenient)
    if is_collecting():
        Catalog(name, tensors).check()
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
