"""Megatron's arguments of every family: what NVIDIA's Megatron-Bridge and ms-swift's mcore-bridge make of the same
configs.

`fixtures/bridge/arguments.json` has the fields of their providers (`bridge_arguments.py`, run by hand). Here they are
spelt as Megatron-LM's arguments, and each must be ours; what differs is listed with why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.families.config.translation import differing, megatron_args

GOLDEN = Path(__file__).parents[2] / "fixtures" / "bridge"
ROWS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "arguments.json").read_text())
# Fields under other names, or in another shape: the words of Gemma 4's two providers are those of the dense one
NAMES = {
    "num_moe_experts": "num_experts",
    "seq_length": "max_position_embeddings",
    "global_head_dim": "global_kv_channels",
    "num_global_key_value_heads": "num_global_query_groups",
    "global_rotary_percent": "rotary_percent",
    "full_attention_rope_partial_factor": "rotary_percent",
    "full_attention_rope_base": "rotary_base",
    "partial_rotary_factor": "rotary_percent",
    "hybrid_attention_pattern": "window_attn_skip_freq",
    "dsa_indexer_rotary_interleaved": "dsa_indexer_rope_interleaved",
}
GATES = {"silu": "swiglu", "quick_gelu": "quick_geglu", "fast_gelu": "geglu", "gelu": "geglu"}
"""Names of activations of a gated MLP."""
SWIFT = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "position_embedding_type": "rope",
}
"""What mcore-bridge's ModelConfig has where the parser states nothing."""
SPEC = {  # facts of a layer's spec, which is no field
    "exaone4": {"norms_after": True},
    "glm4v": {"post_self_attn_layernorm": True, "post_mlp_layernorm": True},
    "swift_glm4": {"post_self_attn_layernorm": True, "post_mlp_layernorm": True},
    "minimax_m2": {"qk_norms_over_heads": True},
    "olmoe": {"qk_norms_over_heads": True},
    "swift_olmoe": {"qk_norms_over_heads": True},
}
PART = "the bridge reads partial_rotary_factor beside the rope alone, transformers 5 has it inside"
SPECS = "a matter of the layer's spec there"
LEFT = "the bridge leaves it to the job"
SILENT = "mcore-bridge turns by section where the config states one alone"
FIXED = "the bridge takes its own, whatever the config says"
# Arguments that are not the provider's, each with why, by its class or by the case. When one is, it must go.
OTHERWISE: dict[str, dict[str, str]] = {
    "mcore_bridge": {"mtp_num_layers": LEFT},
    "MLAModelProvider": {"mtp_num_layers": LEFT},
    "deepseek_v32": {"dsa_indexer_rope_interleaved": "the case poses as GLM-5, whose indexer turns pairs"},
    "ernie4_5_moe": {
        "moe_router_score_function": "transformers has a softmax; its bias beside it is in our notes",
        "moe_router_pre_softmax": "of the softmax",
    },
    "ernie4_5_vl_moe": {"moe_router_score_function": "as of ernie4_5_moe", "moe_router_pre_softmax": "of the softmax"},
    "exaone4": {"window_size": SPECS, "window_attn_skip_freq": SPECS, "no_rope_freq": SPECS},
    "gemma2": {
        "window_attn_skip_freq": SPECS,
        "final_logit_softcapping": "in our notes, and the class's own on the way back",
    },
    "Gemma3ModelProvider": {"sliding_window_rope_base": "in our notes"},
    "Gemma3VLModelProvider": {"sliding_window_rope_base": "in our notes"},
    "Gemma4DenseProvider": {"qk_layernorm": SPECS},
    "Gemma4DenseVLProvider": {"qk_layernorm": SPECS},
    "Gemma4ModelProvider": {"per_layer_embed_vocab_size": "the provider of models with experts has no such embeddings"},
    "Gemma4VLModelProvider": {
        "per_layer_embed_vocab_size": "the provider of models with experts has no such embeddings"
    },
    "glm4_moe": {"rotary_percent": PART},
    "nemotron": {"rotary_percent": PART},
    "qwen3_next": {"rotary_percent": PART},
    "mimo_v2_flash": {
        "rotary_percent": PART,
        "mtp_num_layers": "the bridge counts them in the files, as we do on writing",
    },
    "glm4v_moe": {"mrope_section": FIXED},
    "qwen2_5_vl": {"mrope_section": FIXED},
    "qwen2_5_omni": {"rotary_base": FIXED},
    "qwen3_omni_moe": {"rotary_base": FIXED},
    "Qwen3VLModelProvider": {"mrope_section": "the model's own where the config is silent"},
    "Qwen3VLMoEModelProvider": {"mrope_section": "the model's own where the config is silent"},
    "swift_qwen3_5": {"position_embedding_type": SILENT, "mrope_section": SILENT},
    "swift_qwen3_5_moe": {"position_embedding_type": SILENT, "mrope_section": SILENT},
    "swift_qwen3_vl": {"position_embedding_type": SILENT},
    "swift_qwen3_vl_moe_released": {"position_embedding_type": SILENT},
    "kimi_k25": {"untie_embeddings_and_output_weights": FIXED},
    "llama4": {"attention_chunk_size": "in our notes", "attn_temperature_tuning": "in our notes"},
    "swift_nemotron_h": {"num_experts": "no layer of the pattern has any", "ffn_hidden_size": "of the experts"},
}


def listed(value: Any) -> Any:
    """A pattern that mcore-bridge writes as text: "[0]*1+[1]*2", "[1,0]"."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    parts = (part.partition("*") for part in value.split("+"))
    return [each for text, _, times in parts for _ in range(int(times or 1)) for each in json.loads(text)]


def as_arguments(case: str) -> dict[str, Any]:
    """The fields as Megatron-LM's arguments, with those of a layer's spec."""
    row = ROWS[case]
    out = {NAMES.get(name, name): listed(value) for name, value in row["fields"].items()}
    layers = out["num_layers"]
    out["mtp_num_layers"] = out.get("mtp_num_layers") or None
    if "provider" not in row:
        out = {**SWIFT, **out, **({"squared_relu": True} if out.get("activation_func") == "squared_relu" else {})}
    else:  # what the class of all GPT models has where it is not stated
        gated = out.pop("gated_linear_unit", False)
        activation = out.pop("activation_func", "gelu")
        if gated:
            out[GATES[activation]] = True
        elif activation == "squared_relu":
            out["squared_relu"] = True
        out["untie_embeddings_and_output_weights"] = not out.pop("share_embeddings_and_output_weights", True)
        if isinstance(out.get("rotary_base"), list):
            out["sliding_window_rope_base"], out["rotary_base"] = out["rotary_base"]
    if isinstance(out.get("window_size"), int):
        out["window_size"] = [out["window_size"] - 1, 0]
    if isinstance(out.get("window_size"), str):
        out["window_size"] = json.loads(f"[{out['window_size']}]")
    if "interleaved_attn_pattern" in out:
        windowed, every = out.pop("interleaved_attn_pattern")
        turn = [1] * windowed + [0] * every
        out["window_attn_skip_freq"] = [turn[i % len(turn)] for i in range(layers)]
    groups = out.pop("num_query_groups", out["num_attention_heads"])
    out |= {"group_query_attention": groups != out["num_attention_heads"], "num_query_groups": groups}
    return {**out, **SPEC.get(case, {})}


def config_of(case: str) -> dict[str, Any]:
    path = GOLDEN / f"{case}.config.json"
    return dict(ROWS[case]["config"] if "config" in ROWS[case] else json.loads(path.read_text()))


def found(case: str) -> dict[str, str]:
    """{argument: line} for each that is not the provider's."""
    lines = differing(megatron_args(config_of(case)).config, as_arguments(case))
    return {line.partition(" ")[0]: line for line in lines}


@pytest.mark.parametrize("case", ROWS)
def test_arguments_are_the_provider_s(case: str) -> None:
    wrong = found(case)
    if "num_experts" in OTHERWISE.get(case, {}) and "num_experts" in wrong:
        wrong = {name: line for name, line in wrong.items() if not name.startswith("moe_")}
    assert {name: line for name, line in wrong.items() if name not in known(case)} == {}


def known(case: str) -> dict[str, str]:
    return {**OTHERWISE.get(str(ROWS[case].get("provider", "mcore_bridge")), {}), **OTHERWISE.get(case, {})}


def test_what_is_listed_differs() -> None:
    wrong = {case: found(case) for case in ROWS}
    for place, names in OTHERWISE.items():
        here = [case for case in ROWS if place in (case, ROWS[case].get("provider", "mcore_bridge"))]
        for name in names:
            assert any(name in wrong[case] for case in here), f"{place}: {name} is the provider's: take it out"


@pytest.mark.parametrize("case", ROWS)
def test_numbers_that_decide_nothing_alone(case: str) -> None:
    """Lengths, initial values, dropout: stated, and not compared by `differing`."""
    args = megatron_args(config_of(case)).config
    theirs = as_arguments(case)
    for name in ("attention_dropout", "init_method_std", "hidden_dropout"):
        assert args.get(name, theirs.get(name)) == theirs.get(name, args.get(name)), name
