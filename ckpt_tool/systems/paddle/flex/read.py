"""The data files of a flex checkpoint: from a shard of the metadata to chunks of the logical tensor; and what else the
files show: static names, degrees, averages without metadata.

What is stored of a shard is a piece of the row-major line of a local block (all of it, or a flattened range), and the
block is one box of the logical tensor, or several: a fused `[gate | up]` of TP n is recorded as rank after rank,

    global [g_0 | u_0 | g_1 | u_1]     logical [g_0 | g_1 | u_0 | u_1]

so every piece is cut into boxes twice, along the line and along the block's parts. No byte moves for it.

Static names (averages without metadata and Paddle's other formats use them) are found in three places:

    the name tables of optimizer_state/ and master_weight/    "w.moment1_0": "linear_3.w_0_fp32_master_0_moment1_0"
    model_meta.json, where a zero-cost save left one          sharding_metas.tp00_pp00.structure_name_mapping
    the name table of model_state/, in some versions          "w": "linear_3.w_0"

Tensors that were made for saving have names of no use (`generated_tensor_7`, `eager_tmp_7`): those are left out. Static
names are counted again on each pipeline stage, so one may mean several parameters.

No file states the degrees. Ranks are the data files (every rank writes one, an empty one too). Tensor ranks are the
blocks of a parameter; stages are groups of files that share no layer; expert ranks are files that hold runs of experts;
the rest of the ranks are data ranks. A flattened range shows that sharding v2 was on; v1 looks like plain data
parallelism in the files. Degrees whose product is not the number of ranks are left out: they are a default for writing,
never a claim about values.

    2 files; up_gate_proj in 2 blocks      tp 2
    4 files; layers 0-1 in {0, 1}, 2-3 in {2, 3}; q_proj in 2 blocks      pp 2, tp 2

`ema_state/` before it had a metadata file holds each rank's averages as the optimizer held them:

    0_0.distcp
          {"model.layers.0.mlp.gate.weight": T, "master_weights": {"linear_3.w_0": ("linear_3.w_0_fp32_master_0", T)}}

Averages of fp32 parameters are stored under their structured names, the others under static ones (some versions have a
16-bit copy under the structured name too, which is left out), in the rank's own layout: whole, or as a padded slice of
the flattened block. Paddle loads such a file into the same job only. Its parts can be located nevertheless: tables say
which static name is which parameter, and the `master_weight/` (or, for fp32 parameters, `model_state/`) of the same
rank says which part of it the rank held; ranks whose layout no other folder shows are named in the error.

Source: PaddlePaddle 3.3.1 `flex_checkpoint/dcp/{save_state_dict,sharded_weight}.py` (geometry),
`fleet/layers/mpu/mp_layers.py` (a rank's block of a fused weight is [g_r | u_r]; nothing in the metadata says so);
PaddleFormers 1.2.0 `trainer/trainer.py` (`_save_flex_model_state` wraps its tensors, `_is_fc_format_ema`: without
metadata it is this kind), `trainer/utils/zero_cost_checkpoint.py` (`ema_state_dict`), runs of it. Cost: a pickle's
headers a file, some us a shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Catalog, CatalogRow, Note, mark_replicas
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.flat_line import Boxes, FlatLine
from ckpt_tool.core.hints import Degrees, Dialect, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, Unexplained, UnknownFormat
from ckpt_tool.formats import checksums
from ckpt_tool.formats.base import FileContent, ReadOptions
from ckpt_tool.formats.hub_folder.model_files import side_files
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.storage.safetensors_files.safetensors_file import read_header
from ckpt_tool.storage.source import Tree, missing_file
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.systems.paddle.extras import read_config, read_extras
from ckpt_tool.systems.paddle.flex import folders
from ckpt_tool.systems.paddle.flex.folders import (
    EMA_FOLDER,
    MASTER_FOLDER,
    MASTER_SUFFIX,
    MODEL_FOLDER,
    Save,
    plain_keys,
    suffix_of,
    trainer_key,
)
from ckpt_tool.systems.paddle.flex.metadata import FlexEntry, FlexListing, Shard, read_metadata
from ckpt_tool.systems.paddle.job import PaddleHints
from ckpt_tool.systems.paddle.pickle_file import Saved, chunks_of, read_paddle
from ckpt_tool.systems.paddle.rules import PaddleCut, divides, local_boxes, side_by_side
from ckpt_tool.systems.paddle.stored_names import INFIX

# -- data files --------------------------------------------------------------------------------------------------------

MISSING = "E1336"
MISMATCH = "E1337"
_STORED = {"BF16": ("U16", "BF16"), "F8_E4M3": ("I8", "U8", "F8_E4M3"), "F8_E5M2": ("I8", "U8", "F8_E5M2")}


class DataFiles:
    """The data files, each opened once."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.unsafe: list[str] = []  # of their pickles (see `core.catalog`)
        self.globals: dict[str, None] = {}  # of their pickles
        self.names: dict[str, dict[str, str]] = {}  # file -> key -> the tensor's own name
        self._files: dict[str, dict[str, Saved]] = {}

    def tensors_of(self, file: str) -> Mapping[str, Saved]:
        """The tensors of a file by key; none of a file that is missing, where that is only reported."""
        if is_collecting() and file not in self.tree.listing():
            return {}
        if file not in self._files:
            is_safetensors = file.endswith(".safetensors")
            self._files[file] = self._read_safetensors(file) if is_safetensors else self._read_distcp(file)
        return self._files[file]

    def read(self, files: Iterable[str]) -> None:
        """Open them all; those that can't be read are reported at once."""
        read_each(dict.fromkeys(files), self.tensors_of)

    def rename(self, file: str, key: str, name: str, saved: Saved) -> None:
        """Replace a tensor of a file by `saved`, under another key."""
        tensors = self._files[file]
        del tensors[key]
        tensors[name] = saved

    def forget(self, file: str, key: str) -> None:
        """Treat a tensor as if the file did not have it."""
        del self._files[file][key]

    def _read_distcp(self, file: str) -> dict[str, Saved]:
        content = read_paddle(self.tree, file)
        self.unsafe += content.unsafe
        self.globals.update(dict.fromkeys(content.globals))
        self.names[file] = {dotted(saved.path): saved.name for saved in content.leaves if saved.name}
        return {dotted(saved.path): saved for saved in content.leaves}

    def _read_safetensors(self, file: str) -> dict[str, Saved]:
        header = read_header(self.tree, file)
        tensors = {}
        for row, name in enumerate(header.names):
            array = header.stored(row)
            tensors[name] = Saved((name,), "", array.shape, array.dtype, (array,))
        return tensors

    def find_unlisted(self, entries: Mapping[str, FlexEntry], files: Iterable[str]) -> dict[str, list[str]]:
        """Keys that are stored in these files and that the metadata does not list for them: key -> files."""
        listed = {(entry.key, shard.file) for entry in entries.values() for shard in entry.shards}
        files_by_key: dict[str, list[str]] = {}
        for file in files:
            for key in self.tensors_of(file):
                if (key, file) not in listed:
                    files_by_key.setdefault(key, []).append(file)
        return files_by_key


def check_files(tree: Tree, folder: str, files: Iterable[str], metadata: str) -> None:
    """Raise Incomplete E1336 for all files that the metadata names and the folder lacks."""
    listing = tree.listing()
    missing = [file for file in files if file not in listing]
    if missing:
        fault = Incomplete(
            f"{len(missing)} files that the metadata names are missing: {', '.join(missing[:20])}",
            code=MISSING,
            path=tree.display(folder + metadata),
            faults=missing[20:100],
            hint="copy the missing files from where the job wrote them: every rank writes its own",
        )
        report_missing(fault, files=missing)


def read_lone_file(tree: Tree, path: str) -> FileContent:
    """The content of a data file without the metadata of its save: the parts of its rank under their keys."""
    content = read_paddle(tree, path)
    folder = path.rpartition("/")[0].rpartition("/")[2] or tree.root.name
    rows: list[CatalogRow] = []
    for saved in content.leaves:
        key = trainer_key(folder, dotted(saved.path)) if folder in folders.FOLDERS else TensorKey(dotted(saved.path))
        rows.append(CatalogRow(key.name, key.state, saved.dtype, saved.shape, saved.dtype.nbytes(prod(saved.shape))))
    return FileContent(path, tuple(rows), tuple(content.unsafe))


def chunks_of_entry(entry: FlexEntry, files: DataFiles, parts: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The chunks of a key.

    Args:
        entry: of the metadata.
        files: the data files.
        parts: relative widths of matrices that are fused side by side in it and recorded rank by rank (the Trainer's
            folders): (1, 1) for `[gate | up]`, () for one matrix.

    Raises:
        Incomplete: E1336, a file lacks the key.
        InconsistentCheckpoint: E1337, a stored shape or dtype that the metadata contradicts.
    """
    blocks = fused_blocks(entry, parts)
    chunks: list[Chunk] = []
    for shard in sorted(entry.shards, key=lambda s: s.replica):
        if is_collecting() and shard.file not in files.tree.listing():
            report_missing(missing_file(shard.file, files.tree.display(shard.file)))
            continue
        saved = _find_stored(entry, shard, files)
        if blocks is None:
            pairs: Boxes = ((Box(shard.offset, shard.shape), whole(shard.shape)),)
        else:
            # The block's columns belong to several places of the logical tensor, its rows to one.
            leading_offset = shard.offset[:-1]
            stretched = _stretch(blocks[shard.offset[-1]], shard.shape)
            pairs = [(Box((*leading_offset, box.offset[-1]), box.shape), inner) for box, inner in stretched]
        chunks += place(saved, shard, entry.dtype, pairs)

    # A tensor without elements has no chunk of its own, but it must not look missing.
    if not chunks and not prod(entry.shape) and entry.shards:
        box = whole(entry.shape)
        saved = _find_stored(entry, entry.shards[0], files)
        chunks = [Chunk(box, saved.parts[0]._replace(dtype=entry.dtype, shape=entry.shape), box)]
    return mark_replicas(chunks)


def _stretch(pairs: Boxes, shape: tuple[int, ...]) -> Boxes:
    """Boxes along the last axis, stretched over the other axes of a block."""
    zeros = (0,) * (len(shape) - 1)
    stretched = []
    for box, inner in pairs:
        logical = Box((*zeros, box.offset[-1]), (*shape[:-1], box.shape[-1]))
        local = Box((*zeros, inner.offset[-1]), (*shape[:-1], inner.shape[-1]))
        stretched.append((logical, local))
    return stretched


def fused_blocks(entry: FlexEntry, parts: tuple[int, ...]) -> dict[int, Boxes] | None:
    """Where the blocks of a fused tensor belong, by their offset on the last axis; None where nothing is interleaved:
    one matrix, one block, or blocks that no tensor parallel job makes. parts: see `chunks_of_entry`."""
    if not parts or not entry.shape:
        return None
    widths = {(shard.offset[-1], shard.shape[-1]) for shard in entry.shards if prod(shard.shape)}
    offsets = sorted(offset for offset, _ in widths)
    tp = len(offsets)
    total = entry.shape[-1]
    if (
        tp < 2
        or not divides((total,), PaddleCut(0, parts), tp)
        or widths != {(rank * total // tp, total // tp) for rank in range(tp)}
    ):
        return None
    return {offsets[rank]: local_boxes((total,), PaddleCut(0, parts), tp, rank)[1] for rank in range(tp)}


def _find_stored(entry: FlexEntry, shard: Shard, files: DataFiles) -> Saved:
    """What the file holds of a shard, compared with the metadata."""
    saved = files.tensors_of(shard.file).get(entry.key)
    shown = files.tree.display(shard.file)
    if saved is None:
        raise Incomplete(
            f"the metadata says that it is stored in {shard.file}, which does not hold it",
            code=MISSING,
            path=shown,
            key=entry.key,
            hint="the file and the metadata come from two saves: get both from one save",
        )

    numel = prod(shard.shape) if shard.span is None else shard.span[1] - shard.span[0]
    fits = prod(saved.shape) == numel
    if shard.span is None and saved.shape != shard.shape and len(saved.shape) != 1:
        fits = False

    stored_dtypes = _STORED.get(entry.dtype.name, (entry.dtype.name,))
    if not fits or saved.dtype.name not in stored_dtypes:
        what = "" if shard.span is None else f", elements {shard.span[0]} to {shard.span[1]} of it"
        raise InconsistentCheckpoint(
            f"the file holds {saved.dtype.name} {list(saved.shape)}; the metadata says {entry.dtype.name}, a block of "
            f"shape {list(shard.shape)} at {list(shard.offset)}{what}",
            code=MISMATCH,
            path=shown,
            key=entry.key,
            hint="the file and the metadata come from two saves: get both from one save",
        )

    return saved


# -- geometry ----------------------------------------------------------------------------------------------------------


def place(saved: Saved, shard: Shard, dtype: DType, pairs: Boxes) -> Iterator[Chunk]:
    """The chunks of one stored shard. pairs: (box in the logical tensor, box in the local block), tiling the block."""
    start = shard.span[0] if shard.span else 0

    # A whole block needs no line: its boxes are boxes of the array.
    if shard.span is None and len(saved.parts) == 1:
        array = saved.parts[0]
        if array.shape != shard.shape:
            array = array._replace(shape=shard.shape, strides=None)
        yield from (Chunk(box, array._replace(dtype=dtype), inner, shard.replica) for box, inner in pairs if box.numel)
        return

    # A flattened range: each box may be cut anywhere.
    line = FlatLine.of_block(shard, shard.shape, pairs)

    for part in saved.parts:
        array = part._replace(dtype=dtype, shape=(part.numel,), strides=None)
        yield from (chunk._replace(replica=shard.replica) for _, chunk in line.chunks(array, start))
        start += part.numel


# -- static names ------------------------------------------------------------------------------------------------------

META = "model_meta.json"
META_LIMIT = 256 << 20  # bytes
_TEMPORARY_NAME = re.compile(r"(?:generated_tensor|eager_tmp|eager_in_tmp|auto)_\d+.*")


def read_static_names(listings: Mapping[str, FlexListing], files: DataFiles) -> dict[str, set[str]]:
    """Structured name -> its static names: usually one; several if files disagree, or stages restart the counters."""
    names: dict[str, set[str]] = {}

    for structured, static in (*_read_name_tables(listings, files), *_read_meta_names(files)):
        if not _TEMPORARY_NAME.fullmatch(static):
            names.setdefault(structured, set()).add(static)
    return names


def _read_name_tables(listings: Mapping[str, FlexListing], files: DataFiles) -> Iterator[tuple[str, str]]:
    for folder, listing in listings.items():
        kind = folder.rstrip("/")
        if kind == EMA_FOLDER or not kind:
            continue
        for file in listing.files:
            files.tensors_of(file)  # reads the names too
            for key, static in files.names.get(file, {}).items():
                name = trainer_key(kind, key)
                suffix = "" if name.state in (MODEL, MASTER) else f"_{suffix_of(name)[1:]}"
                if static.endswith(suffix):
                    yield name.name, static.removesuffix(suffix).removesuffix(INFIX)


def _read_meta_names(files: DataFiles) -> Iterator[tuple[str, str]]:
    if not files.tree.exists(META):
        return
    value = parse(files.tree.read_whole(META, limit=META_LIMIT), path=files.tree.display(META))
    metas = value.get("sharding_metas") if isinstance(value, dict) else None
    for meta in metas.values() if isinstance(metas, dict) else ():
        names = meta.get("structure_name_mapping") if isinstance(meta, dict) else None
        for structured, static in names.items() if isinstance(names, dict) else ():
            if isinstance(static, str):
                yield structured, static


# -- degrees -----------------------------------------------------------------------------------------------------------

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.")


def degrees_of(listings: Iterable[FlexListing], ranks: int) -> tuple[dict[str, int], str]:
    """(degrees, sharding version), as far as the boxes and files show them.

    degrees: tp, pp, ep, and dp (all data ranks) if their product is the number of ranks.
    """
    all_listings = list(listings)
    entries = [entry for listing in all_listings for entry in listing.entries.values()]

    tp = max([_count_blocks(entry) for entry in entries], default=1)
    version = "v2" if any(shard.span for entry in entries for shard in entry.shards) else ""
    degrees = {"tp": tp} if tp > 1 else {}

    pp = _count_stages(entries) if ranks > 1 else 1
    if ranks % (tp * pp):
        pp = 1
    if pp > 1:
        degrees["pp"] = pp

    # Data ranks are what is left; expert ranks are carved out of them.
    if ranks % (tp * pp) == 0:
        dp = ranks // (tp * pp)
        if dp > 1:
            degrees["dp"] = dp
        ep = _count_expert_ranks(entries) if dp > 1 else 1  # with dp 1 they may be on the tensor ranks (`moe_group` mp)
        if ep > 1 and ep % tp == 0 and tp * dp % ep == 0:
            degrees["ep"] = ep
        version = version or ("v1" if dp > 1 else "")
    return degrees, version


def _count_blocks(entry: FlexEntry) -> int:
    """The number of blocks into which an entry is cut along one axis."""
    if len(entry.shards) < 2 or not entry.shape:
        return 1
    boxes = {(shard.offset, shard.shape) for shard in entry.shards if prod(shard.shape)}
    offsets = [offset for offset, _ in boxes]
    cuts = [len(set(starts)) for starts in zip(*offsets, strict=True)]
    return max(cuts) if cuts and prod(cuts) == len(boxes) else 1


def _rank_of(file: str) -> str:
    """The rank of a data file, as its name has it."""
    return file.rpartition("/")[2].partition("_")[0]


def _count_stages(entries: Sequence[FlexEntry]) -> int:
    """Groups of ranks that share no layer, where each group has layers of its own."""
    ranks_by_layer: dict[int, set[str]] = {}
    for entry in entries:
        match = _LAYER.search(entry.key)
        if match:
            ranks_by_layer.setdefault(int(match[1]), set()).update(_rank_of(shard.file) for shard in entry.shards)

    # Ranks that hold the same layer belong to one stage: joined by union-find.
    parent: dict[str, str] = {}

    def find_root(rank: str) -> str:
        """The representative of a rank's stage."""
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for ranks in ranks_by_layer.values():
        first_rank, *other_ranks = ranks or {""}
        for other in other_ranks:
            parent[find_root(other)] = find_root(first_rank)
        find_root(first_rank)

    ranks_of_stage: dict[str, int] = {}
    for rank in [*parent]:
        ranks_of_stage[find_root(rank)] = ranks_of_stage.get(find_root(rank), 0) + 1

    # Stages have as many ranks each: groups of several sizes are no stages.
    return len(ranks_of_stage) if len(set(ranks_of_stage.values())) == 1 else 1


def _count_expert_ranks(entries: Sequence[FlexEntry]) -> int:
    """Runs of experts that are stored in files of their own, each as long as the others."""
    ranks_by_expert: dict[str, dict[int, set[str]]] = {}
    for entry in entries:
        match = _EXPERT.match(entry.key)
        if match:
            ranks = ranks_by_expert.setdefault(match[1], {}).setdefault(int(match[2]), set())
            ranks.update(_rank_of(shard.file) for shard in entry.shards)
    return max([_count_runs(experts) for experts in ranks_by_expert.values()], default=1)


def _count_runs(experts: Mapping[int, set[str]]) -> int:
    """The number of runs of neighbouring experts on the same ranks; 1 unless runs have one length and separate ranks.

    experts: number -> ranks that hold it.
    """
    ranks_of_run: list[set[str]] = []
    lengths: list[int] = []
    for number in sorted(experts):
        if ranks_of_run and ranks_of_run[-1] & experts[number]:
            ranks_of_run[-1] |= experts[number]
            lengths[-1] += 1
        else:
            ranks_of_run.append(set(experts[number]))
            lengths.append(1)

    ranks = [rank for run in ranks_of_run for rank in run]
    are_separate = len(ranks) == len(set(ranks))
    are_of_one_length = len(set(lengths)) == 1
    return len(ranks_of_run) if are_separate and are_of_one_length else 1


# -- averages without metadata -----------------------------------------------------------------------------------------

UNPLACED = "E1338"
MASTERS = "master_weights"
HINT = "load and save it with Paddle in a job of the same degrees, or remove the folder to go on without it"


class _Home(NamedTuple):
    """The entry of another folder that shares the average's layout, and the file of the same rank there."""

    entry: FlexEntry
    file: str


class OldEma(NamedTuple):
    """Averages of a folder without metadata."""

    listing: FlexListing  # as if a metadata file had it
    rounded: tuple[str, ...]  # keys left out: 16-bit copies of averages that are stored in fp32 too


def list_old_ema(save: Save, listings: Mapping[str, FlexListing], files: DataFiles) -> OldEma:
    """The averages as if a metadata file listed them. listings: of the other folders, by folder. Raises Unexplained
    E1338 where nothing says which part of which parameter an average is."""
    ema_listing = FlexListing(save.folder)
    names_by_static = _invert_static_names(save, listings, files)
    rounded: dict[str, None] = {}

    # Averages of masters first: a 16-bit tensor is only a copy where its fp32 average is listed.
    for is_master in (True, False):
        for name in save.data:
            file = save.folder + name
            ema_listing.files[file] = None
            for key, saved in [*files.tensors_of(file).items()]:
                if (saved.path[0] == MASTERS) is not is_master:
                    continue
                if not is_master and saved.dtype.bits == 16 and key + MASTER_SUFFIX in ema_listing.entries:
                    rounded[key] = None
                    files.forget(file, key)
                    continue

                home = _find_home(saved, name, listings, names_by_static)
                if home is None:
                    raise _unplaced_error(key, files.tree.display(file))
                shard = _find_shard(saved, home, file, files.tree.display(file))
                if shard is not None:
                    unpadded = _cut_padding(saved, shard)
                    _add_shard(ema_listing, home.entry, shard, unpadded)
                    files.rename(file, key, home.entry.key, unpadded)
    return OldEma(ema_listing, tuple(rounded))


def _invert_static_names(save: Save, listings: Mapping[str, FlexListing], files: DataFiles) -> dict[str, list[str]]:
    """Static name -> structured names, by the tables of all folders and the averages' own names."""
    structured_names: dict[str, list[str]] = {}
    for structured, static_names in read_static_names(listings, files).items():
        for static in static_names:
            structured_names.setdefault(static, []).append(structured)

    for name in save.data:
        for key, saved in files.tensors_of(save.folder + name).items():
            if saved.path[0] == MASTERS or not saved.name:
                continue
            same_static = structured_names.setdefault(saved.name, [])
            if key not in same_static:
                same_static.append(key)
    return structured_names


def _add_shard(listing: FlexListing, home: FlexEntry, shard: Shard, saved: Saved) -> None:
    dtype = DTYPES["BF16"] if saved.dtype.name == "U16" else saved.dtype  # Paddle has no uint16 tensors
    entry = listing.entries.setdefault(home.key, FlexEntry(home.key, (home.key,), dtype, home.shape, []))
    entry.shards.append(shard)


def _unplaced_error(key: str, shown: str) -> Unexplained:
    return Unexplained(
        f"nothing says which part of which parameter this is: the {EMA_FOLDER} has no metadata, and no other folder "
        "has the same rank's layout",
        code=UNPLACED,
        path=shown,
        key=key[:200],
        hint=HINT,
    )


def _cut_padding(saved: Saved, shard: Shard) -> Saved:
    """A slice without its padding."""
    if shard.span is None or len(saved.parts) != 1:
        return saved
    shape = (shard.span[1] - shard.span[0],)
    return saved._replace(shape=shape, parts=(saved.parts[0]._replace(shape=shape),))


def _find_home(
    saved: Saved, name: str, listings: Mapping[str, FlexListing], names_by_static: Mapping[str, list[str]]
) -> _Home | None:
    """The entry of another folder for the parameter that this is the average of, None if there is none.

    Args:
        saved: the average.
        name: of its file, which is that of the same rank in the other folder.
        listings: of the other folders.
        names_by_static: static -> structured names.
    """
    folder = MODEL_FOLDER if saved.path[0] != MASTERS else MASTER_FOLDER
    listing = listings.get(f"{folder}/")
    if listing is None or len(saved.path) != (1 if folder == MODEL_FOLDER else 2):
        return None
    file = f"{folder}/{name}"
    if folder == MODEL_FOLDER:
        entry = listing.entries.get(str(saved.path[0]))
        return None if entry is None else _Home(entry, file)

    # A static name may mean several parameters, of several stages: prefer the one that the same rank holds.
    candidates = []
    for structured in names_by_static.get(str(saved.path[1]), ()):
        entry = listing.entries.get(structured + MASTER_SUFFIX)
        if entry is not None:
            candidates.append(entry)
    for entry in candidates:
        if any(shard.file == file for shard in entry.shards):
            return _Home(entry, file)
    return _Home(candidates[0], file) if candidates else None


def _find_shard(saved: Saved, home: _Home, file: str, shown: str) -> Shard | None:
    """The part of the parameter that an average covers.

    It is the same rank's shard in the other folder, or the only block that has as many elements. None for a slice that
    is padding alone, or that another rank of the same data holds too.
    """
    rank_shards = [shard for shard in home.entry.shards if shard.file == home.file]
    numel = prod(saved.shape)
    blocks = [shard for shard in rank_shards or home.entry.shards if shard.span is None and prod(shard.shape) == numel]
    if len({(shard.offset, shard.shape) for shard in blocks}) == 1:
        return blocks[0]._replace(file=file, replica=0)

    # A slice of the flattened block, padded to the length that all ranks have.
    is_sliced = any(shard.span is not None for shard in home.entry.shards)
    if len(saved.shape) == 1 and is_sliced and not blocks:
        if not rank_shards:
            return None
        span = rank_shards[0].span
        if len(rank_shards) == 1 and span and span[1] - span[0] <= numel:
            return rank_shards[0]._replace(file=file, replica=0)
    raise Unexplained(
        f"an average of shape {list(saved.shape)} fits no one part of its parameter of shape {list(home.entry.shape)}",
        code=UNPLACED,
        path=shown,
        key=home.entry.key,
        hint=HINT,
    )


# -- the catalog -------------------------------------------------------------------------------------------------------

TWICE = "E1339"
_JOB = re.compile(r"training_args\.bin|trainer_state\.(bin|json)|rng_state(_\d+)?\.pth|static_name_to_dyg_name\.json")


def read_tree(tree: Tree, options: ReadOptions) -> Catalog:
    """Read a flex checkpoint into one catalog. Raises what `read` of `systems.paddle.flex.format` lists."""
    saves = folders.find(tree.listing())
    if not saves:
        raise UnknownFormat(
            "no N.metadata and no R_N.distcp: this is no flex checkpoint",
            code="E0393",
            path=tree.display(),
            hint="pass the folder that holds model_state/, or the one with 0.metadata",
        )
    catalog = _FlexReading(tree, saves, options).catalog()
    catalog.check()
    return catalog


class _FlexReading:
    """One read: the tensors of all folders, put into one catalog."""

    def __init__(self, tree: Tree, saves: Sequence[Save], options: ReadOptions) -> None:
        self.tree = tree
        self.saves = saves
        self.options = options
        self.notes = folders.check(saves, tree.display(), tree.names(), lenient=options.lenient)
        self.files = DataFiles(tree)
        self.trainer = bool(saves[0].folder)
        self.listings: dict[str, FlexListing] = {}
        self.tensors: dict[TensorKey, LogicalTensor] = {}
        self.roots: Mapping[str, str] = {}

    def catalog(self) -> Catalog:
        """The catalog, unchecked."""
        self._read_listings()
        for save in self.saves:
            self._add_save(save, self.listings[save.folder])
        extra_files = read_extras(self.tree)
        for tensor in extra_files.tensors.values():
            self._add_tensor(tensor, "next to the folders")

        degrees, hints = self._build_hints()
        required = self.options.require_checksums
        checks = checksums.missing(self.tree, self.tensors.values(), required=required)

        data = [file for listing in self.listings.values() for file in listing.files]
        data += [save.folder + name for save in self.saves for name in save.data]  # a rank without tensors writes one
        metadata = [save.folder + save.metadata for save in self.saves if save.metadata]
        unsafe = [line for listing in self.listings.values() for line in listing.unsafe]
        unsafe += [*self.files.unsafe, *extra_files.unsafe]
        return Catalog(
            "paddle-flex",
            tensors=self.tensors,
            extras=extra_files.extras,
            mesh=Mesh.of_degrees(degrees) if degrees.get("dp", 1) % degrees.get("ep", 1) == 0 else Mesh(),
            files=(
                *metadata,
                *dict.fromkeys(data),
                *extra_files.files,
                *([META] if self.tree.exists(META) else []),
            ),
            sidefiles=side_files(self.tree),
            notes=(*self.notes, *self._job_notes(), *(checks if required else ())),
            unsafe=tuple(dict.fromkeys(unsafe)),
            hints=hints,
            indexes=tuple(metadata),
        )

    def _read_listings(self) -> None:
        for save in self.saves:
            if save.metadata is None:
                continue
            listing = read_metadata(self.tree, save.folder, save.metadata)
            folders.refuse_other_save(save, listing.files, self.tree.display(save.folder + save.metadata))
            check_files(self.tree, save.folder, listing.files, save.metadata)
            self.listings[save.folder] = listing

        # All files at once, so that all that can't be read are reported together.
        unlisted = [save.folder + name for save in self.saves if save.metadata is None for name in save.data]
        existing = self.tree.listing()
        listed = [file for listing in self.listings.values() for file in listing.files if file in existing]
        self.files.read((*listed, *unlisted))

        for save in self.saves:
            if save.metadata is None:
                old = list_old_ema(save, self.listings, self.files)
                self.listings[save.folder] = old.listing
                copies = ""
                if old.rounded:
                    copies = f"; {len(old.rounded)} of them are there in 16 bits too, which is left out"
                self.notes.append(
                    Note(
                        "N-ema-without-metadata",
                        f"{save.folder} has no metadata (an older Trainer's): its tensors are placed as "
                        f"the other folders place the same rank's{copies}",
                        self.tree.display(save.folder),
                    )
                )

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _add_save(self, save: Save, listing: FlexListing) -> None:
        entries = list(listing.entries.values())
        kind = save.kind or (self.tree.root.name if self.tree.root.name in folders.FOLDERS else "")
        if kind:
            keys = [trainer_key(kind, entry.key) for entry in entries]
        else:
            plain_key_table = plain_keys((entry.key, entry.path) for entry in entries)
            keys = plain_key_table.keys
            self.roots = plain_key_table.roots

        recorded: list[str] = []
        config = self._plain_config()
        for key, entry in zip(keys, entries, strict=True):
            parts = side_by_side(key.name, config)
            chunks = chunks_of_entry(entry, self.files, parts if kind else ())
            path = entry.path if len(entry.path) > 1 else ()
            self._add_tensor(LogicalTensor(key, entry.shape, entry.dtype, chunks, path), save.folder)
            if not kind and fused_blocks(entry, parts):
                recorded.append(entry.key)

        if recorded:
            self.notes.append(
                Note(
                    "N-fused-as-recorded",
                    f"{len(recorded)} fused gate and up weights are in blocks and taken as recorded: a fleet job "
                    "with tensor parallelism would mean rank after rank, an auto-parallel one means this. If it was "
                    f"a fleet job, move the files into a folder {MODEL_FOLDER}: {', '.join(recorded[:5])}",
                    self.tree.display(),
                    recorded[0],
                )
            )
        self._add_unlisted(save, listing)

    def _add_tensor(self, tensor: LogicalTensor, where: str) -> None:
        """Add a tensor. Raises InconsistentCheckpoint E1339 where another key means the same one."""
        first = self.tensors.setdefault(tensor.key, tensor)
        if first is not tensor:
            raise InconsistentCheckpoint(
                f"two keys mean the same tensor: one is in {where}",
                code=TWICE,
                path=self.tree.display(),
                key=str(tensor.key),
                hint="files of two saves are mixed: remove those of the older one",
            )

    def _add_unlisted(self, save: Save, listing: FlexListing) -> None:
        """Keys of the data files that the metadata does not list: averages keep them, elsewhere they are left over."""
        left_over = []
        for key, files in self.files.find_unlisted(listing.entries, listing.files).items():
            name = trainer_key(EMA_FOLDER, key)
            if save.kind != EMA_FOLDER or name in self.tensors or save.metadata is None:
                left_over.append(key)
                continue

            saved = [self.files.tensors_of(file)[key] for file in files]
            if len({(part.shape, part.dtype) for part in saved}) > 1:
                raise InconsistentCheckpoint(
                    "the metadata does not list it, and ranks hold it in different shapes",
                    code="E2201",
                    key=str(name),
                    path=self.tree.display(files[0]),
                    hint="nothing says how the parts make up the tensor",
                )
            shape = saved[0].shape
            dtype = saved[0].dtype
            if dtype.name == "U16":  # Paddle has no such tensors: its bits are a bfloat16
                dtype = DTYPES["BF16"]
            chunks = mark_replicas(chunk for part in saved for chunk in chunks_of(part, whole(shape), dtype=dtype))
            self._add_tensor(LogicalTensor(TensorKey(name.name, EMA), shape, dtype, chunks), save.folder)

        if left_over:
            self.notes.append(
                Note(
                    "N-unlisted-keys",
                    f"{len(left_over)} keys of the data files are not in the metadata and are left out: "
                    f"{', '.join(left_over[:10])}",
                    self.tree.display(save.folder),
                )
            )

    # -- what is not tensors -------------------------------------------------------------------------------------------

    def _build_hints(self) -> tuple[dict[str, int], Hints]:
        ranks = max(len(save.data) for save in self.saves)
        degrees, version = degrees_of(self.listings.values(), ranks) if self.trainer else ({}, "")
        paddle_hints = PaddleHints(
            flex="trainer" if self.trainer else "plain", sharding=version, config=self._plain_config() or None
        )

        # Only the Trainer's folders show degrees and static names.
        if self.trainer:
            paddle_hints = replace(
                paddle_hints, sharding_degree=degrees.get("dp", 1) if version else 1, names=self._order_static_names()
            )
        else:
            safe = any(name.endswith(".safetensors") for name in self.saves[0].data)
            paddle_hints = replace(paddle_hints, roots=dict(self.roots), safetensors=safe)

        globals_ = Globals.each(*(each.globals for each in self.listings.values()), self.files.globals)
        hints = Hints.of(Dialect("paddle"), paddle_hints, globals_)
        return degrees, hints.having(Degrees(**degrees)) if degrees else hints

    def _order_static_names(self) -> dict[str, str]:
        """Structured -> static, in the model's order; {} unless the tables have one for every trained parameter."""
        static_names = read_static_names(self.listings, self.files)
        trained = {key.name for key in self.tensors if key.state not in (MODEL, EMA, EXTRAS)}
        listing = self.listings.get(f"{MODEL_FOLDER}/")
        if listing is None or not trained or any(len(static_names.get(name, ())) != 1 for name in trained):
            return {}
        order = dict.fromkeys((*listing.entries, *sorted(trained)))
        return {name: next(iter(static_names[name])) for name in order if len(static_names.get(name, ())) == 1}

    def _plain_config(self) -> dict[str, Any]:
        """The plain scalars of the model's config: `--config`, else the folder's own."""
        config = read_config(self.tree, ReadOptions(config=self.options.config))
        return {key: value for key, value in config.items() if value is None or type(value) in (bool, int, float, str)}

    def _job_notes(self) -> Iterable[Note]:
        names = [name for name in self.tree.names() if _JOB.fullmatch(name)]
        if names:
            yield Note("N-job-files", f"files of the job, not copied: {', '.join(names[:20])}")
        if self.trainer:
            others = sorted(
                {path.partition("/")[0] for path in self.tree.listing() if "/" in path}
                - {save.kind for save in self.saves}
            )
            if others:
                yield Note("N-other-folders", f"other folders next to it, not read: {', '.join(others[:20])}")
