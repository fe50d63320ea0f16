"""`megatron-dist`: Megatron's `torch_dist` checkpoints: model, optimizer and what belongs to them, without Megatron.

The one idea: the folder is a DCP (`formats.dcp.format`) whose keys, shapes and objects follow Megatron's rules; this
format undoes the rules (stacked layers, stacked experts, parted gate and up, flat optimizer buckets), so that every
parameter has one name and one shape, whatever degrees wrote it, and does them again when it writes.

    decoder.layers.mlp.linear_fc1.weight  BF16 (4, 96, 32)  in boxes (1, 24, 32)    4 layers, TP 2, gate and up
    -> decoder.layers.0.mlp.linear_fc1.weight (96, 32) of 4 chunks, ... decoder.layers.3.mlp.linear_fc1.weight
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight                     -> ... [exp_avg]

Specification (NVIDIA/Megatron-LM, core 0.16.1 where nothing else is stated; `megatron/core/`):

* Folder (`megatron_dist.folder`): `.metadata`, `__R_S.distcp`, `common.pt` (core <= 0.18) or an item
  `common_state/shard_0_1` (core >= 0.19), `metadata.json` last. A parent folder's `latest_checkpointed_iteration.txt`
  names the iteration.
* `.metadata`: torch's, with attributes of Megatron's own: `all_local_plans` (0.16), `mcore_data` (0.8-0.15); core 0.15
  pickles a subclass `MCoreMetadata`. `planner_data` is None: keys do not nest.
* Keys (`megatron_dist.keys`), objects (`megatron_dist.state`). Only the first replica
  of a shard is stored. Gate and up of a gated fc1 are boxes of one tensor [gate; up]. Tied weights are stored once.
* Optimizer, by `content_metadata.distrib_optim_sharding_type` of the common state:
  none: `optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.KEY`; one step for all in the common state (`common_step`);
  `fully_reshardable` (0.15-): `optimizer.state.{param,...}.KEY`;
  `fully_sharded_model_space` (0.6-0.15): `optimizer.state.{fp32_param,...}.KEY`, flattened ranges;
  where data ranks hold slices of the last dim of a tensor that is stored flattened: (X, Y) whose ranks hold (x, y) is
  (X/x, Y/y, x*y). So (128, 32) over 2 ranks is (2, 1, 2048), and the piece at (1, 0, 1000) of 1048 elements begins at
  element 1000 of the lower half: rows 95.25-127, at most 2n - 1 boxes. The true shape stands in `.metadata`, attribute
  `mcore_data`; one-dimensional tensors have it since core 0.11, before that they lay as they are. Source: core 0.14
  `dist_checkpointing/strategies/torch.py` (`mcore_data`), removed from core 0.16 (pull request 2126);
  `dp_reshardable` (before 0.15: `fully_sharded_bucket_space`), the default: flat buckets without names
  (`megatron_dist.flat`); `dp_zero_gather_scatter` (core <= 0.14): the same in one object a rank. Hyperparameters lie in
  the common state, or with the flat buckets as objects a rank.
* An adapter alone (a LoRA run of Megatron-Bridge): the same keys below `.adapter.`, see `formats.megatron.adapter`.
* Steps stand in `param_groups`. RNG states are objects keyed by pipeline and tensor rank.

Writing: `formats.megatron_dist.target`. Cost: 0.1 ms a box. What it does not do: zarr (core <= 0.15 can read it),
Megatron-FSDP's `fsdp_dtensor` (`megatron-fsdp`), FP8 scales in extra states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from operator import lt
from typing import TYPE_CHECKING, Any, cast

from ckpt_tool.core.box import Box, contiguous_strides, whole
from ckpt_tool.core.catalog import Catalog, Note, Unread
from ckpt_tool.core.faults import both
from ckpt_tool.core.flat_line import FlatLine
from ckpt_tool.core.hints import Degrees, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.tensor import (
    EXTRAS,
    MASTER,
    MODEL,
    STEP,
    Chunk,
    ChunkColumns,
    LogicalTensor,
    StoredArray,
    TensorKey,
    simple_tensor,
)
from ckpt_tool.errors import InconsistentCheckpoint, InputError
from ckpt_tool.formats import checksums
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions, Specificity
from ckpt_tool.formats.containers.dcp_items import Items, rank_of
from ckpt_tool.formats.containers.dcp_metadata import (
    CONTRADICTION,
    METADATA,
    Listing,
    TensorEntry,
    check_files,
    read_listing,
)
from ckpt_tool.formats.containers.dcp_pieces import Piece
from ckpt_tool.formats.hf import files as hf_files
from ckpt_tool.formats.megatron.adapter import degrees_of_run, is_adapter, read_adapter
from ckpt_tool.formats.megatron.args import arguments, facts_of
from ckpt_tool.formats.megatron.chains import held_by
from ckpt_tool.formats.megatron.hints import DistHints
from ckpt_tool.formats.megatron.parts import HALF, Gathered
from ckpt_tool.formats.megatron.pointer import misnamed
from ckpt_tool.formats.megatron_dist import folder as megatron_dist_folder
from ckpt_tool.formats.megatron_dist.keys import KINDS, DistKey, name_of, parse, styles_of
from ckpt_tool.formats.megatron_dist.nemo import with_context
from ckpt_tool.formats.megatron_dist.state import Objects, check_step, read_objects
from ckpt_tool.formats.megatron_dist.windows import KINDS_UNKNOWN, windows_of
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted
    from ckpt_tool.formats.containers.dcp_columns import Columns

FLAT = ".distributed.dp_group_idx_"
POSITIONS = 1 << 18  # layers times experts of one key


class _MegatronDist:
    """The format. See the module."""

    name = "megatron-dist"
    holds = Holds(
        all_states=True,
        extras=True,
        mesh=("tp", "pp", "ep", "etp", "dp", "cp", "vpp"),
        replicas=False,
        zero=0,
        dialect="megatron",
        own_layout=True,
        uses_options=frozenset({"spec", "pp-split"}),
        # Megatron's `load_args_from_checkpoint` wants the iteration; weights without one have 0
        with_args={"checkpoint_version": 3.0, "iteration": 0},
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
        all_experts=True,
        run_config=True,
    )

    hashed = staticmethod(megatron_dist_folder.hashed)
    late_faults = staticmethod(megatron_dist_folder.late_faults)

    def detect(self, tree: Tree) -> Evidence | None:
        """By `metadata.json`, or `common.pt` beside items."""
        found = megatron_dist_folder.find(tree)
        if found is None:
            return None
        return Evidence(found[1], Specificity.OWN, megatron_dist_folder.files(tree, found[0]))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from `.metadata`, the common state and the heads of the items; objects are read whole. Options:
        `require_checksums` (bool) refuses files without CRCs (E0397).

        Raises Incomplete (E0385 not finished, E0301 files missing, E0309 boxes),
        InconsistentCheckpoint (E0308 overlap, E0379 steps, E0389), CorruptFile (E2005 `integrity.json`), InputError
        (E0303 zarr), and what the containers raise. Flat buckets that do not fit are `unread` (E2004).
        """
        found = megatron_dist_folder.find(tree)
        folder = found[0] if found else ""
        megatron_dist_folder.check(tree, folder)
        notes = megatron_dist_folder.check_integrity(tree, folder)
        listing = read_listing(tree, folder, (METADATA,))
        check_files(tree, [listing], folder + METADATA)
        catalog = _Reading(tree, folder, listing, notes, options).catalog(required=options.require_checksums)
        catalog.check()
        return catalog

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The rank alone, as the names of DCP's files have it."""
        return rank_of(path)

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """Main weights (Megatron-FSDP's model) as master and model. See `megatron.main_weights`."""
        from ckpt_tool.formats.megatron.main_weights import with_masters

        return with_masters(tensors, extras)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The whole output; see `formats.megatron_dist.target`."""
        from ckpt_tool.formats.megatron_dist.target import dist_target

        return dist_target(wanted)


FORMAT = _MegatronDist()


class _Reading:
    """One read: entries and objects, put into one catalog."""

    def __init__(self, tree: Tree, folder: str, listing: Listing, notes: Iterable[Note], options: ReadOptions) -> None:
        self.tree = tree
        self.options = options
        self.folder = folder
        self.listing = listing
        self.items = Items(tree)
        self.notes = list(notes)
        self.found: dict[TensorKey, Gathered] = {}
        self.styles: dict[str, None] = {}
        self.windows: list[bool] = []

    def catalog(self, *, required: bool) -> Catalog:
        objects, arrays = both(
            lambda: read_objects(self.tree, self.folder, self.listing.objects, self.items),
            lambda: self.items.arrays(self.listing.tensors.values()),
        )
        self.notes += with_context(self.tree, self.folder, objects.extras, self.listing.tensors, objects.extra_states)
        flat = []
        if any(key.kind and key.layers for key in map(parse, self.listing.tensors)):
            self.windows = windows_of(self.tree, self.folder, objects.extras, self.options.config)
        for entry in self.listing.tensors.values():
            own = arrays.get(entry.fqn, [])
            if FLAT in entry.fqn:
                flat.append((entry, own))
            else:
                self._entry(entry, own)
        tensors, degrees = self._tensors(), _degrees(objects)
        misfits: tuple[Unread, ...] = ()
        if (flat or objects.gathered) and is_adapter(key.name for key in tensors if key.state == MODEL):
            line = "optimizer states of the adapter's run are left out: they are stored in flat buckets without names"
            self.notes.append(Note("N-no-state", line, self.folder))
        elif flat or objects.gathered:
            from ckpt_tool.formats.megatron_dist.flat import MISFIT, flat_states, nameless

            try:
                tensors |= flat_states(
                    flat, objects.gathered, tensors, arguments(objects.extras), degrees, self.tree.display(self.folder)
                )
            except InconsistentCheckpoint as e:
                if e.code != MISFIT:
                    raise
                misfits = nameless(flat, objects.gathered, e)
        tensors, unread = set_apart(tensors | self._of_common(objects, tensors))
        unread += misfits
        read, lora, notes = read_adapter(
            self.tree, self.folder, tensors, arguments(objects.extras), self.options.lora_alpha
        )
        self.notes += notes
        if lora is not None and not arguments(objects.extras):
            degrees |= degrees_of_run(lora)
        if note := misnamed(self.tree, self.folder, objects.extras.get("iteration")):
            self.notes.append(note)
        unsafe = (*self.listing.unsafe, *self.items.unsafe, *objects.unsafe)
        return Catalog(
            "megatron-dist",
            read,
            objects.extras,
            Mesh.of_degrees(degrees),
            self._files(objects),
            hf_files.of_a_job(self.tree) if self.folder == megatron_dist_folder.JOB else (),
            (
                *self.notes,
                *objects.notes,
                *notes_of(unread),
                *checksums.missing(self.tree, tensors.values(), required=required),
            ),
            tuple(dict.fromkeys(unsafe)),
            self._hints(objects, degrees) if lora is None else self._hints(objects, degrees).having(lora),
            indexes=(self.folder + METADATA,),
            unread=unread,
        )

    def _files(self, objects: Objects) -> tuple[str, ...]:
        names = [METADATA, megatron_dist_folder.CONFIG]
        names += [megatron_dist_folder.COMMON] if objects.common_file else []
        names += (
            [megatron_dist_folder.INTEGRITY] if self.tree.exists(self.folder + megatron_dist_folder.INTEGRITY) else []
        )
        return (*(self.folder + name for name in names), *self.listing.files)

    def _hints(self, objects: Objects, degrees: Mapping[str, int]) -> Hints:
        return Hints.of(
            Degrees(**degrees),
            DistHints(
                tuple(self.styles),
                {base: list(shape) for base, shape in objects.extra_states.items()},
                objects.common_file,
                self.tree.exists(self.folder + megatron_dist_folder.INTEGRITY),
                tuple(self.windows),
            ),
            Globals.each(self.listing.globals, self.items.globals, objects.globals),
        )

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _entry(self, entry: TensorEntry, arrays: Sequence[StoredArray]) -> None:
        """One stored tensor: its chunks go to the parameters that lie in it."""
        key = parse(entry.fqn)
        shape = self.listing.reformed.get(entry.fqn, entry.shape)
        if len(shape) < key.leads or prod(n or 1 for n in shape[: key.leads]) > POSITIONS:
            raise InconsistentCheckpoint(
                f"a tensor of shape {list(shape)} under a key of {key.leads} stacked dims",
                code=CONTRADICTION,
                path=self.tree.display(self.folder),
                key=entry.fqn,
                hint="the key has a kind that this version does not know",
            )
        self.styles.update(dict.fromkeys(styles_of(key)))
        own = shape[key.leads :]
        number = self._numbers(key, shape)
        for at in product(*(range(n) for n in shape[: key.leads])):
            self._parameter(key, number(at), own, entry)
        chunks = chunks_of(entry, arrays, self.listing.reformed.get(entry.fqn))
        for at, some in _columns_apart(chunks, key.leads) or self._apart(chunks, key, entry.fqn, shape):
            self.found[TensorKey(name_of(key, number(at)), key.state)].place(key.part, some)

    def _apart(self, chunks: Iterable[Chunk], key: DistKey, fqn: str, shape: At) -> Iterable[tuple[At, list[Chunk]]]:
        """The chunks at each position of the leading dims of a tensor of `shape`, without these."""
        out: dict[At, list[Chunk]] = {}
        for chunk in chunks:
            for at, inner in apart(chunk, key.leads):
                if not all(map(lt, at, shape)) or len(at) + len(inner.box.offset) != len(shape):
                    raise InconsistentCheckpoint(
                        f"a box at {list(chunk.box.offset)} leaves the tensor of shape {list(shape)}",
                        code=CONTRADICTION,
                        path=inner.array.path,
                        key=fqn,
                        hint="the metadata contradicts itself",
                    )
                out.setdefault(at, []).append(inner)
        return out.items()

    def _numbers(self, key: DistKey, shape: At) -> Callable[[At], At]:
        """What makes the numbers of a tensor of its position. Raises InputError E2006 for another number of
        layers of a kind than the model has."""
        if not (key.kind and key.layers):
            return lambda at: at
        layers = [i for i, windowed in enumerate(self.windows) if windowed == KINDS[key.kind]]
        if len(layers) != shape[0]:
            raise InputError(
                f"{shape[0]} layers of the kind {key.kind!r} are stored, the model has {len(layers)} of them",
                code=KINDS_UNKNOWN,
                path=self.tree.display(self.folder),
                key=key.key,
                hint="pass the config of this very model with --config FILE",
            )
        return lambda at: (layers[at[0]], *at[1:]) if at[0] < len(layers) else at

    def _parameter(self, key: DistKey, at: tuple[int, ...], shape: tuple[int, ...], entry: TensorEntry) -> None:
        name = TensorKey(name_of(key, at), key.state)
        known = self.found.get(name)
        if known is None:
            known = self.found[name] = Gathered(shape, entry.dtype, key.parts)
        elif (
            not key.part
            or known.parts != key.parts
            or key.part in known.held
            or (known.shape[1:], known.dtype) != (shape[1:], entry.dtype)
            or key.part in HALF
            and known.shape != shape
        ):
            raise InconsistentCheckpoint(
                f"{name} is stored twice, once under {entry.fqn}",
                code=CONTRADICTION,
                path=self.tree.display(self.folder + METADATA),
                key=str(name),
                hint="two spellings of one tensor in one save: nothing says which counts",
            )
        if key.part:
            known.begin(key.part, shape)

    def _tensors(self) -> dict[TensorKey, LogicalTensor]:
        out, frozen, path = {}, list[str](), self.tree.display(self.folder)
        for key, found in self.found.items():
            tensor = found.whole(key, path)
            if not tensor.chunks and key.state != MODEL and 0 not in tensor.shape:
                frozen.append(str(key))  # a layer or expert that the stacked tensor of the others has a place for
                continue
            out[key] = tensor
        if frozen:
            message = (
                f"{len(frozen)} states are in no file although others of their key do (frozen?), such as {frozen[0]}"
            )
            self.notes.append(Note("N-no-state", message, key=frozen[0]))
        return out

    def _of_common(
        self, objects: Objects, tensors: Mapping[TensorKey, LogicalTensor]
    ) -> dict[TensorKey, LogicalTensor]:
        """Tensors of the common state: the optimizer's one step is every parameter's, others are extras."""
        out: dict[TensorKey, LogicalTensor] = {}
        for path, array in objects.leaves:
            if path[-2:] == ("state", "common_step"):
                at = next((key for key in path if type(key) is int), None)
                holds = held_by(objects.extras.get("optimizer"), at, facts_of(arguments(objects.extras)))
                own = (key for key, tensor in tensors.items() if holds(key.name, tensor.shape))
                stepping = dict.fromkeys(key.name for key in own if key.state not in (MODEL, MASTER))
                for key in (TensorKey(name, STEP) for name in stepping):
                    if key not in tensors:
                        out[key] = simple_tensor(key, array)
            elif path[-1:] != ("step",) or "param_state" not in path or not check_step(self.tree, path, array, objects):
                key = TensorKey(dotted(path), EXTRAS)
                out[key] = simple_tensor(key, array, path)
        return out


def _degrees(objects: Objects) -> dict[str, int]:
    """The degrees that the arguments state; tensor and pipeline degrees as the RNG states show them."""
    args = arguments(objects.extras)
    out = facts_of(args).degrees
    if len(objects.rng_shape) in (2, 3) and all(0 < n < 1 << 20 for n in objects.rng_shape):
        out["pp"], out["tp"] = objects.rng_shape[:2]
    if type(args.get("expert_tensor_parallel_size")) is not int:
        out["etp"] = out["tp"]
    return out


# -- pieces ------------------------------------------------------------------------------------------------------------

At = tuple[int, ...]


def _columns_apart(chunks: Sequence[Chunk], leads: int) -> Iterable[tuple[At, Sequence[Chunk]]] | None:
    """Columns at each position of the first `leads` dims, without these; None for what goes chunk by chunk."""
    if not isinstance(chunks, ChunkColumns):
        return None
    return cast("Columns", chunks).apart(leads) if leads else [((), chunks)]


def chunks_of(entry: TensorEntry, arrays: Sequence[StoredArray], true_shape: At | None) -> Sequence[Chunk]:
    """The pieces of `entry` as chunks of the tensor that its key means (leading dims included).

    arrays: the pieces' bytes, in the same order. true_shape: of a tensor whose stored form is the flattened one. Raises
    InconsistentCheckpoint (E0389) when the two shapes do not go together.
    """
    if true_shape is None:
        return entry.chunks(arrays)
    cell = _cell(entry, true_shape)
    return [
        chunk for piece, array in zip(entry.pieces, arrays, strict=True) for chunk in _flattened(piece, array, cell)
    ]


def _cell(entry: TensorEntry, true_shape: At) -> At:
    """The local shape that each grid cell of the stored, flattened tensor holds."""
    grid, numel = entry.shape[:-1], entry.shape[-1] if entry.shape else 0
    fits = len(grid) == len(true_shape) and all(n and not size % n for size, n in zip(true_shape, grid, strict=True))
    cell = tuple(size // n for size, n in zip(true_shape, grid, strict=True)) if fits else ()
    if not fits or prod(cell) != numel:
        raise InconsistentCheckpoint(
            f"stored as {list(entry.shape)}, which is no flattened form of {list(true_shape)}",
            code=CONTRADICTION,
            key=entry.fqn,
            hint="the metadata contradicts itself: get the checkpoint again",
        )
    return cell


def _flattened(piece: Piece, array: StoredArray, cell: At) -> Iterator[Chunk]:
    start, count = piece.offset[-1], piece.shape[-1]
    if prod(piece.shape[:-1]) != 1:
        raise InconsistentCheckpoint(
            f"a piece of shape {list(piece.shape)} covers several cells of the grid",
            code=CONTRADICTION,
            path=piece.file,
            offset=piece.at,
            hint="no version of Megatron writes this: get the checkpoint again",
        )
    line = array.view(0, (count,), _line_stride(array))
    corner = tuple(i * n for i, n in zip(piece.offset[:-1], cell, strict=True))
    flat = FlatLine.of_block(None, cell, [(Box(corner, cell), whole(cell))])
    yield from (chunk for _, chunk in flat.chunks(line, start))


def _line_stride(array: StoredArray) -> At | None:
    return None if array.strides is None else array.strides[-1:]


def apart(chunk: Chunk, leads: int) -> Iterator[tuple[At, Chunk]]:
    """The chunk without its `leads` first dims: (position, chunk) for every position that it covers."""
    box = chunk.box
    if not leads:
        yield (), chunk
        return
    inner = Box(box.offset[leads:], box.shape[leads:])
    flat = chunk.within.shape != box.shape
    for index in product(*(range(n) for n in box.shape[:leads])):
        at = tuple(o + i for o, i in zip(box.offset[:leads], index, strict=True))
        if flat:
            steps = contiguous_strides(box.shape)[:leads]
            start = chunk.within.offset[0] + sum(i * step for i, step in zip(index, steps, strict=True))
            yield at, Chunk(inner, chunk.array, Box((start,), (inner.numel,)))
        else:
            yield at, _row(chunk, inner, index)


def _row(chunk: Chunk, inner: Box, index: At) -> Chunk:
    """The chunk's box at position `index` (relative to the box) of its leading dims."""
    array, leads = chunk.array, len(index)
    strides = array.strides or contiguous_strides(array.shape)
    lead = zip(chunk.within.offset[:leads], index, strides[:leads], strict=True)
    skipped = sum((offset + i) * stride for offset, i, stride in lead)
    row = array.view(skipped, array.shape[leads:], None if array.strides is None else array.strides[leads:])
    return Chunk(inner, row, Box(chunk.within.offset[leads:], chunk.within.shape[leads:]))
