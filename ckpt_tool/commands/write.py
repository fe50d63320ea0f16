"""Writing: the one road that `reshard`, `convert`, `merge` and `apply` take from chosen tensors to a committed output.

chosen tensors -> wanted -> layout -> target -> plan -> (shown, saved) -> executed -> read back -> committed. Every fault
that can be known is raised before the first byte is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_tool.commands.arguments import with_arguments
from ckpt_tool.commands.carry_out import execute
from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.computed import more_than_computed
from ckpt_tool.commands.config import config_in
from ckpt_tool.commands.degrees import degrees_of, layout_of
from ckpt_tool.commands.heeded import refuse_idle, refuse_unsplit, single_name
from ckpt_tool.commands.on_device import movers_of, with_device
from ckpt_tool.commands.options import DEFAULT_SHARD_SIZE, Writing
from ckpt_tool.commands.plan_file import save_plan
from ckpt_tool.commands.quantised import as_they_are, refuse_cut_blocks
from ckpt_tool.commands.replaced import check_replaced
from ckpt_tool.commands.select import group_of, removed_rows
from ckpt_tool.commands.side_files import side_files, source_of, with_side_files
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.target import Target, Wanted, WantedTensor
from ckpt_tool.core.tensor import MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import Fitting, Format
from ckpt_tool.plan.moves import LaterMoves, Stored, count_copies
from ckpt_tool.plan.plan import Plan, SourceFile
from ckpt_tool.plan.schedule import build_moves
from ckpt_tool.storage.destination import (
    check_beside,
    check_destination,
    check_space,
    local_path,
    staging_path,
    sweep_leavings,
)
from ckpt_tool.storage.safetensors_file import gc_paused

SIDE = -1  # in place of a source's number: a side file, which may lie beside the pointer file


def write(chosen: Chosen, dst: str, writing: Writing, progress: Progress, *, to: str) -> dict[str, Any]:
    """Plan and, unless `dry_run`, carry out. Returns the writers' JSON document of `cli.md`."""
    began = time.monotonic()
    fmt = registry.by_name(to)
    destination = local_path(dst)
    refuse_idle(fmt, writing)
    if writing.plan_file:
        given = (
            tree.display() for opened in chosen.sources for tree in (opened.tree, opened.outer) if tree is not None
        )
        check_beside(writing.plan_file, "--plan", given, (dst,))
    for opened in chosen.sources:
        opened.refuse_unsafe()
    chosen = _fitted(_fit(as_they_are(chosen, writing), fmt, writing), fmt, writing)
    with gc_paused():  # a plan is many small values that all live
        plan, wanted = make_plan(chosen, destination, fmt, writing)
    locals_ = [Path(opened.tree.root) if opened.tree.single is None else opened.tree.root / opened.tree.single
               for opened in chosen.sources if opened.tree.local]  # fmt: skip
    try:
        check_destination(destination, locals_, force=writing.force or writing.dry_run or bool(writing.plan_file))
        if writing.force:
            check_replaced(destination)
    except Exception:
        sweep_leavings(destination)
        raise
    moving = None if writing.plan_file or writing.dry_run else movers_of(writing, plan)
    document = with_device(plan.report, moving)
    progress.plan(document)
    if writing.plan_file:
        save_plan(plan, writing.plan_file)
        document["plan_file"] = writing.plan_file
        return document
    if writing.dry_run:
        return document
    check_space(destination.parent, plan.bytes_written, len(plan.outputs), already=_already(destination))
    trees = {tree.shown: tree for opened in chosen.sources for tree in (opened.tree, opened.outer) if tree is not None}
    digests = _recorded(chosen)
    if writing.ray:
        from ckpt_tool.commands.on_ray import execute_on_ray

        result: dict[TensorKey, int] | None = execute_on_ray(plan, writing, progress, recorded=digests)
    else:
        with moving.movers if moving else nullcontext() as movers:
            result = execute(plan, trees, writing, progress, recorded=digests, movers=movers)
    document["elapsed_s"] = round(time.monotonic() - began, 3)
    document["digest_checked"] = writing.verify != "off"
    if result:
        document["overflows"] = {str(key): count for key, count in result.items()}
    return document


def _recorded(chosen: Chosen) -> dict[TensorKey, str]:
    """The digests that the sources state for the tensors that travel as they are."""
    stated = [opened.catalog.digests for opened in chosen.sources]
    if not any(stated):
        return {}
    found = {row.tensor.key: stated[row.source].get(row.tensor.key) for row in chosen.stored}
    return {key: text for key, text in found.items() if text is not None and key not in chosen.renewed}


def _already(destination: Path) -> int:
    """Bytes that an interrupted run has allocated in the staging folder already."""
    staged = staging_path(destination)
    if staged.is_symlink() or not staged.is_dir():
        return 0
    return sum(path.lstat().st_blocks * 512 for path in staged.rglob("*") if not path.is_symlink())


# -- choosing ---------------------------------------------------------------------------------------------------------


def _fit(chosen: Chosen, fmt: Format, writing: Writing) -> Chosen:
    """Leave behind, by name, what the target format has no place for; what was asked for in words is an error."""
    stored, dropped, extras = list(chosen.stored), list(chosen.dropped), chosen.extras
    asked = {name for name in writing.states if name != "all"} - set(writing.drop)
    behind: dict[str, list[Stored]] = {}
    for row in stored:
        if row.tensor.key.state != MODEL and not fmt.holds.has(group_of(row.tensor.key.state)):
            behind.setdefault(row.tensor.key.state, []).append(row)
    for state, rows in behind.items():
        if state in asked or group_of(state) in asked:
            raise UsageError(
                f"--to {fmt.name} has no place for the state {state}", code="E0257",
                hint=f"write to a training format (dcp, torch, sharded), or add --drop {group_of(state)}",
            )  # fmt: skip
        reason = f"{fmt.name} has no place for it" if fmt.holds.all_states else f"{fmt.name} holds the model only"
        dropped.append({"state": state, "tensors": len(rows), "bytes": sum(row.tensor.nbytes for row in rows),
                        "reason": reason})  # fmt: skip
    if behind:
        stored = [row for row in stored if row.tensor.key.state not in behind]
    if MASTER not in writing.drop:
        _refuse_to_lose_masters(chosen, stored)
    if extras and not fmt.holds.extras:
        if "extras" in asked:
            raise UsageError(f"--to {fmt.name} has no place for extras", code="E0257", hint="add --drop extras")
        dropped.append({"state": "extras", "names": sorted(map(str, extras)), "tensors": 0, "bytes": 0,
                        "reason": f"{fmt.name} has no place for them"})  # fmt: skip
        extras = {}
    unheld = [row.tensor for row in stored if row.tensor.dtype.name in fmt.holds.dtypes]
    if unheld:
        raise UsageError(
            f"{fmt.name} has no {unheld[0].dtype.name}", code="E0258", key=str(unheld[0].key),
            hint="choose another format, or --remove-keys", faults=[str(tensor.key) for tensor in unheld[1:]],
        )  # fmt: skip
    if not stored:
        if not any(opened.catalog.tensors for opened in chosen.sources):
            raise UsageError("the source holds no tensor, so there is nothing to write", code="E0259",
                             hint="an empty state dict is what a rank saves that has nothing; pass the whole folder")  # fmt: skip
        masters = any(MASTER in opened.catalog.states() for opened in chosen.sources) and MASTER in behind
        hint = "the only weights here are fp32 masters: --as-model master writes them as the model, --dtype bf16 rounds them"
        raise UsageError("nothing is left to write", code="E0259",
                         hint=hint if masters else "widen --state or the key patterns")  # fmt: skip
    return replace(chosen, stored=tuple(stored), dropped=tuple(dropped), extras=extras)


def _refuse_to_lose_masters(chosen: Chosen, stored: Sequence[Stored]) -> None:
    """Raise UsageError E0249 where parameters have no other weights than fp32 masters (ZeRO 3) and would stay behind, all of
    them, while the rest of the model is written."""
    if not any(row.tensor.key.state == MODEL for row in stored):
        return
    gone = {tensor.key.name for tensor in chosen.removed}
    written = {row.tensor.key.name for row in stored}
    written |= {name for name, made in chosen.names.items() if any(to in written for to in made)}
    for opened in chosen.sources:
        if MASTER not in opened.catalog.states():
            continue
        keys = opened.catalog.tensors
        alone = [key.name for key in keys if key.state == MASTER and TensorKey(key.name) not in keys]
        lost = [name for name in alone if name not in written and name not in gone]
        if lost:
            raise UsageError(
                f"{len(lost)} parameters have no weights but their fp32 masters, which would stay behind: {lost[0]}",
                code="E0249", key=lost[0], faults=lost[1:20],
                hint="--as-model master writes them as the model (with --dtype bf16 as the trainer would round them);"
                " --drop master leaves them behind",
            )  # fmt: skip


def _fitted(chosen: Chosen, fmt: Format, writing: Writing) -> Chosen:
    """The tensors as the format keeps them: some formats keep the same state with other tensors in some of their kinds."""
    if not isinstance(fmt, Fitting):
        return chosen
    made = fmt.fit([row.tensor for row in chosen.stored], chosen.extras, _options(chosen, fmt, writing))
    stored = tuple(Stored(chosen.stored[index].source, tensor) for index, tensor in made.tensors)
    return replace(chosen, stored=stored, dropped=(*chosen.dropped, *made.dropped), casts={**chosen.casts, **made.casts},
                   unlisted=made.unlisted)  # fmt: skip


def _options(chosen: Chosen, fmt: Format, writing: Writing) -> dict[str, Any]:
    """`Wanted.options` for a format with a layout of its own."""
    config = chosen.config
    if config is None and fmt.holds.dialect == "paddle":
        config = config_in(chosen.sources[0].tree)
    return {"degrees": degrees_of(chosen, writing), "zero": writing.zero, "pp_split": writing.pp_split,
            "sharding": writing.sharding, "spec": writing.spec, "hints": chosen.all_hints, "config": config,
            "vocab_size": writing.vocab_size, "removed": frozenset(t.key for t in chosen.removed)}  # fmt: skip


def opaque_names(value: Any, prefix: str = "") -> list[str]:
    """Where in the extras opaque records lie, as `a.b: class`."""
    if isinstance(value, Opaque):
        return [f"{prefix}: {value.name}"]
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in opaque_names(item, f"{prefix}.{key}".lstrip("."))]
    if isinstance(value, list | tuple):
        return [found for i, item in enumerate(value) for found in opaque_names(item, f"{prefix}.{i}".lstrip("."))]
    return []


# -- planning -----------------------------------------------------------------------------------------------------------


def make_plan(chosen: Chosen, destination: Path, fmt: Format, writing: Writing) -> tuple[Plan, Wanted]:
    """The plan and what it wants. Pure but for the identities of the source files, which are read here."""
    first = chosen.sources[0]
    single = single_name(destination, fmt)
    wanted = Wanted(
        _wanted_tensors(chosen, _dtypes(writing)),
        chosen.extras,
        chosen.all_hints,
        first.catalog.format,
        () if single else side_files(chosen, fmt),
        single,
        writing.max_shard_size or DEFAULT_SHARD_SIZE,
        _options(chosen, fmt, writing) if fmt.holds.own_layout else {},
    )  # fmt: skip
    extras, said = with_arguments(wanted, chosen, fmt)
    wanted = replace(wanted, extras=extras)
    chosen = replace(chosen, notes=(*chosen.notes, *said))
    layout, fallbacks = layout_of(chosen, wanted, fmt, writing)
    if not fmt.holds.replicas:  # what ranks share is stored once
        fallbacks = [{**entry, "extra_bytes": 0} for entry in fallbacks]
    target = with_side_files(fmt.target(wanted, layout), chosen, fmt, wanted, writing)
    refuse_unsplit(target, fmt, writing)
    refuse_cut_blocks(target, wanted, chosen, fmt)
    numbers: dict[tuple[int, str], int] = {}

    def number_of(source: int, path: str) -> int:
        return numbers.setdefault((source, path), len(numbers))

    moves, records, arrays = build_moves(chosen.stored, wanted, target, number_of)
    for file in target.files:
        if file.copy_of is not None:
            number_of(SIDE if (0, file.copy_of) not in numbers else 0, file.copy_of)
    if chosen.first_replica:
        moves = (
            moves.first_replicas()
            if isinstance(moves, LaterMoves)
            else tuple(m._replace(sources=tuple(r for r in m.sources if r.replica == 0)) for m in moves)
        )
    trees = ((source_of(chosen, path) if i == SIDE else chosen.sources[i].tree, path) for i, path in numbers)
    sources = tuple(SourceFile(tree.shown, path, tuple(tree.identity(path))) for tree, path in trees)
    plan = Plan(
        sources,
        records,
        tuple(replace(file, arrays=()) for file in target.files),
        arrays,
        moves,
        fmt.name,
        target.single,
        str(destination.absolute()),
        {
            "verify": writing.verify,
            "max_shard_size": wanted.shard_size,
            **({"unlisted": [list(key) for key in chosen.unlisted]} if chosen.unlisted else {}),
        },
        {},
    )
    plan.report.update(_report(chosen, plan, target, layout, fallbacks, writing))
    return plan, wanted


def _wanted_tensors(chosen: Chosen, dtypes: Mapping[str, DType]) -> tuple[WantedTensor, ...]:
    changes = bool(dtypes or chosen.casts)
    return tuple(
        [
            WantedTensor(
                row.tensor.key,
                row.tensor.shape,
                _dtype(row.tensor, dtypes, chosen.casts) if changes else row.tensor.dtype,
                row.tensor.path,
            )
            for row in chosen.stored
        ]
    )


def _dtypes(writing: Writing) -> dict[str, DType]:
    return {state: DTYPES[name] for state, name in writing.dtypes.items()}


def _dtype(tensor: LogicalTensor, dtypes: Mapping[str, DType], casts: Mapping[TensorKey, DType]) -> DType:
    """The output's dtype: the most exact rule for its state; integers and `step` counters are never cast."""
    if tensor.key in casts:
        return casts[tensor.key]
    if not dtypes or tensor.key.state in ("step", "extras") or not tensor.dtype.is_float or tensor.dtype.bits < 8:
        return tensor.dtype
    state = tensor.key.state
    return dtypes.get(state) or dtypes.get(group_of(state)) or dtypes.get("") or tensor.dtype


def _report(
    chosen: Chosen, plan: Plan, target: Target, layout: Layout, fallbacks: list[dict[str, Any]], writing: Writing
) -> dict[str, Any]:
    """The writers' document as far as it is known before a byte moves."""
    states: dict[str, dict[str, int]] = {}
    if isinstance(plan.moves, LaterMoves):
        states = {state: {"tensors": count, "bytes": nbytes} for state, (count, nbytes) in plan.moves.states.items()}
    else:
        for move in plan.moves:
            row = states.setdefault(move.key.state, {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += move.numel * move.item_out
    removed = removed_rows(chosen.removed)
    first = chosen.sources[0]
    given = [opened.path for opened in chosen.sources if opened.catalog.tensors]  # the others are computed of these
    notes = [note.message for opened in chosen.sources for note in opened.catalog.notes]
    return {
        "schema_version": 1,
        "source": {
            "path": first.path, "format": first.catalog.format, "resolved": first.resolved,
            **({"paths": given} if len(given) > 1 else {}),
        },
        "target": {"path": plan.destination, "format": plan.format, "mesh": layout.mesh.to_json(),
                   "files": [{"path": file.path, "bytes": file.size} for file in plan.outputs[:10_000]]},
        "plan": {
            "bytes_read": plan.bytes_read + more_than_computed(chosen), "bytes_written": plan.bytes_written, "peak_memory": peak_memory(writing, chosen.stored),
            "files": len(plan.outputs), "copies": count_copies(plan.moves),
        },
        "states": states,
        "layout_source": layout.source,
        "fallbacks": fallbacks,
        "removed": removed,
        "removed_bytes": sum(int(str(row["bytes"])) for row in removed),
        "dropped": list(chosen.dropped),
        "notes": [*chosen.notes, *notes, *target.notes],
    }  # fmt: skip


def peak_memory(writing: Writing, stored: Sequence[Stored] = ()) -> int:
    """Bytes of buffers that the run will use at most: what each thread holds, times the threads. Sources that lie the other
    way round are put in order in a panel a thread (`run.transposed`)."""
    import os

    per_thread = 4 << 20
    threads = max(1, min(writing.threads or min(os.cpu_count() or 1, 8), writing.memory // per_thread))
    turned = any(chunk.array.strides for row in stored for chunk in row.tensor.chunks[:1])
    if turned:
        from ckpt_tool.run.transposed import PANEL

        per_thread += min(PANEL, max(0, writing.memory // threads - per_thread))
    return threads * per_thread
