"""A model saved without its head has the hub's names without their root: embedding models, encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpt_tool as ckpt

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
@pytest.mark.parametrize("to", ["megatron-dist", "paddle-unified"])
def test_it_is_converted_and_loads(tmp_path: Path, name: str, to: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    kind = getattr(transformers, f"{name}Model")
    kind(getattr(transformers, f"{name}Config")(**SIZES)).save_pretrained(tmp_path / "hf")
    ckpt.convert(str(tmp_path / "hf"), str(tmp_path / "there"), to=to)
    ckpt.convert(str(tmp_path / "there"), str(tmp_path / "back"), to="safetensors")
    want = ckpt.open(str(tmp_path / "hf"))
    have = ckpt.open(str(tmp_path / "back"))
    assert "layers.1.self_attn.k_proj.weight" in want and {f"model.{key}" for key in want} == set(have)
    assert all(np.array_equal(want[key].numpy(), have[f"model.{key}"].numpy()) for key in want)
    _, info = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
