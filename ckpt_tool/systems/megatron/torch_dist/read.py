"""Reads a torch_dist folder and undoes the rules of Megatron's keys, so that each parameter has one name and one shape.

    decoder.layers.mlp.linear_fc1.weight (4, 96, 32) in boxes (1, 24, 32)  ->  4 parameters of 4 chunks each

The specification is that of `systems.megatron.torch_dist.format`. Cost: 0.1 ms a box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from operator import lt
from typing import TYPE_CHECKING, cast

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
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.dcp_container.dcp_items import DcpItems
from ckpt_tool.formats.dcp_container.dcp_metadata import (
    CONTRADICTION,
    METADATA,
    DcpListing,
    DcpTensorEntry,
    check_files,
    read_listing,
)
from ckpt_tool.formats.dcp_container.dcp_pieces import DcpPiece
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.adapter import degrees_of_run, is_adapter, read_adapter
from ckpt_tool.systems.megatron.args import arguments, facts_of
from ckpt_tool.systems.megatron.chains import held_by
from ckpt_tool.systems.megatron.hints import DistHints
from ckpt_tool.systems.megatron.parts import HALF, Gathered
from ckpt_tool.systems.megatron.pointer import misnamed
from ckpt_tool.systems.megatron.torch_dist import folder as megatron_dist_folder
from ckpt_tool.systems.megatron.torch_dist.keys import KINDS, DistKey, name_of, parse, styles_of
from ckpt_tool.systems.megatron.torch_dist.nemo import with_context
from ckpt_tool.systems.megatron.torch_dist.state import Objects, check_step, read_objects
from ckpt_tool.systems.megatron.torch_dist.windows import KINDS_UNKNOWN, windows_of

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.formats.dcp_container.dcp_columns import DcpColumns

FLAT = ".distributed.dp_group_idx_"
POSITIONS = 1 << 18  # the most positions (layers times experts) under one key; more means damaged metadata


def read_tree(tree: Tree, options: ReadOptions) -> Catalog:
    """Return the catalog of the checkpoint in `tree`. The format's `read` lists the errors."""
    found = megatron_dist_folder.find(tree)
    folder = found[0] if found else ""
    megatron_dist_folder.check(tree, folder)
    notes = megatron_dist_folder.check_integrity(tree, folder)
    listing = read_listing(tree, folder, (METADATA,))
    check_files(tree, [listing], folder + METADATA)
    catalog = _TorchDistReading(tree, folder, listing, notes, options).catalog(required=options.require_checksums)
    catalog.check()
    return catalog


class _TorchDistReading:
    """One read: entries and objects, put into one catalog."""

    def __init__(
        self, tree: Tree, folder: str, listing: DcpListing, notes: Iterable[Note], options: ReadOptions
    ) -> None:
        self.tree = tree
        self.options = options
        self.folder = folder
        self.listing = listing
        self.items = DcpItems(tree)
        self.notes = list(notes)
        self.found: dict[TensorKey, Gathered] = {}
        self.styles: dict[str, None] = {}
        self.windows: list[bool] = []

    def catalog(self, *, required: bool) -> Catalog:
        """Return the catalog of the checkpoint. required: refuse files without CRCs."""
        objects, arrays = both(
            lambda: read_objects(self.tree, self.folder, self.listing.objects, self.items),
            lambda: self.items.arrays(self.listing.tensors.values()),
        )
        self.notes += with_context(self.tree, self.folder, objects.extras, self.listing.tensors, objects.extra_states)
        # The attentions' keys must be known before the first tensor gets its name.
        flat = []
        if any(key.kind and key.layers for key in map(parse, self.listing.tensors)):
            self.windows = windows_of(self.tree, self.folder, objects.extras, self.options.config)
        for entry in self.listing.tensors.values():
            own = arrays.get(entry.fqn, [])
            if FLAT in entry.fqn:
                flat.append((entry, own))
            else:
                self._entry(entry, own)
        tensors = self._tensors()
        degrees = _degrees(objects)
        misfits: tuple[Unread, ...] = ()
        if (flat or objects.gathered) and is_adapter(key.name for key in tensors if key.state == MODEL):
            line = "optimizer states of the adapter's run are left out: they are stored in flat buckets without names"
            self.notes.append(Note("N-no-state", line, self.folder))
        elif flat or objects.gathered:
            from ckpt_tool.systems.megatron.torch_dist.flat import MISFIT, flat_states, list_unnamed

            try:
                tensors |= flat_states(
                    flat, objects.gathered, tensors, arguments(objects.extras), degrees, self.tree.display(self.folder)
                )
            except InconsistentCheckpoint as e:
                if e.code != MISFIT:
                    raise
                # The rest of the checkpoint is readable: the error is raised only if these states are used.
                misfits = list_unnamed(flat, objects.gathered, e)
        tensors, unread = set_apart(tensors | self._add_common_tensors(objects, tensors))
        unread += misfits
        read, lora, notes = read_adapter(
            self.tree, self.folder, tensors, arguments(objects.extras), self.options.lora_alpha
        )
        self.notes += notes
        # An adapter of Megatron-Bridge has no arguments; its run's config states the degrees.
        if lora is not None and not arguments(objects.extras):
            degrees |= degrees_of_run(lora)
        if note := misnamed(self.tree, self.folder, objects.extras.get("iteration")):
            self.notes.append(note)
        unsafe = (*self.listing.unsafe, *self.items.unsafe, *objects.unsafe)
        return Catalog(
            "megatron-dist",
            tensors=read,
            extras=objects.extras,
            mesh=Mesh.of_degrees(degrees),
            files=self._files(objects),
            sidefiles=hf_files.of_a_job(self.tree) if self.folder == megatron_dist_folder.JOB else (),
            notes=(
                *self.notes,
                *objects.notes,
                *notes_of(unread),
                *checksums.missing(self.tree, tensors.values(), required=required),
            ),
            unsafe=tuple(dict.fromkeys(unsafe)),
            hints=self._hints(objects, degrees) if lora is None else self._hints(objects, degrees).having(lora),
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

    def _entry(self, entry: DcpTensorEntry, arrays: Sequence[StoredArray]) -> None:
        """Add one stored tensor: its chunks go to the parameters that are stacked in it."""
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
        own = shape[key.leads :]  # of one parameter
        number = self._numbers(key, shape)
        # Every position gets its parameter, even without a chunk, so that a gap is noticed.
        for at in product(*(range(n) for n in shape[: key.leads])):
            self._parameter(key, number(at), own, entry)
        chunks = chunks_of(entry, arrays, self.listing.reformed.get(entry.fqn))
        for at, some in _columns_apart(chunks, key.leads) or self._split_positions(chunks, key, entry.fqn, shape):
            self.found[TensorKey(name_of(key, number(at)), key.state)].place(key.part, some)

    def _split_positions(
        self, chunks: Iterable[Chunk], key: DistKey, fqn: str, shape: At
    ) -> Iterable[tuple[At, list[Chunk]]]:
        """Return the chunks at each position of the leading dims of a tensor of `shape`, without these dims."""
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
        """Return the function from a position under `key` to the numbers of layer and expert.

        They differ if only layers of one kind are stacked under the key. Raises InputError E2006 if it has another
        number of layers than the model has of that kind.
        """
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

    def _parameter(self, key: DistKey, at: tuple[int, ...], shape: tuple[int, ...], entry: DcpTensorEntry) -> None:
        name = TensorKey(name_of(key, at), key.state)
        known = self.found.get(name)
        if known is None:
            known = self.found[name] = Gathered(shape, entry.dtype, key.parts)
        elif (
            not key.part
            or known.parts != key.parts
            or key.part in known.held
            or (known.shape[1:], known.dtype) != (shape[1:], entry.dtype)
            or (key.part in HALF and known.shape != shape)
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
        out = {}
        frozen = list[str]()
        path = self.tree.display(self.folder)
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

    def _add_common_tensors(
        self, objects: Objects, tensors: Mapping[TensorKey, LogicalTensor]
    ) -> dict[TensorKey, LogicalTensor]:
        """Return the tensors of the common state: each parameter gets the optimizer's step, other tensors are
        extras."""
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
    """Return the degrees that the arguments state, but tensor and pipeline degrees as the RNG states show them."""
    args = arguments(objects.extras)
    out = facts_of(args).degrees
    # The grid of the RNG states is (pipeline stages, tensor ranks) or, with EP > 1, has data ranks as a third dim.
    if len(objects.rng_shape) in (2, 3) and all(0 < n < 1 << 20 for n in objects.rng_shape):
        out["pp"], out["tp"] = objects.rng_shape[:2]
    if type(args.get("expert_tensor_parallel_size")) is not int:
        out["etp"] = out["tp"]
    return out


# -- pieces ------------------------------------------------------------------------------------------------------------

At = tuple[int, ...]


def _columns_apart(chunks: Sequence[Chunk], leads: int) -> Iterable[tuple[At, Sequence[Chunk]]] | None:
    """Return the columns at each position of the first `leads` dims, without these dims; None if they are plain
    chunks."""
    if not isinstance(chunks, ChunkColumns):
        return None
    return cast("DcpColumns", chunks).apart(leads) if leads else [((), chunks)]


def chunks_of(entry: DcpTensorEntry, arrays: Sequence[StoredArray], true_shape: At | None) -> Sequence[Chunk]:
    """Return the pieces of `entry` as chunks of its tensor, leading dims included.

    Args:
        entry: of the metadata.
        arrays: the pieces' bytes, in the same order.
        true_shape: of a tensor that is stored flattened, None for any other.

    Raises:
        InconsistentCheckpoint: E0389, the stored shape is no flattened form of the true one.
    """
    if true_shape is None:
        return entry.chunks(arrays)
    cell = _cell(entry, true_shape)
    return [
        chunk for piece, array in zip(entry.pieces, arrays, strict=True) for chunk in _flatten_piece(piece, array, cell)
    ]


def _cell(entry: DcpTensorEntry, true_shape: At) -> At:
    """Return the shape of the block that each cell of a flattened tensor's grid holds, row-major in the last dim."""
    grid = entry.shape[:-1]
    numel = entry.shape[-1] if entry.shape else 0
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


def _flatten_piece(piece: DcpPiece, array: StoredArray, cell: At) -> Iterator[Chunk]:
    start = piece.offset[-1]
    count = piece.shape[-1]
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
    """Yield (position, chunk without its first `leads` dims) for every position that the chunk covers."""
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
    """Return the chunk at position `index` (relative to the box) of its leading dims; no data is read."""
    array = chunk.array
    leads = len(index)
    strides = array.strides or contiguous_strides(array.shape)
    lead = zip(chunk.within.offset[:leads], index, strides[:leads], strict=True)
    skipped = sum((offset + i) * stride for offset, i, stride in lead)
    row = array.view(skipped, array.shape[leads:], None if array.strides is None else array.strides[leads:])
    return Chunk(inner, row, Box(chunk.within.offset[leads:], chunk.within.shape[leads:]))
