"""Megatron-Core itself loads what `convert` made of a Hugging Face model, and computes transformers' logits (marker
`peers`).

The model is random, tiny and fp32; `convert --to megatron-dist --tp 2 --pp 2` cuts it, `dist_checkpointing.load` of
megatron-core 0.16.1 takes it strictly (no key missing, none left over) into a GPTModel of the local layer spec on the
CPU, of one rank, of two tensor ranks, or of two tensor and expert ranks (megatron_logits.py). Seen with transformers
5.23.0 and torch 2.13.0: the logits, of size 2, differ by 1.2e-6 at most. Needs a Python with megatron-core 0.16.1:

    CKPT_MEGATRON_PYTHON=/venv/bin/python pytest tests/acceptance/test_megatron_logits.py -m peers
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_process import last_words
from peers import ROOT, Runner
from safetensors.torch import load_file, save_file
from tiny_models import hub_shapes, logits, tiny_model, tokens

PYTHON = os.environ.get("CKPT_MEGATRON_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not PYTHON, reason="set CKPT_MEGATRON_PYTHON (a Python with megatron-core)"),
]
ONE = ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "ernie4_5"]
DIST = ("--to", "megatron-dist", "--tp", "2", "--pp", "2")
TOLERANCE = 4e-6  # absolute, on logits of size 2


def computed(hub: Path, tp: int, ep: int, ckpt: Runner, tmp_path: Path, *options: object) -> dict[str, torch.Tensor]:
    """What the judge writes of the model in `hub`. options: of `convert`. tp, ep: ranks of the job that loads it."""
    ckpt("convert", hub, tmp_path / "there", *(options or DIST))
    where = [tmp_path / "there" / "release", hub / "config.json", tmp_path / "tokens.safetensors"]
    command = [PYTHON, "-W", "ignore", ROOT / "tests" / "acceptance" / "megatron_logits.py", *where]
    last_words([*command, tmp_path / "out.safetensors", tp, ep], 900, environment={"OMP_NUM_THREADS": "1"})
    return load_file(tmp_path / "out.safetensors")


def judged(model: Any, tp: int, ep: int, ckpt: Runner, tmp_path: Path, *options: object) -> None:
    model.save_pretrained(tmp_path / "hf")
    save_file({"input_ids": tokens(model.config).contiguous()}, tmp_path / "tokens.safetensors")
    found = computed(tmp_path / "hf", tp, ep, ckpt, tmp_path, *options)["logits"]
    want = logits(model)
    assert found.shape == want.shape and want.std() > 0.1
    torch.testing.assert_close(found, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "tp", "ep"),
    [(family, 1, 1) for family in ONE] + [("llama", 2, 1), ("qwen3", 2, 1), ("mixtral", 2, 2), ("deepseek_v3", 2, 2)],
)
def test_its_logits_are_transformers(family: str, tp: int, ep: int, ckpt: Runner, tmp_path: Path) -> None:
    judged(tiny_model(family), tp, ep, ckpt, tmp_path)


@pytest.mark.parametrize("rank", [14, None])
def test_deepseek_v2_with_and_without_a_rank_of_queries(rank: int | None, ckpt: Runner, tmp_path: Path) -> None:
    """It turns pairs of rows where V3 turns halves: the same weights, the same logits."""
    classes = ("deepseek_v2", "DeepseekV2ForCausalLM")
    model = tiny_model(
        "deepseek_v3", classes=classes, q_lora_rank=rank, routed_scaling_factor=1.5, topk_method="greedy"
    )
    judged(model, 1, 1, ckpt, tmp_path)


def test_ernie_s_experts_where_nothing_shifts_the_choice(ckpt: Runner, tmp_path: Path) -> None:
    """Megatron 0.16.1 shifts the choice of experts for sigmoid scores alone; ERNIE takes softmax: its shift is zero
    here, and stays behind."""
    model = tiny_model("ernie4_5_moe")
    for name, buffer in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    judged(model, 1, 1, ckpt, tmp_path, *DIST, "--remove-keys", "*e_score_correction_bias")


def test_more_ranks_than_query_groups(ckpt: Runner, tmp_path: Path) -> None:
    """Four ranks share two groups: each gathers what it needs (Megatron-Core since 0.16)."""
    judged(tiny_model("llama", num_key_value_heads=2), 4, 1, ckpt, tmp_path, *DIST[:2], "--tp", 4)


@pytest.mark.parametrize(
    ("family", "tp"), [("llama", 1), ("qwen3", 2), ("mixtral", 1), ("deepseek_v3", 1), ("ernie4_5", 2)]
)
def test_rank_folders_are_those_of_the_model(family: str, tp: int, ckpt: Runner, tmp_path: Path) -> None:
    """`--to megatron`: names and shapes of each rank's own parameters."""
    judged(tiny_model(family), tp, 1, ckpt, tmp_path, "--to", "megatron", "--tp", tp)


def test_layers_of_multi_token_prediction_are_taken(ckpt: Runner, tmp_path: Path) -> None:
    """transformers leaves them out, so they are put beside what it saved: layer 4 of 4, as DeepSeek releases it."""
    hub = tmp_path / "hf"
    tiny_model("deepseek_v3").save_pretrained(hub)
    config = {**json.loads((hub / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (hub / "config.json").write_text(json.dumps(config))
    have = load_file(hub / "model.safetensors")
    shapes = {
        name: n for name, n in hub_shapes("deepseek_v3", config, mtp=True).items() if name.startswith("model.layers.4.")
    }
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    more = {name: torch.randn(n, generator=torch.Generator().manual_seed(len(name))) for name, n in shapes.items()}
    more |= {f"model.layers.4.{name}.weight": have[of].clone() for name, of in copies.items()}
    save_file({**have, **more}, hub / "model.safetensors", {"format": "pt"})
    found = computed(hub, 1, 1, ckpt, tmp_path)
    at = "model.layers.4."
    inner = "mtp.layers.0.transformer_layer."
    same = {
        "mtp.layers.0.enorm.weight": "enorm.weight",
        "mtp.layers.0.hnorm.weight": "hnorm.weight",
        "mtp.layers.0.eh_proj.weight": "eh_proj.weight",
        "mtp.layers.0.final_layernorm.weight": "shared_head.norm.weight",
        f"{inner}input_layernorm.weight": "input_layernorm.weight",
        f"{inner}mlp.router.weight": "mlp.gate.weight",
        f"{inner}mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        f"{inner}self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        f"{inner}mlp.experts.local_experts.3.linear_fc2.weight": "mlp.experts.3.down_proj.weight",
    }
    for name, source in same.items():
        assert torch.equal(found[name], more[at + source]), name
    back = tmp_path / "back"
    ckpt("convert", tmp_path / "there", back, "--to", "safetensors")
    came = load_file(back / "model.safetensors")
    assert came.keys() == {**have, **more}.keys()
    assert all(torch.equal(tensor, came[name]) for name, tensor in {**have, **more}.items())
