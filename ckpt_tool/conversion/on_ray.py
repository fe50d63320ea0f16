"""The same plan over a Ray cluster: on every node workers claim what they do, as `ckpt apply --claim` does.

`--ray auto` joins the running cluster, `--ray local` starts one on this machine, anything else is an address. The
source and the output must be in a store, or on a file system that all nodes see. Workers are spread over the nodes; Ray
starts one again that died, and what a lost one had claimed is taken over by the others, so a node may go at any time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.conversion.carry_out import execute
from ckpt_tool.conversion.output_state import is_committed, output_state
from ckpt_tool.core.installation import install_command
from ckpt_tool.core.progress import Progress, Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.core.urls import cause_without_secrets, full_url, hide_in_message
from ckpt_tool.errors import CkptError, OutputExists, StorageError, UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.plan.saved import read_plan
from ckpt_tool.storage.output.destination import place_of
from ckpt_tool.storage.output.replaced import ReplacedOutput
from ckpt_tool.storage.output.staging import new_worker

Outcome = tuple[bool, dict[TensorKey, int], CkptError | None]
_THREADS = 2  # of a worker, if `--threads` is not given
_RETRIES = 3  # of a worker that died
_LOOK = 0.5  # seconds between two checks of the progress
_TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "2")  # of 36 s each, where something answers that is no Ray; Ray's own is 20
_KNOCK = 10.0  # seconds for an address to answer: a head node's port is open at once
_SHARE = 20  # of the time that a look takes, at least: journals of large plans are long


def work(
    document: Mapping[str, Any], writing: Writing, recorded: Mapping[TensorKey, str], replaced: ReplacedOutput
) -> Outcome:
    """One worker, on the node that Ray chose: (did it commit, overflows, what went wrong)."""
    from ckpt_tool.storage.opening import open_tree

    plan = read_plan(document, "the plan sent by the driver")
    try:
        roots = dict.fromkeys(file.root for file in plan.sources)
        trees = {root: open_tree(root) for root in roots}
        result = execute(plan, trees, writing, Silent(), recorded=recorded, worker=new_worker(), replaced=replaced)
    except OutputExists as e:
        done = e.code == "E0501" and is_committed(plan)
        return done, {}, None if done else e  # another committed before this one began
    except CkptError as e:
        return False, {}, e
    return result.committed, result.overflows, None


def execute_on_ray(
    plan: Plan, writing: Writing, progress: Progress, *, recorded: Mapping[TensorKey, str], replaced: ReplacedOutput
) -> dict[TensorKey, int]:
    """Run the plan on the cluster that `writing.ray` names. Returns the overflows of lossy casts. replaced: what
    `--force` may remove, as this process has seen it.

    Raises UsageError E0271 without Ray, StorageError E0714 where workers were lost and none is left that could finish,
    else what the first failing worker raised; the same command goes on from there.
    """
    os.environ.setdefault(*_TRIES)  # Ray reads it when it is imported
    try:
        import ray
    except ImportError as e:
        raise UsageError("Ray is not installed", code="E0271", hint=install_command("ray")) from e

    _join(ray, writing.ray)
    cpus = int(ray.cluster_resources().get("CPU", 1))
    threads = writing.threads or min(_THREADS, max(1, cpus // 2))
    count = max(1, cpus // threads)
    document = ray.put(plan.to_json())
    options = {"num_cpus": threads, "max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
    remote = ray.remote(**options)(work)
    sent = replace(writing, ray=None, threads=threads)
    waiting = [remote.remote(document, sent, dict(recorded), replaced) for _ in range(count)]
    nodes = len([node for node in ray.nodes() if node.get("Alive")])
    progress.start(sum(move.nbytes for move in plan.moves), f"writing, {count} workers on {nodes} nodes")
    ended = _ended(ray, waiting, plan, progress)
    progress.finish()
    if ended.found:
        return max(ended.found, key=len)
    if ended.failure is not None:
        raise ended.failure

    raise StorageError(
        f"{len(ended.lost)} of {count} workers were lost, and none is left",
        code="E0714",
        path=plan.destination,
        faults=ended.lost,
        hint="run the same command again: it goes on from what is written (ckpt status shows it)",
    )


class _Ended(NamedTuple):
    """How the workers ended."""

    found: list[dict[TensorKey, int]]  # the overflows of each that committed
    lost: list[str]  # why, of those that Ray lost
    failure: CkptError | None  # the first error of the others


def _ended(ray: Any, waiting: list[Any], plan: Plan, progress: Progress) -> _Ended:
    """Wait for the workers, and show how far the output is meanwhile."""
    found = list[dict[TensorKey, int]]()
    lost = list[str]()
    failure = None
    shown = 0
    due = 0.0
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=_LOOK)
        if time.monotonic() >= due:
            began = time.monotonic()
            moved = output_state(place_of(plan.destination)).moved
            due = time.monotonic() + max(_LOOK, _SHARE * (time.monotonic() - began))
            progress.advance(max(0, moved - shown))
            shown = max(shown, moved)
        for one in done:
            try:
                committed, overflows, error = ray.get(one)
            except ray.exceptions.RayError as e:  # killed again and again, or its node is gone
                lost.append(str(e).strip().partition("\n")[0])
                progress.note(f"a worker was lost, the others take over what it had claimed: {lost[-1]}")
                continue
            failure = failure or error
            found += [overflows] if committed else []
    return _Ended(found, lost, failure)


def _join(ray: Any, address: str | None) -> None:
    if ray.is_initialized():
        return
    whole = full_url(address or "")
    try:
        _knock(whole)
        ray.init(address=whole if address else address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as e:
        raise UsageError(
            f"no Ray cluster at {address}: {hide_in_message(str(e))}",
            code="E0271",
            hint="start one with ray start --head, or --ray local",
        ) from cause_without_secrets(e)


def _knock(address: str) -> None:
    """Raise OSError where nothing listens at `HOST:PORT`: Ray itself would try for twelve minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK).close()
