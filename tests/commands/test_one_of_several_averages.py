"""Several averages of one model in a file: E2974 shows options that choose one, and these very options work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.cli import run

NAMES = ("layers.0.weight", "layers.0.bias", "head.weight")


def weights(number: int, names: tuple[str, ...] = NAMES) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(number)) for name in names}


def post_hoc(count: int) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for number in range(count):
        lead = f"ema_models.{number}."
        state |= {f"{lead}ema_model.{name}": tensor for name, tensor in weights(number + 1).items()}
        state |= {f"{lead}step": torch.tensor(3), f"{lead}initted": torch.tensor(True)}
    return state


STATES: dict[str, dict[str, Any]] = {
    "EDM2": {"net": weights(0), "ema": {"stds": [0.05, 0.1], "emas": [weights(1), weights(2)]}},
    "many": {"net": weights(0), "ema": {"emas": [weights(number) for number in range(1, 9)]}},
    "by width": {"model": weights(0), "ema": {"emas": {"0.050": weights(1), "0.100": weights(2)}}},
    "post-hoc": {"model": weights(0), "ema": post_hoc(2)},
    "many post-hoc": {"model": weights(0), "ema": post_hoc(5)},
    "of parameters": {"model": weights(0) | {"norm.running_mean": torch.zeros(3)}, "ema": {"emas": [weights(1)] * 2}},
    "one": {"model": weights(0), "ema": {"encoder." + name: tensor for name, tensor in weights(1).items()}},
}


@pytest.mark.parametrize("kind", STATES)
def test_the_options_of_the_hint_choose_one(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.pt"
    torch.save(STATES[kind], source)
    command = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--as-model", "ema"]

    assert run(command) == 3
    error = capfd.readouterr().err
    assert "E2974" in error
    shown = re.search(r"(--rename \S+(?: --remove-keys \S+)*)", error.replace("\n", " "))
    assert shown is not None, error

    assert run([*command, *shlex.split(shown[1])]) == 0
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == STATES[kind].get("model", weights(0)).keys()
    assert all((written[name] == 1).all() for name in NAMES)


def test_nothing_is_suggested_that_would_hit_the_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.pt"
    model = {"emas.0.w": torch.zeros(2), "w": torch.zeros(2), "v": torch.zeros(2)}
    averages = {"w": torch.ones(2), "v": torch.ones(2)}
    torch.save({"model": model, "ema": {"emas": [averages, averages]}}, source)

    assert run(["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--as-model", "ema"]) == 3
    error = capfd.readouterr().err
    assert "E2974" in error and "emas.0.*" not in error
