"""Workers that claim shares of an output in a store: any number, that come late and die. One commits, by the word of a
real server; the bytes are the plan's; nothing is left."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import yaml
from s3_server import BUCKET, S3, Answer, Asked
from test_real_server import files, pending

from ckpt_tool.cli import run
from ckpt_tool.commands.clean import clean
from ckpt_tool.storage.stores import multipart

pytestmark = pytest.mark.server
PART = 5 << 20  # bytes, the least that S3 takes
OUT = f"s3://{BUCKET}/out"
RECORDS = ".out.ckpt-partial"
ROOT = Path(__file__).parents[2]
SLOW_JOBS = (("slurm", ["--part", "auto"]), ("k8s", []))
# A worker in a process of its own, with units of 1 MiB and pauses between them: there is time to die in
WORKER = """
import sys, time
from ckpt_tool.cli import run
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor, shares, store_executor
from ckpt_tool.storage.stores import store_claims
store_claims.LEASE, store_claims.BEAT = 3.0, 0.5
executor._PAUSE, store_executor._LONGEST, shares.SHARE = 0.1, 0.5, 5 << 20
executor.units = lambda moves: schedule.units(moves, size=1 << 20)
unit = executor.Executor._move_unit
def slowly(self, *given):
    time.sleep(float(sys.argv[2]))
    return unit(self, *given)
executor.Executor._move_unit = slowly
sys.exit(run(["apply", sys.argv[1], *sys.argv[3:], "--json", "-q", "--threads", "1"]))
"""


@pytest.fixture(autouse=True)
def least_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "LEAST", PART)


class Ground:
    """A source of 48 MB, a plan into the store, and what the same conversion writes to a disk."""

    def __init__(self, s3: S3, root: Path, *options: str, tensors: int = 12) -> None:
        self.s3 = s3
        self.plan = str(root / "plan.json")
        numbers = np.random.default_rng(0)
        weights = {
            f"layers.{i}.mlp.up_proj.weight": numbers.integers(0, 1 << 32, (1024, 1000), np.uint32).view(np.float32)
            for i in range(tensors)
        }
        safetensors.numpy.save_file(weights, root / "in.safetensors")
        line = ["convert", str(root / "in.safetensors")]
        assert run([*line, OUT, *options, "--plan", self.plan, "-q"]) == 0
        assert run([*line, str(root / "out"), *options, "-q"]) == 0
        self.good = files(root / "out")

    def worker(self, pause: float = 0.0, *how: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-c", WORKER, self.plan, str(pause), *(how or ("--claim",))]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def begun(self, what: str, workers: list[subprocess.Popen[bytes]]) -> None:
        """Wait until a record of that name is there."""
        while not any(key.startswith(what) for key in self.s3.content(RECORDS)):
            assert any(worker.poll() is None for worker in workers)
            time.sleep(0.05)

    def commits(self, last: str) -> int:
        """How often the store has taken the object that is written last."""
        return sum(
            asked.path == f"/{BUCKET}/out/{last}"
            and ((asked.method == "PUT" and "partNumber" not in asked.query) or "uploadId" in asked.query)
            and asked.method in ("PUT", "POST")
            and status == 200
            for asked, status in self.s3.proxy.done
        )


def ended(worker: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """(exit code, does it say that the output is committed?)."""
    out, err = worker.communicate(timeout=300)
    assert worker.returncode in (0, -signal.SIGKILL), err.decode()
    return worker.returncode, bool(out) and json.loads(out)["committed"]


def as_it_should(ground: Ground, last: str) -> None:
    assert ground.s3.content("out") == ground.good and ground.commits(last) == 1
    clean(OUT, remove=True)
    assert not pending(ground.s3) and not ground.s3.content(RECORDS)


def test_a_worker_that_dies_and_one_that_comes_late(real: S3, tmp_path: Path) -> None:
    ground = Ground(real, tmp_path, "--to", "dcp", tensors=5)
    workers = [ground.worker(0.3), ground.worker(0.1)]
    ground.begun("share-", workers)
    workers[0].kill()
    workers.append(ground.worker())
    found = [ended(worker) for worker in workers]
    assert found[0][0] == -signal.SIGKILL and found[1:] == [(0, True)] * 2
    as_it_should(ground, ".metadata")
    assert ended(ground.worker()) == (0, True), "run again, it is committed already"


@pytest.mark.parametrize(
    ("engine", "way"),
    [("slurm", []), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_JOBS)],
    ids=["slurm claims", "slurm by numbers", "k8s claims"],
)
def test_an_emitted_job_fills_the_store(real: S3, tmp_path: Path, engine: str, way: list[str]) -> None:
    """What the engine would run, with the variables that it sets: two workers at a time of the eight that the file asks
    for, as many as it takes."""
    ground = Ground(real, tmp_path, "--to", "dcp", tensors=3)
    job = tmp_path / "job"
    assert run(["apply", ground.plan, *way, "--emit", engine, str(job), "--threads", "1", "-q"]) == 0
    (tmp_path / "ckpt").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckpt_tool "$@"\n')
    (tmp_path / "ckpt").chmod(0o755)
    command = ["bash", str(job)]
    counted = "SLURM_ARRAY_TASK_COUNT"
    if engine == "k8s":
        (container,) = yaml.safe_load(job.read_text())["spec"]["template"]["spec"]["containers"]
        command = [word.replace("$$", "$") for word in container["command"]]
        counted = "JOB_COMPLETIONS"
    numbers = {"slurm": "SLURM_ARRAY_TASK_ID", "k8s": "JOB_COMPLETION_INDEX"}[engine]
    first = int(engine == "slurm")
    base = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), counted: "8"}
    base |= {"SLURM_ARRAY_TASK_MIN": "1"} if engine == "slurm" else {}
    for at in range(first, first + 8 if way else first + 2, 2):
        tasks = [
            subprocess.Popen(command, env={**base, numbers: str(task)}, cwd="/", stderr=subprocess.PIPE)
            for task in (at, at + 1)
        ]
        for task in tasks:
            said = task.communicate(timeout=300)[1]
            assert task.returncode == 0, said.decode()
    as_it_should(ground, ".metadata")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_one_that_commits_is_killed(real: S3, tmp_path: Path, when: str) -> None:
    """At its last object: before the store has it, and after; another finishes, or finds that all is done."""
    ground = Ground(real, tmp_path, "--to", "dcp", tensors=3)
    killed = list[subprocess.Popen[bytes]]()

    def kill(asked: Asked) -> Answer | None:
        if asked.path != f"/{BUCKET}/out/.metadata" or asked.method != "PUT" or not killed:
            return None
        killed.pop().kill()
        return Answer(gone=when == "before", lost=True)

    real.proxy.fault = kill
    first = ground.worker()
    killed.append(first)
    assert ended(first)[0] == -signal.SIGKILL and not killed
    assert (".metadata" in real.content("out")) == (when == "after") and real.content(RECORDS)
    assert ended(ground.worker()) == (0, True)
    assert real.content("out") == ground.good and ground.commits(".metadata") == 1
    assert not pending(real) and not real.content(RECORDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_eight_workers_of_which_three_die_while_two_come_late(real: S3, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    options, last = (
        (("--to", "dcp"), ".metadata"),
        (("--to", "sharded", "--tp", "2"), "ckpt.index.json"),
        (("--to", "safetensors", "--max-shard-size", "20MB"), "model.safetensors.index.json"),
    )[seed % 3]
    ground = Ground(real, tmp_path, *options)
    workers = [ground.worker(0.3) for _ in range(8)]
    ground.begun("claim-", workers)
    victims = rng.sample(workers, 3)
    for victim in victims:
        time.sleep(rng.uniform(0, 1.5))
        victim.kill()
    workers += [ground.worker() for _ in range(2)]
    found = {worker.pid: ended(worker) for worker in workers}
    for victim in victims:
        assert found.pop(victim.pid)[0] in (0, -signal.SIGKILL)
    assert list(found.values()) == [(0, True)] * 7
    as_it_should(ground, last)
