"""A plain number under a parameter's name in the model's state dict is named where it is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tool as ckpt

WEIGHTS = {"layers.0.weight": torch.ones(2, 3), "layers.0.bias": torch.ones(3)}
NUMBERS = {
    "float": 2.5,
    "int": 3,
    "numpy float32": np.float32(2.5),
    "numpy float16": np.float16(2.5),
    "numpy int64": np.int64(3),
}


def left_extras(state: dict[str, Any], folder: Path, **more: Any) -> list[str]:
    """The names of the extras that a conversion leaves out."""
    torch.save(state, folder / "in.pt")
    report = ckpt.convert(str(folder / "in.pt"), str(folder / "out"), to="safetensors", **more)
    return [name for entry in report["dropped"] if entry["state"] == "extras" for name in entry["names"]]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("root", ["model", "state_dict", "encoder"])
def test_a_number_of_the_model_is_named(root: str, kind: str, tmp_path: Path) -> None:
    state = {root: {**WEIGHTS, "logit_scale": NUMBERS[kind]}}
    assert left_extras(state, tmp_path) == [f"{root}.logit_scale (a number)"]


def test_what_is_left_out_as_requested_is_named(tmp_path: Path) -> None:
    state = {"model": {**WEIGHTS, "logit_scale": 2.5}}
    assert left_extras(state, tmp_path, drop=["extras"]) == ["model.logit_scale (a number)"]


def test_numbers_of_the_trainer_are_none_of_the_model(tmp_path: Path) -> None:
    inner = {**WEIGHTS, "enc": {"scale": 1.0}, "kind": "clip", "tied": True}
    state = {"model": inner, "epoch": 3, "args": {"lr": 0.1}}
    assert left_extras(state, tmp_path) == ["args", "epoch", "model", "model.enc.scale (a number)"]
