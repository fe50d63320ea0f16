"""`ckpt apply PLAN`: execute a saved plan, all of it or one share; the last share to finish commits the output, once.

ckpt apply p.json                 all of it
ckpt apply p.json --part 3/8      the third of eight fixed shares
ckpt apply p.json --claim         units of work that no other process has claimed yet
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.conversion.accounted import check_replaced
from ckpt_tool.conversion.carry_out import execute, refuse_in_store
from ckpt_tool.conversion.on_device import movers_of, with_device
from ckpt_tool.conversion.output_state import is_committed, output_state
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.report_data import keep_for_report
from ckpt_tool.errors import OutputExists, SourceChanged, StorageError, UsageError
from ckpt_tool.option_kinds.values import AUTO
from ckpt_tool.options.verbs import Share
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.signing.seal import seal_of
from ckpt_tool.storage.opening import open_tree, scheme_of, short_url
from ckpt_tool.storage.output import journal
from ckpt_tool.storage.output.destination import (
    Place,
    RemotePlace,
    check_apart,
    check_destination,
    check_not_read,
    check_space,
    place_of,
)
from ckpt_tool.storage.output.replaced import ReplacedOutput
from ckpt_tool.storage.output.staging import new_worker
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.core.tensor import TensorKey
    from ckpt_tool.report.holdings import Rewriting
    from ckpt_tool.signing.seal import Seal

NOTHING_THERE = "E0702"


def apply(plan_file: str, share: Share, writing: Writing, progress: Progress) -> dict[str, Any]:
    """Execute the plan in `plan_file`, or the share of it that `share` selects.

    Raises:
        SourceChanged: the plan file, or a source that it names, was changed since the plan was made.
    """
    began = time.monotonic()
    if scheme_of(plan_file) or short_url(plan_file):
        raise UsageError("a plan must be a local file", code="E2502", path=plan_file, hint="copy it here first")
    plan = load_plan(plan_file)
    keep_for_report("rewriting", partial(_rewriting, plan))
    destination = place_of(plan.destination)
    share_option = "--part" if share.part else ""
    if share.claim:
        share_option = "--claim"
    seal = seal_of(writing, destination, part=share_option)
    if writing.emit:
        from ckpt_tool.conversion.job_file import write_job

        progress.plan(plan.report)
        return {**plan.report, "job_file": write_job(plan, plan_file, share, writing, writing.emit)}
    job = _Job(
        plan, plan_file, destination, _part(share, writing, progress), new_worker() if share.claim else None, writing
    )
    if isinstance(destination, RemotePlace):
        refuse_in_store(writing)
    if job.shared and is_committed(plan):
        return _committed_already(job, progress)
    trees = _opened(plan)
    replaced = _check_output(job, trees)
    seal = seal.over(plan, trees) if seal is not None else None
    if writing.dry_run:
        document = {**plan.report, **replaced.document()}
        progress.plan(document)
        return document
    if writing.ray:
        from ckpt_tool.conversion.on_ray import execute_on_ray

        document = {**plan.report, **replaced.document()}
        progress.plan(document)
        document["committed"] = True
        overflows = execute_on_ray(plan, writing, progress, recorded={}, replaced=replaced)
    else:
        try:
            document, overflows = _carried_out(job, trees, seal, replaced, progress)
        except OutputExists as e:
            if not job.shared or e.code != "E0501" or not is_committed(plan):
                raise
            return _committed_already(job, progress)  # the others have committed while this process was starting
    document["elapsed_s"] = round(time.monotonic() - began, 3)
    document["digest_checked"] = writing.verify != "off"
    document |= seal.said if seal is not None else {}
    if overflows:
        document["overflows"] = {str(key): count for key, count in overflows.items()}
    if job.part is not None:
        document["part"] = list(job.part)
    return document


class _Job(NamedTuple):
    """The work of this process on a plan: all of it, if both `part` and `worker` are None."""

    plan: Plan
    plan_file: str
    destination: Place
    part: tuple[int, int] | None  # (i, n), with i from 1: the share number i of n
    worker: str | None  # with --claim, the unique name of this worker
    writing: Writing

    @property
    def shared(self) -> bool:
        """Do other processes execute the rest of the plan?"""
        return self.part is not None or self.worker is not None


def _check_output(job: _Job, trees: Mapping[str, Tree]) -> ReplacedOutput:
    """The existing output that `--force` replaces. Raises any error about the output path before data is written."""
    destination = job.destination
    force = job.writing.force
    if isinstance(destination, RemotePlace):
        check_apart(destination, [root for root, tree in trees.items() if not tree.local])
    else:
        local = [tree for tree in trees.values() if tree.local]
        roots = [tree.root if tree.single is None else tree.root / tree.single for tree in local]
        check_destination(destination, roots, force=force)
        check_space(destination.parent, 0 if job.part else job.plan.bytes_written, len(job.plan.outputs))
    begun = isinstance(destination, RemotePlace) and job.shared and output_state(destination).of
    # Once workers share the output, the first has made these checks, and the last may be replacing the output now.
    if force and not begun:
        replaced = check_replaced(destination)
        if not isinstance(destination, RemotePlace):
            check_not_read(destination, replaced.files, trees.values())
        return replaced
    return ReplacedOutput({})


def _carried_out(
    job: _Job, trees: Mapping[str, Tree], seal: Seal | None, replaced: ReplacedOutput, progress: Progress
) -> tuple[dict[str, Any], dict[TensorKey, int]]:
    """Do this process's work; returns the document and the overflows of lossy casts. Raises as `carry_out.execute`."""
    plan = job.plan
    part = job.part
    worker = job.worker
    moving = movers_of(job.writing, plan)
    document = {**with_device(plan.report, moving), **replaced.document()}
    progress.plan(document)
    with moving.movers if moving else nullcontext() as movers:
        result = execute(
            plan,
            trees,
            job.writing,
            progress,
            part=part,
            worker=worker,
            movers=movers,
            plan_file=job.plan_file,
            seal=seal,
            replaced=replaced,
        )
    document["committed"] = result.committed or (worker is not None and is_committed(plan))
    if not result.committed and part is not None:
        document["parts"] = _states(result.parts, part)
    return document, result.overflows


def _rewriting(plan: Plan) -> Rewriting:
    from ckpt_tool.conversion.rewriting import rewriting_of_plan

    return rewriting_of_plan(plan)


def _opened(plan: Plan) -> dict[str, Tree]:
    """The plan's sources by the paths in the plan. Raises SourceChanged E0602 if one does not exist any more."""
    trees = {}
    for root in dict.fromkeys(file.root for file in plan.sources):
        try:
            trees[root] = open_tree(root)
        except StorageError as e:
            if e.code != NOTHING_THERE:
                raise
            raise SourceChanged(
                f"the source {root} is gone: {e.message}",
                code="E0602",
                path=root,
                hint="plan again with the source in place",
            ) from e
    return trees


def _part(share: Share, writing: Writing, progress: Progress) -> tuple[int, int] | None:
    """The share (i, n) of the plan, with i from 1; None for all of it. `--part auto` asks the launcher's variables."""
    ways = {"--part": share.part is not None, "--claim": share.claim, "--ray": writing.ray is not None}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise UsageError(
            f"{given[0]} and {given[1]} both say how the work is shared out", code="E0266", hint="give one of them"
        )
    if share.part is None:
        return None
    if share.part != AUTO:
        return share.part
    from ckpt_tool.conversion.launcher import part_of_environment

    found = part_of_environment(os.environ)
    progress.note(f"part {found.part[0]} of {found.part[1]}, by {found.by}")
    return found.part


def _committed_already(job: _Job, progress: Progress) -> dict[str, Any]:
    """The document of a process that had nothing to do, because the others have committed the output already."""
    progress.plan(job.plan.report)
    said = {"elapsed_s": 0.0, "digest_checked": False, "committed": True, "already_committed": True}
    return {**job.plan.report, **said, **({"part": list(job.part)} if job.part else {})}


def _states(statuses: Sequence[journal.PartStatus], part: tuple[int, int]) -> dict[str, list[int]]:
    """The numbers of all parts by state: `done`, `running`, `dead` (ended too early) or `missing` (not begun)."""
    known = {status.part[0]: status.state for status in statuses if status.part is not None}
    known[part[0]] = "done"
    states: dict[str, list[int]] = {}
    for number in range(1, part[1] + 1):
        states.setdefault(known.get(number, "missing"), []).append(number)
    return states
