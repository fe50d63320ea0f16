"""Rounds of one conversion on a Ray cluster of this machine, in which something goes wrong each time.

    python tests/bench/ray_rounds.py --rounds 20              # needs ray, and two cores for two workers
    python tests/bench/ray_rounds.py --rounds 10 --nodes 3    # needs ray[default]

With `--nodes` the cluster has so many, of one core each, beside its head; in each round one of them is killed as soon
as somebody writes, and a new one comes for the next. Without, in even rounds the first worker that writes is killed
with SIGKILL. In odd ones every share fails at first, since the output was begun with another plan (E0611); what is left
is cleaned, and the same conversion runs again. Each must end within LIMIT, and its output must have the bytes of one
process's. Prints a line a round, and how many held.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import ray
import safetensors.numpy

import ckpt_tool
from ckpt_tool.cli import run
from ckpt_tool.commands.convert import convert
from ckpt_tool.conversion import on_ray
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.output.destination import staging_path

LIMIT = 120  # seconds of a round


class Killing(Silent):
    """Kills the first worker that has begun to write to `out`, or what `kill` kills instead."""

    def __init__(self, out: Path, kill: Callable[[], None] | None = None) -> None:
        self._out = out
        self._kill = kill
        self.killed = False

    def advance(self, nbytes: int) -> None:
        for file in () if self.killed else sorted(staging_path(self._out).glob(".ckpt-journal-by-*")):
            self._kill() if self._kill else os.kill(int(file.name.split("-")[-2]), signal.SIGKILL)
            self.killed = True
            break


class Nodes:
    """A cluster of `count` nodes of one core on this machine, and a head that works nothing."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._nodes = deque(self._cluster.add_node(num_cpus=1) for _ in range(count))
        self._cluster.wait_for_nodes()
        self.address = self._cluster.address

    def kill(self) -> None:
        self._cluster.remove_node(self._nodes.popleft(), allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def renew(self) -> None:
        self._nodes.append(self._cluster.add_node(num_cpus=1))
        self._cluster.wait_for_nodes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=0)
    asked = parser.parse_args()
    on_ray._LOOK = 0.02
    signal.signal(signal.SIGALRM, _too_long)
    here = str(Path(ckpt_tool.__file__).parents[1])
    nodes = Nodes(asked.nodes) if asked.nodes else None
    where: dict[str, Any] = {"address": nodes.address} if nodes else {"num_cpus": 2}
    ray.init(**where, log_to_driver=False, logging_level="error", runtime_env={"env_vars": {"PYTHONPATH": here}})
    with tempfile.TemporaryDirectory(prefix="ckpt-ray-") as name:
        root = Path(name)
        count = max(2, asked.mb // 32)
        tensors = {f"w{i}": np.full((1 << 23,), i + 0.5, np.float32) for i in range(count)}
        safetensors.numpy.save_file(tensors, root / "in.safetensors")
        _convert(root, root / "alone", Silent(), on=None)
        held = sum(_round(number, root, nodes) for number in range(asked.rounds))
    if nodes:
        nodes.close()
    print(f"{held} of {asked.rounds} rounds: no hang, equal bytes")
    return 0 if held == asked.rounds else 1


def _round(number: int, root: Path, nodes: Nodes | None) -> bool:
    began = time.monotonic()
    out = root / f"out{number}"
    signal.alarm(LIMIT)
    try:
        if nodes is not None:
            progress = Killing(out, nodes.kill)
            _convert(root, out, progress, on="local")
            what = f"node killed: {progress.killed}"
            wanted = progress.killed
            nodes.renew()
        elif number % 2:
            failed = _failed(root, out)
            _convert(root, out, Silent(), on="local")
            what = f"shares failed with {failed}, then cleaned and run again"
            wanted = failed == "E0611"
        else:
            progress = Killing(out)
            _convert(root, out, progress, on="local")
            what = f"worker killed: {progress.killed}"
            wanted = progress.killed
        same = _contents(out) == _contents(root / "alone")
    except (CkptError, TimeoutError) as e:
        what = f"{type(e).__name__}: {e}"
        wanted = False
        same = False
    signal.alarm(0)
    print(f"{number:3} {time.monotonic() - began:5.1f} s  {what}, {'equal' if same else 'NOT EQUAL'}", flush=True)
    for file in out.iterdir() if out.is_dir() else ():
        file.unlink()
    return wanted and same


def _failed(root: Path, out: Path) -> str:
    """The code of a conversion whose output another plan's worker began; nothing of that is left."""
    plan = root / "other.json"
    words = [
        "convert",
        str(root / "in.safetensors"),
        str(out),
        "--to",
        "sharded",
        "--tp",
        "4",
        "--plan",
        str(plan),
        "-q",
    ]
    assert run(words) == 0 and run(["apply", str(plan), "--part", "1/2", "-q"]) == 0
    plan.unlink()
    try:
        _convert(root, out, Silent(), on="local")
    except CkptError as e:
        assert run(["clean", str(root), "--remove", "-q"]) == 0
        return e.code
    return "nothing"


def _convert(root: Path, out: Path, progress: Silent, *, on: str | None) -> None:
    writing = Writing(to="sharded", degrees={"tp": 2}, threads=1, ray=on, fsync=False)
    convert(str(root / "in.safetensors"), str(out), Reading(), writing, progress)


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no end within {LIMIT} s")


if __name__ == "__main__":
    sys.exit(main())
