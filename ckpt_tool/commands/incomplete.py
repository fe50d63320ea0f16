"""`ckpt inspect` of an incomplete checkpoint: what is there, and what is missing.

    model-00002-of-00002.safetensors is gone     the tensors of the other file as usual, and `missing`:
      {"files": [{"path": "model-00002-of-00002.safetensors", "rank": {}, "tensors": 12, "bytes": None}],
       "tensors": [{"name": "lm_head.weight", "state": "model", "bytes": None}, ...], "bytes": None,
       "error": {"code": "E0380", ...}}

First the format's reader tries to go on without the missing part (`core.missing`). If it can't, because the rest has no
meaning without that part, every file is read alone: names and shapes are then those of the files, and each row names
its file. A format whose files no other reader understands does this itself (`formats.base.ReadsAlone`): items of a DCP
checkpoint without `.metadata`, parts of a flex checkpoint without its metadata, arrays of Orbax without `_METADATA`.

Commands that write never use this module: they refuse an incomplete checkpoint. Cost: the headers are read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpt_tool import errors
from ckpt_tool.core.catalog import Catalog, CatalogRow
from ckpt_tool.core.missing import MissingParts, collected_missing
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InputError, UnknownFormat
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import WEIGHT_SUFFIXES, FileContent, Format, ReadOptions, ReadsAlone, ranks_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import Opened, open_source
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.source import Tree

UNRECOGNISED = "E0390"  # no format recognises the folder
FILES_READ = 10_000  # at most so many files of a folder are read alone


class LookedInto(NamedTuple):
    """An incomplete checkpoint that its own format's reader could open."""

    opened: Opened
    parts: MissingParts


def is_broken(fault: CkptError) -> bool:
    """Does the error mean that files are missing, possibly so many that no format is recognised?"""
    return isinstance(fault, Incomplete) or (isinstance(fault, UnknownFormat) and fault.code == UNRECOGNISED)


def open_incomplete(src: str, reading: Reading) -> tuple[LookedInto | None, MissingParts]:
    """The checkpoint without its missing parts (None if its reader can't go on), and the parts known to be missing."""
    with collected_missing() as parts:
        try:
            opened = open_source(src, reading)
        except CkptError:  # the reader can't go on without the part: the caller then reads the files alone
            return None, parts
    return LookedInto(opened, parts), parts


def describe_missing(
    fault: CkptError, parts: MissingParts, fmt: Format | None, mesh: Mapping[str, int]
) -> dict[str, Any]:
    """The field `missing` of the document. fault: the error that a strict reader raises."""
    rank_of = None if fmt is None else ranks_of(fmt, mesh)
    files = [
        {
            "path": path,
            "rank": dict((rank_of(path) if rank_of is not None else None) or {}),
            "tensors": count,
            "bytes": parts.file_bytes.get(path),
        }
        for path, count in parts.files.items()
    ]
    tensors = [{"name": key.name, "state": key.state, "bytes": nbytes} for key, nbytes in parts.tensors.items()]
    return {
        "files": files,
        "tensors": tensors,
        "bytes": _sum_known(tensors) or _sum_known(files),
        "error": fault.to_json()["error"],
    }


def fault_of(document: Mapping[str, Any]) -> InputError | None:
    """The error recorded in a document's `missing`; None if nothing is missing, or if `--lenient` accepts it."""
    missing = document.get("missing")
    if not missing or missing["lenient"]:
        return None
    error = missing["error"]
    kind: type[InputError] = getattr(errors, errors.catalogue()[error["code"]].kind)
    return kind(
        error["message"],
        code=error["code"],
        path=error["path"],
        offset=error["offset"],
        place=error["place"],
        key=error["tensor"],
        hint=error["hint"],
        faults=error["faults"],
    )


def _sum_known(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The bytes of all rows, None if those of any row are unknown."""
    sizes = [row["bytes"] for row in rows]
    return sum(sizes) if sizes and None not in sizes else None


# -- each file alone ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FilesAlone:
    """The content of every file, read without the others."""

    format: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # the files that no reader can read alone

    def add(self, path: str, rows: Iterable[CatalogRow], unsafe: Iterable[str], notes: Iterable[str] = ()) -> None:
        """Add the content of one file."""
        self.unsafe.extend(line for line in unsafe if line not in self.unsafe)
        self.notes.extend(notes)
        for name, state, dtype, shape, nbytes in rows:
            row = {"name": name, "state": state, "dtype": dtype.name, "shape": list(dtype.elements(shape))}
            self.rows.append({**row, "bytes": nbytes, "file": path})


def read_files_alone(src: str, reading: Reading) -> FilesAlone:
    """The tensors of every file of weights, under the names that the file gives them."""
    tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    alone = FilesAlone(_format_name(tree, reading))
    if tree.single is not None:
        return alone

    # First the files that only their own format can read, such as those of a DCP checkpoint without its metadata.
    formats = [registry.by_name(name) for name in registry.NAMES]
    readers = {path: read for fmt in formats if isinstance(fmt, ReadsAlone) for path, read in _lone_files(fmt, tree)}
    for path, read in list(readers.items())[:FILES_READ]:
        try:
            content = read()
        except CkptError:
            alone.unread.append(path)
        else:
            alone.add(content.path, content.rows, content.unsafe, content.notes)

    # Then all others, each opened as if it were a checkpoint of its own.
    options = ReadOptions(lenient=True, forced=True)
    weights = [path for path in sorted(tree.listing()) if path.endswith((*WEIGHT_SUFFIXES, ".distcp"))]
    for path in [path for path in weights if path not in readers][:FILES_READ]:
        try:
            catalog = _read_file(open_tree(tree.display(path)), path, options)
        except CkptError:
            alone.unread.append(path)
        else:
            alone.add(path, catalog.rows(), catalog.unsafe)
    return alone


def _lone_files(fmt: ReadsAlone, tree: Tree) -> Iterable[tuple[str, Callable[[], FileContent]]]:
    """(path, function that reads it) for each of the format's files; none if their names or headers can't be read."""
    try:
        return fmt.find_lone_files(tree).items()
    except CkptError:
        return ()


def _read_file(tree: Tree, path: str, options: ReadOptions) -> Catalog:
    """The content of one file. Raises the error of its last reader, UnknownFormat if no format recognises the file."""
    fault: InputError | None = None
    for claim in registry.claims(tree):
        try:
            return registry.by_name(claim.name).read(tree, options)
        except InputError as error:
            fault = error
    raise fault or UnknownFormat("no format reads this file alone", code=UNRECOGNISED, path=tree.display())


def _format_name(tree: Tree, reading: Reading) -> str:
    """The format that recognises the folder, "files" if none or several do."""
    if reading.from_format:
        return reading.from_format
    try:
        return registry.detect(tree)[0].name
    except InputError:
        return "files"


def without_missing(opened: Opened, parts: MissingParts) -> Opened:
    """The same checkpoint without its incomplete tensors, so that the values of the others can be read."""
    keys: Iterable[TensorKey] = parts.tensors.keys()
    gone = set(keys)
    tensors = {key: tensor for key, tensor in opened.catalog.tensors.items() if key not in gone}
    return opened._replace(catalog=replace(opened.catalog, tensors=tensors))
