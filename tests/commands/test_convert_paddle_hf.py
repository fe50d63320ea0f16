"""`ckpt convert` is the external weights tool of Paddle: both ways equal what PaddleFormers' own saves hold, name for name.

`fixtures/families/NAME`: `paddle.safetensors` is a live model's state dict, `hf.safetensors` what its `save_pretrained` wrote.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.options import Reading, Writing
from ckpt_tool.core.progress import Silent

FIXTURES = Path(__file__).parents[2] / "fixtures" / "families"
TIED = ("gemma3",)  # whose second copy is a matter of --tied-head
NAMES = sorted(path.name for path in FIXTURES.iterdir() if (path / "hf.safetensors").exists() and path.name not in TIED)


def converted(name: str, kind: str, out: Path, **writing: str) -> dict[str, torch.Tensor]:
    source = out / "in"
    source.mkdir(parents=True)
    shutil.copy(FIXTURES / name / f"{kind}.safetensors", source / "model.safetensors")
    shutil.copy(FIXTURES / name / "config.json", source)
    told = (
        "gpt_oss:paddle" if (name, kind) == ("gpt_oss", "paddle") else None
    )  # its names and square matrices tell nothing
    convert(str(source), str(out / "out"), Reading(), Writing(to="safetensors", fsync=False, **writing), Silent())
    assert json.loads((out / "out" / "config.json").read_text())["model_type"]
    return load_file(out / "out" / "model.safetensors")


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    wrong = [name for name, tensor in want.items() if not torch.equal(got[name], tensor)]
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_from_paddle(name: str, tmp_path: Path) -> None:
    want = load_file(FIXTURES / name / "hf.safetensors")
    if name == "ernie4_5_vl_moe":  # transformers 5 saves the tower inside the model
        want = {key.replace("vision_model.", "model.vision_model."): tensor for key, tensor in want.items()}
    assert_same(converted(name, "paddle", tmp_path), want)


@pytest.mark.parametrize("name", NAMES)
def test_paddle_from_the_hub(name: str, tmp_path: Path) -> None:
    got = converted(name, "hf", tmp_path, dialect="paddle")
    assert_same(got, load_file(FIXTURES / name / "paddle.safetensors"))
