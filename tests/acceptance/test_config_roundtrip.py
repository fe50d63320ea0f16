"""A model comes back from Megatron's arguments alone: no config.json, the same class, the same logits, bit for bit.

Random small models of transformers -> Megatron (two tensor ranks) -> config.json removed -> safetensors. What
`from_pretrained` makes of the result must know every tensor, miss none, and give the source's logits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from peers import Runner
from test_use_checkpoint_args import CASES, KINDS, saved

# phi3: the same with matrices apart (other sums), and stands first. deepseek_v3: of sizes this small nothing tells it
# from GLM-4.7-Flash, which computes the same
SAME = {"phi3": "llama", "deepseek_v3": "glm4_moe_lite", "deepseek_v3_groups": "glm4_moe_lite"}
QUICK = ("qwen3_moe", "deepseek_v3", "llama_tied_rope3")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*CASES, "ernie4_5_moe")]


@pytest.mark.share(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_way_back_needs_no_config(name: str, ckpt: Runner, tmp_path: Path) -> None:
    CASES.setdefault("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "use_bias": False})
    want = saved(name, tmp_path / "hub")
    to = "megatron" if len(name) % 2 else "megatron-dist"
    assert ckpt.run("convert", tmp_path / "hub", tmp_path / "there", "--to", to, "--tp", 2).code == 0
    (tmp_path / "there" / "config.json").unlink()
    made = ckpt.run("convert", tmp_path / "there", tmp_path / "back", "--to", "safetensors")
    assert made.code == 0, made.err
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == SAME.get(name, KINDS.get(name, name))
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(said.values())
    with torch.no_grad():
        have = model.eval()(torch.arange(1, 17).reshape(1, 16)).logits
    assert torch.allclose(have, want, rtol=1e-5, atol=1e-5) if name in SAME else torch.equal(have, want)


@pytest.mark.parametrize("name", ["ernie4_5", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_round_by_paddle_and_megatron(name: str, ckpt: Runner, tmp_path: Path) -> None:
    """hub -> Paddle -> Megatron, its arguments alone -> Paddle -> hub: each config is made of the last one."""
    want = saved(name, tmp_path / "hub")
    for there, back, to in (("hub", "a", "paddle-unified"), ("a", "b", "megatron-dist"), ("b", "c", "paddle-flex")):
        made = ckpt.run("convert", tmp_path / there, tmp_path / back, "--to", to)
        assert made.code == 0, made.err
        if to == "megatron-dist":
            (tmp_path / back / "config.json").unlink()
    assert ckpt.run("convert", tmp_path / "c", tmp_path / "d", "--to", "safetensors").code == 0
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "d", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(said.values())
    with torch.no_grad():
        assert torch.equal(model.eval()(torch.arange(1, 17).reshape(1, 16)).logits, want)
