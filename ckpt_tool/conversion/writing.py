"""Writes chosen tensors as a committed output; `reshard`, `convert` and `merge` all use it.

    chosen -> fitted (`passes.FITTING`) -> planned (`planning`) -> shown, saved -> executed (`carry_out`)

Every fault that can be detected in advance is raised before the first byte is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.carry_out import execute, refuse_in_store
from ckpt_tool.conversion.fitting import refuse_idle
from ckpt_tool.conversion.passes import FITTING, passed
from ckpt_tool.conversion.planning import make_plan
from ckpt_tool.conversion.selection import refuse_code
from ckpt_tool.core.gc_pause import gc_paused
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.storage.opening import scheme_of
from ckpt_tool.storage.output.destination import (
    Place,
    RemotePlace,
    check_apart,
    check_beside,
    check_destination,
    check_not_read,
    check_space,
    place_of,
    staging_path,
    sweep_leavings,
)
from ckpt_tool.storage.output.replaced import ReplacedOutput
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.conversion.on_device import Moving
    from ckpt_tool.signing.seal import Seal


def write(chosen: Chosen, dst: str, job: Conversion, progress: Progress) -> dict[str, Any]:
    """Plan the output and, unless `dry_run`, write it. Returns the report, the writers' JSON document of `cli.md`."""
    began = time.monotonic()
    writing = job.writing
    destination = place_of(dst)
    refuse_idle(job.fmt, writing)
    seal = _seal(writing, destination)
    if writing.emit and not writing.plan_file:
        raise UsageError(
            "--emit writes a job that runs a saved plan, and no --plan is given",
            code="E0277",
            hint="add --plan FILE, at a place that every node sees",
        )
    if writing.plan_file:
        given = (
            tree.display() for opened in chosen.sources for tree in (opened.tree, opened.outer) if tree is not None
        )
        check_beside(writing.plan_file, "--plan", given, (dst,))
    for opened in chosen.sources:
        refuse_code(opened, job)
    chosen = passed(chosen, job, FITTING)
    with gc_paused():
        plan, wanted = make_plan(chosen, destination, job.fmt, writing)
    replaced = check_place(destination, [opened.tree for opened in chosen.sources], writing)
    trees = {tree.shown: tree for opened in chosen.sources for tree in (opened.tree, opened.outer) if tree is not None}
    seal = seal.over(plan, trees) if seal is not None else None
    moving: Moving | None = None
    report = dict(plan.report)
    if writing.device != "cpu" and not writing.plan_file and not writing.dry_run:
        from ckpt_tool.conversion.on_device import movers_of, with_device

        moving = movers_of(writing, plan)
        report = with_device(report, moving)
    document = _with_stores(report, plan, chosen, destination)
    document |= chosen.reported.document(done=False) if chosen.reported else {}
    document |= replaced.document()
    if writing.dry_run and isinstance(destination, RemotePlace):
        from ckpt_tool.storage.stores.object_store import describe_credentials

        document["notes"].append(describe_credentials(destination.url))
    progress.plan(document)
    if writing.plan_file:
        for opened in chosen.sources:
            opened.tree.check_unchanged(pointers=False)
        _save(plan, document, writing, writing.plan_file)
        return document
    if writing.dry_run:
        return document
    if isinstance(destination, Path):
        check_space(destination.parent, plan.bytes_written, len(plan.outputs), already=_already(destination))
    digests = _recorded(chosen)
    if writing.ray:
        from ckpt_tool.conversion.on_ray import execute_on_ray

        overflows = execute_on_ray(plan, writing, progress, recorded=digests, replaced=replaced)
    else:
        with moving.movers if moving else nullcontext() as movers:
            result = execute(
                plan,
                trees,
                writing,
                progress,
                recorded=digests,
                movers=movers,
                seal=seal,
                replaced=replaced,
                planned_from=[opened.tree for opened in chosen.sources],
            )
        overflows = result.overflows
    document |= chosen.reported.document(done=True) if chosen.reported else {}
    document["elapsed_s"] = round(time.monotonic() - began, 3)
    document["digest_checked"] = writing.verify != "off"
    document |= seal.said if seal is not None else {}
    if overflows:
        document["overflows"] = {str(key): count for key, count in overflows.items()}
    return document


def _save(plan: Plan, document: dict[str, Any], writing: Writing, plan_file: str) -> None:
    """Save the plan, and the job file that runs it; if the job file can't be written, neither is kept."""
    from ckpt_tool.conversion.plan_file import save_plan

    save_plan(plan, plan_file)
    if writing.emit:
        from ckpt_tool.conversion.job_file import write_job
        from ckpt_tool.options.verbs import Share

        try:
            document["job_file"] = write_job(plan, plan_file, Share(), writing, writing.emit)
        except CkptError:
            os.unlink(plan_file)
            raise
    document["plan_file"] = plan_file


def _with_stores(document: dict[str, Any], plan: Plan, chosen: Chosen, destination: Place) -> dict[str, Any]:
    """The report with the memory that reading from and writing to stores needs added to its peak."""
    more = 0
    if any(scheme_of(opened.tree.shown) for opened in chosen.sources if not opened.tree.local):  # others are computed
        from ckpt_tool.storage.stores.read_ahead import WINDOW

        more += 2 * WINDOW  # the data that was received, and the buffer into which it is assembled
    if isinstance(destination, RemotePlace):
        from ckpt_tool.run.upload import memory_of

        more += memory_of(plan)
    shown = document["plan"]
    return {**document, "plan": {**shown, "peak_memory": shown["peak_memory"] + more}} if more else document


def check_place(destination: Place, trees: Iterable[Tree], writing: Writing) -> ReplacedOutput:
    """Check the output's place before anything is written, and return what `--force` replaces there.

    trees: those of the sources, which must not be overwritten.
    """
    given = [*trees]
    if isinstance(destination, RemotePlace):
        check_apart(destination, [tree.shown for tree in given if not tree.local])
        refuse_in_store(writing)
        return _replaced(destination, writing)
    locals_ = [Path(tree.root) if tree.single is None else tree.root / tree.single for tree in given if tree.local]
    locals_ += [tree.packed_in for tree in given if tree.packed_in is not None]
    try:
        check_destination(destination, locals_, force=writing.force or writing.dry_run or bool(writing.plan_file))
        replaced = _replaced(destination, writing)
        check_not_read(destination, replaced.files, given)
        return replaced
    except Exception:
        sweep_leavings(destination)
        raise


def _replaced(destination: Place, writing: Writing) -> ReplacedOutput:
    """What `--force` replaces; an empty result without the option."""
    if not writing.force:
        return ReplacedOutput({})
    from ckpt_tool.conversion.accounted import check_replaced

    return check_replaced(destination)


def _seal(writing: Writing, destination: Place) -> Seal | None:
    """The signature and the attestation that the options request, None without such options."""
    if not writing.sign and not writing.attest:
        return None
    from ckpt_tool.signing.seal import seal_of

    return seal_of(writing, destination)


def _recorded(chosen: Chosen) -> dict[TensorKey, str]:
    """The digests that the sources state for tensors whose values are not changed."""
    stated = [opened.catalog.digests for opened in chosen.sources]
    if not any(stated):
        return {}
    found = {row.tensor.key: stated[row.source].get(row.tensor.key) for row in chosen.stored}
    return {key: text for key, text in found.items() if text is not None and key not in chosen.renewed}


def _already(destination: Path) -> int:
    """Bytes that an interrupted run has already allocated in the staging folder."""
    staged = staging_path(destination)
    if staged.is_symlink() or not staged.is_dir():
        return 0
    return sum(path.lstat().st_blocks * 512 for path in staged.rglob("*") if not path.is_symlink())
