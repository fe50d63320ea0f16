"""`ckpt patch`: a base and a chain of deltas become a checkpoint, in one pass.

    BASE under the hub's names -> its tensors as recipes (`patched`) -> planned and written as any conversion
    BASE's files as entries    -> the same                            -> the files of the step   (`--dedup`)

All of the writers' ways are there: any format and layout, resume, stores, signatures. Nothing is committed unless each
tensor has the digest that the chain states for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.conversion.carry_out import executor_of
from ckpt_tool.conversion.passes import in_wanted_names
from ckpt_tool.conversion.planning import peak_memory
from ckpt_tool.conversion.renaming import rename_tensors
from ckpt_tool.conversion.unused_options import refuse_dropped_model, refuse_of_other_states, refuse_without_patterns
from ckpt_tool.conversion.writing import check_place, write
from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.target import Target, TargetArray, TargetFile, Wanted, WantedTensor
from ckpt_tool.core.tensor import MODEL, TensorKey
from ckpt_tool.deltas.archive import entries_of, whole_step
from ckpt_tool.deltas.folder import CHAIN, Archive, Delta, check_chain, read_delta
from ckpt_tool.deltas.patched_tensor import Cursors, Patched
from ckpt_tool.deltas.under_hub_names import hub_names
from ckpt_tool.errors import InconsistentCheckpoint, UsageError, near_misses
from ckpt_tool.option_kinds.statement import options_given
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored, count_copies
from ckpt_tool.plan.plan import Plan, SourceFile
from ckpt_tool.plan.schedule import build_moves
from ckpt_tool.quantised.keep_together import keep_parts_together
from ckpt_tool.run.computed import ComputedTree, Input
from ckpt_tool.sources.chosen import Chosen, Conversion, memory_of_computed, with_computed
from ckpt_tool.sources.opening import Opened, open_source
from ckpt_tool.sources.select import split_keys
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.output.destination import place_of
from ckpt_tool.storage.source import Tree

UNLIKE = "E2615"
OPTION = "E2618"
_APPLIED = ".weight_sync/state.json"  # which version SGLang's copy of the model is
_READERS = 64 << 20  # bytes of all threads' readers, where one thread's are not more
_RUN = frozenset("force resume fsync dry_run memory threads verify".split())  # that an archive's rebuilding takes


def patch(
    base: str, deltas: Sequence[str], dst: str, reading: Reading, writing: Writing, progress: Progress
) -> dict[str, Any]:
    """Write `base` with all of `deltas` applied. Returns the writers' document.

    Raises InconsistentCheckpoint E2609 (no chain), E2614 (other values than stated), E2615 (other tensors), UsageError
    E2618, CorruptFile E2608, E2611, and what reading and writing raise."""
    if writing.verify == "off":
        raise UsageError(
            "--verify off: only the digests would show a wrong base",
            code=OPTION,
            place="ckpt patch",
            hint="leave it off",
        )

    refuse_without_patterns("patch", writing)
    chain = [read_delta(open_tree(path, follow_symlinks=reading.follow_symlinks)) for path in deltas]
    check_chain(chain)
    opened = open_source(base, reading)
    _check_version(opened.tree, chain[0])
    if (archive := chain[-1].archive) is not None:
        return _rebuild(opened, chain, archive, dst, writing, progress)

    if unsupported := [state for state in writing.states if state not in (MODEL, "all")]:
        raise UsageError(
            f"--state {unsupported[0]}: a delta holds the model alone",
            code=OPTION,
            hint="ckpt delta --dedup keeps whole steps",
        )

    refuse_of_other_states("patch", writing)
    refuse_dropped_model("patch", writing)
    chosen = _apply_chain(hub_names(opened, reading), chain, writing)
    to = Conversion.of(opened, reading, replace(_limit_threads(writing, memory_of_computed(chosen)), states=()))
    chosen = rename_tensors(_without_removed(chosen, opened, reading, writing), to)
    chosen = in_wanted_names(replace(chosen, inherits=to.inherits), opened, to)
    return write(chosen, dst, to, progress) | {"chain": [delta.about() for delta in chain]}


def _limit_threads(writing: Writing, memory: int) -> Writing:
    """With as few threads as long chains leave. memory: of each thread's readers."""
    limit = max(1, _READERS // max(1, memory))
    return replace(writing, threads=min(writing.threads or min(os.cpu_count() or 1, 8), limit))


def _check_version(tree: Tree, first: Delta) -> None:
    """Where the base is the copy that SGLang keeps, it says which version it is."""
    if tree.single is not None or not tree.exists(_APPLIED):
        return
    try:
        version = int(json.loads(tree.read_whole(_APPLIED, limit=4096))["version"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return  # the digests show it
    if version != first.base_version:
        raise InconsistentCheckpoint(
            f"the base is version {version}, and the first delta is {first.label}",
            code=CHAIN,
            path=tree.display(_APPLIED),
            hint=f"begin with the delta on version {version}",
        )


def _apply_chain(chosen: Chosen, chain: Sequence[Delta], writing: Writing) -> Chosen:
    """The model with every tensor that the chain names as a recipe."""
    model = chosen.model
    named = dict.fromkeys(name for delta in chain for name in delta.digests)
    strange = [name for name in named if name not in model]
    if strange:
        raise InconsistentCheckpoint(
            f"the base has no {strange[0][:200]}, which the deltas change"
            + (f", and {len(strange) - 1} more" if strange[1:] else ""),
            code=UNLIKE,
            path=chosen.sources[0].path,
            key=strange[0][:200],
            faults=[name[:200] for name in strange[1:100]],
            hint=near_misses(strange[0], model) or "is it of another model, or does a family not know it? see --family",
        )

    cursors = Cursors()
    recipes = [
        Patched.of(row.tensor.key, row.tensor.shape, row.tensor.dtype, chosen.input(row), chain, cursors)
        for name, row in model.items()
        if name in named
    ]
    last_delta = chain[-1]
    unnamed = len(model) - len(recipes)
    versions = f"version {last_delta.version} from version {chain[0].base_version}"
    line = f"{versions}; {_describe_chain(chain)}; tensors: {len(recipes)}"
    if unnamed:
        line += f"; {unnamed} that no delta names are the base's, and nothing proves them"

    description = f"{chosen.sources[0].path} with {' and '.join(delta.tree.display() for delta in chain)}"
    return with_computed(chosen, recipes, description, writing, option="ckpt patch", dtypes={}, notes=(line,))


def _without_removed(chosen: Chosen, opened: Opened, reading: Reading, writing: Writing) -> Chosen:
    """The patched model without what `--keep-keys` and `--remove-keys` leave out. The patterns see the hub's names, as
    the deltas have them; scales share the lot of their weight."""
    tensors = {row.tensor.key: row.tensor for row in chosen.stored}
    kept_keys, removed = split_keys(tensors, remove=writing.remove_keys, keep=writing.keep_keys)
    kept_keys, removed = keep_parts_together(tensors, kept_keys, removed, writing, opened, reading)
    gone = set(removed)
    return replace(
        chosen,
        stored=tuple([row for row in chosen.stored if row.tensor.key not in gone]),
        removed=(*chosen.removed, *(tensors[key] for key in removed)),
    )


def _describe_chain(chain: Sequence[Delta]) -> str:
    return f"deltas applied: {len(chain)}"


# -- a step's files ---------------------------------------------------------------------------------------------------


def _rebuild(
    opened: Opened, chain: Sequence[Delta], archive: Archive, dst: str, writing: Writing, progress: Progress
) -> dict[str, Any]:
    """The files of the step that the last delta keeps."""
    began = time.monotonic()
    wrong = [option.names[0] for name, option in options_given(writing) if name not in _RUN]
    if wrong:
        raise UsageError(
            f"{wrong[0]}: the files of a step are rebuilt as they were",
            code=OPTION,
            place="ckpt patch",
            hint="rebuild the step, then ckpt convert or ckpt reshard it",
        )
    destination = place_of(dst)
    replaced = check_place(destination, [opened.tree, *(delta.tree for delta in chain)], writing)
    tree = ComputedTree(f"{opened.path} ({_describe_chain(chain)})", _entries(opened, chain, archive))
    writing = _limit_threads(writing, tree.memory)
    plan = _plan(tree, archive.files, archive.format, str(destination.absolute()), writing)
    plan.report.update(_report(opened, chain, plan, tree, writing) | replaced.document())
    progress.plan(plan.report)
    if writing.dry_run:
        return plan.report
    executor_of(plan, {tree.shown: tree}, writing, progress, replaced=replaced).run()
    return plan.report | {"elapsed_s": round(time.monotonic() - began, 3), "digest_checked": True}


def _entries(opened: Opened, chain: Sequence[Delta], archive: Archive) -> list[Patched]:
    """A recipe of each entry. Raises InconsistentCheckpoint E2615 for one that nothing in the chain has."""
    # Archives of older versions have the files inside a step under their names there, without the folder.
    base = entries_of(opened) | entries_of(whole_step(opened))
    cursors = Cursors()
    sizes = dict[str, int]()
    faults = list[str]()
    for _, pieces in archive.files.values():
        for piece in pieces:
            sizes[piece.name] = sizes.get(piece.name, 0) + piece.nbytes

    recipes = []
    for name, nbytes in sizes.items():
        links: list[Delta] = []
        own_input: Input | None = None
        for delta in reversed(chain):
            if name not in delta.digests:
                break
            links.insert(0, delta)
            if delta.archive is not None and name in delta.archive.whole:
                break
        else:
            base_tensor = base.get(name)
            own_input = (
                Input(base_tensor.tensor, base_tensor.tree)
                if base_tensor is not None and base_tensor.tensor.numel == nbytes
                else None
            )
            if own_input is None:
                faults.append(name)
                continue
        if len(links) < len(chain) and not (links and links[0].archive and name in links[0].archive.whole):
            faults.append(name)
            continue
        recipes.append(Patched.of(TensorKey(name), (nbytes,), DTYPES["U8"], own_input, links, cursors))

    if faults:
        raise InconsistentCheckpoint(
            f"the base and the chain have nothing of this size for {faults[0][:200]}",
            code=UNLIKE,
            path=opened.path,
            faults=[name[:200] for name in faults[1:100]],
            hint=f"is the base step {chain[0].base_version} of this run, with the files that it had?",
        )

    return recipes


def _plan(tree: ComputedTree, files: Any, kind: str, destination: str, writing: Writing) -> Plan:
    rows = {tensor.key.name: row for row, tensor in enumerate(tree.tensors)}
    target_files: list[TargetFile] = []
    for path, (size, pieces) in files.items():
        arrays_of_file = tuple(TargetArray(rows[p.name], Box((p.begin,), (p.nbytes,)), p.offset) for p in pieces)
        target_files.append(TargetFile(path, size, (), arrays_of_file))
    target = Target(kind, tuple(target_files))
    wanted = Wanted(tuple(WantedTensor(tensor.key, tensor.shape, tensor.dtype) for tensor in tree.tensors))
    numbers: dict[str, int] = {}
    moves, records, arrays = build_moves(
        [Stored(0, tensor) for tensor in tree.tensors],
        wanted,
        target,
        lambda _, path: numbers.setdefault(path, len(numbers)),
    )
    sources = tuple(SourceFile(tree.shown, path, tuple(tree.identity(path))) for path in numbers)
    outputs = tuple(file._replace(arrays=()) for file in target.files)
    return Plan(sources, records, outputs, arrays, moves, kind, None, destination, {"verify": writing.verify}, {})


def _report(opened: Opened, chain: Sequence[Delta], plan: Plan, tree: ComputedTree, writing: Writing) -> dict[str, Any]:
    origin = f"the files of step {chain[-1].version} as they were, from step {chain[0].base_version}"
    return {
        "schema_version": 1,
        "source": {"path": opened.path, "format": opened.catalog.format, "resolved": opened.resolved},
        "target": {
            "path": plan.destination,
            "format": plan.format,
            "files": [{"path": file.path, "bytes": file.size} for file in plan.outputs[:10_000]],
        },
        "plan": {
            "bytes_read": sum(tree.bytes_of_inputs(path) for path in tree.listing()),
            "bytes_written": plan.bytes_written,
            "peak_memory": peak_memory(writing, turned=False, more=tree.memory),
            "files": len(plan.outputs),
            "copies": count_copies(plan.moves),
        },
        "chain": [delta.about() for delta in chain],
        "fallbacks": [],
        "removed": [],
        "removed_bytes": 0,
        "dropped": [],
        "notes": [f"{origin}; {_describe_chain(chain)}"],
    }
