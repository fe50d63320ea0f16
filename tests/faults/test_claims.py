"""Workers that claim what they do: any number, joining and dying at any time. One commits, the bytes are the plan's."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.cli import run
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor
from ckpt_tool.storage.output import claims, journal
from ckpt_tool.storage.output.claims import Claims, Taken
from ckpt_tool.storage.output.destination import staging_path
from ckpt_tool.storage.output.staging import Staging, new_worker

# A worker in a process of its own, with units of 4 KiB and pauses between them: there is time to die in
WORKER = """
import sys, time
from ckpt_tool.cli import run
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor
from ckpt_tool.storage.output.staging import Staging
executor.units = lambda moves: schedule.units(moves, size=1 << 12)
executor._PAUSE = 0.05
unit = executor.Executor._move_unit
def slowly(self, *given):
    time.sleep(float(sys.argv[2]))
    return unit(self, *given)
executor.Executor._move_unit = slowly
rename = Staging._rename
def noted(self, staged, final):
    old = rename(self, staged, final)
    with open(sys.argv[1] + ".commits", "a") as f:
        f.write("committed\\n")
    return old
Staging._rename = noted
sys.exit(run(["apply", sys.argv[1], "--claim", "--json", "-q", "--no-fsync", "--threads", "1"]))
"""


class Ground:
    """A source of an optimizer's states, a plan, and the plan's output."""

    def __init__(self, root: Path, *options: str) -> None:
        self.place = root / "place"
        self.out = root / "place" / "out"
        self.plan = str(root / "plan.json")
        self.place.mkdir()
        tensors = {
            f"layers.{i}.mlp.{kind}_proj.weight": np.arange(n * 40, dtype=np.float32).reshape(n, 40) + i
            for i, n in enumerate((50, 33, 64, 7, 50, 41))
            for kind in ("up", "down")
        }
        safetensors.numpy.save_file(tensors, root / "in.safetensors")
        assert run(["convert", str(root / "in.safetensors"), str(self.out), *options, "--plan", self.plan, "-q"]) == 0
        assert run(["apply", self.plan, "-q"]) == 0
        self.good = self.bytes()
        self.clear()

    def bytes(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.out)): path.read_bytes() for path in self.out.rglob("*") if path.is_file()}

    def commits(self) -> int:
        """How often a worker has put the output in its place."""
        noted = Path(self.plan + ".commits")
        return len(noted.read_text().splitlines()) if noted.exists() else 0

    def clear(self) -> None:
        Path(self.plan + ".commits").unlink(missing_ok=True)
        shutil.rmtree(self.place)
        self.place.mkdir()

    def worker(self, pause: float = 0.01) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-c", WORKER, self.plan, str(pause)]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(
    scope="module",
    params=[("--to", "sharded", "--tp", "2"), ("--to", "deepspeed-universal"), ("--to", "dcp", "--dp", "2")],
    ids=lambda options: options[1],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("claims"), *request.param)


@pytest.fixture
def ground(made: Ground, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 12))
    monkeypatch.setattr(executor, "_PAUSE", 0.05)
    yield made
    made.clear()


def ended(worker: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """(exit code, does it say that the output is committed?)."""
    out, err = worker.communicate(timeout=120)
    assert worker.returncode in (0, -signal.SIGKILL), err.decode()
    return worker.returncode, bool(out) and json.loads(out)["committed"]


def test_one_worker_does_it_all(ground: Ground, capfd: Any) -> None:
    assert run(["apply", ground.plan, "--claim", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["committed"] is True
    assert ground.bytes() == ground.good and os.listdir(ground.place) == ["out"]
    assert run(["apply", ground.plan, "--claim"]) == 0
    assert "already committed" in capfd.readouterr().out
    assert ground.bytes() == ground.good


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(3))
def test_workers_that_die_and_workers_that_come_late(ground: Ground, seed: int) -> None:
    rng = random.Random(seed)
    workers = [ground.worker() for _ in range(4)]
    for victim in workers[:2]:
        time.sleep(rng.uniform(0.2, 1.0))
        victim.kill()
    workers += [ground.worker(0)]
    found = [ended(worker) for worker in workers]
    assert all(code == 0 for code, _ in found[2:])
    assert all(committed for code, committed in found if code == 0)
    assert ground.bytes() == ground.good and os.listdir(ground.place) == ["out"]


@pytest.mark.share(21)
@pytest.mark.parametrize("seed", range(7))
def test_eight_workers_of_which_three_die_while_two_come_late(ground: Ground, seed: int) -> None:
    rng = random.Random(seed)
    workers = [ground.worker(0.5) for _ in range(8)]
    staged = staging_path(ground.out)
    while not list(staged.glob(".ckpt-journal-claims/*-1")):
        assert any(worker.poll() is None for worker in workers)
        time.sleep(0.01)
    victims = rng.sample(workers, 3)
    for victim in victims:
        time.sleep(rng.uniform(0, 0.3))
        victim.kill()
    workers += [ground.worker(0) for _ in range(2)]
    found = {worker.pid: ended(worker) for worker in workers}
    assert [found.pop(victim.pid)[0] for victim in victims] == [-signal.SIGKILL] * 3
    assert list(found.values()) == [(0, True)] * 7
    assert ground.commits() == 1
    assert ground.bytes() == ground.good and os.listdir(ground.place) == ["out"]


def test_what_dead_workers_did_is_not_done_again(ground: Ground) -> None:
    worker = ground.worker(0.05)
    staged = staging_path(ground.out)
    while not list(staged.glob(".ckpt-journal-claims/*-done")):
        assert worker.poll() is None
        time.sleep(0.01)
    worker.kill()
    worker.wait()
    before = len(list(staged.glob(".ckpt-journal-claims/*-done")))
    moved: list[int] = []
    unit = executor.Executor._move_unit

    def counted(self: Any, taken: Any, *rest: Any) -> Any:
        moved.append(taken[0])
        return unit(self, taken, *rest)

    executor.Executor._move_unit = counted  # type: ignore[method-assign]
    try:
        assert run(["apply", ground.plan, "--claim", "-q"]) == 0
    finally:
        executor.Executor._move_unit = unit  # type: ignore[method-assign]
    assert ground.bytes() == ground.good and len(set(moved)) == len(moved) > 0
    assert before > 0 and min(moved) >= 0


def test_a_slow_worker_is_overtaken_and_does_no_harm(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped in the middle, holds its locks, and goes on after the commit."""
    monkeypatch.setattr(claims, "LEASE", 0.5)
    monkeypatch.setattr(Claims.__init__, "__defaults__", (0.5,))
    slow = ground.worker(0.05)
    staged = staging_path(ground.out)
    while not list(staged.glob(".ckpt-journal-claims/*-1")):
        assert slow.poll() is None
        time.sleep(0.01)
    slow.send_signal(signal.SIGSTOP)
    try:
        assert run(["apply", ground.plan, "--claim", "-q"]) == 0
        assert ground.bytes() == ground.good
    finally:
        slow.send_signal(signal.SIGCONT)
    assert ended(slow) == (0, True)
    assert ground.bytes() == ground.good and os.listdir(ground.place) == ["out"]


def test_a_heartbeat_after_the_commit_touches_no_other_file(ground: Ground, tmp_path: Path) -> None:
    """The commit closes the journal while claims are still kept alive; its number may then be another file's."""
    source = tmp_path / "source"
    source.write_bytes(b"values")
    os.utime(source, (1, 1))
    with Staging(ground.out, executor_plan(ground), [], part=new_worker()) as staging:
        staging.begin(1, 1)
        own = os.dup(staging._journal_fd)
        with Claims(staging._folder_fd, own, "worker", 1, lease=0.06):
            os.close(own)
            reused = os.open(source, os.O_RDONLY)
            try:
                assert reused == own  # the lowest number that is free
                time.sleep(0.1)
            finally:
                os.close(reused)
    assert source.stat().st_mtime == 1


def test_workers_and_parts_do_not_mix(ground: Ground, capfd: Any) -> None:
    assert run(["apply", ground.plan, "--part", "1/2", "-q"]) == 0
    assert run(["apply", ground.plan, "--claim", "-q"]) == 6
    assert "E1602" in capfd.readouterr().err
    assert run(["apply", ground.plan, "--part", "2/2", "-q"]) == 0
    assert ground.bytes() == ground.good
    ground.clear()
    with Staging(ground.out, executor_plan(ground), [], part=new_worker()):
        pass
    assert run(["apply", ground.plan, "--part", "1/2", "-q"]) == 6
    assert "E1602" in capfd.readouterr().err
    assert run(["apply", ground.plan, "--claim", "--part", "1/2"]) == 2


def executor_plan(ground: Ground) -> str:
    from ckpt_tool.conversion.plan_file import load_plan

    return load_plan(ground.plan).identifier()


def test_status_shows_the_workers(ground: Ground, capfd: Any) -> None:
    with Staging(ground.out, executor_plan(ground), [], part="one") as staging:
        staging.begin(4, 1000)
        staging.record({"unit": 1, "bytes": 250})
        assert run(["status", str(ground.out), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [(part["worker"], part["state"], part["bytes"]) for part in document["parts"]] == [("one", "running", 250)]


# -- the claims themselves ---------------------------------------------------------------------------------------------


def test_two_workers_never_hold_one_share(tmp_path: Path) -> None:
    with (
        Staging(tmp_path / "out", "plan", [], part="a") as one,
        Staging(tmp_path / "out", "plan", [], part="b") as two,
        one.claims(5) as mine,
        two.claims(5) as others,
    ):
        taken = [share.number for _ in range(3) for each in (mine, others) for share in each.take(1)]
        assert sorted(taken) == [0, 1, 2, 3, 4]
        for number in taken[:4]:
            mine.finish(number)
        assert mine.left() == others.left() == 1 and others.done() == set(taken[:4])
        mine.finish(taken[4])
        assert mine.take_commit() and not others.take_commit() and mine.take_commit()
    with Staging(tmp_path / "out", "plan", [], part="c") as three, three.claims(5) as later:
        assert later.take_commit(), "whoever held it is gone"


def test_a_dead_worker_s_share_is_free_at_once_and_a_silent_one_s_after_the_lease(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", "plan", [], part="live") as live:
        with Staging(tmp_path / "out", "plan", [], part="dead") as dead, dead.claims(2) as its:
            assert [share.over for share in its.take(1)] == [False]
        name = journal.name_of("live")
        mine = Claims(live._folder_fd, live._journal_fd, name, 2, lease=60)
        found = mine.take(9)
        assert sorted(found) == sorted([Taken(found[0].number, found[0].over), Taken(found[1].number, found[1].over)])
        assert sorted(share.over for share in found) == [False, True]
        with Staging(tmp_path / "out", "plan", [], part="late") as late:
            its = Claims(late._folder_fd, late._journal_fd, journal.name_of("late"), 2, lease=0.2)
            assert its.take(9) == []
            time.sleep(0.4)
            assert [share.over for share in its.take(9)] == [True, True]
