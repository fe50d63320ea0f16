"""The data files of a flex checkpoint: from a shard of the metadata to chunks of the logical tensor.

The one idea: what is stored of a shard is a piece of the row-major line of a local block (all of it, or a flattened range),
and the block is one box of the logical tensor, or several: a fused `[gate | up]` of TP n is recorded as rank after rank,

    global [g_0 | u_0 | g_1 | u_1]     logical [g_0 | g_1 | u_0 | u_1]

so every piece is cut into boxes twice, along the line and along the block's parts, and each cut is a strided array in the
file. No byte moves for it.

Source: PaddlePaddle 3.3.1 `flex_checkpoint/dcp/{save_state_dict,sharded_weight}.py` (geometry), `fleet/layers/mpu/mp_layers.py`
(a rank's block of a fused weight is [g_r | u_r]; nothing in the metadata says so). Cost: a pickle's headers a file, some us a
shard. What it does not do: names of states (`paddle_flex.keys`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckpt_tool.core.box import Box, contiguous_strides, flat_boxes, whole
from ckpt_tool.core.catalog import mark_replicas
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.faults import for_each
from ckpt_tool.core.tensor import Chunk, StoredArray
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.paddle.file import Saved, read_paddle
from ckpt_tool.formats.paddle.rules import Cut, divides, local_boxes
from ckpt_tool.formats.paddle_flex.metadata import Entry, Shard
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.storage.safetensors_file import read_header
from ckpt_tool.storage.source import Tree

MISSING, MISMATCH = "E1336", "E1337"
_STORED = {"BF16": ("U16", "BF16"), "F8_E4M3": ("I8", "U8", "F8_E4M3"), "F8_E5M2": ("I8", "U8", "F8_E5M2")}
Pairs = Sequence[tuple[Box, Box]]  # (box in the logical tensor, box in the local block)


class DataFiles:
    """The data files, each opened once. unsafe, globals: of their pickles (see `core.catalog`)."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.unsafe: list[str] = []
        self.globals: dict[str, None] = {}
        self.names: dict[str, dict[str, str]] = {}  # file -> key -> the tensor's own name
        self._files: dict[str, dict[str, Saved]] = {}

    def of(self, file: str) -> Mapping[str, Saved]:
        """The tensors of a file by key."""
        if file not in self._files:
            self._files[file] = self._safetensors(file) if file.endswith(".safetensors") else self._distcp(file)
        return self._files[file]

    def read(self, files: Iterable[str]) -> None:
        """Open them all; those that do not read are named at once."""
        for_each(dict.fromkeys(files), self.of)

    def rename(self, file: str, key: str, name: str, saved: Saved) -> None:
        """Make a tensor of a file known under another key, as `saved`."""
        tensors = self._files[file]
        del tensors[key]
        tensors[name] = saved

    def forget(self, file: str, key: str) -> None:
        """Count a tensor as not there."""
        del self._files[file][key]

    def _distcp(self, file: str) -> dict[str, Saved]:
        content = read_paddle(self.tree, file)
        self.unsafe += content.unsafe
        self.globals.update(dict.fromkeys(content.globals))
        self.names[file] = {dotted(saved.path): saved.name for saved in content.leaves if saved.name}
        return {dotted(saved.path): saved for saved in content.leaves}

    def _safetensors(self, file: str) -> dict[str, Saved]:
        header = read_header(self.tree, file)
        arrays = [header.stored(row) for row in range(len(header))]
        return {
            name: Saved((name,), "", array.shape, array.dtype, (array,))
            for name, array in zip(header.names, arrays, strict=True)
        }

    def unlisted(self, entries: Mapping[str, Entry], files: Iterable[str]) -> dict[str, list[str]]:
        """Keys that lie in these files and that the metadata does not list for them: key -> files."""
        listed = {(entry.key, shard.file) for entry in entries.values() for shard in entry.shards}
        out: dict[str, list[str]] = {}
        for file in files:
            for key in self.of(file):
                if (key, file) not in listed:
                    out.setdefault(key, []).append(file)
        return out


def check_files(tree: Tree, folder: str, files: Iterable[str], metadata: str) -> None:
    """Raise Incomplete E1336 naming every file that the metadata names and that is not there."""
    have = tree.listing()
    missing = [file for file in files if file not in have]
    if missing:
        raise Incomplete(
            f"{len(missing)} files that the metadata names are missing: {', '.join(missing[:20])}", code=MISSING,
            path=tree.display(folder + metadata), faults=missing[20:100],
            hint="copy the missing files from where the job wrote them: every rank writes its own",
        )  # fmt: skip


def chunks_of_entry(entry: Entry, files: DataFiles, parts: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The chunks of a key. parts: relative widths of what lies side by side in it and is recorded rank by rank (the Trainer's
    folders): (1, 1) for `[gate | up]`, () for one matrix.

    Raises Incomplete E1336 (a file lacks the key), InconsistentCheckpoint E1337 (a stored shape or dtype that the metadata
    contradicts).
    """
    ways = fused_blocks(entry, parts)
    out: list[Chunk] = []
    for shard in sorted(entry.shards, key=lambda s: s.replica):
        saved = _stored(entry, shard, files)
        if ways is None:
            pairs: Pairs = ((Box(shard.offset, shard.shape), whole(shard.shape)),)
        else:
            pairs = ways[shard.offset[-1]]
            front = shard.offset[:-1]
            pairs = [(Box((*front, box.offset[-1]), box.shape), inner) for box, inner in _fit(pairs, shard.shape)]
        out += place(saved, shard, entry.dtype, pairs)
    if not out and not prod(entry.shape) and entry.shards:
        box = whole(entry.shape)
        saved = _stored(entry, entry.shards[0], files)
        out = [Chunk(box, replace(saved.parts[0], dtype=entry.dtype, shape=entry.shape), box)]
    return mark_replicas(out)


def _fit(pairs: Pairs, shape: tuple[int, ...]) -> Pairs:
    """Pairs along the last axis, stretched over the other axes of a block."""
    return [
        (Box((*(0,) * (len(shape) - 1), box.offset[-1]), (*shape[:-1], box.shape[-1])),
         Box((*(0,) * (len(shape) - 1), inner.offset[-1]), (*shape[:-1], inner.shape[-1])))
        for box, inner in pairs
    ]  # fmt: skip


def fused_blocks(entry: Entry, parts: tuple[int, ...]) -> dict[int, Pairs] | None:
    """Where the blocks of a fused tensor belong, by their offset on the last axis; None where nothing is interleaved: one
    matrix, one block, or blocks that no tensor parallel job makes. parts: see `chunks_of_entry`."""
    if not parts or not entry.shape:
        return None
    widths = {(shard.offset[-1], shard.shape[-1]) for shard in entry.shards if prod(shard.shape)}
    offsets = sorted(offset for offset, _ in widths)
    tp, total = len(offsets), entry.shape[-1]
    if (
        tp < 2
        or not divides((total,), Cut(0, parts), tp)
        or widths != {(rank * total // tp, total // tp) for rank in range(tp)}
    ):
        return None
    return {offsets[rank]: local_boxes((total,), Cut(0, parts), tp, rank)[1] for rank in range(tp)}


def _stored(entry: Entry, shard: Shard, files: DataFiles) -> Saved:
    """What the file holds of a shard, held against the metadata."""
    saved = files.of(shard.file).get(entry.key)
    shown = files.tree.display(shard.file)
    if saved is None:
        raise Incomplete(
            f"the metadata says that it lies in {shard.file}, which does not hold it", code=MISSING, path=shown,
            key=entry.key, hint="the file is of another save than the metadata: get both from one save",
        )  # fmt: skip
    numel = prod(shard.shape) if shard.span is None else shard.span[1] - shard.span[0]
    fits = prod(saved.shape) == numel
    if shard.span is None and saved.shape != shard.shape and len(saved.shape) != 1:
        fits = False
    if not fits or saved.dtype.name not in _STORED.get(entry.dtype.name, (entry.dtype.name,)):
        what = "" if shard.span is None else f", elements {shard.span[0]} to {shard.span[1]} of it"
        raise InconsistentCheckpoint(
            f"the file holds {saved.dtype.name} {list(saved.shape)}; the metadata says {entry.dtype.name}, a block of shape "
            f"{list(shard.shape)} at {list(shard.offset)}{what}", code=MISMATCH, path=shown, key=entry.key,
            hint="the file is of another save than the metadata: get both from one save",
        )  # fmt: skip
    return saved


# -- geometry -----------------------------------------------------------------------------------------------------------


def place(saved: Saved, shard: Shard, dtype: DType, pairs: Pairs) -> Iterator[Chunk]:
    """The chunks of one stored shard. pairs: (box in the logical tensor, box in the local block), tiling the block."""
    start = shard.span[0] if shard.span else 0
    if shard.span is None and len(saved.parts) == 1:
        array = saved.parts[0]
        if array.shape != shard.shape:
            array = replace(array, shape=shard.shape, strides=None)
        yield from (Chunk(box, replace(array, dtype=dtype), inner, shard.replica) for box, inner in pairs if box.numel)
        return
    for part in saved.parts:
        line = replace(part, dtype=dtype, shape=(part.numel,), strides=None)
        yield from _pieces(line, start, shard, pairs)
        start += part.numel


def _pieces(line: StoredArray, start: int, shard: Shard, pairs: Pairs) -> Iterator[Chunk]:
    """Chunks of elements [start, start + line.numel) of a block's row-major line."""
    strides = contiguous_strides(shard.shape)
    for piece in flat_boxes(shard.shape, start, start + line.numel):
        for box, inner in pairs:
            shared = piece & inner if piece.shape else piece
            if shared is None:
                continue
            first = sum(o * s for o, s in zip(shared.offset, strides, strict=True)) - start
            there = shared.translate(tuple(b - i for b, i in zip(box.offset, inner.offset, strict=True)))
            if shared == piece:  # without gaps in the line
                yield Chunk(there, line, Box((first,), (shared.numel,)), shard.replica)
                continue
            array = line.view(first, shared.shape, strides)
            yield Chunk(there, array, whole(shared.shape), shard.replica)
