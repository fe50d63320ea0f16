"""Reads the values of a torch_dist checkpoint that are no tensors: common state, RNG and extra states, optimizer
objects.

The one idea: every object item is `torch.save([object])` under a key `NAME/shard_POSITION_SHAPE`; all of them become
plain values in the extras, where a legacy checkpoint has them:

    common.pt or common_state/shard_0_1  {"args": Namespace, "iteration": 2, ...}  -> the extras themselves
    optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1  [{"param_groups": [...]}]
          -> extras["optimizer"]["optimizer"]
    chained_1.optimizer.distributed...   the experts' optimizer         -> extras["optimizer"][1]["optimizer"]
    rng_state/shard_0.1_2.2           pipeline stage 0, tensor rank 1           -> extras["rng_state"]["mp_rank_01_000"]
    decoder.layers.mlp.linear_fc1._extra_state/shard_3_4   None, or FP8 scales   -> nothing, extras["extra_states"][KEY]
    anything else                                                                      -> extras["sharded_objects"][KEY]

Small tensors inside objects become bytes (RNG states: 5056 of them) or NumPy arrays in the extras, values like others.
The hyperparameters of all model-parallel ranks become one copy, after their step counters were compared.

Source: NVIDIA/Megatron-LM core 0.16.1 `dist_checkpointing/strategies/torch.py` (`_mcore_to_torch_sharded_object`),
`serialization.py` of core 0.19 (`common_state`), `optimizer/distrib_optimizer.py` (`sharded_state_dict`),
`optimizer/__init__.py`, training `checkpointing.py` (`get_rng_state`: keyed by pipeline and tensor rank; `no_save_rng`
and `no_save_optim` keep a loading job from looking for states that were not saved). Cost: 60 us an object; repeated
extra states 10 us. What it does not do: carry FP8 scales (a note says how many there are), files
(`megatron.torch_dist.target`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.faults import both, read_each
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import Path, StoredArray
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, InconsistentCheckpoint, InputError, UnsafeInput
from ckpt_tool.formats.dcp_container.dcp_items import DcpItems, ReadObject
from ckpt_tool.formats.dcp_container.dcp_metadata import ObjectEntry
from ckpt_tool.formats.state_dict.content import read_content
from ckpt_tool.formats.state_dict.tree import part
from ckpt_tool.formats.state_dict.unread import hidden_in
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_values import NumpyArray, PickledRecord, TensorRef, WrapperRef, as_extras
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.extra_states import EXTRA_STATES, WITHOUT, holds_scales, is_empty, is_extra_state
from ckpt_tool.systems.megatron.groups import groups_of
from ckpt_tool.systems.megatron.rng import rank_name
from ckpt_tool.systems.megatron.torch_dist.folder import COMMON
from ckpt_tool.systems.megatron.torch_dist.keys import parse_object

COMMON_STATE = "common_state"
MISSING = "E0301"
STEPS = "E0379"
_DISTRIBUTED = re.compile(r"(?:chained_(\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,9})\.(\w+)")
_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded")
_TENSOR_LIMIT = 1 << 20  # bytes of a tensor inside an object that becomes a value
_NUMPY = dict(
    pair.split("=") for pair in "U8=|u1 I8=|i1 BOOL=|b1 I16=<i2 I32=<i4 I64=<i8 F16=<f2 F32=<f4 F64=<f8".split()
)
_SMALL = 4096  # bytes of an object item that is compared whole


@dataclass(slots=True)
class Objects:
    """The values of a checkpoint that are no tensors, as far as they are read."""

    extras: dict[str, Any] = field(default_factory=dict)  # as the catalog has them
    leaves: list[tuple[Path, StoredArray]] = field(default_factory=list)  # tensors of the common state
    # base key of each extra state -> its shape
    extra_states: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unsafe: list[str] = field(default_factory=list)
    globals: dict[str, None] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    gathered: list[tuple[int, int, int, str, dict[str, StoredArray]]] = field(default_factory=list)
    rng_shape: tuple[int, ...] = ()
    common_file: bool = False


def read_objects(tree: Tree, folder: str, entries: Mapping[str, ObjectEntry], items: DcpItems) -> Objects:
    """Return everything that is no tensor entry.

    Raises Incomplete E0301 without a common state, InconsistentCheckpoint E0379 for step counters that differ, and what
    pickles and containers raise.
    """
    out = Objects()
    shards = {fqn: parse_object(fqn) for fqn in entries}
    states = [entry for fqn, entry in entries.items() if _is_extra(shards[fqn])]
    counts: dict[tuple[str, tuple[int, ...]], int] = {}

    for entry in states:
        key = parse_object(entry.fqn)
        if key is not None:
            counts[key.base, key.shape] = counts.get((key.base, key.shape), 0) + 1

    # Only complete grids of extra states are recorded, so that a writer can fill the same grids.
    out.extra_states |= {base: shape for (base, shape), count in counts.items() if count == prod(shape)}
    filled, others = both(
        lambda: _read_extra_states(tree, states, items, out),
        lambda: items.objects([entry for fqn, entry in entries.items() if not _is_extra(shards[fqn])]),
    )
    read = {one.entry.fqn: one for one in others}
    _common(tree, folder, {f: r for f, r in read.items() if _base(shards[f]) == COMMON_STATE}, out)
    groups: dict[int, dict[int, dict[str, Any]]] = {}

    for fqn, one in read.items():
        key = shards[fqn]
        if _base(key) == COMMON_STATE:
            continue
        found = _DISTRIBUTED.fullmatch(key.base) if key else None
        if found is not None and found[3] == "param_state":
            out.gathered += _read_gathered_buffers(tree, one, int(found[1] or 0), int(found[2]))
            continue
        value = _value(tree, one, out)
        if key is not None and key.base == "rng_state":
            out.rng_shape = key.shape
            out.extras.setdefault("rng_state", {})[rank_name(key.at, key.shape)] = value
        elif found is not None and found[3] not in _BUCKETS:
            groups.setdefault(int(found[1]) if found[1] else -1, {}).setdefault(int(found[2]), {})[found[3]] = value
        elif found is None:
            out.extras.setdefault("sharded_objects", {})[fqn] = value

    _hyperparameters(tree, groups, out)
    scales = {fqn: value for fqn, value in filled.items() if holds_scales(value)}
    if scales:
        out.extras[EXTRA_STATES] = scales
    if recipes := [fqn for fqn in filled if fqn not in scales]:
        out.notes.append(Note("N-extra-state", f"{len(recipes)} {WITHOUT}", key=recipes[0]))
    return out


def _is_extra(key: Any) -> bool:
    return key is not None and is_extra_state(key.base)


def _base(key: Any) -> str:
    return key.base if key is not None else ""


# -- the common state --------------------------------------------------------------------------------------------------


def _common(tree: Tree, folder: str, stated: Mapping[str, ReadObject], out: Objects) -> None:
    path = folder + COMMON
    if tree.exists(path):
        content = read_content(tree, path)
        out.common_file = True
        out.leaves += content.leaves
        out.unsafe += content.unsafe
        out.globals.update(dict.fromkeys(content.globals))
        out.extras = dict(content.extras) if isinstance(content.extras, dict) else {"value": content.extras}
        return

    if not stated:
        fault = Incomplete(
            f"there is neither {COMMON} nor an item {COMMON_STATE}: arguments, iteration and "
            "hyperparameters are missing",
            code=MISSING,
            path=tree.display(folder),
            hint="copy common.pt from where the job's first rank wrote it",
        )
        report_missing(fault, files=[path])
        return

    one = next(iter(stated.values()))
    parted = part(_only(one, tree))
    shown = tree.display(one.entry.file)
    for at, ref in parted.leaves:
        if isinstance(ref, TensorRef):
            out.leaves.append((at, one.zip.array(ref)))

    where = f"item {one.entry.fqn} of {shown}"
    lines, hidden = hidden_in(one.value, parted, shown, where)
    out.leaves += [(each.path, each.array(one.entry.file)) for each in hidden]
    out.unsafe += [*lines, *(f"{line} ({where})" for line in parted.hanging)]
    out.extras = dict(parted.extras)


def _only(read: ReadObject, tree: Tree) -> Any:
    """The object in the list of one that Megatron saves."""
    if isinstance(read.value, list) and len(read.value) == 1:
        return read.value[0]
    raise InputError(
        f"an object item holds {type(read.value).__name__}, want a list of one object",
        code="E0303",
        path=tree.display(read.entry.file),
        offset=read.entry.at,
        key=read.entry.fqn,
        hint="written by something else than megatron-core: load and save it with that",
    )


# -- objects -----------------------------------------------------------------------------------------------------------


def _value(tree: Tree, read: ReadObject, out: Objects) -> Any:
    shown = tree.display(read.entry.file)
    try:
        pickles.refuse_weight_bearing(read.value, shown)
    except UnsafeInput as e:
        out.unsafe.append(f"{e.message} (item {read.entry.fqn} of {shown})")
    return _plain(tree, read, _only(read, tree), 0)


def _plain(tree: Tree, read: ReadObject, value: Any, depth: int) -> Any:
    """`value` as extras hold it; tensors as NumPy arrays."""
    if depth > 100:
        raise CorruptFile(
            "an object nests deeper than 100 levels",
            code="E0398",
            path=tree.display(read.entry.file),
            key=read.entry.fqn,
            hint="the file is damaged or malicious",
        )
    if isinstance(value, TensorRef | WrapperRef):
        return _array(tree, read, value)
    if isinstance(value, dict):
        return {key: _plain(tree, read, item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_plain(tree, read, item, depth + 1) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Opaque | PickledRecord):
        args = tuple(_plain(tree, read, item, depth + 1) for item in value.args)
        return as_extras(Opaque(value.name, args, _plain(tree, read, value.state, depth + 1)))
    return as_extras(value)


def _array(tree: Tree, read: ReadObject, ref: TensorRef | WrapperRef) -> Any:
    kind = _NUMPY.get(ref.dtype.name)
    if isinstance(ref, WrapperRef) or kind is None or ref.dtype.nbytes(prod(ref.shape)) > _TENSOR_LIMIT:
        raise InputError(
            f"an object holds a {ref.dtype.name} tensor of shape {list(ref.shape)}: too much for a value",
            code="E2607",
            path=tree.display(read.entry.file),
            offset=read.entry.at,
            key=read.entry.fqn,
            hint="the object has a kind that this version does not know",
        )
    array = read.zip.array(ref)
    if not ref.contiguous:
        raise InputError(
            "a tensor inside an object is not contiguous",
            code="E2607",
            path=tree.display(read.entry.file),
            key=read.entry.fqn,
            hint="the object has a kind that this version does not know",
        )
    data = read_array(tree, array)
    if kind == "|u1" and len(ref.shape) == 1:
        return data
    return as_extras(NumpyArray(kind, ref.shape, False, data))


def _read_extra_states(tree: Tree, entries: list[ObjectEntry], items: DcpItems, out: Objects) -> dict[str, Any]:
    """Return {key: value} of the extra states that are not empty.

    Most are empty and equal, so an item as long as a known empty one is only compared with it, which is cheaper than
    opening it.
    """
    known: dict[int, tuple[int, bytes]] = {}  # length of an empty item -> (offset of its pickle, the pickle)

    def held(entry: ObjectEntry) -> Any:
        """Return the value of one extra state, None if it is empty."""
        same = known.get(entry.length)
        if same is not None and entry.length <= _SMALL:
            offset, data = same
            if tree.read(entry.file, entry.at + offset, len(data)) == data:
                tree.met.zip(entry.file, entry.at, entry.length)
                return None
        try:
            (one,) = items.objects([entry])
            value = _value(tree, one, out)
        except CkptError as e:
            e.key = e.key or entry.fqn
            raise
        if is_empty(value):
            record = one.zip.records["data.pkl"]
            known[entry.length] = (record.offset - entry.at, one.zip.read("data.pkl"))
        return value

    order = sorted(entries, key=lambda e: (e.file, e.at))
    values = read_each(order, held, file=lambda entry: entry.file)
    return {entry.fqn: value for entry, value in zip(order, values, strict=True) if not is_empty(value)}


def _read_gathered_buffers(
    tree: Tree, read: ReadObject, chained: int, group: int
) -> Iterator[tuple[int, int, int, str, dict[str, StoredArray]]]:
    """Yield the coalesced buffers that one data rank gathered, as (chained, group, buffer, dtype, {state: array}).

    The object is {buffer: {(dtype, dtype of gradients): {state: line}}}.
    """
    value = _only(read, tree)
    for number, by_dtype in value.items() if isinstance(value, dict) else ():
        if type(number) is not int:
            continue
        for dtypes, states in by_dtype.items() if isinstance(by_dtype, dict) else ():
            lines = {state: ref for state, ref in states.items() if isinstance(ref, TensorRef)}
            parameters = dtypes[0] if isinstance(dtypes, tuple) and dtypes else None
            if not lines or not isinstance(parameters, Symbol) or any(len(ref.shape) != 1 for ref in lines.values()):
                raise InputError(
                    "a gathered optimizer state is not coalesced",
                    code="E0303",
                    path=tree.display(read.entry.file),
                    offset=read.entry.at,
                    key=read.entry.fqn,
                    hint="written before core 0.6: load it with "
                    "--ckpt-convert-update-legacy-dist-opt-format and save it",
                )
            kind = parameters.name.removeprefix("torch.")
            yield chained, group, number, kind, {state: read.zip.array(ref) for state, ref in lines.items()}


# -- the distributed optimizer's own objects ---------------------------------------------------------------------------


def _hyperparameters(tree: Tree, groups: Mapping[int, Mapping[int, dict[str, Any]]], out: Objects) -> None:
    """Put one copy of the optimizer's param_groups and loss scaler, which each model-parallel rank stored, into `out`.

    Raises InconsistentCheckpoint E0379 if the ranks' step counters differ.
    """
    if not groups:
        return
    stated = out.extras.get("optimizer")
    optimizer: dict[Any, Any] = dict(stated) if isinstance(stated, dict) else {}
    for chained, by_group in sorted(groups.items()):
        first = by_group[min(by_group)]
        for number, one in by_group.items():
            if _steps(one) != _steps(first):
                raise InconsistentCheckpoint(
                    f"the optimizer's steps are {_steps(one)} in dp group {number} and {_steps(first)} in dp group"
                    f" {min(by_group)}",
                    code=STEPS,
                    path=tree.display(),
                    hint="files of two saves are mixed: get all of them from one",
                )
        if chained < 0:
            optimizer |= first
        else:
            below = optimizer.get(chained)
            optimizer[chained] = (dict(below) if isinstance(below, dict) else {}) | first
    out.extras["optimizer"] = optimizer


def _steps(state: Mapping[str, Any]) -> list[Any]:
    return [group.get("step") for group in groups_of(state)]


def check_step(tree: Tree, path: Path, array: StoredArray, objects: Objects) -> bool:
    """Return whether the step counter of a parameter in the common state is in the parameter's group, too.

    Core <= 0.14 with torch's Adam stores such counters, at `path`. Raises InconsistentCheckpoint E0379 if the group
    states another number.
    """
    optimizer = objects.extras.get("optimizer")
    inner = optimizer.get(path[1]) if isinstance(optimizer, dict) and type(path[1]) is int else optimizer
    counted = {step for step in _steps(inner) if isinstance(step, int | float)} if isinstance(inner, dict) else set()
    if len(counted) != 1 or array.shape != () or array.dtype.name != "F32":
        return False
    (have,) = struct.unpack("<f", read_array(tree, array))
    if have not in counted:
        raise InconsistentCheckpoint(
            f"a parameter was stepped {have:g} times, its group {counted.pop():g} times",
            code=STEPS,
            path=tree.display(array.path),
            offset=array.offset,
            place=".".join(map(str, path)),
            hint="the common state comes from two saves: go back to a complete save, or take --state model",
        )
    return True
