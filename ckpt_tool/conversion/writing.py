"""Writing: from chosen tensors to a committed output, the one way of `reshard`, `convert` and `merge`.

    chosen -> fitted (`passes.FITTING`) -> planned (`planning`) -> shown, saved -> carried out (`carry_out`)

Every fault that can be known is raised before the first byte is written.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ckpt_tool.conversion.carry_out import check_replaced, execute
from ckpt_tool.conversion.fitting import refuse_idle
from ckpt_tool.conversion.on_device import movers_of, with_device
from ckpt_tool.conversion.passes import FITTING, passed
from ckpt_tool.conversion.planning import make_plan
from ckpt_tool.core.collector import gc_paused
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.storage.destination import (
    check_beside,
    check_destination,
    check_space,
    local_path,
    staging_path,
    sweep_leavings,
)


def write(chosen: Chosen, dst: str, job: Conversion, progress: Progress) -> dict[str, Any]:
    """Plan and, unless `dry_run`, carry out. Returns the writers' JSON document of `cli.md`."""
    began = time.monotonic()
    writing, destination = job.writing, local_path(dst)
    refuse_idle(job.fmt, writing)
    if writing.plan_file:
        given = (
            tree.display() for opened in chosen.sources for tree in (opened.tree, opened.outer) if tree is not None
        )
        check_beside(writing.plan_file, "--plan", given, (dst,))
    for opened in chosen.sources:
        opened.refuse_unsafe()
    chosen = passed(chosen, job, FITTING)
    with gc_paused():
        plan, wanted = make_plan(chosen, destination, job.fmt, writing)
    locals_ = [
        Path(opened.tree.root) if opened.tree.single is None else opened.tree.root / opened.tree.single
        for opened in chosen.sources
        if opened.tree.local
    ]
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
        from ckpt_tool.conversion.plan_file import save_plan

        save_plan(plan, writing.plan_file)
        document["plan_file"] = writing.plan_file
        return document
    if writing.dry_run:
        return document
    check_space(destination.parent, plan.bytes_written, len(plan.outputs), already=_already(destination))
    trees = {tree.shown: tree for opened in chosen.sources for tree in (opened.tree, opened.outer) if tree is not None}
    digests = _recorded(chosen)
    if writing.ray:
        from ckpt_tool.conversion.on_ray import execute_on_ray

        overflows = execute_on_ray(plan, writing, progress, recorded=digests)
    else:
        with moving.movers if moving else nullcontext() as movers:
            overflows = execute(plan, trees, writing, progress, recorded=digests, movers=movers).overflows
    document["elapsed_s"] = round(time.monotonic() - began, 3)
    document["digest_checked"] = writing.verify != "off"
    if overflows:
        document["overflows"] = {str(key): count for key, count in overflows.items()}
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
