"""Configs of GPT-2, gpt-oss, Phi-3, GLM-4 and Gemma told as Megatron's arguments and back; transformers' classes are
the judge."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tool.families.config.translation import from_megatron, megatron_args

transformers = pytest.importorskip("transformers", minversion="5")
BASE = {
    "num_hidden_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
    "vocab_size": 22,
    "head_dim": 8,
}
TURNS = ["sliding_attention", "full_attention"] * 2
GPT2 = {"n_layer": 4, "n_embd": 24, "n_head": 6, "n_positions": 32, "vocab_size": 22}
FALCON = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "vocab_size": 22,
    "rope_theta": 10000.0,
    "ffn_hidden_size": 96,
}
LATENT = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 10,
    "vocab_size": 22,
    "q_lora_rank": None,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "moe_intermediate_size": 5,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("phi3", {**BASE, "sliding_window": 16, "rope_theta": 10000.0, "partial_rotary_factor": 0.75}),
    ("glm", {**BASE, "rope_theta": 10000.0}),
    ("glm4", {**BASE, "rope_theta": 10000.0, "attention_bias": False}),
    ("gpt2", {**GPT2, "n_inner": 44}),
    ("gpt2", {**GPT2, "n_inner": 96, "activation_function": "gelu", "tie_word_embeddings": False}),
    (
        "gpt_oss",
        {
            **BASE,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": TURNS,
            "rope_theta": 150000.0,
            "rope_scaling": {"rope_type": "default"},
            "swiglu_limit": 6.0,
        },
    ),
    ("falcon", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    ("falcon", FALCON),
    ("falcon", {**FALCON, "num_kv_heads": 3, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 44}),
    ("deepseek_v2", {**LATENT, "n_group": 1, "topk_group": 1}),
    (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": 7,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
    ("gemma", {**BASE, "rope_theta": 10000.0}),
    ("gemma2", {**BASE, "sliding_window": 8, "layer_types": TURNS, "query_pre_attn_scalar": 8, "rope_theta": 10000.0}),
    (
        "gemma3_text",
        {
            **BASE,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention"] * 4,
            "rope_theta": 1e6,
        },
    ),
]
SILENT = {
    "architectures",
    "transformers_version",
    "dtype",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "query_pre_attn_scalar",
    "output_router_logits",
    "_name_or_path",
    "num_key_value_heads",
    "attn_pdrop",
    "rope_parameters",
    "attention_dropout",
    "original_max_position_embeddings",
}


def held(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    loaded = transformers.AutoConfig.for_model(kind, **told).to_dict()
    return {key: value for key, value in loaded.items() if key not in SILENT}


@pytest.mark.parametrize(("kind", "config"), CASES, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(CASES)])
def test_there_and_back(kind: str, config: dict[str, Any]) -> None:
    args, notes = megatron_args({"model_type": kind, **config})
    assert bool(notes) == (kind.startswith("gemma") or (kind == "falcon" and config.get("parallel_attn", True)))
    back, lost = from_megatron(args, "phi3" if kind == "phi3" else None)  # Phi-3's arguments are Llama's
    assert not lost and back["model_type"] == kind
    assert held(kind, back) == held(kind, config)
    if "rope_theta" in config:
        assert back["rope_theta"] == config["rope_theta"]
        assert back.get("partial_rotary_factor", 1.0) == config.get(
            "partial_rotary_factor", 0.5 if "glm" in kind else 1.0
        )


def test_a_width_that_gpt2_leaves_out_is_four_times_the_model_s() -> None:
    assert megatron_args({"model_type": "gpt2", **GPT2}).config["ffn_hidden_size"] == 96


def test_what_megatron_lm_cannot_say_of_gemma_is_told() -> None:
    gemma = {**BASE, "model_type": "gemma2", "query_pre_attn_scalar": 144}
    notes = " ".join(megatron_args(gemma).notes)
    for word in (
        "hidden_act",
        "attn_logit_softcapping 50.0",
        "final_logit_softcapping 30.0",
        "query_pre_attn_scalar 144",
    ):
        assert word in notes
    three = megatron_args({**BASE, "model_type": "gemma3_text", "rope_local_base_freq": 10000.0, "head_dim": 256})
    assert any(note.startswith("rope_local_base_freq") for note in three.notes) and len(three.notes) == 2
    assert three.config["window_attn_skip_freq"] == [1, 1, 1, 1] and three.config["window_size"] == (4095, 0)


def test_plain_arguments_are_no_gemma() -> None:
    """RMSNorm with --apply-layernorm-1p and a plain MLP: no class of ours, Gemma's MLP is gated."""
    args = megatron_args({**BASE, "model_type": "gemma2"}).config
    del args["geglu"]
    back, notes = from_megatron(args)
    assert "model_type" not in back and "no class" in notes[0]


def test_a_model_that_sees_is_told_by_its_language_part() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    args, _ = megatron_args({"model_type": "gemma3", "text_config": text, "tie_word_embeddings": True})
    want = {"num_layers": 34, "hidden_size": 2560, "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 256}
    assert want.items() <= args.items() and args["untie_embeddings_and_output_weights"] is False
