"""Makes the plan of a conversion and its report, from the chosen tensors: the layout, the target's files, the moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.asked import may_hold_codes
from ckpt_tool.conversion.fitting import refuse_unsplit, single_name, wish_of
from ckpt_tool.conversion.layout import layout_of
from ckpt_tool.conversion.side_files import refuse_lost_modules, side_files, source_of, with_side_files
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.report_data import keep_for_report
from ckpt_tool.core.target import LayoutWish, Target, Wanted, WantedTensor
from ckpt_tool.core.tensor import MASTER
from ckpt_tool.core.urls import VARIABLE, has_hidden_secrets
from ckpt_tool.formats.base import Format
from ckpt_tool.formats.entry import of_dialect
from ckpt_tool.options.writing import DEFAULT_SHARD_SIZE, Writing
from ckpt_tool.plan.copy import is_transposed
from ckpt_tool.plan.moves import LaterMoves, count_copies
from ckpt_tool.plan.plan import Extent, Move, Plan, Record, SourceFile
from ckpt_tool.plan.schedule import build_moves
from ckpt_tool.sources.chosen import Chosen, dtypes_of, memory_of_computed, more_than_computed, written_as
from ckpt_tool.sources.select import removed_rows
from ckpt_tool.storage.output.destination import Place, RemotePlace
from ckpt_tool.storage.views import memory_of

if TYPE_CHECKING:
    from ckpt_tool.report.holdings import Rewriting

SIDE = -1  # instead of a source's number: a side file, which may be stored next to the pointer file


def make_plan(chosen: Chosen, destination: Place, fmt: Format, writing: Writing) -> tuple[Plan, Wanted]:
    """The plan and the wanted tensors on which it is based. It reads nothing but the identities of the source files."""
    if chosen.removed:
        from ckpt_tool.conversion.whole_layers import notes_on_gaps

        chosen = chosen.noted(*notes_on_gaps(chosen))
    first = chosen.sources[0]
    single = single_name(destination, fmt)
    refuse_lost_modules(chosen, fmt, single=single is not None)
    wanted = Wanted(
        _wanted_tensors(chosen, dtypes_of(writing)),
        chosen.extras,
        chosen.all_hints,
        first.catalog.format,
        () if single else side_files(chosen, fmt),
        single,
        writing.max_shard_size or DEFAULT_SHARD_SIZE,
        wish_of(chosen, fmt, writing) if fmt.holds.own_layout else LayoutWish(),
    )
    complete_extras = of_dialect(fmt.holds.dialect, "extras")
    if complete_extras is not None:
        extras, lines = complete_extras(wanted, chosen, fmt)
        wanted = replace(wanted, extras=extras)
        chosen = chosen.noted(*lines)
    layout, fallbacks = layout_of(chosen, wanted, fmt, writing)
    if not fmt.holds.replicas:  # replicated tensors are stored once, so replication costs no space
        fallbacks = [{**entry, "extra_bytes": 0} for entry in fallbacks]
    target = with_side_files(fmt.target(wanted, layout), chosen, fmt, wanted, writing)
    refuse_unsplit(target, fmt, writing)
    if may_hold_codes(wanted.tensors):
        from ckpt_tool.quantised.keep_together import refuse_cut_blocks

        refuse_cut_blocks(target, wanted, chosen, fmt)
    # a dry run on a disk only counts its moves; into a store, what an upload holds at once depends on each of them
    counted = writing.dry_run and not writing.plan_file and not isinstance(destination, RemotePlace)
    sources, moves, records, arrays = _moved(chosen, wanted, target if counted else _listed(target))
    plan = Plan(
        sources,
        records,
        tuple(file._replace(arrays=()) for file in target.files),
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
    keep_for_report("rewriting", partial(_rewriting, chosen, wanted, _listed(target), layout, fmt))
    return plan, wanted


def _moved(
    chosen: Chosen, wanted: Wanted, target: Target
) -> tuple[tuple[SourceFile, ...], Sequence[Move], tuple[Record, ...], Sequence[Sequence[Extent]]]:
    """(the source files by number, the moves, the checksummed records that they read, the arrays of each output file).
    Side files that are copied are numbered after the files that moves read."""
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
    return sources, moves, records, arrays


def _listed(target: Target) -> Target:
    """The target in the form that a run needs, with all arrays listed, if the target allows that."""
    return target._replace(places=None) if target.places is not None and target.places.listable else target


def _rewriting(chosen: Chosen, wanted: Wanted, target: Target, layout: Layout, fmt: Format) -> Rewriting:
    from ckpt_tool.conversion.rewriting import rewriting_of

    return rewriting_of(chosen, wanted, target, layout, fmt)


def _wanted_tensors(chosen: Chosen, dtypes: Mapping[str, DType]) -> tuple[WantedTensor, ...]:
    changes = bool(dtypes or chosen.casts)
    return tuple(
        [
            WantedTensor(
                row.tensor.key,
                row.tensor.shape,
                written_as(row.tensor, dtypes, chosen.casts) if changes else row.tensor.dtype,
                row.tensor.path,
            )
            for row in chosen.stored
        ]
    )


# Notes that recommend --as-model master; they are left out if the user does that already.
ADVISES_MASTER = frozenset({"N-zero3", "N-sliced-module"})


def _report(
    chosen: Chosen, plan: Plan, target: Target, layout: Layout, fallbacks: list[dict[str, Any]], writing: Writing
) -> dict[str, Any]:
    """The report of a run, as far as it is known before a byte moves."""
    states: dict[str, dict[str, int]] = {}
    if isinstance(plan.moves, LaterMoves):
        states = {state: {"tensors": count, "bytes": nbytes} for state, (count, nbytes) in plan.moves.states.items()}
    else:
        for move in plan.moves:
            row = states.setdefault(move.key.state, {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += move.numel * move.item_out

    removed = removed_rows(chosen.removed)
    names: list[dict[str, Any]] = []
    if chosen.names:
        from ckpt_tool.core.name_table import table_of_names

        names = table_of_names(chosen.names)
    first = chosen.sources[0]
    given = [opened.path for opened in chosen.sources if opened.catalog.tensors]  # the others are computed of these
    known = ADVISES_MASTER if writing.state_as_model == MASTER else frozenset[str]()  # the user does it already
    notes = [note.message for opened in chosen.sources for note in opened.catalog.notes if note.code not in known]

    if writing.plan_file and any(has_hidden_secrets(path) for path in given):
        notes.append(
            f"the plan holds no user name, password or signature of a URL: set {VARIABLE} to the whole URLs of the "
            "sources, separated by blanks, before ckpt apply"
        )

    return {
        "schema_version": 1,
        "source": {
            "path": first.path,
            "format": first.catalog.format,
            "resolved": first.resolved,
            **({"paths": given} if len(given) > 1 else {}),
        },
        "target": {
            "path": plan.destination,
            "format": plan.format,
            "mesh": layout.mesh.to_json(),
            "files": [{"path": file.path, "bytes": file.size} for file in plan.outputs[:10_000]],
        },
        "plan": {
            "bytes_read": plan.bytes_read + more_than_computed(chosen),
            "bytes_written": plan.bytes_written,
            "peak_memory": peak_memory(
                writing,
                turned=_turned(plan.moves),
                more=memory_of_computed(chosen),
                paths=[file.path for file in plan.sources],
            ),
            "files": len(plan.outputs),
            "copies": count_copies(plan.moves),
        },
        "states": states,
        "layout_source": layout.source,
        "fallbacks": fallbacks,
        "removed": removed,
        "removed_bytes": sum(int(str(row["bytes"])) for row in removed),
        "dropped": [_agree_reason(entry) for entry in chosen.dropped],
        "notes": _agree_texts((*chosen.notes, *notes, *target.notes)),
        **({"names": names} if names else {}),
    }


def _agree_reason(entry: dict[str, Any]) -> dict[str, Any]:
    """A report entry of a dropped item, with its reason in the singular if it is about one thing."""
    reason = entry.get("reason")
    return {**entry, "reason": _agree_texts([reason])[0]} if isinstance(reason, str) else entry


def _agree_texts(texts: Sequence[str]) -> list[str]:
    """The sentences, in the singular where they count one thing. The module for that is only loaded if one does."""
    if not any("1 " in text for text in texts):
        return list(texts)
    from ckpt_tool.core.plurals import agree_all

    return agree_all(texts)


def peak_memory(writing: Writing, *, turned: bool, more: int = 0, paths: Sequence[str] = ()) -> int:
    """The most bytes of buffers that the run will use: those of one thread, times the number of threads.

    Args:
        turned: are elements reordered? That needs a panel per thread (`run.transposed`).
        more: further bytes of each thread, in addition to its blocks.
        paths: the sources' files; views of them need memory too.
    """
    import os

    per_thread = 4 << 20
    threads = max(1, min(writing.threads or min(os.cpu_count() or 1, 8), writing.memory // per_thread))
    if turned:
        from ckpt_tool.run.transposed import PANEL

        per_thread += min(PANEL, max(0, writing.memory // threads - per_thread))
    return threads * (per_thread + more) + memory_of(paths, threads)


def _turned(moves: Sequence[Move]) -> bool:
    """Does any move transpose elements? One output per tensor is checked, because all outputs of a tensor are alike."""
    if isinstance(moves, LaterMoves):
        return moves.has_transposed
    return any(map(is_transposed, (region for move in moves for region in (*move.sources, *move.outputs[:1]))))
