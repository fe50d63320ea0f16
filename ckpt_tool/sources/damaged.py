"""Opens a checkpoint with damaged files, so that `ckpt verify` can check the rest and list each damaged file.

A reader refuses a checkpoint at the first file whose header, pickle or zip directory is broken. Most of the others are
most often whole, and "which rank is corrupt" is the question. So the checkpoint is opened again, and the damaged file
counts as one that is missing (`core.missing`): what readers can go on without, they go on without.

    __2_0.distcp has a flipped byte in an item's pickle
        damaged = open_rest("step_7", reading, fault)
        damaged.faults      # [CorruptFile E0347, __2_0.distcp, byte 22972, model.layers.0.w2.weight]
        damaged.opened      # the checkpoint without that tensor

Where a format has no meaning without the file, `opened` is None and only the checksums of the other files can be
looked at. A fault of an index without which nothing can be opened, of a single file, or one that asks for code in a
file that is whole is no fault of a part: it is raised as ever. Cost: the headers once more for each damaged file, at
most `TRIES` times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import faults_of
from ckpt_tool.core.missing import MissingParts, collected_missing
from ckpt_tool.errors import CkptError, UnsafeInput
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import WEIGHT_SUFFIXES, Format, ranks_of
from ckpt_tool.formats.state_dict.unread import UNREAD, notes_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import Opened, open_source, resolve
from ckpt_tool.sources.sound import ZIP_CONTRADICTIONS, finding, is_damage_of_bytes
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.source import Tree

TRIES = 100  # damaged files that are named one by one
ASKS_FOR_CODE = "E0420"
# Notes that only repeat that a file was left out.
CONSEQUENCES = frozenset({"W-total-size", "W-extra-tensors", "W-rank-file-missing", "W-side-file-gone", UNREAD})
_PARTS = (*WEIGHT_SUFFIXES, ".distcp")


class Damaged(NamedTuple):
    """A checkpoint of which files are damaged."""

    faults: list[CkptError]  # each names its file
    tree: Tree
    format: Format
    opened: Opened | None  # without what is damaged; None where its reader can't go on
    unjudged: int  # tensors that lack a part because of it
    reasons: tuple[str, ...]  # why some of those have no names, in the words of their reader
    refused: dict[str, Any] | None  # the first fault, where other verbs refuse the checkpoint for safety


def open_rest(src: str, reading: Reading, fault: CkptError) -> Damaged | None:
    """The checkpoint without the files that are damaged; None where `fault` is not one of a part among others."""
    try:
        tree = resolve(open_tree(src, follow_symlinks=reading.follow_symlinks), reading)[0]
        fmt = registry.by_name(reading.from_format) if reading.from_format else registry.detect(tree)[0]
    except CkptError:
        return None
    damage = _damage_behind(fault)
    if tree.single is not None or _file_of(damage, tree) is None:
        return None

    faults = _with_others(damage)
    hidden: frozenset[str] = frozenset()
    for _ in range(TRIES):
        opened, parts, again = _attempt(src, reading, hidden)
        if opened is not None and opened.format.name == fmt.name:
            item_faults = [each for each in parts.faults if is_damage_of_bytes(each)]
            known = {(each.path, each.offset) for each in item_faults}
            rest = [each for each in faults if each.path in hidden and (each.path, each.offset) not in known]
            whole, unjudged, reasons = _without_torn(opened, parts)
            return Damaged([*rest, *item_faults], tree, fmt, whole, unjudged, reasons, refusal_of(fault))

        # The reader stops at the damaged file: next time it is not there.
        if again is not None and _file_of(_damage_behind(again), tree) is not None:
            met = {(each.path, each.offset) for each in faults}
            faults += [each for each in _with_others(_damage_behind(again)) if (each.path, each.offset) not in met]
        damaged_files = frozenset(each.path for each in faults if each.path is not None)
        if damaged_files == hidden:
            break
        hidden = damaged_files
    others = [path for path in tree.listing() if path.endswith(_PARTS) and tree.display(path) not in hidden]
    is_index = not _is_of_a_part(damage, tree, fmt)
    return None if is_index or not others else Damaged(faults, tree, fmt, None, 0, (), refusal_of(fault))


def refusal_of(fault: CkptError) -> dict[str, Any] | None:
    """The row for a fault that ends every other verb for safety, None for plain damage.

    The first fault decides, which is the one that other verbs raise: if one item of a DCP is at a wrong offset, the
    items after it look like contradictions too.
    """
    if fault.code in ZIP_CONTRADICTIONS:
        hint = (
            "damage does that, and so does a zip that was made to read as two: copy the file again from where the job "
            "wrote it, and compare"
        )
    elif fault.code == ASKS_FOR_CODE:
        hint = "nothing was run; a file is damaged, which may have changed that name: copy the file again"
    else:
        return None
    return {**finding(fault), "hint": hint}


def refused(document: Mapping[str, Any]) -> UnsafeInput | None:
    """The error for a document's `refused` row, None without one. It gives the report the exit code of an attack."""
    row = document.get("refused")
    if row is None:
        return None
    return UnsafeInput(
        row["message"],
        code=row["code"],
        path=row["file"],
        offset=row.get("offset"),
        place=row.get("place"),
        key=row["tensor"],
        hint=row["hint"],
    )


def _damage_behind(fault: CkptError) -> CkptError:
    """The error of a checksum that differs, where a damaged pickle names what would be code; else `fault` itself."""
    cause = fault.__cause__
    if fault.code == ASKS_FOR_CODE and isinstance(cause, CkptError):
        return cause
    return fault


def _file_of(fault: CkptError, tree: Tree) -> str | None:
    """The file of the tree whose bytes are damaged; None where the error says something else."""
    if not is_damage_of_bytes(fault):
        return None
    return next((path for path in tree.listing() if tree.display(path) == fault.path), None)


def _is_of_a_part(fault: CkptError, tree: Tree, fmt: Format) -> bool:
    """Is it damage to a file that is one among others, such as a rank's, and not to the checkpoint's index?"""
    path = _file_of(fault, tree)
    return path is not None and (path.endswith(_PARTS) or bool(ranks_of(fmt, {})(path)))


def _with_others(fault: CkptError) -> list[CkptError]:
    """The faults of one pass."""
    return [fault, *(each for each in fault.others if is_damage_of_bytes(each))]


def _attempt(
    src: str, reading: Reading, hidden: frozenset[str]
) -> tuple[Opened | None, MissingParts, CkptError | None]:
    """(the checkpoint without the hidden files, what its reader went on without, why it can't go on)."""
    with collected_missing() as parts:
        try:
            return open_source(src, reading, hidden=hidden), parts, None
        except CkptError as fault:
            return None, parts, fault


def _without_torn(opened: Opened, parts: MissingParts) -> tuple[Opened, int, tuple[str, ...]]:
    """(the same without the hidden files and the tensors that lack a part, how many those are, why some of them could
    not be named)."""
    catalog = opened.catalog
    hidden = {path for path in catalog.files if opened.tree.display(path) in opened.tree.hidden}
    torn = {fault.key for fault in faults_of(catalog.tensors.values(), catalog.indexes)}
    torn |= {str(key) for key in parts.tensors}
    kept = catalog.tensors
    if torn:
        kept = {key: tensor for key, tensor in catalog.tensors.items() if str(key) not in torn}

    # Faults of the tensors that are left (such as a flat buffer whose parameter is unclear) may be consequences of the
    # missing parts, so they are reported only if nothing is missing.
    unread = tuple(one for one in catalog.unread if one.fault is None)
    faults = [one.fault for one in catalog.unread if one.fault is not None]
    reasons = dict.fromkeys(fault.message for fault in faults if not is_damage_of_bytes(fault))
    notes = (*(note for note in catalog.notes if note.code not in CONSEQUENCES), *notes_of(unread))
    unjudged = len(torn) + len(catalog.unread) - len(unread)
    files = tuple(path for path in catalog.files if path not in hidden)
    digests = {key: digest for key, digest in catalog.digests.items() if str(key) not in torn}
    rest = replace(catalog, tensors=kept, unread=unread, notes=notes, files=files, digests=digests)
    return opened._replace(catalog=rest), unjudged, tuple(reasons)
