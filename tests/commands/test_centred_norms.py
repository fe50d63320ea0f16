"""Norms that a Megatron job with --apply-layernorm-1p stores one lower: plain on the hub, and Gemma's the other way
round."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tool as ckpt

BASE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def real(folder: Path, name: str) -> None:
    import transformers

    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**BASE))
    for key, value in model.state_dict().items():
        if key.endswith("norm.weight"):  # exact in bf16 and with one more or less
            value.copy_(torch.arange(value.numel()).reshape(value.shape) / 64 + 0.5)
    model.bfloat16().save_pretrained(folder)


def job_with(folder: Path, changes: dict[str, Any], by: float) -> None:
    """The converted checkpoint as a job with other arguments would have saved it."""
    (file,) = folder.rglob("model_optim_rng.pt")
    with torch.serialization.safe_globals([Namespace]):
        saved = torch.load(file, weights_only=True)
    for key, value in saved["model"].items():
        if key.endswith("norm.weight"):
            saved["model"][key] = value + by
    vars(saved["args"]).update(changes)
    torch.save(saved, file)
    (folder / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("argument", ["layernorm_zero_centered_gamma", "apply_layernorm_1p"])
@pytest.mark.parametrize(
    ("name", "there", "by"), [("Qwen3", True, -1.0), ("Gemma2", False, 1.0), ("Gemma2", True, 0.0)]
)
def test_norms_are_the_hubs(tmp_path: Path, name: str, there: bool, by: float, argument: str) -> None:
    real(tmp_path / "hf", name)
    ckpt.convert(str(tmp_path / "hf"), str(tmp_path / "megatron"), to="megatron")
    job_with(tmp_path / "megatron", {"layernorm_zero_centered_gamma": None, argument: there}, by)
    config = str(tmp_path / "hf" / "config.json")
    report = ckpt.convert(str(tmp_path / "megatron"), str(tmp_path / "back"), to="safetensors", config=config)
    want = ckpt.open(str(tmp_path / "hf"))
    have = ckpt.open(str(tmp_path / "back"))
    assert set(want) == set(have)
    for key in want:
        assert have[key].dtype == want[key].dtype and np.array_equal(have[key].numpy(), want[key].numpy()), key
    assert any("a number is added to" in note for note in report["notes"]) == bool(by)


def test_the_dialect_can_be_named(tmp_path: Path) -> None:
    real(tmp_path / "hf", "Qwen3")
    ckpt.convert(str(tmp_path / "hf"), str(tmp_path / "megatron"), to="sharded", dialect="megatron")
    config = str(tmp_path / "hf" / "config.json")
    ckpt.convert(
        str(tmp_path / "megatron"), str(tmp_path / "back"), to="safetensors", family="qwen3:megatron-1p", config=config
    )
    name = "model.layers.1.self_attn.k_norm.weight"
    want = ckpt.open(str(tmp_path / "hf"))
    have = ckpt.open(str(tmp_path / "back"))
    assert np.array_equal(have[name].numpy().astype(np.float32), want[name].numpy().astype(np.float32) + 1)
