"""`--method average`: the weights of each schedule as Megatron-LM computes them, over steps picked by number or age."""

from __future__ import annotations

from math import cos, pi, sqrt
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError
from ckpt_tool.merging.schedules import SCHEDULES, weights_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_weights_follow_the_decay_curves(count: int) -> None:
    """Each curve as Megatron-LM's tool samples it, written out once more as a sum over steps."""
    curves = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + cos(pi * x)) / 2, "minus-sqrt": lambda x: 1 - sqrt(x)}
    for name, curve in curves.items():
        weights = weights_of(name, count)
        # after checkpoint i the run counts with s(i/n): what checkpoints from i on weigh together
        for position in range(1, count):
            assert sum(weights[position:]) == pytest.approx(curve(position / count), abs=1e-12), name
    assert weights_of("linear", count) == pytest.approx((1 / count,) * count)
    assert weights_of("uniform", count) == (1 / count,) * count


def test_an_exponential_average_is_its_recurrence() -> None:
    values = [3.0, -1.0, 7.0, 2.0]
    average = values[0]
    for value in values[1:]:
        average = 0.8 * average + 0.2 * value
    assert sum(w * v for w, v in zip(weights_of("ema", 4, 0.8), values, strict=True)) == pytest.approx(average)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_add_up_to_one(schedule: str) -> None:
    assert sum(weights_of(schedule, 7, 0.9)) == pytest.approx(1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps, whose numbers sort otherwise as text."""
    random = np.random.default_rng(1)
    for step in (5, 10, 20, 100, 1000):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": random.standard_normal((8, 3)).astype(np.float32)}, folder / "model.safetensors")
    return tmp_path / "run"


def values_of(run: Path, *steps: int) -> list[np.ndarray]:
    return [load_file(run / f"checkpoint-{step}" / "model.safetensors")["w"].astype(np.float64) for step in steps]


@pytest.mark.parametrize("schedule", ["uniform", "cosine", "minus-sqrt", "ema"])
def test_the_last_steps_are_averaged_by_their_age(schedule: str, run: Path, tmp_path: Path) -> None:
    decay = {"decay": 0.7} if schedule == "ema" else {}
    ckpt.merge([run], tmp_path / "out", method="average", last=3, schedule=schedule, **decay)
    weights = weights_of(schedule, 3, 0.7)
    expected = sum(w * v for w, v in zip(weights, values_of(run, 20, 100, 1000), strict=True))
    np.testing.assert_allclose(ckpt.open(tmp_path / "out")["w"].numpy(), expected, rtol=2e-6, atol=1e-7)


def test_steps_are_picked_by_number_or_name_in_any_order(run: Path, tmp_path: Path) -> None:
    ckpt.merge([run], tmp_path / "out", method="average", steps="1000,5,checkpoint-20")
    expected = sum(values_of(run, 5, 20, 1000)) / 3
    np.testing.assert_allclose(ckpt.open(tmp_path / "out")["w"].numpy(), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"last": 3}, "E1442", "nothing says how to merge"),
        ({"steps": "5,10"}, "E1442", "nothing says how to merge"),
        ({"last": 3, "steps": "5", "method": "average"}, "E1442", "both pick the steps"),
        ({"steps": "5,11", "method": "average"}, "E1450", "no step 11"),
        ({"last": 6, "method": "average"}, "E1450", "5 checkpoints"),
        ({"last": 2, "method": "average", "decay": 0.5}, "E1442", "--schedule ema"),
        ({"last": 2, "method": "linear", "schedule": "cosine"}, "E1442", "--method average"),
        ({"last": 2, "method": "average", "schedule": "ema"}, "E1442", "needs --decay"),
        ({"last": 2, "method": "average", "weight": [1, 2]}, "E1442", "--weight"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict, code: str, said: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt.merge([run], tmp_path / "out", **options)
    assert caught.value.code == code
    assert said in " ".join((caught.value.message, caught.value.hint or "", *caught.value.faults))
    if code == "E1442" and "method" not in options:
        assert "--method average" in (caught.value.hint or "")


def test_counters_of_an_average_are_those_of_the_newest_step(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for step in (90, 100, 200):
        (tmp_path / f"run/checkpoint-{step}").mkdir(parents=True)
        state = {"model": {"w": torch.ones(4)}, "iteration": step, "optimizer": {"lr": 0.1}}
        torch.save(state, tmp_path / f"run/checkpoint-{step}/checkpoint.pt")
    report = ckpt.merge([tmp_path / "run"], tmp_path / "out.pt", method="average", last=3, to="torch")
    assert ckpt.open(tmp_path / "out.pt").extras["iteration"] == 200
    newest = f"counters, extras and side files are those of the newest checkpoint, {tmp_path}/run/checkpoint-200"
    assert newest in report["notes"] and "1 tensor is merged by average, 0 are taken as they are" in report["notes"]
    reasons = [entry["reason"] for entry in report["dropped"]]
    assert reasons == ["a merge has no optimizer"]


def test_what_all_steps_leave_out_is_one_entry(tmp_path: Path) -> None:
    steps = []
    for step in (1, 2, 3):
        steps.append(tmp_path / f"step-{step}")
        steps[-1].symlink_to(ROOT / "fixtures/dcp/fsdp2_dp4")
    report = ckpt.merge(steps, tmp_path / "out", method="average")
    left = [(entry["state"], entry["tensors"]) for entry in report["dropped"]]
    assert left == [("step", 15), ("exp_avg", 15), ("exp_avg_sq", 15), ("extras", 0)]


@pytest.mark.parametrize("options", [{}, {"last": 1}, {"steps": "20"}])
def test_one_checkpoint_has_no_average(options: dict, run: Path, tmp_path: Path) -> None:
    source = run if options else run / "checkpoint-20"
    with pytest.raises(UsageError, match="needs at least 2 checkpoints") as caught:
        ckpt.merge([source], tmp_path / "out", method="average", **options)
    assert caught.value.code == "E1442" and not (tmp_path / "out").exists()
