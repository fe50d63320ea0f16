"""Megatron-Core's logits of GPT-2, gpt-oss, Phi-3, GLM-4 and DeepSeek-V2 are transformers' (marker `peers`): see
test_megatron_logits.py.

Not here: Gemma 2 and 3, GLM-4-0414 and Falcon, whose layers are Megatron-Bridge's, slime's and NeMo's own; plain
Megatron-Core has no norm after a module and no parallel attention. gpt-oss without its YaRN and within one window of
its attention.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_process import last_words
from peers import ROOT, Runner
from safetensors.torch import load_file, save_file
from tiny_models import logits, tiny_config, tiny_model, tokens

PYTHON = os.environ.get("CKPT_MEGATRON_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not PYTHON, reason="set CKPT_MEGATRON_PYTHON (a Python with megatron-core)"),
]
TOLERANCE = 4e-6  # absolute, on logits of size 1
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64},
    "phi3": {},
    "gpt_oss": {"sliding_window": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


OTHERS = {"glm": ("glm4", "Glm"), "deepseek_v2": ("deepseek_v3", "DeepseekV2")}  # classes beside the families' own


def model_of(kind: str) -> Any:
    if kind not in OTHERS:
        model = tiny_model(kind, **CHANGES[kind])
        for name, value in model.state_dict().items():
            value.add_(1.0) if ".ln_" in name and name.endswith("weight") else None
        return model
    import transformers

    family, name = OTHERS[kind]
    told = {key: value for key, value in tiny_config(family).items() if key not in ("model_type", "architectures")}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**told)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name, value in model.state_dict().items():
        value.copy_(torch.rand_like(value) + 0.5 if "norm" in name else torch.randn_like(value) / 10)
    return model


@pytest.mark.parametrize(
    ("kind", "tp", "ep"),
    [
        ("gpt2", 1, 1),
        ("gpt2", 2, 1),
        ("phi3", 1, 1),
        ("phi3", 2, 1),
        ("glm", 2, 1),
        ("deepseek_v2", 2, 2),
        ("gpt_oss", 1, 1),
        ("gpt_oss", 2, 2),
    ],
)
def test_its_logits_are_transformers(kind: str, tp: int, ep: int, ckpt: Runner, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "hf")
    save_file({"input_ids": tokens(model.config).contiguous()}, tmp_path / "tokens.safetensors")
    ckpt("convert", tmp_path / "hf", tmp_path / "there", "--to", "megatron-dist", "--tp", "2", "--pp", "2")
    where = [tmp_path / "there" / "release", tmp_path / "hf" / "config.json", tmp_path / "tokens.safetensors"]
    command = [PYTHON, "-W", "ignore", ROOT / "tests" / "acceptance" / "megatron_logits_more.py", *where]
    environment = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    last_words([*command, tmp_path / "out.safetensors", tp, ep], 900, environment=environment)
    found = load_file(tmp_path / "out.safetensors")["logits"]
    want = logits(model)
    assert found.shape == want.shape and want.std() > 0.1
    torch.testing.assert_close(found, want, rtol=0, atol=TOLERANCE)
