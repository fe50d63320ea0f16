"""Lists the faults of a checkpoint as findings: rows of a report, where other commands would raise errors.

`findings_of` checks the headers of an open checkpoint (`ckpt verify` in both modes, `ckpt latest`, `ckpt prune`);
`findings_at` opens it too; `cut_short` checks whether files next to it that no reader uses (a Trainer's optimizer.pt)
were written to their end. Cost: headers, directories of zips, and pickles that are no zips.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from ckpt_tool.core.catalog import Catalog, faults_of
from ckpt_tool.core.plurals import agree
from ckpt_tool.errors import (
    CkptError,
    CorruptFile,
    Incomplete,
    InconsistentCheckpoint,
    InputError,
    Unexplained,
    UnsafeInput,
)
from ckpt_tool.formats.adapters.pairs import find_adapter_faults
from ckpt_tool.formats.base import WEIGHT_SUFFIXES
from ckpt_tool.formats.soundness import unsound
from ckpt_tool.formats.steps import other_steps, trainer_step
from ckpt_tool.formats.two_models import two_in_one_state
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import LFS_POINTER, Opened, open_source
from ckpt_tool.storage.safetensors_files.safetensors_file import looks_like_header, read_header, refuse_twin
from ckpt_tool.storage.source import Tree

# Notes of readers that make a checkpoint unsound; the others (files that are ignored, shapes that can't be known)
# inform.
UNSOUND = frozenset({"W-total-size", "W-header", "W-bool", "W-extra-tensors", "W-rank-file-missing", LFS_POINTER})
DAMAGE = (CorruptFile, Incomplete, InconsistentCheckpoint)
# The errors for a damaged zip directory; a reader can't distinguish it from a zip crafted to have two contents.
ZIP_CONTRADICTIONS = frozenset({"E0430", "E0431", "E0432", "E0433", "E0434", "E0435", "E0436", "E0437", "E0438"})
JSON_LIMIT = 64 << 20  # bytes: a trainer_state.json of a long run has some megabytes
_PICKLES = (".pkl", ".pickle")
CUT_SHORT = "E1671"


def row(code: str, message: str, tensor: str | None, *, file: str | None = None, **more: Any) -> dict[str, Any]:
    """A finding, with its message in the singular if it is about one thing. All outputs (HTML, JSON, SARIF, JUnit) show
    the message unchanged, so it is adjusted here."""
    return {"code": code, "message": agree(message), "file": file, "tensor": tensor, **more}


def finding(fault: CkptError) -> dict[str, Any]:
    """Convert an error to a finding."""
    return row(fault.code, fault.message, fault.key, file=fault.path, offset=fault.offset, place=fault.place)


def findings_of(opened: Opened, *, complete: bool = True) -> tuple[list[dict[str, Any]], Set[str | None]]:
    """(what headers show to be wrong, the tensors that are not whole). Raises UnsafeInput (E0420, E0415).

    complete: False where damaged parts were left out: that states lack tensors of each other is no fault of its own
    then.
    """
    catalog = opened.refuse_unsafe().catalog
    _refuse_twins(opened)
    torn = list(faults_of(catalog.tensors.values(), catalog.indexes))
    faults = [
        *torn,
        *(unsound(catalog, opened.format.holds) if complete else ()),
        *other_steps(opened.tree, catalog),
        *trainer_step(opened.outer or opened.tree, opened.tree, catalog),
        *two_in_one_state(opened.tree, catalog),
        *find_adapter_faults(catalog, opened.tree.display()),
        *damage_noted(catalog),
    ]
    notes = [row(note.code, note.message, note.key, file=note.path) for note in catalog.notes if note.code in UNSOUND]
    return [*map(finding, faults), *notes], {fault.key for fault in torn}


def findings_at(path: str, reading: Reading, from_format: str | None = None) -> tuple[list[dict[str, Any]], set[str]]:
    """(what names and headers show to be wrong with the checkpoint at `path`, its files as messages show them). Raises
    what keeps it from being judged: UnsafeInput, StorageError, and InputError that shows no damage (`is_damage`)."""
    try:
        opened = open_source(path, replace(reading, from_format=from_format or reading.from_format))
        return findings_of(opened)[0], {opened.tree.display(file) for file in opened.catalog.files}
    except InputError as e:
        if not is_damage(e):
            raise
        return [finding(e)], set()


def is_damage(fault: CkptError) -> bool:
    """Does the error mean that the checkpoint is broken? Unsupported forms, newer versions, and files that older
    versions never wrote do not."""
    return isinstance(fault, DAMAGE) and not isinstance(fault, Unexplained)


def is_damage_of_bytes(fault: CkptError) -> bool:
    """Does the error mean that a file's bytes differ from those that were written?"""
    is_ambiguous = isinstance(fault, UnsafeInput) and fault.code in ZIP_CONTRADICTIONS
    return fault.bytes_differ or is_ambiguous


def damage_noted(catalog: Catalog) -> list[CkptError]:
    """Damage for which a reader skipped a file and only added a note, such as that of a Trainer's optimizer."""
    faults = [note.fault for note in catalog.notes if note.fault is not None]
    return [fault for fault in faults if is_damage_of_bytes(fault)]


def _refuse_twins(opened: Opened) -> None:
    """Raise UnsafeInput (E0415) for a safetensors file that another tool would open as a zip of its own."""
    tree = opened.tree
    if opened.format.holds.safetensors:
        for path in opened.catalog.files:  # these may include pickles, such as a trainer's optimizer.pt
            if not path.endswith(".json") and looks_like_header(tree.head(path, 9), tree.size(path)):
                refuse_twin(tree, read_header(tree, path, lenient=True))


def cut_short(tree: Tree, taken: Set[str]) -> Iterator[CkptError]:
    """CorruptFile E1671 for each file that no reader has taken and whose header, directory or end is not whole; the
    error itself for a zip that contradicts itself. taken: files, as messages show them."""
    for path, size in tree.listing().items() if tree.single is None else ():
        kind = next((kind for kind in (*WEIGHT_SUFFIXES, *_PICKLES, ".json") if path.endswith(kind)), None)
        if kind is None or size < 0 or tree.display(path) in taken:
            continue
        offset: int | None = None
        try:
            why = "the file is empty" if not size else _why_cut(tree, path, size)
        except InputError as e:
            why = e.message
            offset = e.offset
        except UnsafeInput as e:
            if not is_damage_of_bytes(e):
                raise
            yield e
            continue
        if why:
            yield CorruptFile(
                f"{path} is cut short or damaged: {why}",
                code=CUT_SHORT,
                path=tree.display(path),
                offset=offset,
                hint="the save was killed, or bytes changed: take an older step, or copy the file again",
            )


def _why_cut(tree: Tree, path: str, size: int) -> str:
    """Why a file that is not empty is not whole, "" where it is or nothing is known of its kind. Raises InputError."""
    from ckpt_tool.storage.pickles.pickle_reader import load_file
    from ckpt_tool.storage.torch_files.torch_stream import TorchStream, is_stream
    from ckpt_tool.storage.torch_files.zip_directory import ZipArchive, members

    head = tree.head(path, 512)
    if path.endswith(".json"):
        if size <= JSON_LIMIT:
            try:
                json.loads(tree.read_whole(path, limit=JSON_LIMIT))  # NaN is a loss that Trainers write
            except (ValueError, RecursionError) as e:
                return f"it is no JSON ({e})"
    elif not any(head):
        return "it begins with zeros"
    elif looks_like_header(head, size) or path.endswith(".safetensors"):
        read_header(tree, path, lenient=True)
    elif head.startswith(b"PK\x03\x04"):
        members(ZipArchive(tree, path, 0, size))
    elif is_stream(head):
        TorchStream.open(tree, path)
    elif head[:1] == b"\x80" and path.endswith((*_PICKLES, ".pt", ".pth", ".bin", ".pdopt", ".pdparams")):
        load_file(tree, path, multi=True)
    return ""
