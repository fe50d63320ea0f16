"""Objects of a job's own classes in a training state: left behind by its owner's word, never created."""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.cli import run
from ckpt_tool.storage.pickles.pickle_globals import users_own


@dataclasses.dataclass
class Config:
    rate: float = 1e-3


class Kind(enum.Enum):
    A = 1


class Runs:
    def __reduce__(self) -> object:
        return os.system, ("touch ran",)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.arange(6.0)}, "config": Config(), "kind": Kind.A, "epoch": 3}
    torch.save(state, tmp_path / "own.pt")
    torch.save({**state, "hook": Runs()}, tmp_path / "runs.pt")
    return tmp_path


def test_weights_come_out_and_the_objects_are_named(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = saved / "out"
    assert run(["convert", str(saved / "own.pt"), str(out), "--to", "safetensors"]) == 4
    assert "--drop extras leaves their objects out" in capfd.readouterr().err and not out.exists()
    words = ["--state", "model", "--drop", "extras"]
    assert run(["convert", str(saved / "own.pt"), str(out), "--to", "safetensors", *words]) == 0
    report = " ".join(capfd.readouterr().out.split())
    assert "Config at" in report and "Kind at" in report and "never created" in report
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.arange(6.0))


def test_code_is_refused_whatever_is_dropped(saved: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(saved)
    assert run(["convert", "runs.pt", "out", "--to", "dcp", "--drop", "extras"]) == 4
    error = capfd.readouterr().err
    assert "posix.system" in error and "Config" not in error
    assert not (saved / "out").exists() and not (saved / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["os.PathLike", "subprocess.Popen", "builtins.eval", "torch.hub.Thing", "lib.make", "lib:A.b", "numpy.Odd", ""],
)
def test_what_is_nobody_s_own_class(name: str) -> None:
    assert not users_own(f"{name} at a.pt, opcode 3")
    assert users_own("lib.config.Config at a.pt, opcode 3") and not users_own("lib.config.Config")


def test_states_without_a_model_are_called_that(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torchtune's recipe_state.pt."""
    states = {"layers.0.w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    torch.save({"epochs_run": 1, "optimizer": {"state": states, "param_groups": []}}, tmp_path / "recipe_state.pt")
    words = ["convert", str(tmp_path / "recipe_state.pt"), str(tmp_path / "out")]
    assert run([*words, "--to", "safetensors"]) == 2
    error = capfd.readouterr().err
    assert "no model is in this source" in error and "--state" not in error
    assert run([*words, "--to", "dcp", "-q"]) == 0
