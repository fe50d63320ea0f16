"""The same plan over a Ray cluster: every node takes shares of it, as `ckpt apply --part I/N` would.

`--ray auto` joins the running cluster, `--ray local` starts one on this machine, anything else is an address. The
source and the output's folder must be on a file system that all nodes see; the last share to finish commits, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.conversion.carry_out import execute
from ckpt_tool.core.progress import Progress, Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, InternalError, UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.plan.saved import read_plan

Outcome = tuple[bool, dict[TensorKey, int], CkptError | None]


def share(
    document: Mapping[str, Any], part: tuple[int, int], writing: Writing, recorded: Mapping[TensorKey, str]
) -> Outcome:
    """One share, on the node that Ray chose: (committed, overflows, what went wrong)."""
    from ckpt_tool.storage.opening import open_tree

    plan = read_plan(document, "the plan sent by the driver")
    try:
        trees = {root: open_tree(root) for root in dict.fromkeys(file.root for file in plan.sources)}
        result = execute(plan, trees, writing, Silent(), recorded=recorded, part=part)
    except CkptError as e:
        return False, {}, e
    return result.committed, result.overflows, None


def execute_on_ray(
    plan: Plan, writing: Writing, progress: Progress, *, recorded: Mapping[TensorKey, str]
) -> dict[TensorKey, int]:
    """Run the plan on the cluster that `writing.ray` names. Returns the overflows of lossy casts.

    Raises UsageError E0271 without Ray, else what the first failing share raised; the others finish what they have, and
    the same command goes on from there.
    """
    try:
        import ray
    except ImportError as e:
        raise UsageError("Ray is not installed", code="E0271", hint="pip install 'ckpt-tool[ray]'") from e
    address = {"auto": "auto", "local": "local"}.get(writing.ray or "", writing.ray)
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as e:
            raise UsageError(
                f"no Ray cluster at {writing.ray}: {e}",
                code="E0271",
                hint="start one with ray start --head, or --ray local",
            ) from e
    cpus = int(ray.cluster_resources().get("CPU", 1))
    threads = writing.threads or 2
    count = max(1, cpus // threads)
    sent = replace(writing, ray=None, threads=threads)
    document = ray.put(plan.to_json())
    remote = ray.remote(num_cpus=threads, max_retries=0)(share)
    tasks = {remote.remote(document, (i + 1, count), sent, dict(recorded)): i + 1 for i in range(count)}
    progress.start(0, f"writing in {count} shares")
    overflows: dict[TensorKey, int] | None = None
    failure: CkptError | None = None
    waiting = list(tasks)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        committed, lost, error = ray.get(done[0])
        progress.note(
            f"share {tasks[done[0]]}/{count} done" if error is None else f"share {tasks[done[0]]}/{count} failed"
        )
        failure = failure or error
        overflows = lost if committed else overflows
    progress.finish()
    if failure is not None:
        raise failure
    if overflows is None:
        raise InternalError(
            "all shares ended and none committed", hint="please report this; ckpt clean removes the leavings"
        )
    return overflows
