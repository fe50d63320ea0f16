"""`--dedup`: every file of a step, byte for byte, stored as the changes since another step of the run.

A step's files are cut into entries: each stored array of a tensor, and the rest of each file (headers, pickles,
padding). An array is named by its contents, so it is compared with its counterpart of the other step wherever that is
stored, in any file of any layout:

    exp_avg/decoder.layers.0.mlp.fc1.weight[0, 0]      rest/mp_rank_00/model_optim_rng.pt

What has no counterpart of its size is kept whole (a change to zeros). Nothing is understood that need not be: objects
that only a trainer can load, files that no format knows, side files, all are bytes, and none can be lost: a file that
could not be written again is an error before anything is kept. What is not kept: links (what they lead to is), empty
folders, the right to be executed (the result names all three), other permissions. Files are rebuilt by the plan and
the executor as any output is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.inner_path import is_view, output_faults
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.deltas.folder import Archive, ArchivedRange
from ckpt_tool.errors import InconsistentCheckpoint, UsageError, wrap_os_error
from ckpt_tool.formats.moved import moved
from ckpt_tool.sources.opening import Opened
from ckpt_tool.sources.steps import step_of
from ckpt_tool.storage.source import Tree

_BYTE = DTYPES["U8"]
NOT_A_FOLDER = "E2617"
NOT_KEPT = "E2850"
SHOWN = 20  # names in one error


class ArchiveEntry(NamedTuple):
    """Bytes of a step under a name: a tensor U8 [n], and the tree in which it is stored."""

    tensor: LogicalTensor
    tree: Tree


def whole_step(opened: Opened) -> Opened:
    """The step as the user gave it. A Trainer's step is opened at the folder of DeepSpeed's inside it, and the files
    around that folder belong to the step too; a run that was opened at one of its steps stays at that step."""
    outer = opened.outer
    inner = opened.tree
    if outer is None or outer.single is not None or not (outer.local and inner.local):
        return opened
    is_step = step_of(outer.root.name, numbers=True) is not None
    if not is_step or outer.root not in inner.root.parents:
        return opened
    folder = inner.root.relative_to(outer.root).as_posix()
    return opened._replace(tree=outer, catalog=moved(outer, inner, folder, opened.catalog), outer=inner)


def entries_of(opened: Opened) -> dict[str, ArchiveEntry]:
    """Every byte of the step's files, each in one entry; in the order of the files.

    Raises UsageError E2617 for what is no folder of this machine or a store, or has links that lead out of it."""
    tree = opened.tree
    listing = tree.listing()
    one_file = tree.single is not None or tree.packed_in is not None
    if one_file or tree.odd_links:
        raise UsageError(
            "--dedup keeps a step's folder, and this is one file"
            if one_file
            else f"the step has links that are not followed: {next(iter(tree.odd_links))}",
            code=NOT_A_FOLDER,
            path=tree.display(),
            hint="pass the folder of the step" if one_file else "--follow-symlinks keeps what they lead to",
        )

    entries: dict[str, ArchiveEntry] = {}
    arrays = _arrays(opened)
    for path, size in sorted(listing.items()):
        gaps = list[tuple[int, int]]()
        position = 0
        for offset, nbytes, name in arrays.get(path, ()):
            if offset < position or offset + nbytes > size:  # shared with the one before, or not there at all
                continue
            if offset > position:
                gaps.append((position, offset))
            entries[name] = ArchiveEntry(_tensor(name, path, size, [(offset, offset + nbytes)]), tree)
            position = offset + nbytes
        if position < size:
            gaps.append((position, size))
        if gaps:
            name = f"rest/{path}"
            entries[name] = ArchiveEntry(_tensor(name, path, size, gaps), tree)

    return entries


def refuse_unkept(tree: Tree) -> None:
    """Raise InconsistentCheckpoint E2850 where something below the step would be missing in the archive, or could not
    be written again out of it: what the listing leaves out, what is no regular file, names that no output may have."""
    listing = tree.listing()
    paths = [path for path, size in listing.items() if size >= 0]
    faults = [f"{path[:200]}: {reason}" for path, reason in tree.left_out.items()]
    faults += [f"{path[:200]}: no regular file" for path, size in listing.items() if size < 0]
    faults += [f"{ascii(path[:200])} {reason}" for path, reason in output_faults(paths)]
    if faults:
        raise InconsistentCheckpoint(
            f"--dedup can't keep all that is in the step: {faults[0]}",
            code=NOT_KEPT,
            path=tree.display(),
            faults=faults[1:SHOWN],
            hint="move it out of the step, and give it back when the step is rebuilt; what an interrupted run left: "
            "ckpt clean",
        )


def list_empty_folders(tree: Tree) -> list[str]:
    """The folders of a local step that have nothing in them: an archive, made of files, does not have them."""
    if not tree.local:
        return []
    found = []
    for folder, folders, files in os.walk(tree.root, onerror=_fail):
        if not folders and not files:
            found.append(os.path.relpath(folder, tree.root))
    return sorted(found)


def list_links_and_programs(tree: Tree) -> tuple[list[str], list[str]]:
    """(links, files with the right to be executed) of a local step: an archive has the bytes of files and no more."""
    links: list[str] = []
    programs: list[str] = []
    if not tree.local:
        return links, programs
    for folder, folders, files in os.walk(tree.root, onerror=_fail):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            shown = os.path.relpath(path, tree.root)
            if os.path.islink(path):
                links.append(shown)
            elif name in files and os.access(path, os.X_OK):
                programs.append(shown)
    return sorted(links), sorted(programs)


def name_some(names: Sequence[str]) -> str:
    """The first of many names.

    >>> name_some(["a", "b"])
    'a, b'
    """
    return ", ".join(names[:5]) + (", ..." if names[5:] else "")


def _fail(error: OSError) -> NoReturn:
    raise wrap_os_error(error, error.filename or "", "listing") from error


def _arrays(opened: Opened) -> dict[str, list[tuple[int, int, str]]]:
    """File -> (offset, bytes, name) of the arrays that hold tensors, by offset; of arrays with the same offset the
    largest first."""
    seen: dict[str, dict[tuple[int, int], str]] = {}
    count = Counter[str]()
    for key, tensor in opened.catalog.tensors.items():
        for chunk in tensor.chunks:
            array = chunk.array
            if is_view(array.path) or array.strides is not None or not array.numel:
                continue
            place = array.offset, array.dtype.nbytes(array.numel)
            known = seen.setdefault(array.path, {})
            if place in known:
                continue
            name = f"{key.state}/{key.name}{list(chunk.box.offset)}"
            count[name] += 1
            known[place] = name if count[name] == 1 else f"{name}~{count[name]}"
    arrays: dict[str, list[tuple[int, int, str]]] = {}
    for path, names in seen.items():
        rows = [(offset, size, name) for (offset, size), name in names.items()]
        arrays[path] = sorted(rows, key=lambda row: (row[0], -row[1]))
    return arrays


def _tensor(name: str, path: str, size: int, spans: list[tuple[int, int]]) -> LogicalTensor:
    """A tensor of the bytes [start, stop) of a file, all spans joined in their order."""
    file_array = StoredArray(path, 0, _BYTE, (size,))
    chunks = []
    position = 0
    for start, stop in spans:
        box = Box((position,), (stop - start,))
        chunks.append(Chunk(box, file_array.view(start, box.shape), Box((0,), box.shape)))
        position += stop - start
    return LogicalTensor(TensorKey(name), (position,), _BYTE, tuple(chunks))


def pair_entries(
    old: Mapping[str, ArchiveEntry], new: Mapping[str, ArchiveEntry]
) -> Iterator[tuple[str, ArchiveEntry | None, ArchiveEntry]]:
    """(name, its counterpart of the same size, the entry)."""
    for name, entry in new.items():
        old_entry = old.get(name)
        same = old_entry is not None and old_entry.tensor.shape == entry.tensor.shape
        yield name, old_entry if same else None, entry


def laid_out(opened: Opened, entries: Mapping[str, ArchiveEntry], whole: frozenset[str]) -> Archive:
    """How the step's files are put together of entries; empty files of none."""
    ranges_of: dict[str, list[tuple[int, int, int, str]]] = {path: [] for path in opened.tree.listing()}
    for name, entry in entries.items():
        for chunk in entry.tensor.chunks:
            ranges_of[chunk.array.path].append((chunk.array.offset, chunk.box.numel, chunk.box.offset[0], name))
    files: dict[str, tuple[int, tuple[ArchivedRange, ...]]] = {}
    for path, rows in ranges_of.items():
        ranges = tuple(ArchivedRange(offset, nbytes, name, begin) for offset, nbytes, begin, name in sorted(rows))
        files[path] = (opened.tree.size(path), ranges)
    return Archive(opened.catalog.format, files, whole)
