"""Megatron-LM builds and runs a model from the arguments that `ckpt` wrote, and gives transformers' logits (marker
`peers`).

A random small model of transformers -> `ckpt convert --to megatron-dist` -> a real Megatron-LM job
(use_checkpoint_args.py) that is told nothing of the model but `--use-checkpoint-args` and the flags named in the
report. So arguments, names and values are proved at once, and the proof needs no reader of ours. Needs what
test_megatron_loads.py needs; CPU, fp32, local spec.

    CKPT_MEGATRON_PYTHON=/venv/bin/python MEGATRON_LM=/src/Megatron-LM pytest
    tests/acceptance/test_use_checkpoint_args.py -m peers
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peers import Runner
from test_megatron_loads import program, pytestmark

__all__ = ["pytestmark"]
BASE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "vocab_size": 24,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_shared_experts": 2,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-6,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied_rope3": {
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {
        "num_experts": 4,
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [1], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {**LATENT, "n_group": 1, "topk_group": 1},
    "deepseek_v3_groups": {**LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "ernie4_5": {},
    "phi3": {"pad_token_id": 0},
    "gpt2": {
        "n_positions": 64,
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 16,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "sliding_window": 5,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 8,
    },
}
KINDS = {"llama_tied_rope3": "llama", "deepseek_v3_groups": "deepseek_v3"}


def saved(name: str, folder: Path) -> torch.Tensor:
    """A random model of the case in `folder`; its logits."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(KINDS.get(name, name), **{**BASE, **CASES[name]})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim == 1 and "inv_freq" not in parameter_name:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    model.save_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(1, 17).reshape(1, 16)).logits
    return logits


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_same(name: str, ckpt: Runner, tmp_path: Path) -> None:
    want = saved(name, tmp_path / "hub")
    made = ckpt.run("convert", tmp_path / "hub", tmp_path / "there", "--to", "megatron-dist")
    assert made.code == 0, made.err
    beside = [
        found[1]
        for note in made.out["notes"]
        if (found := re.search(r"in addition to --use-checkpoint-args: (.*)", note))
    ]
    flags = f"{beside[0]} --vocab-size {BASE['vocab_size'] - 1}"  # NullTokenizer adds one
    program("tests/acceptance/use_checkpoint_args.py", tmp_path / "there", flags, tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    difference = (torch.tensor(report["logits"]) - want).abs().max()
    assert float(difference) < 2e-5 * float(want.abs().max()), (float(difference), float(want.abs().max()))
