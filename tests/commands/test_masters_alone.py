"""ZeRO 3 keeps fp32 masters and no 16-bit weights: a model-only output must not be its buffers in silence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError

CASE = Path(__file__).parents[2] / "fixtures" / "deepspeed" / "z3_bf16_dp4"


@pytest.mark.parametrize("options", [{}, {"state": "model"}])
def test_it_is_refused_with_the_way_out(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="no weights but their fp32 masters") as caught:
        ckpt.convert(str(CASE), str(tmp_path / "out"), to="safetensors", **options)
    assert caught.value.code == "E0249" and "--as-model master" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_the_master_as_the_model_is_rounded_as_torch_rounds(tmp_path: Path) -> None:
    ckpt.convert(str(CASE), str(tmp_path / "out.safetensors"), to="safetensors", as_model="master", dtype="bf16")
    truth = load_file(CASE.with_name(CASE.name + ".truth.safetensors"))
    masters = {key.removeprefix("master/"): value for key, value in truth.items() if key.startswith("master/")}
    have = load_file(tmp_path / "out.safetensors")
    assert masters and set(masters) < set(have)
    for name, value in masters.items():
        want = value.to(torch.bfloat16).view(torch.int16).numpy()
        assert np.array_equal(have[name].view(torch.int16).numpy(), want), name


def test_left_behind_in_words(tmp_path: Path) -> None:
    report = ckpt.convert(str(CASE), str(tmp_path / "out"), to="safetensors", drop="master")
    assert any(entry["state"] == "master" for entry in report["dropped"])
