"""Reading: the shards of Meta's ranks joined to whole tensors, from pickles and directories alone.

    shards (16, 4), (16, 4) of layers.0.attention.wq.weight, 32 rows by params.json  ->
          one tensor, two boxes of 16 rows

The shards' shapes must add up to the sizes in params.json; a missing shard is reported with the rows that there are and
those that are expected. All faults are reported at once. Cost: a pickle a shard, then some 5 us a tensor and shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Catalog, Note, mark_replicas
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.hints import Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, InconsistentCheckpoint, UnmappedTensor
from ckpt_tool.formats import checksums
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.meta.consolidated import files as meta_files
from ckpt_tool.systems.meta.consolidated.files import PARAMS
from ckpt_tool.systems.meta.consolidated.params import MetaHints, MetaSizes, read_params, sizes_of
from ckpt_tool.systems.meta.consolidated.rules import (
    ALL,
    EITHER,
    EMBEDDING,
    cut_of,
    is_key_or_value,
    layer_of,
    shape_of,
)

NO_PARAMS = "E1402"
SHAPE = "E1403"
NO_RULE = "E1404"
LAYERS = "E1406"
ABSENT = "E1407"
UNLIKE = "E1408"
NESTED = "E1409"
_AGAIN = "files and params.json come from two saves: fetch both again"
_MORE = "a shard is missing, or params.json is another model's: fetch the folder again"


class _Shards(NamedTuple):
    """The content of all shards."""

    names: Sequence[str]  # of the files, by rank
    held: Sequence[Mapping[str, StoredArray]]  # {tensor: array} of each file
    sizes: MetaSizes | None  # None without params.json

    @property
    def hidden(self) -> int | None:
        """The width of the MLP, from the first layer in the files; None if there is none."""
        first = next((each for name, each in self.held[0].items() if name.endswith(".feed_forward.w1.weight")), None)
        return first.shape[0] * len(self.held) if first is not None and len(first.shape) == 2 else None


def read_shards(tree: Tree, names: tuple[str, ...], *, lenient: bool, required: bool) -> Catalog:
    """Join the shards into one catalog of unsharded tensors.

    Args:
        tree: The folder.
        names: The shards, by rank.
        lenient: Leave out tensors that no rule can join.
        required: Refuse files without CRCs.

    Raises what `read` of `systems.meta.consolidated.format` lists.
    """
    meta_files.check(names, path=tree.display())
    params = read_params(tree)
    if params is None and len(names) > 1:
        raise Incomplete(
            f"params.json is missing: how {len(names)} shards make up a tensor depends on the heads",
            code=NO_PARAMS,
            path=tree.display(PARAMS),
            hint="fetch it into this folder: it is next to every release",
        )
    files = read_each(names, lambda name: read_content(tree, name))
    sizes = sizes_of(params, tree.display(PARAMS)) if params is not None else None
    shards = _Shards(names, [_flat(tree, name, file) for name, file in zip(names, files, strict=True)], sizes)
    # Again, now that the shapes show how many shards there should be.
    meta_files.check(names, path=tree.display(), count=_count_in_all(shards))

    # Faults are collected, so that the user sees all damaged tensors after one run.
    faults: list[CkptError] = []
    notes: list[Note] = []
    tensors: dict[TensorKey, LogicalTensor] = {}
    for name in dict.fromkeys(name for held in shards.held for name in held):
        joined = _join_shards(tree, shards, name, faults)
        if joined is not None:
            tensors[joined.key] = joined
    # Tensors are found by the names in the files, so layers that all files lack are looked for by number.
    _check_layers(tree, shards, faults)
    _raise(faults, notes, lenient=lenient)
    if params is None:
        notes.append(Note("W-no-params", "params.json is missing: heads and sizes are not known"))
    tensors, unread = set_apart(tensors)
    notes += notes_of(unread)
    notes += checksums.missing(tree, tensors.values(), required=required)
    return Catalog(
        "meta",
        tensors,
        mesh=Mesh.of(tp=len(names)),
        files=names,
        sidefiles=hf_files.side_files(tree),
        notes=tuple(notes),
        unsafe=tuple(line for file in files for line in file.unsafe),
        hints=Hints.of(
            MetaHints(params, _embedding_dim(tensors), params is not None), Globals.each(*(f.globals for f in files))
        ),
        unread=unread,
    )


def _count_in_all(shards: _Shards) -> int:
    """The number of shards of the complete model, from the rows of a query in the first file and in params.json.

    0 if it can't be derived. File names alone do not show that the last shards are missing.
    """
    for name, array in shards.held[0].items():
        if shards.sizes is not None and name.endswith(".attention.wq.weight") and len(array.shape) == 2:
            rows = shards.sizes.heads * shards.sizes.head
            whole_count, rest = divmod(rows, array.shape[0] or 1)
            is_cut = cut_of(name) == 0 and array.shape[1] == shards.sizes.dim
            return whole_count if is_cut and not rest else 0
    return 0


def _embedding_dim(tensors: Mapping[TensorKey, LogicalTensor]) -> int | None:
    """The dim along which the embedding is sharded, None if it has one chunk."""
    found = tensors.get(TensorKey(EMBEDDING))
    if found is None or len(found.chunks) < 2:
        return None
    return 0 if found.chunks[1].box.offset[0] else 1


def _flat(tree: Tree, name: str, file: TorchContent) -> dict[str, StoredArray]:
    """The content of one shard, {tensor: array}. Raises CorruptFile E1409 if it is no flat state dict."""
    deep = next((path for path, _ in file.leaves if len(path) != 1 or not isinstance(path[0], str)), None)
    if deep is not None or file.extras not in ({}, None):
        more = ".".join(map(str, deep)) if deep is not None else ", ".join(map(str, list(file.extras)[:3]))
        raise CorruptFile(
            f"want names and tensors alone, found {more[:200]}",
            code=NESTED,
            path=tree.display(name),
            hint="a training state: read it with --from torch, a file at a time",
        )
    return {str(path[0]): array for path, array in file.leaves}


def _join_shards(tree: Tree, shards: _Shards, name: str, faults: list[CkptError]) -> LogicalTensor | None:
    """The tensor joined from all shards; None if that fails, with the reason added to `faults`."""
    arrays = [held.get(name) for held in shards.held]
    absent = next((file for file, array in zip(shards.names, arrays, strict=True) if array is None), None)
    there = [array for array in arrays if array is not None]
    first = there[0]

    if absent is not None:
        faults.append(
            Incomplete(
                f"{absent} lacks it, {first.path} has it", code=ABSENT, path=tree.display(absent), key=name, hint=_AGAIN
            )
        )
        return None

    odd = next((array for array in there if (array.shape, array.dtype) != (first.shape, first.dtype)), None)
    if odd is not None:
        faults.append(
            InconsistentCheckpoint(
                f"{odd.dtype.name} {list(odd.shape)} in {odd.path}, {first.dtype.name} {list(first.shape)} in "
                f"{first.path}",
                code=UNLIKE,
                path=tree.display(odd.path),
                key=name,
                hint="the shards come from two saves: fetch them again",
            )
        )
        return None

    return _check_shape(tree, shards, name, _place_shards(shards, name, there, faults), faults)


def _place_shards(
    shards: _Shards, name: str, arrays: Sequence[StoredArray], faults: list[CkptError]
) -> LogicalTensor | None:
    """The tensor with each shard's array at its place; None with a fault if no rule says how it is sharded.

    The shape is not compared with params.json yet (`_check_shape`).
    """
    first = arrays[0]
    count = len(arrays)
    if count == 1:
        return simple_tensor(TensorKey(name), first, (name,))

    sizes = shards.sizes
    cut = cut_of(name)
    if cut is None or sizes is None:
        faults.append(
            UnmappedTensor(
                f"nothing says how {count} shards share it",
                code=NO_RULE,
                path=first.path,
                key=name,
                hint="it is no tensor of Meta's Llama; --lenient leaves such tensors out",
            )
        )
        return None

    if cut == EITHER:  # columns in Llama 1 and 2, rows since Llama 3
        cut = 1 if len(first.shape) == 2 and first.shape[1] * count == sizes.dim else 0
    if cut == ALL or len(first.shape) != 2:
        same = [Chunk(whole(first.shape), array, whole(first.shape)) for array in arrays]
        return LogicalTensor(TensorKey(name), first.shape, first.dtype, mark_replicas(same), (name,))

    # With more ranks than heads of keys, `repeats` neighbouring ranks hold the same rows.
    band = first.shape[cut]
    repeats = 1
    if is_key_or_value(name) and count > sizes.kv and band == sizes.head:
        repeats = count // sizes.kv

    shape = list(first.shape)
    shape[cut] = band * count // repeats
    chunks = []

    for rank, array in enumerate(arrays):
        offset = [0, 0]
        offset[cut] = rank // repeats * band
        chunks.append(Chunk(Box(tuple(offset), first.shape), array, whole(first.shape)))

    return LogicalTensor(TensorKey(name), tuple(shape), first.dtype, mark_replicas(chunks), (name,))


def _check_shape(
    tree: Tree, shards: _Shards, name: str, tensor: LogicalTensor | None, faults: list[CkptError]
) -> LogicalTensor | None:
    """The tensor if it has the shape that params.json gives; else None, with a fault."""
    if tensor is None or shards.sizes is None:
        return tensor
    wanted = shape_of(name, shards.sizes, shards.hidden)
    if wanted is None:
        return tensor
    fits = len(wanted) == len(tensor.shape) and all(n in (None, m) for n, m in zip(wanted, tensor.shape, strict=True))
    if fits:
        return tensor
    shown = [n if n is not None else "any" for n in wanted]
    of = (
        f"{len(shards.names)} shards come to {list(tensor.shape)}" if len(shards.names) > 1 else f"{list(tensor.shape)}"
    )
    faults.append(
        InconsistentCheckpoint(
            f"{of}, params.json wants {shown}",
            code=SHAPE,
            path=tree.display(tensor.chunks[0].array.path),
            key=name,
            hint=_MORE,
        )
    )
    return None


def _check_layers(tree: Tree, shards: _Shards, faults: list[CkptError]) -> None:
    """Add a fault if the files have other layers than params.json counts."""
    if shards.sizes is None:
        return
    layers = shards.sizes.layers
    have = {number for number in map(layer_of, shards.held[0]) if number is not None}
    absent: list[int] = []
    if layers > len(have):  # a count in a file may be any number: no more than ten are looked for
        absent = list(islice((number for number in range(layers) if number not in have), 10))
    more = sorted(number for number in have if number >= layers)[:10]
    for numbers, what in ((absent, "missing"), (more, "more than n_layers")):
        if numbers and have:
            some = ", ".join(map(str, numbers))
            faults.append(
                Incomplete(
                    f"layers {some} of {layers} are {what}",
                    code=LAYERS,
                    path=tree.display(shards.names[0]),
                    hint=_AGAIN,
                )
            )


def _raise(faults: list[CkptError], notes: list[Note], *, lenient: bool) -> None:
    """Raise the first fault, with the others attached. With `lenient`, tensors without a rule become notes instead."""
    if lenient:
        for fault in faults:
            if fault.code == NO_RULE:
                notes.append(Note("W-extra-tensors", f"not read: {fault.message}", fault.path, fault.key))
        faults = [fault for fault in faults if fault.code != NO_RULE]
    if faults:
        first = faults[0]
        rest = faults[1:]
        first.faults = tuple(f"{fault.key or fault.path}: {fault.message}" for fault in rest[:100])
        raise first
