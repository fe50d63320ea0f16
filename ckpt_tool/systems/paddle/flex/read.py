"""The data files of a flex checkpoint: from a shard of the metadata to chunks of the logical tensor; and what the files
show besides: static names, degrees, averages without metadata.

What is stored of a shard is a piece of the row-major line of a local block (all of it, or a flattened range), and the
block is one box of the logical tensor, or several: a fused `[gate | up]` of TP n is recorded as rank after rank,

    global [g_0 | u_0 | g_1 | u_1]     logical [g_0 | g_1 | u_0 | u_1]

so every piece is cut into boxes twice, along the line and along the block's parts. No byte moves for it.

Static names (averages without metadata and Paddle's other formats go by them) stand in three places:

    the name tables of optimizer_state/ and master_weight/    "w.moment1_0": "linear_3.w_0_fp32_master_0_moment1_0"
    model_meta.json, where a zero-cost save left one          sharding_metas.tp00_pp00.structure_name_mapping
    the name table of model_state/, in some versions          "w": "linear_3.w_0"

Tensors that were made for saving have names of no use (`generated_tensor_7`, `eager_tmp_7`): those are left out. Static
names count anew on each pipeline stage, so one may stand for several parameters.

No file states the degrees. Ranks are the data files (every rank writes one, an empty one too). Tensor ranks are the
blocks of a parameter; stages are groups of files that share no layer; expert ranks are files that hold runs of experts;
what is left of the ranks are data ranks. A flattened range shows that sharding v2 was on; v1 looks like plain data
parallelism in the files. What does not multiply out is left out: the degrees are a default for writing, never a claim
about values.

    2 files; up_gate_proj in 2 blocks      tp 2
    4 files; layers 0-1 in {0, 1}, 2-3 in {2, 3}; q_proj in 2 blocks      pp 2, tp 2

`ema_state/` before it had a metadata file holds each rank's averages as the optimizer held them:

    0_0.distcp
          {"model.layers.0.mlp.gate.weight": T, "master_weights": {"linear_3.w_0": ("linear_3.w_0_fp32_master_0", T)}}

Averages of fp32 parameters are there under their structured names, the others under static ones (some versions have a
16-bit copy under the structured name too, which is left out), in the rank's own layout: whole, or as a padded slice of
the flattened block. Paddle loads such a file into the same job alone. It can be placed all the same: tables say which
static name is which parameter, and the `master_weight/` (or, for fp32 parameters, `model_state/`) of the same rank says
which part of it the rank held; ranks whose layout no other folder shows are named in the error.

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
from ckpt_tool.core.faults import for_each
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
    """The data files, each opened once. unsafe, globals: of their pickles (see `core.catalog`)."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.unsafe: list[str] = []
        self.globals: dict[str, None] = {}
        self.names: dict[str, dict[str, str]] = {}  # file -> key -> the tensor's own name
        self._files: dict[str, dict[str, Saved]] = {}

    def of(self, file: str) -> Mapping[str, Saved]:
        """The tensors of a file by key; none of a file that is missing, where that is only reported."""
        if is_collecting() and file not in self.tree.listing():
            return {}
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

    def unlisted(self, entries: Mapping[str, FlexEntry], files: Iterable[str]) -> dict[str, list[str]]:
        """Keys that are stored in these files and that the metadata does not list for them: key -> files."""
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
        fault = Incomplete(
            f"{len(missing)} files that the metadata names are missing: {', '.join(missing[:20])}",
            code=MISSING,
            path=tree.display(folder + metadata),
            faults=missing[20:100],
            hint="copy the missing files from where the job wrote them: every rank writes its own",
        )
        report_missing(fault, files=missing)


def read_lone_file(tree: Tree, path: str) -> FileContent:
    """What a data file says without the metadata of its save: the parts of its rank under their keys."""
    content = read_paddle(tree, path)
    folder = path.rpartition("/")[0].rpartition("/")[2] or tree.root.name
    rows: list[CatalogRow] = []
    for saved in content.leaves:
        key = trainer_key(folder, dotted(saved.path)) if folder in folders.FOLDERS else TensorKey(dotted(saved.path))
        rows.append(CatalogRow(key.name, key.state, saved.dtype, saved.shape, saved.dtype.nbytes(prod(saved.shape))))
    return FileContent(path, tuple(rows), tuple(content.unsafe))


def chunks_of_entry(entry: FlexEntry, files: DataFiles, parts: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The chunks of a key. parts: relative widths of what stand side by side in it and is recorded rank by rank (the
    Trainer's folders): (1, 1) for `[gate | up]`, () for one matrix.

    Raises Incomplete E1336 (a file lacks the key), InconsistentCheckpoint E1337 (a stored shape or dtype that the
    metadata contradicts).
    """
    ways = fused_blocks(entry, parts)
    out: list[Chunk] = []
    for shard in sorted(entry.shards, key=lambda s: s.replica):
        if is_collecting() and shard.file not in files.tree.listing():
            report_missing(missing_file(shard.file, files.tree.display(shard.file)))
            continue
        saved = _stored(entry, shard, files)
        if ways is None:
            pairs: Boxes = ((Box(shard.offset, shard.shape), whole(shard.shape)),)
        else:
            pairs = ways[shard.offset[-1]]
            front = shard.offset[:-1]
            pairs = [(Box((*front, box.offset[-1]), box.shape), inner) for box, inner in _fit(pairs, shard.shape)]
        out += place(saved, shard, entry.dtype, pairs)
    if not out and not prod(entry.shape) and entry.shards:
        box = whole(entry.shape)
        saved = _stored(entry, entry.shards[0], files)
        out = [Chunk(box, saved.parts[0]._replace(dtype=entry.dtype, shape=entry.shape), box)]
    return mark_replicas(out)


def _fit(pairs: Boxes, shape: tuple[int, ...]) -> Boxes:
    """Boxes along the last axis, stretched over the other axes of a block."""
    return [
        (
            Box((*(0,) * (len(shape) - 1), box.offset[-1]), (*shape[:-1], box.shape[-1])),
            Box((*(0,) * (len(shape) - 1), inner.offset[-1]), (*shape[:-1], inner.shape[-1])),
        )
        for box, inner in pairs
    ]


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


def _stored(entry: FlexEntry, shard: Shard, files: DataFiles) -> Saved:
    """What the file holds of a shard, held against the metadata."""
    saved = files.of(shard.file).get(entry.key)
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
    if not fits or saved.dtype.name not in _STORED.get(entry.dtype.name, (entry.dtype.name,)):
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
    if shard.span is None and len(saved.parts) == 1:
        array = saved.parts[0]
        if array.shape != shard.shape:
            array = array._replace(shape=shard.shape, strides=None)
        yield from (Chunk(box, array._replace(dtype=dtype), inner, shard.replica) for box, inner in pairs if box.numel)
        return
    line = FlatLine.of_block(shard, shard.shape, pairs)
    for part in saved.parts:
        array = part._replace(dtype=dtype, shape=(part.numel,), strides=None)
        yield from (chunk._replace(replica=shard.replica) for _, chunk in line.chunks(array, start))
        start += part.numel


# -- static names ------------------------------------------------------------------------------------------------------

# bytes
META = "model_meta.json"
META_LIMIT = 256 << 20
_MADE = re.compile(r"(?:generated_tensor|eager_tmp|eager_in_tmp|auto)_\d+.*")


def statics(listings: Mapping[str, FlexListing], files: DataFiles) -> dict[str, set[str]]:
    """Structured name -> its static names (one; several where files contradict each other or stages count anew)."""
    out: dict[str, set[str]] = {}
    for structured, static in (*_of_tables(listings, files), *_of_meta(files)):
        if not _MADE.fullmatch(static):
            out.setdefault(structured, set()).add(static)
    return out


def _of_tables(listings: Mapping[str, FlexListing], files: DataFiles) -> Iterator[tuple[str, str]]:
    for folder, listing in listings.items():
        kind = folder.rstrip("/")
        if kind == EMA_FOLDER or not kind:
            continue
        for file in listing.files:
            files.of(file)
            for key, static in files.names.get(file, {}).items():
                name = trainer_key(kind, key)
                suffix = "" if name.state in (MODEL, MASTER) else f"_{suffix_of(name)[1:]}"
                if static.endswith(suffix):
                    yield name.name, static.removesuffix(suffix).removesuffix(INFIX)


def _of_meta(files: DataFiles) -> Iterator[tuple[str, str]]:
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
    """(degrees, sharding version). degrees: tp, pp, ep, and dp (all data ranks) where they account for all `ranks`."""
    every = list(listings)
    model = [entry for listing in every for entry in listing.entries.values()]
    tp = max([_blocks(entry) for entry in model], default=1)
    version = "v2" if any(shard.span for entry in model for shard in entry.shards) else ""
    degrees = {"tp": tp} if tp > 1 else {}
    pp = _stages(model) if ranks > 1 else 1
    if ranks % (tp * pp):
        pp = 1
    if pp > 1:
        degrees["pp"] = pp
    if ranks % (tp * pp) == 0:
        dp = ranks // (tp * pp)
        if dp > 1:
            degrees["dp"] = dp
        ep = _experts(model) if dp > 1 else 1  # with dp 1 they may be on the tensor ranks (`moe_group` mp)
        if ep > 1 and ep % tp == 0 and tp * dp % ep == 0:
            degrees["ep"] = ep
        version = version or ("v1" if dp > 1 else "")
    return degrees, version


def _blocks(entry: FlexEntry) -> int:
    """Into how many blocks an entry is cut along one axis."""
    if len(entry.shards) < 2 or not entry.shape:
        return 1
    boxes = {(shard.offset, shard.shape) for shard in entry.shards if prod(shard.shape)}
    cuts = [len({offset[axis] for offset, _ in boxes}) for axis in range(len(entry.shape))]
    return max(cuts) if boxes and prod(cuts) == len(boxes) else 1


def _rank_of(file: str) -> str:
    """The rank of a data file, as its name has it."""
    return file.rpartition("/")[2].partition("_")[0]


def _stages(entries: Sequence[FlexEntry]) -> int:
    """Groups of ranks that share no layer, where each group has layers of its own."""
    layers: dict[int, set[str]] = {}
    for entry in entries:
        found = _LAYER.search(entry.key)
        if found:
            layers.setdefault(int(found[1]), set()).update(_rank_of(shard.file) for shard in entry.shards)
    parent: dict[str, str] = {}

    def root(rank: str) -> str:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for ranks in layers.values():
        first, *others = ranks or {""}
        for other in others:
            parent[root(other)] = root(first)
        root(first)
    sizes: dict[str, int] = {}
    for rank in [*parent]:
        sizes[root(rank)] = sizes.get(root(rank), 0) + 1
    return len(sizes) if len(set(sizes.values())) == 1 else 1


def _experts(entries: Sequence[FlexEntry]) -> int:
    """Runs of experts that are stored in files of their own, each as long as the others."""
    homes: dict[str, dict[int, set[str]]] = {}
    for entry in entries:
        found = _EXPERT.match(entry.key)
        if found:
            ranks = homes.setdefault(found[1], {}).setdefault(int(found[2]), set())
            ranks.update(_rank_of(shard.file) for shard in entry.shards)
    return max([_runs(experts) for experts in homes.values()], default=1)


def _runs(experts: Mapping[int, set[str]]) -> int:
    files: list[set[str]] = []
    lengths: list[int] = []
    for number in sorted(experts):
        if files and files[-1] & experts[number]:
            files[-1] |= experts[number]
            lengths[-1] += 1
        else:
            files.append(set(experts[number]))
            lengths.append(1)
    homes = [file for run in files for file in run]
    return len(files) if len(homes) == len(set(homes)) and len(set(lengths)) == 1 else 1


# -- averages without metadata -----------------------------------------------------------------------------------------

UNPLACED = "E1338"
MASTERS = "master_weights"
HINT = "load and save it with Paddle in a job of the same degrees, or remove the folder to go on without it"


class _Home(NamedTuple):
    """The entry of another folder that shares the average's layout, and the file of the same rank there."""

    entry: FlexEntry
    file: str


class OldEma(NamedTuple):
    """listing: as if a metadata file had it. rounded: keys left out, 16-bit copies of averages that are there in
    fp32."""

    listing: FlexListing
    rounded: tuple[str, ...]


def old_ema(save: Save, listings: Mapping[str, FlexListing], files: DataFiles) -> OldEma:
    """The averages as if a metadata file listed them. listings: of the other folders, by folder. Raises InputError
    E1338."""
    made = FlexListing(save.folder)
    known = _parameters(save, listings, files)
    rounded: dict[str, None] = {}
    for masters in (True, False):
        for name in save.data:
            file = save.folder + name
            made.files[file] = None
            for key, saved in [*files.of(file).items()]:
                if (saved.path[0] == MASTERS) is not masters:
                    continue
                if not masters and saved.dtype.bits == 16 and key + MASTER_SUFFIX in made.entries:
                    rounded[key] = None
                    files.forget(file, key)
                    continue
                home = _home(saved, name, listings, known)
                if home is None:
                    raise _unplaced(key, files.tree.display(file))
                shard = _shard(saved, home, file, files.tree.display(file))
                if shard is not None:
                    _add(made, home.entry, shard, _cut(saved, shard))
                    files.rename(file, key, home.entry.key, _cut(saved, shard))
    return OldEma(made, tuple(rounded))


def _parameters(save: Save, listings: Mapping[str, FlexListing], files: DataFiles) -> dict[str, list[str]]:
    """Static name -> structured names, by all that is stated of them."""
    known: dict[str, list[str]] = {}
    for structured, names in statics(listings, files).items():
        for static in names:
            known.setdefault(static, []).append(structured)
    for name in save.data:
        for key, saved in files.of(save.folder + name).items():
            if saved.path[0] != MASTERS and saved.name and key not in known.setdefault(saved.name, []):
                known[saved.name].append(key)
    return known


def _add(made: FlexListing, home: FlexEntry, shard: Shard, saved: Saved) -> None:
    dtype = DTYPES["BF16"] if saved.dtype.name == "U16" else saved.dtype  # Paddle has no uint16 tensors
    entry = made.entries.setdefault(home.key, FlexEntry(home.key, (home.key,), dtype, home.shape, []))
    entry.shards.append(shard)


def _unplaced(key: str, shown: str) -> Unexplained:
    return Unexplained(
        f"nothing says which part of which parameter this is: the {EMA_FOLDER} has no metadata, and no other folder "
        "has the same rank's layout",
        code=UNPLACED,
        path=shown,
        key=key[:200],
        hint=HINT,
    )


def _cut(saved: Saved, shard: Shard) -> Saved:
    """A slice without its padding."""
    if shard.span is None or len(saved.parts) != 1:
        return saved
    shape = (shard.span[1] - shard.span[0],)
    return saved._replace(shape=shape, parts=(saved.parts[0]._replace(shape=shape),))


def _home(saved: Saved, name: str, listings: Mapping[str, FlexListing], known: Mapping[str, list[str]]) -> _Home | None:
    """What another folder says about the parameter that this is the average of. known: static -> structured names."""
    folder = MODEL_FOLDER if saved.path[0] != MASTERS else MASTER_FOLDER
    listing = listings.get(f"{folder}/")
    if listing is None or len(saved.path) != (1 if folder == MODEL_FOLDER else 2):
        return None
    file = f"{folder}/{name}"
    if folder == MODEL_FOLDER:
        entry = listing.entries.get(str(saved.path[0]))
        return None if entry is None else _Home(entry, file)
    entries = [listing.entries.get(structured + MASTER_SUFFIX) for structured in known.get(str(saved.path[1]), ())]
    found = [entry for entry in entries if entry is not None]
    mine = [entry for entry in found if any(shard.file == file for shard in entry.shards)]
    return _Home((mine or found)[0], file) if found else None


def _shard(saved: Saved, home: _Home, file: str, shown: str) -> Shard | None:
    """Where the average is: as its home's shard of the same rank does; a whole one wherever only one box fits it.
    None for a slice that is padding alone, or one that another rank of the same data holds too."""
    mine = [shard for shard in home.entry.shards if shard.file == home.file]
    numel = prod(saved.shape)
    blocks = [s for s in mine or home.entry.shards if s.span is None and prod(s.shape) == numel]
    if len({(s.offset, s.shape) for s in blocks}) == 1:
        return blocks[0]._replace(file=file, replica=0)
    flat = [s for s in home.entry.shards if s.span is not None]
    if len(saved.shape) == 1 and flat and not blocks:
        if not mine:
            return None
        if len(mine) == 1 and mine[0].span and mine[0].span[1] - mine[0].span[0] <= numel:
            return mine[0]._replace(file=file, replica=0)
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
    """The catalog. Raises what `systems.paddle.flex.format` says."""
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
        self._listings()
        for save in self.saves:
            self._add(save, self.listings[save.folder])
        beside = read_extras(self.tree)
        for tensor in beside.tensors.values():
            self._put(tensor, "next to the folders")
        degrees, hints = self._hints()
        required = self.options.require_checksums
        checks = checksums.missing(self.tree, self.tensors.values(), required=required)
        data = [file for listing in self.listings.values() for file in listing.files]
        data += [save.folder + name for save in self.saves for name in save.data]  # a rank without tensors writes one
        metadata = [save.folder + save.metadata for save in self.saves if save.metadata]
        return Catalog(
            "paddle-flex",
            tensors=self.tensors,
            extras=beside.extras,
            mesh=Mesh.of_degrees(degrees) if degrees.get("dp", 1) % degrees.get("ep", 1) == 0 else Mesh(),
            files=(
                *metadata,
                *dict.fromkeys(data),
                *beside.files,
                *(name for name in (META,) if self.tree.exists(name)),
            ),
            sidefiles=side_files(self.tree),
            notes=(*self.notes, *self._job_notes(), *(checks if required else ())),
            unsafe=tuple(
                dict.fromkeys(
                    (*(u for each in self.listings.values() for u in each.unsafe), *self.files.unsafe, *beside.unsafe)
                )
            ),
            hints=hints,
            indexes=tuple(metadata),
        )

    def _listings(self) -> None:
        for save in self.saves:
            if save.metadata is None:
                continue
            listing = read_metadata(self.tree, save.folder, save.metadata)
            folders.refuse_other_save(save, listing.files, self.tree.display(save.folder + save.metadata))
            check_files(self.tree, save.folder, listing.files, save.metadata)
            self.listings[save.folder] = listing
        bare = [save.folder + name for save in self.saves if save.metadata is None for name in save.data]
        there = self.tree.listing()
        named = [file for listing in self.listings.values() for file in listing.files if file in there]
        self.files.read((*named, *bare))
        for save in self.saves:
            if save.metadata is None:
                old = old_ema(save, self.listings, self.files)
                self.listings[save.folder] = old.listing
                copies = (
                    f"; {len(old.rounded)} of them are there in 16 bits too, which is left out" if old.rounded else ""
                )
                self.notes.append(
                    Note(
                        "N-ema-without-metadata",
                        f"{save.folder} has no metadata (an older Trainer's): its tensors are placed as "
                        f"the other folders place the same rank's{copies}",
                        self.tree.display(save.folder),
                    )
                )

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _add(self, save: Save, listing: FlexListing) -> None:
        entries = list(listing.entries.values())
        kind = save.kind or (self.tree.root.name if self.tree.root.name in folders.FOLDERS else "")
        if kind:
            keys = [trainer_key(kind, entry.key) for entry in entries]
        else:
            plain = plain_keys((entry.key, entry.path) for entry in entries)
            keys = plain.keys
            self.roots = plain.roots
        recorded: list[str] = []
        config = self._config()
        for key, entry in zip(keys, entries, strict=True):
            parts = side_by_side(key.name, config)
            chunks = chunks_of_entry(entry, self.files, parts if kind else ())
            path = entry.path if len(entry.path) > 1 else ()
            self._put(LogicalTensor(key, entry.shape, entry.dtype, chunks, path), save.folder)
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
        self._unlisted(save, listing)

    def _put(self, tensor: LogicalTensor, where: str) -> None:
        known = self.tensors.setdefault(tensor.key, tensor)
        if known is not tensor:
            raise InconsistentCheckpoint(
                f"two keys mean the same tensor: one is in {where}",
                code=TWICE,
                path=self.tree.display(),
                key=str(tensor.key),
                hint="files of two saves are mixed: remove those of the older one",
            )

    def _unlisted(self, save: Save, listing: FlexListing) -> None:
        """Keys of the data files that the metadata does not list: averages keep them, elsewhere they are left over."""
        found = self.files.unlisted(listing.entries, listing.files)
        left = []
        for key, homes in found.items():
            name = trainer_key(EMA_FOLDER, key)
            if save.kind != EMA_FOLDER or name in self.tensors or save.metadata is None:
                left.append(key)
                continue
            saved = [self.files.of(file)[key] for file in homes]
            if len({(one.shape, one.dtype) for one in saved}) > 1:
                raise InconsistentCheckpoint(
                    "the metadata does not list it, and ranks hold it in different shapes",
                    code="E2201",
                    key=str(name),
                    path=self.tree.display(homes[0]),
                    hint="nothing says how the parts make up the tensor",
                )
            shape = saved[0].shape
            dtype = saved[0].dtype
            if dtype.name == "U16":  # Paddle has no such tensors: its bits are a bfloat16
                dtype = DTYPES["BF16"]
            chunks = mark_replicas(chunk for one in saved for chunk in chunks_of(one, whole(shape), dtype=dtype))
            self._put(LogicalTensor(TensorKey(name.name, EMA), shape, dtype, chunks), save.folder)
        if left:
            self.notes.append(
                Note(
                    "N-unlisted-keys",
                    f"{len(left)} keys of the data files are not in the metadata and are left out: "
                    f"{', '.join(left[:10])}",
                    self.tree.display(save.folder),
                )
            )

    # -- what is not tensors -------------------------------------------------------------------------------------------

    def _hints(self) -> tuple[dict[str, int], Hints]:
        ranks = max(len(save.data) for save in self.saves)
        degrees, version = degrees_of(self.listings.values(), ranks) if self.trainer else ({}, "")
        own = PaddleHints(flex="trainer" if self.trainer else "plain", sharding=version, config=self._config() or None)
        if self.trainer:
            own = replace(own, sharding_degree=degrees.get("dp", 1) if version else 1, names=self._names())
        else:
            safe = any(name.endswith(".safetensors") for name in self.saves[0].data)
            own = replace(own, roots=dict(self.roots), safetensors=safe)
        globals_ = Globals.each(*(each.globals for each in self.listings.values()), self.files.globals)
        hints = Hints.of(Dialect("paddle"), own, globals_)
        return degrees, hints.having(Degrees(**degrees)) if degrees else hints

    def _names(self) -> dict[str, str]:
        """Structured -> static, in the model's order; {} where the tables do not say it of every trained parameter."""
        known = statics(self.listings, self.files)
        trained = {key.name for key in self.tensors if key.state not in (MODEL, EMA, EXTRAS)}
        listing = self.listings.get(f"{MODEL_FOLDER}/")
        if listing is None or not trained or any(len(known.get(name, ())) != 1 for name in trained):
            return {}
        order = dict.fromkeys((*listing.entries, *sorted(trained)))
        return {name: next(iter(known[name])) for name in order if len(known.get(name, ())) == 1}

    def _config(self) -> dict[str, Any]:
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
