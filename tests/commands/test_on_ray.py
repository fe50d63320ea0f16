"""The same plan by workers on a Ray cluster of this machine: the same bytes as one process writes, whoever dies."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.cli import run
from ckpt_tool.commands.convert import reshard
from ckpt_tool.conversion import on_ray
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.output.destination import staging_path

SOURCE = Path(__file__).parents[2] / "fixtures" / "dcp" / "fsdp2_dp4"
OPTIONS: dict[str, Any] = {"degrees": {"dp": 3}, "threads": 1}


class Seen(Silent):
    """What a bar would show. kill: the first worker is killed when the bytes begin."""

    def __init__(self, *, kill: Path | None = None) -> None:
        self.total = self.done = 0
        self.killed = False
        self._kill = kill

    def start(self, total_bytes: int, what: str) -> None:
        self.total = total_bytes

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        for file in sorted(staging_path(self._kill).glob(".ckpt-journal-by-*")) if self._kill else ():
            os.kill(int(file.name.split("-")[-2]), signal.SIGKILL)
            self._kill = None
            self.killed = True
            break


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, bytes]:
    reshard(str(SOURCE), str(tmp_path / "alone"), Reading(), Writing(**OPTIONS), Silent())
    return contents(tmp_path / "alone")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.peers
def test_workers_write_the_same_bytes(tmp_path: Path, alone: dict[str, bytes]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    seen = Seen()
    document = reshard(str(SOURCE), str(tmp_path / "ray"), Reading(), Writing(**OPTIONS, ray="local"), seen)
    assert document["digest_checked"] and 0 <= seen.done <= seen.total > 0
    assert contents(tmp_path / "ray") == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ray"]


@pytest.mark.peers
def test_a_worker_that_is_killed_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a gigabyte, so that there is time to see a worker and to kill it."""
    pytest.importorskip("ray", reason="Ray is not installed")
    tensors = {f"w{i}": np.full((1 << 24,), i + 0.5, np.float32) for i in range(8)}
    safetensors.numpy.save_file(tensors, tmp_path / "in.safetensors")
    monkeypatch.setattr(on_ray, "_LOOK", 0.02)
    killed = 0
    for _ in range(3):
        out = tmp_path / "out"
        seen = Seen(kill=out)
        writing = Writing(degrees={"tp": 2}, threads=1, ray="local", fsync=False)
        reshard(str(tmp_path / "in.safetensors"), str(out), Reading(), replace(writing, to="sharded"), seen)
        assert run(["diff", str(tmp_path / "in.safetensors"), str(out), "-q"]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out"]
        killed += seen.killed
        shutil.rmtree(out)
    assert killed, "nobody was killed: there was nothing to survive"


class Losing(Seen):
    """Takes a node away, as a machine that loses its power goes: the first of `nodes` whose worker has begun."""

    def __init__(self, cluster: Any, nodes: Sequence[Any], out: Path) -> None:
        super().__init__()
        self._cluster = cluster
        self._out = out
        self._nodes = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
        self.left = 0  # bytes to come when it went

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        for file in () if self.killed else sorted(staging_path(self._out).glob(".ckpt-journal-by-*")):
            node = self._nodes.get(_parent(int(file.name.split("-")[-2])))
            if node is not None:
                self._cluster.remove_node(node, allow_graceful=False)
                self.killed = True
                self.left = self.total - self.done
                break


def _parent(process: int) -> int:
    """The process that started it, 0 where it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.peers
@pytest.mark.timeout(600)
def test_a_node_that_is_lost_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes with a worker each, one of them killed while it writes; two gigabytes, so that there is time."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    tensors = {f"w{i}": np.full((1 << 24,), i + 0.5, np.float32) for i in range(32)}
    safetensors.numpy.save_file(tensors, tmp_path / "in.safetensors")
    monkeypatch.setattr(on_ray, "_LOOK", 0.02)
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        seen = Losing(cluster, nodes, tmp_path / "out")
        writing = Writing(to="sharded", degrees={"tp": 2}, threads=1, ray=cluster.address, fsync=False)
        reshard(str(tmp_path / "in.safetensors"), str(tmp_path / "out"), Reading(), writing, seen)
        assert seen.killed and seen.left, "no node was lost while it wrote: there was nothing to survive"
        assert len(cluster.list_all_nodes()) == 2
        assert run(["diff", str(tmp_path / "in.safetensors"), str(tmp_path / "out"), "-q"]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out"]
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.peers
def test_a_saved_plan_goes_to_ray(tmp_path: Path, alone: dict[str, bytes], capfd: Any) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    plan = str(tmp_path / "plan.json")
    assert run(["reshard", str(SOURCE), str(tmp_path / "out"), "--dp", "3", "--plan", plan, "-q"]) == 0
    assert run(["apply", plan, "--ray", "local", "--threads", "1", "-q"]) == 0
    assert contents(tmp_path / "out") == alone
    assert run(["apply", plan, "--ray", "local", "--claim"]) == 2
    assert "E0266" in capfd.readouterr().err


def test_without_ray_the_way_out_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        reshard(str(SOURCE), str(tmp_path / "out"), Reading(), Writing(ray="auto"), Silent())
    assert "pip install" in caught.value.hint and not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_address_where_nothing_listens_is_told_at_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray alone would try for twelve minutes."""
    import sys
    from types import SimpleNamespace

    def never(**options: Any) -> None:
        raise AssertionError("Ray was asked to join")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=never))
    with pytest.raises(UsageError, match=f"no Ray cluster at {address}") as caught:
        reshard(str(SOURCE), str(tmp_path / "out"), Reading(), Writing(ray=address), Silent())
    assert caught.value.code == "E0271" and not list(tmp_path.iterdir())
