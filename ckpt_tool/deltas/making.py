"""`ckpt delta`: writes a folder of the changes between two checkpoints.

    BASE, NEW -> pairs of tensors -> frames in nameless spools -> files, index, one rename

Both are read once, block by block, a tensor a thread; a frame's size is known only when it is made, so frames wait in
a spool of each thread next to the output, and are copied into files in the tensors' order: the output is the same for
any number of threads. Memory: some 4 MiB a thread.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.conversion.accounted import check_replaced
from ckpt_tool.conversion.vocabulary import is_vocabulary, trim_vocabulary
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.plurals import agree_all
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.deltas.archive import (
    entries_of,
    laid_out,
    list_empty_folders,
    list_links_and_programs,
    name_some,
    pair_entries,
    refuse_unkept,
    whole_step,
)
from ckpt_tool.deltas.dependents import is_found_by_prune
from ckpt_tool.deltas.encoding import Bytes, EncodedFrame, Encoder, Spool
from ckpt_tool.deltas.folder import INDEX, Archive, delta_files, file_names, index_of
from ckpt_tool.deltas.options import Making
from ckpt_tool.deltas.under_hub_names import hub_names
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.formats.hub_folder.packing import pack
from ckpt_tool.options.reading import Reading
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.finish import sync_all, write_all
from ckpt_tool.run.records import CheckedRecords
from ckpt_tool.run.scan import Readable, Visit, readable, walk
from ckpt_tool.run.walk import STRIDED_BLOCK
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.sources.opening import open_source
from ckpt_tool.sources.steps import step_of
from ckpt_tool.storage.descriptors import close_written
from ckpt_tool.storage.output.destination import check_destination, check_not_read, local_path, sweep_leavings
from ckpt_tool.storage.output.replaced import ReplacedOutput
from ckpt_tool.storage.output.staging import Staging
from ckpt_tool.storage.safetensors_files.safetensors_file import build_header
from ckpt_tool.storage.source import Tree, unchanged

UNLIKE = "E2615"
VERSION = "E2616"
_WEIGHTS = re.compile(r"weight_v(\d{1,18})")
_PIECE = 1 << 20  # bytes of a spool that are copied at a time


class HeldTensor(NamedTuple):
    """A tensor and the tree in which it is stored."""

    tensor: LogicalTensor
    tree: Tree


class TensorPair(NamedTuple):
    """A tensor in the base and in the new checkpoint."""

    name: str
    old: HeldTensor | None  # None: the base has no counterpart, so the new bytes are compared with zeros
    new: HeldTensor


def make(base: str, new: str, dst: str, reading: Reading, wanted: Making, progress: Progress) -> dict[str, Any]:
    """Write the delta; returns the document of `delta --json`.

    Raises InconsistentCheckpoint E2615, UsageError E2616, and what opening, reading and writing raise."""
    began = time.monotonic()
    destination = local_path(dst)
    old_source = open_source(base, reading)
    fresh = open_source(new, reading)

    check_destination(
        destination,
        [
            source.tree.packed_in or Path(source.tree.display())
            for source in (old_source, fresh)
            if source.tree.local or source.tree.packed_in
        ],
        force=wanted.force or wanted.dry_run,
    )
    replaced = check_replaced(destination, delta_files) if wanted.force else ReplacedOutput({})
    check_not_read(destination, replaced.files, (old_source.tree, fresh.tree))
    archive: Archive | None = None
    notes: list[str] = [source.resolved for source in (old_source, fresh) if source.resolved]
    dropped: Sequence[dict[str, Any]] = ()

    if wanted.dedup:
        old_source = whole_step(old_source)
        fresh = whole_step(fresh)
        entries = entries_of(fresh)
        refuse_unkept(fresh.tree)
        empty = list_empty_folders(fresh.tree)
        if empty:
            notes.append(f"empty folders are not kept: {name_some(empty)}")
        links, executable = list_links_and_programs(fresh.tree)
        if links:
            notes.append(f"links are kept as the files that they lead to: {name_some(links)}")
        if executable:
            notes.append(f"the right to be executed is not kept: {name_some(executable)}")
        pairs = [
            TensorPair(name, held and HeldTensor(*held), HeldTensor(*source))
            for name, held, source in pair_entries(entries_of(old_source), entries)
        ]
        archive = laid_out(fresh, entries, frozenset(pair.name for pair in pairs if pair.old is None))
        numbers = [_step(path) for path in (old_source.path, fresh.path)]
    else:
        pairs, dropped, pair_notes = _pair_models(hub_names(old_source, reading), hub_names(fresh, reading), base, new)
        notes += pair_notes
        numbers = [None, None]

    # A delta that `ckpt prune` does not find can't keep it from deleting the base.
    if old_source.tree.local and not is_found_by_prune(str(destination), str(old_source.tree.root)):
        run_folder = os.path.dirname(old_source.tree.root)
        notes.append(
            f"ckpt prune does not look at {destination} for deltas on steps of {run_folder}: pass "
            f"--deltas {destination.parent} to it, or keep the delta within three folders of the run"
        )

    version, before = _versions(wanted, numbers, base, dst)
    document = _document(base, new, destination, wanted, pairs, (version, before), notes, dropped)
    document |= replaced.document()
    progress.plan(document)
    if wanted.dry_run:
        return document

    with Frames(str(destination.absolute().parent), wanted) as frames:
        with unchanged(old_source.tree, fresh.tree, pointers=False):  # files of metadata hold no tensor of a pair
            frames.fill(pairs, progress)
        about = (version, before, wanted.encoding, wanted.checksum)
        base_folder = _path_to(old_source.tree, destination)
        names = _write(frames, pairs, destination, about, archive, base_folder, wanted, replaced)
        made = frames.made

    sweep_leavings(destination)
    changed = [source for source, _ in made.values() if source.frame is not None]
    document["plan"] |= {"bytes_written": sum(names.values()), "files": len(names)}
    document["target"]["files"] = [{"path": name, "bytes": size} for name, size in names.items()]
    document["delta"] |= {
        "changed": len(changed),
        "unchanged": len(made) - len(changed),
        "changed_bytes": sum(source.changed for source in changed),
    }
    document |= {"elapsed_s": round(time.monotonic() - began, 3), "digest_checked": True}
    return document


def _document(
    base: str,
    new: str,
    destination: Path,
    wanted: Making,
    pairs: Sequence[TensorPair],
    versions: tuple[int, int],
    notes: Sequence[str],
    dropped: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The report's document, as far as it is known before anything is read; the run fills in the rest."""
    read = sum(entry.tensor.nbytes for pair in pairs for entry in (pair.old, pair.new) if entry is not None)
    return {
        "schema_version": 1,
        "source": {"path": base, "paths": [base, new]},
        "target": {"path": str(destination), "format": "delta", "files": []},
        "delta": {
            "version": versions[0],
            "base_version": versions[1],
            "encoding": wanted.encoding,
            "compression": "zstd",
            "checksum": wanted.checksum,
            "tensors": len(pairs),
            "bytes": sum(pair.new.tensor.nbytes for pair in pairs),
        },
        "plan": {"bytes_read": read, "bytes_written": None, "peak_memory": _memory(wanted), "files": None, "copies": 0},
        "fallbacks": [],
        "removed": [],
        "removed_bytes": 0,
        "dropped": list(dropped),
        "notes": agree_all(notes),
    }


def _memory(wanted: Making) -> int:
    """Bytes of buffers, at most: a block of both sides, a tile of zeros, a compressor, a spool's buffers."""
    return 5 * STRIDED_BLOCK * (wanted.threads or min(os.cpu_count() or 1, 8))


def _path_to(base: Tree, destination: Path) -> str:
    """The path from the delta's folder to the base, "" where no path leads there: it is in a store, or packed."""
    if not base.local or base.packed_in is not None:
        return ""
    real = os.path.join(base.root, base.single or "")
    folder = os.path.join(os.path.realpath(destination.absolute().parent), destination.name)
    path = os.path.relpath(os.path.realpath(real), folder)
    return path if path.isprintable() else ""


def _step(path: str) -> int | None:
    """The number of the step that a folder is named after, None for other names."""
    step = step_of(path.rstrip("/").rpartition("/")[2])
    return step.number if step is not None else None


def _versions(wanted: Making, numbers: Sequence[int | None], base: str, dst: str) -> tuple[int, int]:
    """(version, base version): those of `--weight-version`, else the numbers of the two steps, else those in the names
    that slime gives its folders (`weight_v000012`), else 1 and 0."""
    old_version, new_version = numbers
    if wanted.weight_version is not None:
        if wanted.weight_version < 1:
            raise UsageError("--weight-version 0 is the base", code=VERSION, hint="the first delta is version 1")
        return wanted.weight_version, wanted.weight_version - 1
    if old_version is not None and new_version is not None and old_version < new_version:
        return new_version, old_version
    for path, increment in ((dst, 0), (base, 1)):
        match = _WEIGHTS.fullmatch(path.rstrip("/").rpartition("/")[2])
        if match and int(match[1]) + increment:
            return int(match[1]) + increment, int(match[1]) + increment - 1
    return 1, 0


# -- which tensors ----------------------------------------------------------------------------------------------------


def _pair_models(
    old: Chosen, new: Chosen, base: str, path: str
) -> tuple[list[TensorPair], list[dict[str, Any]], list[str]]:
    """(the pairs, entries for what is dropped, notes for the report). Raises InconsistentCheckpoint E2615 unless both
    models have the same tensors by name, shape and dtype."""
    old_model = old.model
    notes = [*old.notes, *new.notes]
    dropped = [entry for entry in new.dropped if entry.get("tensors") or entry.get("names")]
    # Trainers pad vocabularies. If those of the new checkpoint have more rows than the base's, they are cut to the same
    # number of rows, unless the base's vocabularies differ in it.
    rows = {
        name: row.tensor.shape[0]
        for name, row in new.model.items()
        if is_vocabulary(name) and name in old_model and row.tensor.shape and old_model[name].tensor.shape
    }
    row_counts = {
        old_model[name].tensor.shape[0] for name, count in rows.items() if count > old_model[name].tensor.shape[0]
    }
    stored = new.stored

    if len(row_counts) == 1:
        trimmed, gone = trim_vocabulary(new.stored, min(row_counts))
        stored = tuple(trimmed)
        dropped = [*dropped, *gone]

    stored_rows = {row.tensor.key.name: row for row in stored}
    faults = [f"{name}: in {base} alone" for name in old_model if name not in stored_rows]
    faults += [f"{name}: in {path} alone" for name in stored_rows if name not in old_model]
    hint = "a delta adds and removes no tensors: --tied-head, --dtype, --vocab-size of ckpt convert make two alike"
    for name, row in stored_rows.items():
        unlike = _unlike(old_model[name].tensor, row.tensor) if name in old_model else None
        if unlike:
            faults.append(f"{name}: {unlike}")

    if faults:
        raise InconsistentCheckpoint(
            f"the two do not hold the same tensors: {faults[0]}",
            code=UNLIKE,
            path=path,
            faults=faults[1:200],
            hint=hint,
        )

    pairs = [
        TensorPair(name, HeldTensor(*old.input(old_model[name])), HeldTensor(*new.input(row)))
        for name, row in stored_rows.items()
    ]
    return pairs, dropped, list(dict.fromkeys(notes))


def _unlike(one: LogicalTensor, other: LogicalTensor) -> str:
    """How two tensors differ in dtype or shape, in words; "" if they don't."""
    if one.dtype != other.dtype:
        return f"{one.dtype.name} and {other.dtype.name}"
    return f"{list(one.shape)} and {list(other.shape)}" if one.shape != other.shape else ""


# -- their frames -----------------------------------------------------------------------------------------------------


class Frames:
    """Every pair, encoded. Use as a context manager, which removes the spools. folder: where the spools are written."""

    def __init__(self, folder: str, wanted: Making) -> None:
        self._folder = folder
        self._wanted = wanted
        self.made: dict[str, tuple[EncodedFrame, Spool]] = {}
        self._own = threading.local()
        self._spools = list[Spool]()
        self._lock = threading.Lock()

    def fill(self, pairs: Sequence[TensorPair], progress: Progress) -> None:
        """Read and encode all pairs. Raises SourceChanged if a source changed since it was opened."""
        # A reader reads one tree, so pairs are read together if their tensors are in the same two trees.
        groups: dict[tuple[int, int], list[TensorPair]] = {}
        for pair in pairs:
            groups.setdefault((id(pair.old.tree) if pair.old else 0, id(pair.new.tree)), []).append(pair)
        total = sum(held.tensor.nbytes for pair in pairs for held in (pair.old, pair.new) if held is not None)
        progress.start(total, "comparing")
        for group in groups.values():
            new_reader = readable([pair.new.tensor for pair in group], group[0].new.tree)
            old_reader = None
            if group[0].old is not None:
                old_reader = readable([pair.old.tensor for pair in group if pair.old is not None], group[0].old.tree)
            names = {id(move): pair.name for move, pair in zip(new_reader.moves, group, strict=True)}
            self._group(names, new_reader, old_reader, progress)
            for source in (new_reader, old_reader):
                if source is not None:
                    source.files.check()
        progress.finish()

    def _group(self, names: Mapping[int, str], new: Readable, old: Readable | None, progress: Progress) -> None:
        """Encode the pairs of two readers, a tensor a thread. names: by the identity of the new reader's move."""
        twins = {} if old is None else {id(a): b for a, b in zip(new.moves, old.moves, strict=True)}
        beside = None if old is None else CheckedRecords(old.files, old.records)

        def visit(move: Move) -> Visit:
            """The function that encodes a tensor's blocks as they are read."""
            name = names[id(move)]
            twin = twins.get(id(move))
            encoding = self._wanted.encoding
            checksum = self._wanted.checksum
            encoder = Encoder(encoding, checksum, move.nbytes, self._spool(), name, always=old is None)
            reader: BlockReader | None = None
            room: Bytes = np.empty(STRIDED_BLOCK, np.uint8)
            if beside is not None and twin is not None:
                reader = beside.reader(16)
                if (
                    old is not None and old.files.trees.keys() != new.files.trees.keys()
                ):  # it expects one thing at a time
                    reader.expect([(twin, 0, twin.numel)])

            def see(move: Move, at: int, data: Bytes) -> None:
                before = None
                if reader is not None and twin is not None:
                    before = room[: len(data)]
                    reader.fill(twin, before.data, at, at + len(data) // move.item)
                    progress.advance(len(data))
                encoder.feed(before, data)
                if at + len(data) // move.item >= move.numel:
                    self._keep(name, encoder.finish())
                    if beside is not None and reader is not None:
                        beside.done(reader)

            if not move.numel:
                self._keep(name, encoder.finish())
            return see

        walk(new, visit, threads=self._wanted.threads, progress=progress, beside=beside)

    def _spool(self) -> Spool:
        """The spool of the calling thread, so that threads need no lock to write."""
        spool: Spool | None = getattr(self._own, "spool", None)
        if spool is None:
            spool = self._own.spool = Spool(self._folder)
            with self._lock:
                self._spools.append(spool)
        return spool

    def _keep(self, name: str, made: EncodedFrame) -> None:
        with self._lock:
            self.made[name] = made, self._own.spool

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a frame, piece by piece."""
        delta_tensor, spool = self.made[name]
        offset, remaining = delta_tensor.frame or (0, 0)
        while remaining:
            data = spool.read(offset, min(remaining, _PIECE))
            yield data
            offset = offset + len(data)
            remaining = remaining - len(data)

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        for spool in self._spools:
            spool.close()


# -- the folder -------------------------------------------------------------------------------------------------------


def _write(
    frames: Frames,
    pairs: Sequence[TensorPair],
    destination: Path,
    about: tuple[int, int, str, str],
    archive: Archive | None,
    base_folder: str,
    wanted: Making,
    replaced: ReplacedOutput,
) -> dict[str, int]:
    """Write the delta's files and its index, and commit. Returns file -> bytes."""
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    for pair in pairs:
        delta_tensor = frames.made[pair.name][0]
        digests[pair.name] = delta_tensor.digest
        if delta_tensor.frame is not None:
            sizes[pair.name] = delta_tensor.frame[1]

    names = list(sizes)
    bins: list[list[str]] = []
    for rows in pack(list(sizes.values()), wanted.max_shard_size):
        if rows:
            bins.append([names[row] for row in rows])
    files = file_names(len(bins))
    weight_map = {name: file for file, bin_names in zip(files, bins, strict=True) for name in bin_names}
    unchanged = {name: text for name, text in digests.items() if name not in sizes}
    index = index_of(about, weight_map, unchanged, archive, base_folder)
    plan = blake2b(index, digest_size=16).hexdigest()
    written = {}

    with Staging(destination, plan, [*files, INDEX], resume=False, force=wanted.force, replaced=replaced) as staging:
        try:
            for file, bin_names in zip(files, bins, strict=True):
                written[file] = _file(
                    staging, file, frames, bin_names, {name: digests[name] for name in bin_names}, sizes
                )
            written[INDEX] = len(index)
            _put(staging, INDEX, [(0, index)], len(index))
            if wanted.fsync:
                sync_all(staging, list(written))
            staging.commit()
        except BaseException:
            staging.discard()
            raise

    return written


def _file(
    staging: Staging,
    file: str,
    frames: Frames,
    names: Sequence[str],
    digests: Mapping[str, str],
    sizes: Mapping[str, int],
) -> int:
    """Write a file of frames. Returns its bytes."""
    head, offsets, size = build_header([(name, DTYPES["U8"], (sizes[name],)) for name in names], digests)

    def parts() -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of everything in the file, in order."""
        yield 0, head
        for name, offset in zip(names, offsets, strict=True):
            for data in frames.pieces(name):
                yield offset, data
                offset += len(data)

    _put(staging, file, parts(), size)
    return size


def _put(staging: Staging, name: str, parts: Any, size: int) -> None:
    fd = staging.create(name, size)
    try:
        for offset, data in parts:
            write_all(fd, data, offset, name)
    finally:
        close_written(fd, staging.path / name)
