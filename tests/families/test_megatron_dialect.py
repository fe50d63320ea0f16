"""Dialect `megatron`: equal to what NumPy makes of the hub by the prose of Megatron's modules, name by name; MTP
layers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from family_models import config_of, counted, hub_shapes

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.algebra.piece import apply
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping

Arrays = dict[str, np.ndarray]
NAMES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "glm4_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "nemotron",
    "dots1",
    "exaone4",
    "exaone_moe",
]
MTP = ("deepseek_v3", "glm4_moe")
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
PLAIN = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_proj": "self_attention.linear_q_proj",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
    "block_sparse_moe.gate": "mlp.router",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
}
ROOT = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "model.norm.bias": "decoder.final_layernorm.bias",
}


def by_hand(config: dict[str, Any], hub: Arrays) -> Arrays:
    """Megatron's tensors: one hub tensor after the other."""
    out: Arrays = {}
    for key, value in hub.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", key)
        layer = key.split(".")[2] if key.startswith("model.layers.") else ""
        if key in ROOT:
            out[ROOT[key]] = value
        elif key.endswith("e_score_correction_bias"):
            out[f"decoder.layers.{layer}.mlp.router.expert_bias"] = value.reshape(-1)
        elif found:
            place = f"decoder.layers.{layer}"
            out |= in_layer(config, hub, key, value, place, found[2], found[3])
    return {placed(config, name): value for name, value in out.items()}


def in_layer(
    config: dict[str, Any], hub: Arrays, key: str, value: np.ndarray, at: str, module: str, leaf: str
) -> Arrays:
    latent = "kv_lora_rank" in config
    if config["model_type"] == "exaone4" and module == "post_attention_layernorm":
        return {f"{at}.self_attention.linear_proj.post_layernorm.{leaf}": value}
    if config["model_type"] == "nemotron" and module == "mlp.up_proj":  # nothing gates it
        return {f"{at}.mlp.linear_fc1.{leaf}": value}
    if module == "mlp.shared_expert_gate":
        return {f"{at}.mlp.shared_experts.gate_weight": value}
    if module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") and not latent:
        if module != "self_attn.q_proj":
            return {}
        g = config["num_key_value_heads"]
        d = config["head_dim"]
        parts = [hub[key.replace(".q_proj", f".{x}_proj")] for x in "qkv"]
        heads = [part.reshape(g, -1, d, *part.shape[1:]) for part in parts]
        whole = np.concatenate(heads, axis=1).reshape(-1, *value.shape[1:])
        return {f"{at}.self_attention.linear_qkv.{leaf}": whole}
    expert = re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", module)
    if expert:
        there = f"{at}.mlp.experts.local_experts.{expert[1]}"
        part = expert[2]
    else:
        there, _, part = f"{at}.{module.replace('shared_expert.', 'shared_experts.')}".rpartition(".")
    if part in ("gate_proj", "w1"):
        other = hub[key.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")]
        return {f"{there}.linear_fc1.{leaf}": np.concatenate([value, other])}
    if part in ("up_proj", "w3"):
        return {}
    if part in ("down_proj", "w2"):
        return {f"{there}.linear_fc2.{leaf}": value}
    return {f"{at}.{PLAIN.get(module, module)}.{leaf}": value}


def placed(config: dict[str, Any], name: str) -> str:
    """Layers beyond the decoder's are those of multi-token prediction."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not found or int(found[1]) < config["num_hidden_layers"]:
        return name
    number = int(found[1]) - config["num_hidden_layers"]
    rest = found[2].replace("shared_head.norm", "final_layernorm")
    inner = "" if rest.split(".")[0] in ("enorm", "hnorm", "eh_proj", "final_layernorm") else "transformer_layer."
    return f"mtp.layers.{number}.{inner}{rest}"


def moved(mapped: Mapped, arrays: Arrays) -> Arrays:
    pieces = [piece for made in mapped.made for piece in made.pieces]
    return apply(pieces, arrays, {made.name: made.shape for made in mapped.made})


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_megatron_equals_what_numpy_makes_of_the_hub(name: str, layers: int) -> None:
    config = config_of(name, num_hidden_layers=layers)
    hub = counted(hub_shapes(name, config, mtp=name in MTP))
    mapped = mapping(by_name(name), "hf", "megatron", shapes_of(hub), config)
    copies = {key for key in hub if key.startswith("model.layers.") and key.endswith(COPIES)}
    want = by_hand(config, {key: array for key, array in hub.items() if key not in copies})
    got = moved(mapped, hub)
    assert got.keys() == want.keys() and set(mapped.dropped) == copies
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)
    assert find(config, shapes_of(got), stated="megatron").dialect == "megatron"


@pytest.mark.parametrize("between", ["hf-fused", "paddle"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_other_dialects_lead_to_the_same_tensors(name: str, between: str) -> None:
    """Experts in one tensor, as transformers 5 has them in memory; transposed and fused as Paddle has them."""
    config = config_of(name)
    family = by_name(name)
    hub = counted(hub_shapes(name, config))
    there = moved(mapping(family, "hf", between, shapes_of(hub), config), hub)
    got = moved(mapping(family, between, "megatron", shapes_of(there), config), there)
    want = by_hand(config, hub)
    assert got.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)


def test_a_query_without_a_latent_projection_is_one_matrix() -> None:
    """DeepSeek V2 Lite: q_lora_rank is null."""
    config = config_of("deepseek_v3", q_lora_rank=7)
    shapes = hub_shapes("deepseek_v3", config)
    a = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    lite = {key: n for key, n in shapes.items() if ".q_a_" not in key and ".q_b_" not in key}
    lite |= {f"model.layers.{i}.self_attn.q_proj.weight": (a, config["hidden_size"]) for i in range(2)}
    config["q_lora_rank"] = None
    made = mapping(by_name("deepseek_v3"), "hf", "megatron", lite, config).made
    assert ("decoder.layers.1.self_attention.linear_q_proj.weight", (a, 18)) in [(m.name, m.shape) for m in made]
    back = mapping(by_name("deepseek_v3"), "megatron", "hf", {m.name: m.shape for m in made}, config).made
    assert {m.name: m.shape for m in back} == lite


def test_mtp_layers_come_back_under_the_hub_s_numbers() -> None:
    config = config_of("deepseek_v3", num_hidden_layers=3, num_nextn_predict_layers=2)
    shapes = {
        "mtp.layers.0.enorm.weight": (18,),
        "mtp.layers.1.transformer_layer.mlp.router.weight": (4, 18),
        "mtp.layers.1.transformer_layer.mlp.experts.local_experts.2.linear_fc2.weight": (18, 5),
        "decoder.layers.2.mlp.router.weight": (4, 18),
    }
    made = mapping(by_name("deepseek_v3"), "megatron", "hf", shapes, config).made
    assert [m.name for m in made] == [
        "model.layers.3.enorm.weight",
        "model.layers.4.mlp.gate.weight",
        "model.layers.4.mlp.experts.2.down_proj.weight",
        "model.layers.2.mlp.gate.weight",
    ]


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "says"),
    [
        ("deepseek_v3", "decoder.layers.2.input_layernorm.weight", (18,), "i >= num_hidden_layers"),
        ("glm4_moe", "mtp.layers.3.enorm.weight", (18,), "i=5"),
        ("llama", "decoder.layers.2.input_layernorm.weight", (18,), "i=2"),
        ("llama", "decoder.layers.1.self_attention.linear_qkv.weight", (36, 18), "wants"),
    ],
)
def test_what_the_config_has_no_place_for_is_a_fault(name: str, tensor: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(InconsistentCheckpoint, match=re.escape(says)) as caught:
        mapping(by_name(name), "megatron", "hf", {tensor: shape}, config_of(name))
    assert caught.value.code == "E1370" and caught.value.key == tensor


def test_an_output_layer_beside_a_tied_embedding_is_a_fault() -> None:
    """The config says that there is one matrix, the checkpoint has two."""
    shapes = {"embedding.word_embeddings.weight": (22, 18), "output_layer.weight": (22, 18)}
    with pytest.raises(InconsistentCheckpoint, match="tie_word_embeddings"):
        mapping(by_name("llama"), "megatron", "hf", shapes, config_of("llama", tie_word_embeddings=True))


def test_tied_heads_are_one_matrix_in_megatron() -> None:
    config = config_of("llama", tie_word_embeddings=True)
    shapes = hub_shapes("llama", config)
    mapped = mapping(by_name("llama"), "hf", "megatron", shapes, config)
    assert mapped.dropped == ("lm_head.weight",) and "output_layer.weight" not in {m.name for m in mapped.made}
    assert mapped.aliases == (("output_layer.weight", "embedding.word_embeddings.weight"),)


def test_ernie_s_layers_of_mtp_are_refused() -> None:
    """They end in the model's own last norm; Megatron's have one each."""
    config = config_of("ernie4_5_moe")
    with pytest.raises(InconsistentCheckpoint, match="no rule") as caught:
        mapping(by_name("ernie4_5_moe"), "hf", "megatron", hub_shapes("ernie4_5_moe", config, mtp=True), config)
    assert caught.value.code == "E1374"


def test_the_mtp_layer_of_k_exaone_is_dense_and_has_what_joins_it_at_the_top() -> None:
    """Names of the released files and of Megatron-Bridge 0.6.2, exaone_moe_bridge.py, written out."""
    config = config_of("exaone_moe", num_nextn_predict_layers=1)
    layer = hub_shapes("exaone_moe", config)
    at = "model.layers.0."
    mlp = {"mtp.fc.weight": (18, 36)}
    hub = {name.replace(at, "mtp.layers.0."): shape for name, shape in layer.items() if name.startswith(at)} | mlp
    hub |= {f"mtp.{name}.weight": (18,) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    arrays = counted(hub)
    mapped = mapping(by_name("exaone_moe"), "hf", "megatron", hub, config)
    got = moved(mapped, arrays)
    inner = "mtp.layers.0.transformer_layer."
    renamed = {
        "mtp.layers.0.eh_proj": "mtp.fc",
        "mtp.layers.0.final_layernorm": "mtp.norm",
        "mtp.layers.0.hnorm": "mtp.pre_fc_norm_hidden",
        "mtp.layers.0.enorm": "mtp.pre_fc_norm_embedding",
        f"{inner}input_layernorm": "mtp.layers.0.input_layernorm",
        f"{inner}pre_mlp_layernorm": "mtp.layers.0.post_attention_layernorm",
        f"{inner}self_attention.linear_proj": "mtp.layers.0.self_attn.o_proj",
        f"{inner}self_attention.q_layernorm": "mtp.layers.0.self_attn.q_norm",
        f"{inner}self_attention.k_layernorm": "mtp.layers.0.self_attn.k_norm",
        f"{inner}mlp.linear_fc2": "mtp.layers.0.mlp.down_proj",
    }
    want = {f"{name}.weight": arrays[f"{of}.weight"] for name, of in renamed.items()}
    gate, up = (arrays[f"mtp.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    want[f"{inner}mlp.linear_fc1.weight"] = np.concatenate([gate, up])
    heads = [arrays[f"mtp.layers.0.self_attn.{x}_proj.weight"].reshape(2, -1, 4, 18) for x in "qkv"]
    want[f"{inner}self_attention.linear_qkv.weight"] = np.concatenate(heads, axis=1).reshape(-1, 18)
    assert got.keys() == want.keys() and not mapped.dropped
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)
    back = moved(mapping(by_name("exaone_moe"), "megatron", "hf", shapes_of(got), config), got)
    assert shapes_of(back) == hub and all(np.array_equal(back[key], array) for key, array in arrays.items())
