"""Which tensors a DeepSpeed checkpoint of some ZeRO stage has: what is left out, rounded or folded before it is laid
out.

The one idea: the stages store the same training state with different tensors, and every difference is exact and said in
words:

    stage 3       no 16-bit weights: those of parameters with an fp32 weight are left out (DeepSpeed rounds them again)
    from stage 3
          the 16-bit weights are the rounding of `master` to the module's dtype, as DeepSpeed makes them on resuming
    stage 1-3
          `step` is one number a group: tensors of one step a parameter are folded, and compared while they are read
    stage 1-3     fp32 weights without a `master` are their own master
    stage 0       the optimizer as torch keeps it

Without `--zero` the stage is the source's; a source that says none: 1 with fp32 master weights, else 0.
Source: DeepSpeed 0.19.8 `runtime/zero/stage3.py` (`_rigid_load_state_dict`: fp16 weights are copied from the fp32
ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Fitted
from ckpt_tool.formats.deepspeed.described import Described
from ckpt_tool.formats.deepspeed.groups import groups_of

UNFIT = "E0286"
_NO_OPTIMIZER = frozenset((MODEL, EMA, EXTRAS))


def stage_of(states: Sequence[str], described: Described | None, asked: int | None) -> int:
    """The ZeRO stage to write. Raises UsageError E0286 for `--zero 0` beside fp32 master weights."""
    has_master, trains = MASTER in states, any(state not in _NO_OPTIMIZER for state in states)
    wrapped = described is not None and described.zero_stage == 0  # DeepSpeed's 16-bit wrapper keeps masters
    if asked is not None:
        if asked == 0 and has_master and not wrapped:
            raise UsageError(
                "--zero 0: without ZeRO the optimizer has no fp32 master weights beside the module",
                code=UNFIT,
                hint="write --zero 1, or add --drop master",
            )
        return asked if trains else 0
    if described is not None and has_master:
        return described.zero_stage
    return 1 if has_master else 0


def fit(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], options: Mapping[str, Any]) -> Fitted:
    """The tensors that the stage keeps. Raises UsageError E0286 where the optimizer's states can't be kept exactly."""
    described = Described.from_extras(extras)
    states = list(dict.fromkeys(tensor.key.state for tensor in tensors))
    stage = stage_of(states, described, options.get("zero"))
    if stage == 0:
        return Fitted(tuple(enumerate(tensors)))
    rows = list(enumerate(tensors))
    casts: dict[TensorKey, DType] = {}
    dropped: list[dict[str, Any]] = []
    rows = _with_masters(rows, dropped)
    masters = {row.key.name for _, row in rows if row.key.state == MASTER}
    shared = described.shared if described else {}
    trained = masters | {alias for alias, kept in shared.items() if kept in masters}
    if stage == 3:
        gone = [row for _, row in rows if row.key.state == MODEL and row.key.name in trained]
        rows = [(i, row) for i, row in rows if row.key.state != MODEL or row.key.name not in trained]
        if gone:
            dropped.append(
                _entry(MODEL, gone, "ZeRO 3 keeps no 16-bit weights: DeepSpeed rounds them from the fp32 master")
            )
    else:
        _refuse_removed(masters, options.get("removed", ()))
        rows = _with_module(rows, described, trained, shared, casts, dropped, _configured(extras))
    rows = _with_one_step(rows, extras, dropped)
    unlisted = tuple(row.key for _, row in rows if row.key.state == STEP)
    return Fitted(tuple(rows), casts, tuple(dropped), unlisted)


Rows = list[tuple[int, LogicalTensor]]


def _with_masters(rows: Rows, dropped: list[dict[str, Any]]) -> Rows:
    """fp32 weights are their own master where a parameter has states and no master."""
    names = {state: {row.key.name for _, row in rows if row.key.state == state} for state in (MODEL, MASTER)}
    stateful = {row.key.name for _, row in rows if row.key.state not in (*_NO_OPTIMIZER, MASTER)}
    model = {row.key.name: (i, row) for i, row in rows if row.key.state == MODEL}
    made: Rows = []
    for name in model:
        if name in stateful and name not in names[MASTER]:
            index, row = model[name]
            if row.dtype.name != "F32":
                raise UsageError(
                    f"{name} has optimizer states but no fp32 master weight, and its weight is {row.dtype.name}",
                    code=UNFIT,
                    key=name,
                    hint="write --zero 0, which keeps the optimizer as it is; or --drop optimizer",
                )
            made.append((index, replace(row, key=TensorKey(name, MASTER), path=())))
    lost = stateful - names[MASTER] - names[MODEL]
    if lost:
        raise UsageError(
            f"{len(lost)} parameters have optimizer states but no weights; the first: {min(lost)}",
            code=UNFIT,
            key=min(lost),
            hint="take the state model or master along, or --drop optimizer",
        )
    if made:
        dropped.append(
            {"state": MASTER, "tensors": 0, "bytes": 0, "reason": f"{len(made)} fp32 weights are their own master"}
        )
    return rows + made


def _refuse_removed(masters: set[str], removed: Iterable[TensorKey]) -> None:
    """A removed weight whose master stays would be made again from it (`--model-only`)."""
    names = sorted(key.name for key in removed if key.state == MODEL and key.name in masters)
    if names:
        raise UsageError(
            f"{names[0]} can't leave the module alone: DeepSpeed needs a weight for every fp32 master",
            code=UNFIT,
            key=names[0],
            faults=names[1:20],
            hint="remove the twins with it: leave --model-only off",
        )


def _with_module(
    rows: Rows,
    described: Described | None,
    trained: set[str],
    shared: Mapping[str, str],
    casts: dict[TensorKey, DType],
    dropped: list[dict[str, Any]],
    configured: str,
) -> Rows:
    """The module's weights, rounded from the master where the source has none."""
    have = {row.key.name for _, row in rows if row.key.state == MODEL}
    masters = {row.key.name: (i, row) for i, row in rows if row.key.state == MASTER}
    kinds = [row.dtype.name for _, row in rows if row.key.state == MODEL and row.dtype.is_float]
    dtype = described.dtype if described and described.dtype else max(kinds, key=kinds.count, default=configured)
    made: Rows = []
    for name in [*masters, *(alias for alias in shared if alias in trained)]:
        if name in have:
            continue
        if dtype not in DTYPES:
            raise UsageError(
                f"the module has no weights for {name}, and nothing says their dtype",
                code=UNFIT,
                key=name,
                hint="write --zero 3, which keeps the fp32 weights alone",
            )
        index, row = masters[shared.get(name, name) if name not in masters else name]
        key = TensorKey(name, MODEL)
        made.append((index, replace(row, key=key, path=())))
        casts[key] = DTYPES[dtype]
    if not made:
        return rows
    reason = f"{len(made)} weights of the module are the fp32 master rounded to {dtype}, as DeepSpeed rounds it"
    dropped.append({"state": MODEL, "tensors": 0, "bytes": 0, "reason": reason})
    order = {name: number for number, name in enumerate(described.module if described else ())}
    model = [pair for pair in rows if pair[1].key.state == MODEL] + made
    model.sort(key=lambda pair: order.get(pair[1].key.name, len(order)))
    return model + [pair for pair in rows if pair[1].key.state != MODEL]


def _configured(extras: Mapping[str, Any]) -> str:
    """The module's dtype as the configuration has it, "" where there is none."""
    config = extras.get("ds_config")
    if not isinstance(config, Mapping):
        return ""
    for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
        said = config.get(key)
        if isinstance(said, Mapping) and said.get("enabled"):
            return dtype
    return "F32"


def _with_one_step(rows: Rows, extras: Mapping[str, Any], dropped: list[dict[str, Any]]) -> Rows:
    """`step` tensors of a group as one, whose replicas are the others: they are compared when they are read."""
    steps = {row.key.name: (i, row) for i, row in rows if row.key.state == STEP}
    if not steps:
        return rows
    out = [pair for pair in rows if pair[1].key.state != STEP]
    masters = {row.key.name: row.shape for _, row in rows if row.key.state == MASTER}
    folded: set[str] = set()
    for group in groups_of(extras, masters):
        mine = [steps[name] for name in group.names if name in steps]
        folded |= set(group.names)
        if not mine:
            continue
        index, first = mine[0]
        if any(row.numel != 1 or row.dtype != first.dtype for _, row in mine):
            raise UsageError(
                "the step counters of a group have several shapes or dtypes", code=UNFIT, key=first.key.name
            )
        chunks = []
        for count, (_, row) in enumerate(mine):
            chunk = row.chunks[0]
            chunks.append(Chunk(Box((), ()), chunk.array, chunk.within, count))
        out.append((index, LogicalTensor(TensorKey(f"group.{group.number}", STEP), (), first.dtype, tuple(chunks))))
    lost = [name for name in steps if name not in folded]
    gone = [row for _, row in steps.values()]
    reason = "one step a group: equal ones are folded, and compared while they are read"
    dropped.append(_entry(STEP, gone, reason + (f"; {len(lost)} of no parameter are left out" if lost else "")))
    return out


def _entry(state: str, rows: Sequence[LogicalTensor], reason: str) -> dict[str, Any]:
    return {"state": state, "tensors": len(rows), "bytes": sum(row.nbytes for row in rows), "reason": reason}
