"""Phi-3, Gemma 3 and gpt-oss by `ckpt convert`, opened by PaddleFormers: transformers' logits (marker `peers`).

As test_paddle_pretrained.py. Two things are PaddleFormers 1.2.0's own: its Gemma 3 has one rope for all layers, so the
model here has one too, and gpt-oss runs as in training (load_paddle_pretrained_more.py says why). Largest difference
seen: 2e-6 of 3.

    CKPT_PADDLE_PYTHON=/venv/bin/python pytest tests/acceptance/test_paddle_pretrained_more.py -m peers
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import ROOT, Runner

PYTHON = os.environ.get("CKPT_PADDLE_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON, reason="set CKPT_PADDLE_PYTHON (a Python with paddlepaddle and paddleformers)"),
]
SIZES = {
    "vocab_size": 54,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": 64,
            "query_pre_attn_scalar": 6,
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "rope_parameters": ROPE,
        },
    ),
}


@pytest.mark.parametrize("target", ["paddle-unified", "paddle"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_logits_are_transformers(kind: str, target: str, ckpt: Runner, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    name, more = MODELS[kind]
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **SIZES, **more)).eval()
    for key, tensor in model.named_parameters():
        plain = key.endswith("norm.weight") and kind != "gemma3_text"  # Gemma's norms add one themselves
        torch.nn.init.normal_(tensor, mean=1.0 if plain else 0.0, std=0.2)
    model.save_pretrained(tmp_path / "hf")
    ckpt("convert", tmp_path / "hf", tmp_path / "paddle", "--to", target)
    program = ROOT / "tests" / "acceptance" / "load_paddle_pretrained_more.py"
    convert = "1" if target == "paddle-unified" else "0"
    ran = subprocess.run(
        [PYTHON, "-W", "ignore", str(program), str(tmp_path / "paddle"), name, convert, str(tmp_path / "out.npz")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, "\n".join((ran.stdout + ran.stderr).splitlines()[-25:])
    found = np.load(tmp_path / "out.npz")
    with torch.no_grad():
        want = model(torch.from_numpy(found["tokens"])).logits.numpy()
    assert found["logits"].shape == want.shape and np.abs(want).max() > 1
    assert np.abs(found["logits"] - want).max() < 5e-6
