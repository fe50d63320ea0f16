"""`ckpt apply PLAN`: carry out a saved plan, whole or one share of it; the last share to finish commits, once."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.carry_out import check_replaced, execute, refuse_in_store
from ckpt_tool.conversion.on_device import movers_of, with_device
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.conversion.standing import is_committed, standing
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.witness import tell
from ckpt_tool.errors import OutputExists, SourceChanged, StorageError, UsageError
from ckpt_tool.options.values import AUTO
from ckpt_tool.options.verbs import Share
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.signing.seal import seal_of
from ckpt_tool.storage import journal
from ckpt_tool.storage.destination import RemotePlace, check_apart, check_destination, check_space, place_of
from ckpt_tool.storage.opening import open_tree, scheme_of, short_url
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.staging import new_worker

if TYPE_CHECKING:
    from ckpt_tool.report.holdings import Rewriting

NOTHING_THERE = "E0702"


def apply(plan_file: str, share: Share, writing: Writing, progress: Progress) -> dict[str, Any]:
    """Run the plan in `plan_file`, or the share of it that `share` names.

    Raises SourceChanged when the plan or a source it names is not what it was.
    """
    began = time.monotonic()
    if scheme_of(plan_file) or short_url(plan_file):
        raise UsageError("a plan is a file of this machine", code="E2502", path=plan_file, hint="copy it here first")
    plan = load_plan(plan_file)
    tell("rewriting", partial(_drawn, plan))
    destination = place_of(plan.destination)
    seal = seal_of(writing, destination, part="--claim" if share.claim else "--part" if share.part else "")
    if writing.emit:
        from ckpt_tool.conversion.job_file import write_job

        progress.plan(plan.report)
        return {**plan.report, "job_file": write_job(plan, plan_file, share, writing, writing.emit)}
    part = _part(share, writing, progress)
    worker = new_worker() if share.claim else None
    if isinstance(destination, RemotePlace):
        refuse_in_store(writing)
    if (part or worker) and is_committed(plan):
        return _committed_already(plan, part, progress)
    trees = _opened(plan)
    if isinstance(destination, RemotePlace):
        check_apart(destination, [root for root, tree in trees.items() if not tree.local])
    else:
        check_destination(
            destination,
            [tree.root if tree.single is None else tree.root / tree.single for tree in trees.values() if tree.local],
            force=writing.force,
        )
        check_space(destination.parent, 0 if part else plan.bytes_written, len(plan.outputs))
    shared = isinstance(destination, RemotePlace) and (part or worker) and standing(destination).of
    if writing.force and not shared:  # else the first worker has looked, and the last may be replacing it right now
        check_replaced(destination)
    seal = seal.over(plan, trees) if seal is not None else None
    if writing.dry_run:
        progress.plan(plan.report)
        return plan.report
    if writing.ray:
        from ckpt_tool.conversion.on_ray import execute_on_ray

        progress.plan(plan.report)
        document = plan.report
        overflows = execute_on_ray(plan, writing, progress, recorded={})
        document["committed"] = True
    else:
        moving = movers_of(writing, plan)
        document = with_device(plan.report, moving)
        progress.plan(document)
        try:
            with moving.movers if moving else nullcontext() as movers:
                result = execute(
                    plan,
                    trees,
                    writing,
                    progress,
                    part=part,
                    worker=worker,
                    movers=movers,
                    plan_file=plan_file,
                    seal=seal,
                )
        except OutputExists as e:
            if not (part or worker) or e.code != "E0501" or not is_committed(plan):
                raise
            return _committed_already(plan, part, progress)  # while this one was starting
        overflows = result.overflows
        document["committed"] = result.committed or worker is not None and is_committed(plan)
        if not result.committed and part is not None:
            document["parts"] = _states(result.parts, part)
    document["elapsed_s"] = round(time.monotonic() - began, 3)
    document["digest_checked"] = writing.verify != "off"
    document |= seal.said if seal is not None else {}
    if overflows:
        document["overflows"] = {str(key): count for key, count in overflows.items()}
    if part is not None:
        document["part"] = list(part)
    return document


def _drawn(plan: Plan) -> Rewriting:
    from ckpt_tool.conversion.drawn import drawn_plan

    return drawn_plan(plan)


def _opened(plan: Plan) -> dict[str, Tree]:
    """The plan's sources by the paths that it names. Raises SourceChanged E0602 for one that is gone."""
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
    """(i, n), from 1; None for the whole plan."""
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
    from ckpt_tool.conversion.part import part_of_environment

    found = part_of_environment(os.environ)
    progress.note(f"part {found.part[0]} of {found.part[1]}, by {found.by}")
    return found.part


def _committed_already(plan: Plan, part: tuple[int, int] | None, progress: Progress) -> dict[str, Any]:
    progress.plan(plan.report)
    said = {"elapsed_s": 0.0, "digest_checked": False, "committed": True, "already_committed": True}
    return {**plan.report, **said, **({"part": list(part)} if part else {})}


def _states(statuses: Sequence[journal.PartStatus], part: tuple[int, int]) -> dict[str, list[int]]:
    """The parts by what is known of them: `done`, `running`, `dead` before their end, `missing`."""
    known = {status.part[0]: status.state for status in statuses if status.part is not None}
    known[part[0]] = "done"
    states: dict[str, list[int]] = {}
    for number in range(1, part[1] + 1):
        states.setdefault(known.get(number, "missing"), []).append(number)
    return states
