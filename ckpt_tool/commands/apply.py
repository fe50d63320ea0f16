"""`ckpt apply PLAN`: carry out a saved plan, whole or one share of it; the last share to finish commits, once."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ckpt_tool.conversion.carry_out import check_replaced, execute
from ckpt_tool.conversion.on_device import movers_of, with_device
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import SourceChanged, StorageError, UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.destination import check_destination, check_space
from ckpt_tool.storage.opening import open_tree, scheme_of, short_url

NOTHING_THERE = "E0702"


def apply(plan_file: str, part: tuple[int, int] | None, writing: Writing, progress: Progress) -> dict[str, Any]:
    """Run the plan in `plan_file`. part: (i, n), 1-based, for one of n shares that may run on n machines.

    Raises SourceChanged when the plan or a source it names is not what it was.
    """
    began = time.monotonic()
    if scheme_of(plan_file) or short_url(plan_file):
        raise UsageError("a plan is a file of this machine", code="E2502", path=plan_file, hint="copy it here first")
    plan = load_plan(plan_file)
    if part is not None and not 1 <= part[0] <= part[1]:
        raise UsageError(f"--part {part[0]}/{part[1]}", code="E0267", hint="want I/N with 1 <= I <= N, such as 2/8")
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
    destination = Path(plan.destination)
    check_destination(
        destination,
        [tree.root if tree.single is None else tree.root / tree.single for tree in trees.values() if tree.local],
        force=writing.force,
    )
    if writing.force:
        check_replaced(destination)
    check_space(destination.parent, 0 if part else plan.bytes_written, len(plan.outputs))
    moving = movers_of(writing, plan)
    document = with_device(plan.report, moving)
    progress.plan(document)
    with moving.movers if moving else nullcontext() as movers:
        overflows = execute(plan, trees, writing, progress, part=part, movers=movers, plan_file=plan_file)
    document["elapsed_s"] = round(time.monotonic() - began, 3)
    document["digest_checked"] = writing.verify != "off"
    document["committed"] = overflows is not None
    if part is not None:
        document["part"] = list(part)
    return document
