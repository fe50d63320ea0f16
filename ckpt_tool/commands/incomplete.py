"""`ckpt inspect` of a checkpoint of which something is missing: what is there, and what is not.

    model-00002-of-00002.safetensors is gone     its other file's tensors as ever, and `missing`:
      {"files": [{"path": "model-00002-of-00002.safetensors", "rank": {}, "tensors": 12, "bytes": None}],
       "tensors": [{"name": "lm_head.weight", "state": "model", "bytes": None}, ...], "bytes": None,
       "error": {"code": "E0380", ...}}

First the format's reader is asked to go on without what is missing (`core.missing`). Where it can't, since the rest
has no meaning without it, every file is read alone: names and shapes are then those of the files, and each tensor says
which file it is in. Commands that write never come here. Cost: the headers twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.core.missing import MissingParts, collected_missing
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InputError, UnknownFormat
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import WEIGHT_SUFFIXES, Format, ReadOptions, ranks_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import Opened, open_source
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.source import Tree

# A reader that goes on without a part may find a later step impossible: then the files are read alone.
UNFORESEEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
FILES_READ = 10_000  # of a folder, each alone


class LookedInto(NamedTuple):
    """A checkpoint of which a part is missing, read by its own format's reader."""

    opened: Opened
    parts: MissingParts


def open_incomplete(src: str, reading: Reading) -> tuple[LookedInto | None, MissingParts]:
    """The checkpoint without what is missing, None where its reader can't go on; and what is known to be missing."""
    with collected_missing() as parts:
        try:
            opened = open_source(src, reading)
        except (CkptError, *UNFORESEEN):
            return None, parts
    return LookedInto(opened, parts), parts


def describe_missing(
    fault: CkptError, parts: MissingParts, fmt: Format | None, mesh: Mapping[str, int]
) -> dict[str, Any]:
    """`missing` of the document. fault: what a strict reader says."""
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


def fault_of(document: Mapping[str, Any]) -> Incomplete | None:
    """The error that a document's `missing` stands for, None where nothing is missing or it was asked for."""
    missing = document.get("missing")
    if not missing or missing["lenient"]:
        return None
    error = missing["error"]
    return Incomplete(
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
    """The bytes of all rows, None where those of one are not known."""
    sizes = [row["bytes"] for row in rows]
    return sum(sizes) if sizes and None not in sizes else None


# -- each file alone ---------------------------------------------------------------------------------------------------


class FilesAlone(NamedTuple):
    """What every file holds by itself. unread: the files that no reader takes alone."""

    format: str
    rows: list[dict[str, Any]]
    unsafe: list[str]
    unread: list[str]


def read_files_alone(src: str, reading: Reading) -> FilesAlone:
    """The tensors of every file of weights, under the names that the file gives them."""
    tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    found = FilesAlone(_format_name(tree, reading), [], [], [])
    if tree.single is not None:
        return found

    options = ReadOptions(lenient=True, forced=True)
    paths = [path for path in sorted(tree.listing()) if path.endswith((*WEIGHT_SUFFIXES, ".distcp"))]
    for path in paths[:FILES_READ]:
        try:
            _add_file(found, open_tree(tree.display(path)), path, options)
        except CkptError:
            found.unread.append(path)
    return found


def _add_file(found: FilesAlone, tree: Tree, path: str, options: ReadOptions) -> None:
    """Add what one file holds. Raises what its readers raise, InputError where none takes it."""
    fault: InputError | None = None
    for claim in registry.claims(tree):
        try:
            catalog = registry.by_name(claim.name).read(tree, options)
        except InputError as error:
            fault = error
            continue
        found.unsafe.extend(line for line in catalog.unsafe if line not in found.unsafe)
        for name, state, dtype, shape, nbytes in catalog.rows():
            row = {"name": name, "state": state, "dtype": dtype.name, "shape": list(dtype.elements(shape))}
            found.rows.append({**row, "bytes": nbytes, "file": path})
        return
    raise fault or UnknownFormat("no format reads this file alone", code="E0390", path=tree.display())


def _format_name(tree: Tree, reading: Reading) -> str:
    """The format that claims the folder, "files" where none or several do."""
    if reading.from_format:
        return reading.from_format
    try:
        return registry.detect(tree)[0].name
    except InputError:
        return "files"


def without_missing(opened: Opened, parts: MissingParts) -> Opened:
    """The same without the tensors that are incomplete, so that the values of the others can be read."""
    keys: Iterable[TensorKey] = parts.tensors.keys()
    gone = set(keys)
    tensors = {key: tensor for key, tensor in opened.catalog.tensors.items() if key not in gone}
    return opened._replace(catalog=replace(opened.catalog, tensors=tensors))
