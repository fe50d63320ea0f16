"""Configs of models whose layers are not alike, or are no plain decoder's: recurrent, hybrid, of two kinds, with chosen
blocks of keys. To Megatron's arguments and back; transformers' classes are the judge of what came back."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tool.families.config.translation import differing, from_megatron, megatron_args, set_mtp_layers
from ckpt_tool.families.models import CLASSES, family_of, language_classes, load

transformers = pytest.importorskip("transformers", minversion="5")
BASE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
    "vocab_size": 22,
    "head_dim": 8,
}
PLAIN = {key: value for key, value in BASE.items() if key != "head_dim"}
DELTA = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
SPARSE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
MIXED = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
HYBRID = {
    **{key: value for key, value in BASE.items() if key != "num_hidden_layers"},
    "ssm_state_size": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 5,
    "n_groups": 2,
}
LATENT_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 14,
    "moe_latent_size": 5,
    "n_group": 3,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
TURNS = ["sliding_attention", "full_attention"] * 2
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
MIMO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.25},
}
GEMMA4 = {**BASE, "layer_types": TURNS, "sliding_window": 8, "rope_parameters": ROPES, "global_head_dim": 16}
# (class, config, words of the notes that Megatron can't say it all)
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("qwen3_next", {**BASE, **DELTA, **SPARSE, "mlp_only_layers": [0], "shared_expert_intermediate_size": 9}, ()),
    ("qwen3_next", {**BASE, **DELTA, **SPARSE, "norm_topk_prob": False, "full_attention_interval": 2}, ()),
    ("qwen3_5_text", {**BASE, **DELTA, "layer_types": MIXED, "tie_word_embeddings": True}, ()),
    ("qwen3_5_moe_text", {**BASE, **DELTA, **SPARSE, "shared_expert_intermediate_size": 9, "head_dim": 256}, ()),
    (
        "minimax_m2",
        {**BASE, "num_local_experts": 3, "num_experts_per_tok": 2, "rotary_dim": 4},
        ("norms over all heads",),
    ),
    ("olmoe", {**PLAIN, "num_experts": 3, "num_experts_per_tok": 2}, ("norms over all heads",)),
    ("hy_v3", {**BASE, **SPARSE, "num_shared_experts": 2, "router_scaling_factor": 1.5}, ()),
    ("hy_v3", {**BASE, **SPARSE, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, ()),
    ("nemotron_h", {**HYBRID, **LATENT_MOE, "hybrid_override_pattern": "ME*-"}, ()),
    (
        "nemotron_h",
        {**HYBRID, **LATENT_MOE, "topk_group": 2, "layers_block_type": ["linear_attention", "moe", "full_attention"]},
        ("n_group",),
    ),
    (
        "mimo_v2_flash",
        {
            **BASE,
            "num_attention_heads": 8,
            "rope_parameters": MIMO_ROPES,
            "v_head_dim": 3,
            "n_routed_experts": 4,
            "moe_intermediate_size": 5,
            "layer_types": TURNS,
            "sliding_window": 9,
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "attention_value_scale": 0.5,
        },
        ("windowed layers have", "sees 8 tokens, transformers' 9"),
    ),
    ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 2}, ("heads of their own",)),
    (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 3,
            "top_k_experts": 2,
            "moe_intermediate_size": 5,
        },
        ("heads of their own", "no rope of type proportional", "two"),
    ),
    (
        "llama4_text",
        {**BASE, "num_local_experts": 3, "intermediate_size_mlp": 14, "interleave_moe_layer_step": 2},
        ("attention_chunk_size 8192", "attn_temperature_tuning"),
    ),
    (
        "llama4_text",
        {
            **BASE,
            "num_local_experts": 3,
            "intermediate_size_mlp": 14,
            "moe_layers": [0, 3],
            "use_qk_norm": False,
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0, 1, 1],
        },
        (),
    ),
    (
        "minimax_m3_vl_text",
        {
            **BASE,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "swiglu_limit": 6.0,
            "rotary_dim": 4,
            "partial_rotary_factor": 0.5,
            "dense_intermediate_size": 14,
            "shared_intermediate_size": 6,
            "index_n_heads": 2,
            "index_head_dim": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        },
        ("chosen blocks of keys",),
    ),
    (
        "ernie4_5_vl_moe_text",
        {
            **BASE,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [8, 6],
            "moe_num_shared_experts": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e5, "mrope_section": [1, 1, 2]},
        },
        ("experts of images", "beside a softmax"),
    ),
    (
        "gemma4_unified_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0},
        ("use_bidirectional_attention vision", "heads of their own"),
    ),
    (
        "qwen4_exp_text",
        {
            **BASE,
            **DELTA,
            **SPARSE,
            "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
            "shared_expert_intermediate_size": 9,
            "hc_count": 2,
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 32,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
            "eos_token_id": 1,
            "seed": 7,
        },
        ("hyper-connections",),
    ),
]
SILENT = {  # of no consequence, or another spelling of what is there
    "architectures",
    "transformers_version",
    "dtype",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "_name_or_path",
    "output_router_logits",
    "full_attention_interval",
    "moe_layer_freq",
    "first_k_dense_replace",
    "hybrid_layer_pattern",
    "layernorm_epsilon",
    "scoring_func",
    "norm_topk_prob",
    "sliding_window_size",
    "swa_rope_theta",
    "swa_num_key_value_heads",
    "swa_num_attention_heads",
    "swa_head_dim",
    "swa_v_head_dim",
    "rope_theta",
    "partial_rotary_factor",
    "rotary_dim",
    "interleave_moe_layer_step",
    "num_nextn_predict_layers",
    "num_hidden_layers",  # Nemotron-H's is the pattern's length
}
TEXTS = {  # parts of models that see
    "llama4_text": "llama4",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe",
    "gemma4_unified_text": "gemma4_unified",
    "qwen4_exp_text": "qwen4_exp",
}


def held(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' class holds of a config.json, with every default."""
    told = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    told |= {"eos_token_id": 1}  # without one Qwen4-Exp has no embeddings of n-grams
    loaded = transformers.AutoConfig.for_model(kind, **told).to_dict()
    kept = {
        key: value for key, value in loaded.items() if key not in SILENT or (kind == "qwen3_next" and key[:4] == "norm")
    }
    rope = loaded["rope_parameters"] if "rope_parameters" in loaded else {}
    return {**kept, "rope_parameters": {key: value for key, value in (rope or {}).items() if key != "type"}}


@pytest.mark.parametrize(("kind", "config", "words"), CASES, ids=[f"{kind}-{n}" for n, (kind, *_) in enumerate(CASES)])
def test_there_and_back(kind: str, config: dict[str, Any], words: tuple[str, ...]) -> None:
    args, notes = megatron_args({"model_type": kind, **config})
    assert all(any(word in note for note in notes) for word in words) and bool(notes) == bool(words)
    back, lost = from_megatron(args, family_of(kind).name)
    if kind in TEXTS:
        assert back["model_type"] == TEXTS[kind] and "image or audio part" in lost[0]
        back = {**back["text_config"], "tie_word_embeddings": back["tie_word_embeddings"]}
        lost = lost[1:]
    assert not lost and back["model_type"] == kind
    assert held(kind, back) == held(kind, config)
    again = megatron_args(back)
    assert list(differing(args, again.config)) == []


RELEASED = {
    "nemotron_h": (
        {
            **{key: value for key, value in HYBRID.items() if key != "head_dim"},
            "hybrid_override_pattern": "M-*M",
            "num_hidden_layers": 4,
            "attention_head_dim": 12,
        },
        {"num_layers": 4, "hybrid_layer_pattern": "M-*M", "kv_channels": 12, "num_experts": None, "mamba_num_heads": 4},
    ),
    "mimo_v2_flash": (
        {
            **BASE,
            "n_routed_experts": 4,
            "moe_intermediate_size": 5,
            "moe_layer_freq": [0, 1, 1, 0],
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "sliding_window_size": 128,
            "swa_num_key_value_heads": 3,
            "rope_theta": 5e6,
            "swa_rope_theta": 1e4,
            "layernorm_epsilon": 1e-6,
            "partial_rotary_factor": 0.334,
            "routed_scaling_factor": None,
        },
        {
            "window_size": (127, 0),
            "window_attn_skip_freq": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 0],
            "swa_num_query_groups": 3,
            "rotary_base": 5000000,
            "rotary_percent": 0.334,
            "layernorm_epsilon": 1e-6,
        },
    ),
    "hy_v3": (
        {**BASE, **SPARSE, "first_k_dense_replace": 2, "num_shared_experts": 1, "num_nextn_predict_layers": 1},
        {"moe_layer_freq": [0, 0, 1, 1], "moe_shared_expert_intermediate_size": 5, "mtp_num_layers": 1},
    ),
    "minimax_m2": (
        {**BASE, "num_local_experts": 3, "rotary_dim": 4, "rope_theta": 5e6, "scoring_func": "sigmoid"},
        {"rotary_percent": 0.5, "rotary_base": 5000000, "moe_router_score_function": "sigmoid"},
    ),
    "minimax_m3_vl_text": (
        {
            **BASE,
            "num_local_experts": 3,
            "dense_intermediate_size": 14,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_config": {"sparse_attention_freq": [0, 0, 1, 1]},
        },
        {"moe_layer_freq": [0, 1, 1, 1], "lightning_indexer_layers": [2, 3], "ffn_hidden_size": 14},
    ),
    "qwen3_5_text": (
        {**BASE, **DELTA, "full_attention_interval": 2, "mtp_num_hidden_layers": 1},
        {"linear_attention_freq": [1, 0, 1, 0], "mtp_num_layers": 1},
    ),
    "gemma4_text": (
        {**BASE, "layer_types": TURNS, "per_layer_config": {"1": {"head_dim": 12, "num_key_value_heads": 3}}},
        {"global_kv_channels": 12, "num_global_query_groups": 3, "window_attn_skip_freq": [1, 0, 1, 0]},
    ),
}


@pytest.mark.parametrize("kind", RELEASED)
def test_released_spellings_are_read(kind: str) -> None:
    config, want = RELEASED[kind]
    args = megatron_args({"model_type": kind, **config}).config
    assert {name: args.get(name) for name in want} == want


def test_a_hybrid_pattern_holds_the_layers_ahead() -> None:
    """Behind a slash for each depth; an older checkpoint says them in an argument of their own."""
    config = {**HYBRID, **LATENT_MOE, "n_group": 1, "hybrid_override_pattern": "ME*-", "num_nextn_predict_layers": 2}
    args = megatron_args({"model_type": "nemotron_h", **config, "mtp_hybrid_override_pattern": "*E"}).config
    assert args["hybrid_layer_pattern"] == "ME*-/*E/*E" and args["mtp_num_layers"] == 2
    older = {key: value for key, value in args.items() if key != "hybrid_layer_pattern"}
    older |= {"hybrid_override_pattern": "ME|*-", "mtp_hybrid_override_pattern": "*E"}
    for each in (args, older):
        back, notes = from_megatron(each)
        assert not notes and back["model_type"] == "nemotron_h"
        assert (back["hybrid_override_pattern"], back["mtp_hybrid_override_pattern"]) == ("ME*-", "*E")
        assert back["num_nextn_predict_layers"] == 2
    assert set_mtp_layers(args, 0)["hybrid_layer_pattern"] == "ME*-"
    assert (
        "model_type" not in from_megatron({**args, "hybrid_layer_pattern": "MG*-"}).config
    )  # no class has such layers
    told = from_megatron({**args, "hybrid_layer_pattern": "MG*-"}, "nemotron_h")
    assert any("has no layers G" in note for note in told.notes)


def test_a_pattern_of_linear_layers_may_be_a_number() -> None:
    """As --linear-attention-freq 4 states it."""
    args = megatron_args({"model_type": "qwen3_5_text", **BASE, **DELTA}).config
    assert args["linear_attention_freq"] == [1, 1, 1, 0]
    assert list(differing(args, {**args, "linear_attention_freq": 4})) == []
    assert list(differing(args, {**args, "linear_attention_freq": 2})) != []


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("gemma4", "gemma4_text"),
        ("kimi_k25", "deepseek_v3"),
        ("kimi_k25", "kimi_k2"),
        ("mistral3", "mistral"),
        ("mistral3", "ministral3"),
        ("internvl", "qwen2"),
        ("internvl", "qwen3"),
        ("internvl", "llama"),
    ],
)
def test_a_part_may_be_another_family_s_class(family: str, kind: str) -> None:
    """The arguments of the whole are its language model's; back with the family's name they are the whole again."""
    small = {key: value for key, value in BASE.items() if key not in ("head_dim", "num_key_value_heads")}
    whole = load(family).classes[0]
    text = {"model_type": kind, **small, **({"kv_lora_rank": 9, "q_lora_rank": 7} if family == "kimi_k25" else {})}
    args, _ = megatron_args({"model_type": family, "text_config": text, "tie_word_embeddings": False})
    facts = next(each for each in language_classes(load(family)) if each.model_type == kind)
    assert args.items() >= load(family).parts[kind].items() and facts.part and not CLASSES[kind].part
    back, notes = from_megatron(args, family)
    assert (back["model_type"], back["architectures"]) == (whole.model_type, [whole.architecture])
    assert back["text_config"]["num_hidden_layers"] == 4 and "image or audio part" in notes[-1]
    assert list(differing(args, megatron_args(back).config)) == []


def test_attention_of_qwen4_exp_is_called_indexed() -> None:
    """As its config has it; transformers takes Qwen3.5's word too."""
    config = next(config for kind, config, _ in CASES if kind == "qwen4_exp_text")
    back = from_megatron(megatron_args({"model_type": "qwen4_exp_text", **config}).config, "qwen4_exp").config
    assert back["text_config"]["layer_types"] == config["layer_types"]
    assert "full_attention_interval" not in back["text_config"]


def test_a_flat_config_of_ernie_that_sees() -> None:
    """As Baidu's files have it: the arguments of the same model nested; junk in it has none, and is no crash."""
    text = {**BASE, "moe_num_experts": [4, 4], "moe_k": 2, "moe_intermediate_size": [8, 6], "moe_num_shared_experts": 2}
    flat = {"model_type": "ernie4_5_moe_vl", **text, "moe_layer_start_index": [1, 1], "moe_layer_interval": 1}
    args = megatron_args(flat).config
    want = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layer_freq": [0, 1, 1, 1], "moe_router_topk": 2}
    assert args.items() >= want.items() and args["mrope_section"] == [0, 0, 4]
    assert args["moe_shared_expert_intermediate_size"] == 16
    for key in ("num_hidden_layers", "num_attention_heads", "moe_layer_start_index", "vision_config", "head_dim"):
        for junk in ("x", ["x"], {"hidden_size": "x"}, 1.5):
            assert not megatron_args({**flat, key: junk}).config


def test_a_model_that_sees_turns_by_sections() -> None:
    text = {"model_type": "qwen3_5_text", **BASE, **DELTA}
    assert megatron_args(text).config["position_embedding_type"] == "rope"
    seen = megatron_args({"model_type": "qwen3_5", "text_config": text}).config
    assert (seen["position_embedding_type"], seen["mrope_section"]) == ("mrope", [11, 11, 10])
    assert from_megatron(seen).config["model_type"] == "qwen3_5"
    own = {**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]}}
    assert megatron_args({"model_type": "qwen3_5", "text_config": own}).config["mrope_section"] == [2, 1, 1]
