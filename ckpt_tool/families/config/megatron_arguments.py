"""Megatron-LM's arguments that decide what a model computes, with the value that each takes where a checkpoint does not
state it.

They are compared; all others are the job's own. Sources: Megatron-LM core 0.16.1 `training/arguments.py`,
`core/transformer/transformer_config.py`, and the same of 0.19.2 for gated delta nets and hybrid models; names of
`BRIDGE_ARGUMENTS`: providers of Megatron-Bridge 0.6.2 (`models/gemma/gemma4_provider.py`,
`models/mimo_v2_flash/mimo_v2_flash_provider.py`, `models/minimax_m3/minimax_m3_bridge.py`, `models/ernie_vl`), and
mcore-bridge 1.6.5 `config/parser.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARGUMENTS: Mapping[str, Any] = {
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "num_attention_heads": None,
    "kv_channels": None,
    "group_query_attention": False,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
    "multi_latent_attention": False,
    "num_experts": None,
    "mtp_num_layers": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "no_rope_freq": None,
    "apply_residual_connection_post_layernorm": False,
    "is_hybrid_model": False,
    "experimental_attention_variant": None,
    "dsa_indexer_n_heads": None,
    "dsa_indexer_head_dim": None,
    "dsa_indexer_topk": None,
    "dsa_indexer_topk_freq": None,
    "dsa_indexer_skip_topk_offset": None,
    "dsa_indexer_rope_interleaved": False,
    "heterogeneous_layers_config_path": None,
    "post_self_attn_layernorm": False,
    "post_mlp_layernorm": False,
    "geglu": False,
    "norms_after": False,
    "falconh1_ratio": None,
    "parallel_attention": False,
    "new_decoder_architecture": False,
    "hybrid_layer_pattern": None,
    "fp32_residual_connection": False,
}
QWEN4_EXP_WORDS = (  # of the hub and of mcore-bridge
    *(
        "hc_count",
        "hc_lowrank",
        "ple_layer_ids",
        "ple_embed_dim",
        "ple_conv_kernel_size",
        "ngram_size",
        "heads_per_ngram",
    ),
    *("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts", "indexer_n_heads"),
    *("indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio", "output_gate_type"),
)
BRIDGE_ARGUMENTS: Mapping[str, Any] = {  # what no argument of Megatron-LM says
    "qk_norms_over_heads": False,  # a word of ours: the bridge has it in a layer's spec
    "attention_chunk_size": None,  # Llama 4's words on the hub, as the next: no tool for Megatron has them
    "attn_temperature_tuning": False,
    "attention_k_eq_v": False,
    "attention_value_scale": None,
    "final_logit_softcapping": None,
    "global_kv_channels": None,
    "index_head_dim": None,
    "index_n_heads": None,
    "lightning_indexer_layers": None,
    "num_global_query_groups": None,
    "num_kv_shared_layers": 0,
    "per_layer_embed_dim": 0,
    "per_layer_embed_vocab_size": None,
    "sliding_window_rope_base": None,
    "swa_num_query_groups": None,
    "use_double_wide_mlp": False,
    "moe_intermediate_size": None,  # ERNIE 4.5 VL's two widths
    "linear_decoupled_in_proj": False,
    "ple_seed": None,
    **dict.fromkeys(QWEN4_EXP_WORDS),
}
DELTA_ARGUMENTS: Mapping[str, Any] = {
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MAMBA_ARGUMENTS: Mapping[str, Any] = {
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
}
ROPE_ARGUMENTS: Mapping[str, Any] = {
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
    "mrope_section": None,
}
EXPERT_ARGUMENTS: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
}
LATENT_ARGUMENTS: Mapping[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": None,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
OLD_NAMES = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}  # core <= 0.15
