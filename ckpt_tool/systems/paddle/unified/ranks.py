"""An optimizer that each rank wrote for itself (`ignore_merge_optimizer`): the ranks' tensors joined to unsharded ones.

    optimizer.tp01_shard00.safetensors   mlp.gate_proj.weight/moment1_0 [32, 24]   columns 24-47 of [32, 48]
    optimizer.tp01_shard01.safetensors   mlp.up_proj.weight/moment1_0   [400]      sharding v2: a slice of a rank's line

The merged model next to it has every unsharded shape, and `paddle.rules` has the cut of every name. A rank holds its
complete share, or, if the lengths show it, a slice of that share in row-major order: the slices are concatenated in the
order of the sharding ranks, with zeros after the last (dropped here). Beta powers, and tensors of which each tensor
rank has a full copy, are in several files: replicas. `gather_split_param` leaves complete shares, each in one of the
sharding ranks' files.

Source: PaddleFormers 1.2.0 `trainer/unified_checkpoint/unified_checkpoint.py` (`save_non_merge_optimizer`),
`sharding_split_param_utils.py` (`reshape_params`: the padding), `trainer/training_args.py` (`optimizer_name_suffix`).
Files behind `_shard_0001` hold a random share of the keys of one rank. Cost: 10 us a tensor and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import mark_replicas
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.flat_line import FlatLine
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import MASTER, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError, UsageError
from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader, read_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.rules import PaddleCut, cut_of, joined_shape, local_boxes, module_of, stored_cut
from ckpt_tool.systems.paddle.unified.files import MASTER_STEM, OPTIMIZER_STEM, UnifiedRankFile, optimizer_key
from ckpt_tool.weight_schemes import paddle_states as quant

MISSING_RANK = "E1355"
UNPLACED = "E1356"
DIMS = ("tp", "pp", "shard", "moe")
_BY_SHAPE = frozenset(
    ("k_proj", "v_proj", "kv_b_proj", "embed_tokens", "lm_head")
)  # cut or whole, never several matrices

Shape = tuple[int, ...]


class ArrayOfRank(NamedTuple):
    """One rank's array of a tensor."""

    at: tuple[int, int, int, int]  # (tp, pp, shard, moe)
    array: StoredArray


class RankTensors(NamedTuple):
    """The tensors of all ranks' files, joined."""

    tensors: dict[TensorKey, LogicalTensor]
    headers: list[SafetensorsHeader]  # of every file
    degrees: dict[str, int]  # from the file names


def read_ranks(
    tree: Tree,
    ranks: Mapping[str, Sequence[UnifiedRankFile]],
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    *,
    parts: int,
    marked: bool,
    lenient: bool,
) -> RankTensors:
    """Join the tensors of all ranks' files.

    Args:
        tree: The folder.
        ranks: The files, by stem.
        shapes: Unsharded shapes of the model's tensors, in Paddle's layout.
        config: The model's config.
        parts: Files of each rank (`optim_shard_num`).
        marked: An asynchronous save, in which a rank without tensors writes no file.
        lenient: Accept white space before a header.

    Raises:
        Incomplete: E1355, a rank's file is missing.
        InputError: E1356, a tensor that can't be placed.
    """
    degrees = check_ranks(tree, ranks, parts=parts, marked=marked)
    held: dict[TensorKey, list[ArrayOfRank]] = {}
    stems = (OPTIMIZER_STEM, MASTER_STEM)
    paths = [file.path for stem in stems for file in ranks.get(stem, ())]
    headers = read_by_file(paths, lambda path: read_header(tree, path, lenient=lenient))
    for stem in stems:
        for file in ranks.get(stem, ()):
            header = headers[file.path]
            at = tuple(dict(file.at).get(dim, 0) for dim in DIMS)
            for row, name in enumerate(header.names):
                array = header.stored(row)
                if array.dtype.name == "U16":  # no accumulator is an integer of 16 bits: Paddle's way to hold bf16
                    array = array.view(0, array.shape, dtype=DTYPES["BF16"])
                key = (
                    TensorKey(name, MASTER)
                    if stem == MASTER_STEM
                    else optimizer_key(name, array.dtype, path=tree.display(file.path))
                )
                held.setdefault(key, []).append(ArrayOfRank((at[0], at[1], at[2], at[3]), array))
    tp = degrees.get("tp", 1)
    tensors = {key: join(key, found, shapes, config, tp) for key, found in held.items()}
    return RankTensors(tensors, list(headers.values()), degrees)


def check_ranks(
    tree: Tree, ranks: Mapping[str, Sequence[UnifiedRankFile]], *, parts: int, marked: bool
) -> dict[str, int]:
    """The degrees that the file names show.

    Raises Incomplete E1355 if files of ranks are missing, InconsistentCheckpoint E0384 for names of two jobs.
    """
    every = [file for files in ranks.values() for file in files]
    dims = {tuple(dict(file.at)) for file in every}
    if len(dims) > 1:
        names = sorted(".".join(kind) or "(none)" for kind in dims)
        raise InconsistentCheckpoint(
            f"files of ranks of two jobs are mixed: named by {' and by '.join(names)}",
            code="E0384",
            path=tree.display(every[-1].path),
            hint="remove the files of the older save",
        )

    degrees: dict[str, int] = {}
    for file in every:
        for dim, index in file.at:
            degrees[dim] = max(degrees.get(dim, 2), index + 1)  # a dim of one rank is not in the names

    numbers = range(1, parts + 1) if parts > 1 else range(1)
    order = [dim for dim in DIMS if dim in degrees]
    missing = []

    for stem, files in ranks.items():
        have = {(file.at, file.part) for file in files}
        for place in product(*(range(degrees[dim]) for dim in order)):
            at = tuple(zip(order, place, strict=True))
            missing += [_name(stem, at, part) for part in numbers if (at, part) not in have]

    if missing and not marked:
        fault = Incomplete(
            f"{len(missing)} of the ranks' files are missing; the first: {missing[0]}",
            code=MISSING_RANK,
            path=tree.display(missing[0]),
            faults=missing[1:50],
            hint="fetch the files of every rank into this folder",
        )
        report_missing(fault, files=missing)

    return degrees


def _name(stem: str, at: Sequence[tuple[str, int]], part: int) -> str:
    label = "_".join(f"{dim}{index:02d}" for dim, index in at)
    return f"{stem}.{label}{'.' if label else ''}safetensors" + (f"_shard_{part:04d}" if part else "")


# -- joining -----------------------------------------------------------------------------------------------------------


def join(
    key: TensorKey, held: Sequence[ArrayOfRank], shapes: Mapping[str, Shape], config: Mapping[str, Any], tp: int
) -> LogicalTensor:
    """The whole tensor of one key, from what `tp` tensor ranks and their sharding ranks hold of it."""
    first = held[0].array
    if any(each.array.dtype != first.dtype for each in held):
        raise _mixed_error("the ranks hold it in several dtypes", first.path, str(key))
    full = shapes.get(key.name)
    if key.state in (quant.FIRST8, quant.SECOND8, quant.PACKED) and any(
        each.array.shape != (full or first.shape) or (full is None and tp > 1) for each in held
    ):
        hint = "resume it in Paddle at these degrees and save with the optimizer merged"
        raise _unplaced_error(key, first, "a quantised state in parts: each rank has scales of its own", hint)
    # Or one rank has all of it, and the others nothing but padding.
    sliced = len(first.shape) == 1 and len({each.at[2] for each in held}) > 1
    alike = all(each.array.shape == full for each in held) and not sliced
    if key.state.endswith("pow_acc") or key.state in quant.STATES or alike:
        return _copies(key, first.shape, held)
    full, cut = _cut(key, held, full, config, tp)
    chunks = [chunk for each in _groups(held) for chunk in _place_share(key, each, full, cut, tp)]
    return LogicalTensor(key, full, first.dtype, mark_replicas(chunks))


def _copies(key: TensorKey, shape: Shape, held: Sequence[ArrayOfRank]) -> LogicalTensor:
    """The tensor of which every rank holds a full copy: the first is read, the others are compared with it."""
    chunks = [Chunk(whole(shape), each.array, whole(shape)) for each in held if each.array.shape == shape]
    if len(chunks) != len(held):
        raise _mixed_error("the ranks hold it in several shapes", held[-1].array.path, str(key))
    return LogicalTensor(key, shape, held[0].array.dtype, mark_replicas(chunks))


def _groups(held: Sequence[ArrayOfRank]) -> Iterator[list[ArrayOfRank]]:
    """The arrays of each (tensor rank, stage, expert rank), in the order of its sharding ranks."""
    groups: dict[tuple[int, int, int], list[ArrayOfRank]] = {}
    for each in sorted(held, key=lambda each: each.at):
        tp, pp, _, moe = each.at
        groups.setdefault((tp, pp, moe), []).append(each)
    yield from groups.values()


def _count_elements(arrays: Iterable[ArrayOfRank]) -> int:
    return sum(each.array.numel for each in arrays)


def _cut(
    key: TensorKey, held: Sequence[ArrayOfRank], full: Shape | None, config: Mapping[str, Any], tp: int
) -> tuple[Shape, PaddleCut]:
    """The unsharded shape and how tensor ranks cut it. Raises InputError E1356, E1310."""
    local = held[0].array.shape
    if full is None:
        if any(each.array.shape != local for each in held) or len({each.at[2] for each in held}) > 1:
            raise _unplaced_error(
                key, held[0].array, "slices of a tensor whose shape nothing says", "fetch the model's files too"
            )
        cut = stored_cut(key.name, local, config, tp)
        return joined_shape(local, cut, tp), cut

    if tp == 1:
        return (local if len(local) > 1 else full), PaddleCut(None)  # the array itself shows how it is stored

    whole_numel = prod(full)
    share = max(_count_elements(group) for group in _groups(held))
    if module_of(key.name) in _BY_SHAPE and len(local) == len(full):
        dims = [d for d, (n, m) in enumerate(zip(local, full, strict=True)) if n * tp == m]
        others = sum(n != m for n, m in zip(local, full, strict=True))
        if len(local) > 1 and others == 1 and len(dims) == 1:
            return full, PaddleCut(dims[0])

    if "experts." in key.name and len({each.at[0] for each in held}) == 1 and share >= whole_numel:
        return full, PaddleCut(None)  # experts are divided among the tensor ranks: one rank has all of this one

    try:
        return full, cut_of(key.name, full, config, tp)
    except UsageError as fault:
        raise InputError(
            f"{fault.message}",
            code=UNPLACED,
            path=held[0].array.path,
            key=str(key),
            hint="pass the model's config.json with --config",
        ) from fault


def _place_share(key: TensorKey, group: Sequence[ArrayOfRank], full: Shape, cut: PaddleCut, tp: int) -> Iterator[Chunk]:
    """The chunks of one tensor rank's share: complete arrays, or slices that its sharding ranks hold in order."""
    rank = group[0].at[0] if cut.dim is not None else 0
    local, pairs = local_boxes(full, cut, tp, rank)
    if all(each.array.shape == local for each in group) and (len(local) != 1 or len(group) == 1):
        for each in group:
            for there, here in pairs:
                yield Chunk(there, each.array, here)
        return
    line = FlatLine.of_block(key, local, pairs)
    at = 0
    for each in group:
        if len(each.array.shape) != 1:
            raise _unplaced_error(
                key,
                each.array,
                f"shape {list(each.array.shape)}, want {list(local)} or a slice of its line",
                "model and optimizer come from two runs, or the model's config is another's",
            )
        yield from (chunk for _, chunk in line.chunks(each.array, at))
        at += each.array.shape[0]


def _mixed_error(what: str, path: str, key: str) -> InconsistentCheckpoint:
    hint = "files of two saves are mixed: fetch one save whole"
    return InconsistentCheckpoint(what, code="E0384", path=path, key=key, hint=hint)


def _unplaced_error(key: TensorKey, array: StoredArray, message: str, hint: str) -> InputError:
    return InputError(message, code=UNPLACED, path=array.path, key=str(key), hint=hint)
