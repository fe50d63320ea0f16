"""Faults that a stranger found in the formats of Paddle, each kept from coming back.

Checkpoints that lie are in `tests/hostile/paddle_cases.py`; here are jobs that must succeed, and what they must say.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.cli import run
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.sources.select import split_keys
from ckpt_tool.systems.paddle.rules import head_axis

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLAIN = FIXTURES / "paddle/llama_tied_bf16_legacy_single"
UNIFIED = FIXTURES / "paddle-unified/llama_tied_hf"


def said(capfd, *arguments, code=0):
    """The JSON document of a command that must end with `code`."""
    assert run([*map(str, arguments), "--json"]) == code
    streams = capfd.readouterr()
    return json.loads((streams.out if code < 2 else streams.err).strip().splitlines()[-1])


@pytest.mark.parametrize("to", ["paddle", "paddle-flex", "paddle-unified", "torch"])
def test_padding_of_a_vocabulary_goes_from_numbers_too(tmp_path, capfd, to):
    """Powers of beta are one number a parameter: they have no rows to cut."""
    out = tmp_path / "out"
    said(capfd, "convert", PLAIN, out, "--to", to, "--vocab-size", "50")
    rows = said(capfd, "inspect", out)["tensors"]
    shapes = {tuple(row["shape"]) for row in rows if row["name"].endswith("embed_tokens.weight")}
    assert {shape[0] for shape in shapes if len(shape) == 2} == {50}
    assert {shape for shape in shapes if len(shape) == 1} <= {(1,)}


def test_files_that_no_rank_has_are_named(tmp_path, capfd):
    folder = tmp_path / "in"
    shutil.copytree(PLAIN, folder)
    (folder / "other.pdparams").write_bytes(pickle.dumps({"w": np.ones(4, "f4")}, protocol=4))
    document = said(capfd, "convert", folder, tmp_path / "out", "--to", "paddle")
    assert any("other.pdparams" in note for note in document["notes"])


def test_states_of_a_shape_of_their_own_travel(tmp_path, capfd):
    """Scales of a quantised moment have another shape than their parameter: `paddle` reads what it writes."""
    folder = tmp_path / "in"
    shutil.copytree(PLAIN, folder)
    path = folder / "optimizer.pdopt"
    state = pickle.loads(path.read_bytes())
    key = next(key for key, value in state.items() if key.endswith("moment1_0"))
    name = key.removesuffix("moment1_0") + "scales_0"
    state[name] = (name, np.arange(5, dtype="f4"))
    path.write_bytes(pickle.dumps(state, protocol=4))
    said(capfd, "convert", folder, tmp_path / "out", "--to", "paddle")
    assert said(capfd, "diff", folder, tmp_path / "out")["equal"]


def test_a_state_that_was_left_out_is_no_model(tmp_path, capfd):
    error = said(
        capfd, "convert", PLAIN, tmp_path / "out", "--to", "paddle", "--as-model", "master", "--state", "model", code=2
    )["error"]
    assert error["code"] == "E0265" and "--state" in error["message"]


def test_linked_folders_are_followed_when_asked(tmp_path, capfd):
    folder = tmp_path / "in"
    shutil.copytree(FIXTURES / "paddle-flex/llama_tied_pp2", folder)
    (folder / "model_state").rename(tmp_path / "elsewhere")
    (folder / "model_state").symlink_to(tmp_path / "elsewhere")
    original = FIXTURES / "paddle-flex/llama_tied_pp2"
    said(capfd, "convert", folder, tmp_path / "out", "--to", "sharded", "--dialect", "keep", "--follow-symlinks")
    assert said(capfd, "diff", original, tmp_path / "out")["equal"]


def test_the_model_is_not_gone_where_masters_are_left():
    """sharding_io keeps a router as the only model tensor, all other weights as masters."""
    keys = [TensorKey("gate", "model"), TensorKey("up", "master"), TensorKey("up", "exp_avg")]
    assert split_keys(keys, remove=["gate"], keep=[]) == (keys[1:], keys[:1])
    with pytest.raises(UsageError, match="every tensor of the model"):
        split_keys(keys, remove=["gate"], keep=[], model_only=True)


@pytest.mark.parametrize("to", ["paddle", "paddle-flex"])
def test_sharding_among_one_rank_is_said(tmp_path, capfd, to):
    document = said(capfd, "convert", PLAIN, tmp_path / "out", "--to", to, "--sharding", "v2", "--dry-run")
    assert any("--sharding v2" in note for note in document["notes"])


@pytest.mark.parametrize("arguments", [("paddle-unified", "--sharding", "v1"), ("torch", "--pp-split", "1,1")])
def test_options_that_would_change_nothing_are_refused(tmp_path, capfd, arguments):
    error = said(capfd, "convert", PLAIN, tmp_path / "out", "--to", *arguments, code=2)["error"]
    assert error["code"] == "E0261" and arguments[1] in error["message"]


# -- families ----------------------------------------------------------------------------------------------------------


def test_deepseek_without_a_rank_of_queries():
    """`q_lora_rank` is null in configs of models whose queries come from one matrix."""
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 1,
        "hidden_size": 6,
        "num_attention_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    }
    front = "model.layers.0.self_attn"
    shapes = {
        f"{front}.q_proj.weight": (10, 6),
        f"{front}.kv_a_proj_with_mqa.weight": (7, 6),
        f"{front}.kv_a_layernorm.weight": (5,),
        f"{front}.kv_b_proj.weight": (14, 5),
        f"{front}.o_proj.weight": (6, 8),
        f"{front}.o_proj.bias": (6,),
    }
    made = mapping(by_name("deepseek_v3"), "hf", "paddle", shapes, config).made
    assert {one.name: one.shape for one in made} == {
        name: (shape[1], shape[0]) if len(shape) == 2 else shape for name, shape in shapes.items()
    }


def test_glm_as_the_trainer_saves_for_hugging_face():
    """Fused weights as in Paddle, the others turned: what `paddle-unified` writes with `format: pt`."""
    config = {
        "model_type": "glm4_moe",
        "num_hidden_layers": 1,
        "hidden_size": 6,
        "intermediate_size": 10,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    front = "model.layers.0"
    shapes = {
        f"{front}.mlp.up_gate_proj.weight": (6, 20),
        f"{front}.mlp.down_proj.weight": (6, 10),
        f"{front}.self_attn.qkv_proj.weight": (6, 16),
        f"{front}.self_attn.o_proj.weight": (6, 8),
    }
    found = find(config, shapes)
    assert found.dialect == "paddle-hf"
    made = {one.name: one.shape for one in mapping(found.family, found.dialect, "hf", shapes, config).made}
    assert made[f"{front}.mlp.down_proj.weight"] == (6, 10) and made[f"{front}.mlp.up_proj.weight"] == (10, 6)


def test_a_head_that_looks_alike_both_ways():
    """A rank's part of [hidden, vocab] is square where the vocabulary is hidden * tp: the model type tells."""
    facts = {"model_type": "mixtral", "hidden_size": 32, "vocab_size": 64}
    assert head_axis((32, 32), facts, 2) == head_axis((32, 64), facts, 2) == 1
    assert head_axis((32, 32), facts | {"model_type": "qwen2"}, 2) == 0
