"""SIGKILL at any moment of a job that saves after every step: what goes on from what it left ends in the same bits.

A trial starts a job of several processes, kills it (all ranks at once, or one rank at a named point of a save), takes
the last whole checkpoint, goes on from there to the end, as another layout if the trial says so, and compares every
tensor of the last checkpoint with the job that nobody killed. Moments are drawn over the whole life of the job, its
start and its end included.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ckpt_tool.errors import Incomplete
from ckpt_tool.harness import store
from ckpt_tool.harness.launch import preload
from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.loading import Loader, prepare_checkpoint
from ckpt_tool.harness.pieces import STATES
from ckpt_tool.harness.runs import Saving, run
from ckpt_tool.harness.saving.fault_point import POINTS, VARIABLE
from ckpt_tool.harness.shape import ModelShape
from ckpt_tool.harness.train import TrainingJob

SHAPE = ModelShape.quick().with_(hidden=32, heads=4, kv_heads=4, dense_ffn=32, expert_ffn=16, batch=2, sequence=16)
STEPS = 5
LAYOUTS = ("tp2", "dp2,ep2", "pp2")
FORMATS = ("sharded", "dcp", "megatron-dist", "paddle-flex", "megatron", "paddle-unified")


class Truth(NamedTuple):
    """The job that nobody killed: values by (state, name), seconds that it took."""

    values: dict[tuple[str, str], torch.Tensor]
    scalars: dict[str, object]
    seconds: float


class Trial(NamedTuple):
    """moment: seconds after the start, for a kill of all ranks; point: CKPT_HARNESS_KILL, for one rank. One of both."""

    layout: str
    then: str
    fmt: str
    moment: float | None
    point: str | None = None


def job(layout: str) -> TrainingJob:
    return TrainingJob(SHAPE, HarnessLayout.parse(layout))


def start(root: Path, layout: str, fmt: str, run_id: str, *, scratch: Path, point: str | None = None) -> int:
    """Start the job in a process group of its own, from the last good checkpoint or the beginning. Its process id."""
    child = os.fork()
    if child:
        with suppress(PermissionError, ProcessLookupError):  # both do it: who comes first does not matter
            os.setpgid(child, child)
        return child
    try:
        os.setpgid(0, 0)
        if point:
            os.environ[VARIABLE] = point
        done = 0
        here = None
        try:
            good = store.latest(root)
            done = good.step
            here = prepare_checkpoint(good.path, scratch)
        except Incomplete:
            pass
        saving = Saving(root, fmt, tuple(range(done + 1, STEPS + 1)), run=run_id)
        run(job(layout), STEPS - done, start=here, saving=saving)
        os._exit(0)
    finally:
        os._exit(1)


def values(path: Path, scratch: Path) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, object]]:
    source = Loader(prepare_checkpoint(path, scratch))
    every = SHAPE.parameters()
    found = {(s, p.name): source.read(p.name, s, (0,) * len(p.shape), p.shape) for s in STATES for p in every}
    return found, source.scalars


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    preload()
    root = tmp_path_factory.mktemp("truth")
    began = time.monotonic()
    _, status = os.waitpid(start(root, "tp2", "sharded", "0", scratch=root / "scratch"), 0)
    assert status == 0
    seconds = time.monotonic() - began
    good = store.latest(root)
    assert good.step == STEPS
    return Truth(*values(good.path, root / "hub"), seconds)


def trials(seed: int, count: int, seconds: float) -> Iterator[Trial]:
    """Half of them at a moment in time, half at a point of a save."""
    dice = random.Random(seed)
    for number in range(count):
        layout = LAYOUTS[number % 3]
        then = dice.choice(LAYOUTS)
        fmt = FORMATS[number % len(FORMATS)]
        if number % 2 == 0:
            yield Trial(layout, then, fmt, dice.uniform(0.0, 1.1 * seconds))
        else:
            point = dice.choice(POINTS)
            rank = dice.choice("01") if point in ("snapshot", "spool", "rank-done") else "0"
            step = dice.randint(3 if point == "rotate" else 1, STEPS)
            yield Trial(layout, then, fmt, None, f"{point}:{rank}:{step}")


def carry_out(trial: Trial, truth: Truth, root: Path) -> tuple[int, int]:
    """The step from which it went on, and how many saves were passed over."""
    child = start(root, trial.layout, trial.fmt, "killed", scratch=root.parent / "first", point=trial.point)
    if trial.moment is not None:
        time.sleep(trial.moment)
        os.killpg(child, signal.SIGKILL)  # a job that has ended is still there: nobody has waited for it
    _, status = os.waitpid(child, 0)
    if trial.point is not None:
        assert status != 0, "the point was not reached"
    try:
        good = store.latest(root)
        step = good.step
        torn = len(good.notes)
        assert store.fault_of(good.path) is None
    except Incomplete as e:
        step = 0
        torn = len(e.faults or ())
    store.clean(root)
    _, status = os.waitpid(start(root, trial.then, trial.fmt, "again", scratch=root.parent / "second"), 0)
    assert status == 0, "the job did not go on"
    end = store.latest(root)
    assert (end.step, end.notes) == (STEPS, ())
    got, scalars = values(end.path, root.parent / "end")
    assert scalars == truth.scalars
    for (state, name), want in truth.values.items():
        assert torch.equal(got[state, name].to(want.dtype), want), f"{name} [{state}] after {trial}"
    return step, torn


@pytest.mark.share(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(2))
def test_killed_jobs_go_on(truth: Truth, number: int, tmp_path: Path) -> None:
    trial = list(trials(7, 2, truth.seconds))[number]
    root = tmp_path / "run"
    root.mkdir()
    carry_out(trial, truth, root)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_at_random_moments(truth: Truth, tmp_path: Path) -> None:
    went_on = []
    torn = 0
    for number, trial in enumerate(trials(20261121, 50, truth.seconds)):
        root = tmp_path / f"{number}" / "run"
        root.mkdir(parents=True)
        step, passed_over = carry_out(trial, truth, root)
        went_on.append(step)
        torn += passed_over
    print(
        f"went on from steps {sorted(went_on)}; {torn} saves had been cut off; a whole job takes {truth.seconds:.1f} s"
    )
    assert torn > 0 and len(set(went_on)) > 2, "the kills came at no interesting moments"
