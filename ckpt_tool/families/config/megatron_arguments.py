"""Megatron-LM's arguments that decide what a model computes, with the value that each takes where a checkpoint does not
state it.

They are compared; all others are the job's own. Source: Megatron-LM core 0.16.1 `training/arguments.py`,
`core/transformer/transformer_config.py`.
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
