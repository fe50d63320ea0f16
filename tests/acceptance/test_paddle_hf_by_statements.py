"""Sharded Paddle checkpoints to the files that Paddle itself writes for Hugging Face, by Paddle's own statements, and
back.

`fixtures/paddle-aoa/ernie_hf` is what `save_pretrained` of PaddleFormers 1.2.0 wrote of the model whose training states
lie in the two checkpoints: TP 2 with fused `[gate_0 | up_0 | gate_1 | up_1]`, flat shards, files by rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVED = FIXTURES / "paddle-aoa" / "ernie_hf"
SOURCES = ["paddle-flex/ernie_ema_tp2sd2v2", "paddle-unified/ernie_nm_tp2"]
Tensors = dict[str, torch.Tensor]


def weights(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(got: Tensors, want: Tensors) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("source", SOURCES)
def test_equal_to_paddles_own_hugging_face_files(tmp_path: Path, source: str) -> None:
    writing = Writing(to="safetensors", fsync=False, states=("model",), aoa=str(SAVED / "inverse.json"))
    convert(str(FIXTURES / source), str(tmp_path / "hf"), Reading(), writing, Silent())
    assert_same(weights(tmp_path / "hf"), weights(SAVED))


@pytest.mark.parametrize("source", SOURCES)
def test_and_back_to_the_values_of_the_job(tmp_path: Path, source: str) -> None:
    writing = Writing(to="safetensors", fsync=False, aoa=str(SAVED / "forward.json"))
    convert(str(SAVED), str(tmp_path / "paddle"), Reading(), writing, Silent())
    truth = load_file(FIXTURES / f"{source}.truth.safetensors")
    assert_same(
        weights(tmp_path / "paddle"),
        {name.removeprefix("model/"): t for name, t in truth.items() if name.startswith("model/")},
    )
