"""What is fixed about each model class, told once: its names, what its config leaves unsaid, what it is in Megatron's arguments.

The one idea: a class of transformers is a point among Megatron's arguments. `megatron` are the coordinates that the class fixes
(a Qwen2 always has biases at q, k and v), `forms` those that its config tells, `defaults` what it takes where config.json is
silent. So arguments name a class when the class, told back, gives the same arguments (`families.config.translation`).

    qk_layernorm, RMSNorm, swiglu, rope, no biases, no experts      -> qwen3
    the same without qk_layernorm                                   -> llama

Sources: transformers 5.23 `models/*/configuration_*.py` and `modeling_*.py`; Megatron-LM core 0.16.1 `training/arguments.py`,
`core/transformer/transformer_config.py`; NVIDIA-NeMo/Megatron-Bridge of August 2026 `models/*/..._bridge.py`; PaddleFormers
1.2.0 `transformers/*/configuration.py`. Cost: none. What it does not do: translate. A new class is a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Facts:
    """One class of models.

    family: of `families.registry`. architecture: the class in transformers. keys: its own word for a key (`num_experts` ->
    `num_local_experts`). defaults: what transformers takes where config.json is silent. forms: names in
    `families.config.forms`, in order. megatron, paddle: what the class fixes in Megatron's arguments, in a Paddle config.
    unsayable: {key: value that Megatron can say}; another is told as lost.
    """

    family: str
    architecture: str
    forms: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    paddle: Mapping[str, Any] = field(default_factory=dict)
    unsayable: Mapping[str, Any] = field(default_factory=dict)


_GATED = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope"}
_DENSE = ("sizes", "heads", "rope", "tied", "silu", "dropout")
_BASE: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.02,
}  # fmt: skip
_EXPERTS = {"norm_topk_prob": False, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1}
_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_DEEPSEEK = {
    **_BASE, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "num_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip

_GLM = Facts(
    "glm4", "GlmForCausalLM", (*_DENSE, "qkv_bias"), megatron={**_GATED, "rotary_interleaved": True},
    keys={"qkv_bias": "attention_bias"},
    defaults={**_BASE, "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5,
              "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2},
)  # fmt: skip
_AFTER = {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}  # THUDM/slime's arguments
_GEMMA = {
    "normalization": "RMSNorm", "layernorm_zero_centered_gamma": True, "swiglu": False, "add_bias_linear": False,
    "position_embedding_type": "rope",
}  # fmt: skip

FACTS: Mapping[str, Facts] = {
    "llama": Facts(
        "llama", "LlamaForCausalLM", (*_DENSE, "biases"), megatron=_GATED,
        defaults={**_BASE, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Facts(
        "llama", "MistralForCausalLM", (*_DENSE, "window"), megatron=_GATED,
        defaults={**_BASE, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Facts(
        "qwen2", "Qwen2ForCausalLM", (*_DENSE, "window"), megatron={**_GATED, "add_qkv_bias": True},
        defaults={**_BASE, "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28},
    ),
    "qwen3": Facts(
        "qwen3", "Qwen3ForCausalLM", (*_DENSE, "window"), megatron={**_GATED, "qk_layernorm": True},
        defaults={**_BASE, "max_position_embeddings": 32768, "head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
        unsayable={"attention_bias": False},
    ),
    "qwen2_moe": Facts(
        "qwen2_moe", "Qwen2MoeForCausalLM", (*_DENSE, "qkv_bias", "experts", "sparse_layers", "softmax", "shared_expert"),
        megatron={**_GATED, "moe_shared_expert_gate": True},
        defaults={**_BASE, **_EXPERTS, "max_position_embeddings": 32768, "qkv_bias": True, "num_experts": 60,
                  "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        unsayable={"use_sliding_window": False},
    ),
    "qwen3_moe": Facts(
        "qwen3_moe", "Qwen3MoeForCausalLM", (*_DENSE, "experts", "sparse_layers", "softmax"),
        megatron={**_GATED, "qk_layernorm": True},
        defaults={**_BASE, **_EXPERTS, "max_position_embeddings": 32768, "num_experts": 128, "num_key_value_heads": 4,
                  "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        unsayable={"attention_bias": False, "use_sliding_window": False},
    ),
    "mixtral": Facts(
        "mixtral", "MixtralForCausalLM", (*_DENSE, "experts", "all_sparse", "window"), megatron=_GATED,
        keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        defaults={**_BASE, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072, "num_experts": 8,
                  "num_key_value_heads": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
    ),
    "deepseek_v3": Facts(
        "deepseek_v3", "DeepseekV3ForCausalLM",
        ("sizes", "latent", "rope", "tied", "silu", "dropout", "experts", "first_dense", "groups", "shared_experts", "ahead"),
        megatron={**_GATED, **_SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": True},
        keys={"num_experts": "n_routed_experts"}, defaults={**_DEEPSEEK, "norm_topk_prob": True},
        paddle={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
        unsayable={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
    ),
    "deepseek_v2": Facts(
        "deepseek_v3", "DeepseekV2ForCausalLM",
        ("sizes", "latent", "rope", "tied", "silu", "dropout", "experts", "first_dense", "limited", "shared_experts"),
        megatron={**_GATED, "qk_layernorm": True, "moe_router_pre_softmax": True}, keys={"num_experts": "n_routed_experts"},
        defaults={**_BASE, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "num_experts": 64, "n_shared_experts": 2,
                  "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False,
                  "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        unsayable={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
    ),
    "glm4_moe": Facts(
        "glm4_moe", "Glm4MoeForCausalLM",
        (*_DENSE, "qkv_bias", "qk_norm", "experts", "first_dense", "groups", "shared_experts", "ahead"),
        megatron={**_GATED, **_SIGMOID, "moe_router_pre_softmax": False},
        keys={"num_experts": "n_routed_experts", "qkv_bias": "attention_bias"},
        defaults={**_BASE, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "qkv_bias": False,
                  "use_qk_norm": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
                  "num_experts": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
                  "routed_scaling_factor": 1.0},
        unsayable={"norm_topk_prob": True},
    ),
    "ernie4_5": Facts(
        "ernie4_5", "Ernie4_5ForCausalLM", ("sizes", "heads", "rope", "tied", "silu", "use_bias"), megatron={**_GATED, "rotary_interleaved": True},
        defaults={**_BASE, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "head_dim": 128,
                  "num_key_value_heads": 2, "tie_word_embeddings": True, "use_bias": False},
    ),
    "ernie4_5_moe": Facts(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ("sizes", "heads", "rope", "tied", "silu", "use_bias", "experts", "interval", "shared_experts", "ahead"),
        megatron={**_GATED, "rotary_interleaved": True, "moe_router_enable_expert_bias": True},
        keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", "n_shared_experts": "moe_num_shared_experts"},
        defaults={**_BASE, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                  "num_key_value_heads": 4, "tie_word_embeddings": True, "use_bias": False, "num_experts": 64,
                  "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
                  "moe_layer_end_index": -1, "moe_layer_interval": 1, "router_aux_loss_coef": 0.001},
    ),
    "phi3": Facts(  # the arguments are Llama's: which of the two they are of, --family says
        "phi3", "Phi3ForCausalLM", (*_DENSE, "window"), megatron=_GATED,
        defaults={**_BASE, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, architecture="Glm4ForCausalLM", megatron={**_GLM.megatron, **_AFTER}),
    "gpt2": Facts(
        "gpt2", "GPT2LMHeadModel", ("sizes", "gelu", "tied"),
        megatron={"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "attention_dropout": 0.0,
                  "position_embedding_type": "learned_absolute"},
        keys={"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
              "rms_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "n_positions"},
        defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "n_positions": 1024, "initializer_range": 0.02,
                  "tie_word_embeddings": True, "activation_function": "gelu_new"},
        unsayable={"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False},
    ),
    "falcon": Facts(
        "falcon", "FalconForCausalLM", ("sizes", "rope", "tied", "falcon"),
        megatron={"normalization": "LayerNorm", "swiglu": False, "position_embedding_type": "rope", "bias_gelu_fusion": False,
                  "attention_dropout": 0.0},
        keys={"intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layer_norm_epsilon"},
        defaults={"layer_norm_epsilon": 1e-5, "rope_theta": 10000.0, "initializer_range": 0.02, "tie_word_embeddings": True,
                  "max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
                  "new_decoder_architecture": False},
        unsayable={"activation": "gelu"},
    ),
    "gpt_oss": Facts(
        "gpt_oss", "GptOssForCausalLM", ("sizes", "heads", "rope", "tied", "experts", "all_sparse", "clamp", "every_second"),
        megatron={"normalization": "RMSNorm", "swiglu": False, "quick_geglu": True, "add_bias_linear": True, "glu_linear_offset": 1.0,
                  "softmax_type": "learnable", "position_embedding_type": "rope", "moe_router_pre_softmax": False,
                  "attention_dropout": 0.0},
        keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        defaults={**_BASE, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 131072, "head_dim": 64,
                  "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001,
                  "sliding_window": 128, "swiglu_limit": 7.0, "rope_scaling": {
                      "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                      "original_max_position_embeddings": 4096}},
        unsayable={"attention_bias": True, "swiglu_alpha": 1.702},
    ),
    "gemma": Facts(
        "gemma", "GemmaForCausalLM", ("sizes", "heads", "rope", "tied", "gated_gelu"), megatron=_GEMMA,
        keys={"hidden_activation": "hidden_act"},
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "initializer_range": 0.02,
                  "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 16},
        unsayable={"attention_bias": False},
    ),
    "gemma2": Facts(
        "gemma2", "Gemma2ForCausalLM", ("sizes", "heads", "rope", "tied", "gated_gelu", "every_second"), megatron=_GEMMA,
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "initializer_range": 0.02,
                  "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256,
                  "num_key_value_heads": 4, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
                  "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256},
        unsayable={"attention_bias": False},
    ),
    "gemma3_text": Facts(
        "gemma3", "Gemma3ForCausalLM", ("sizes", "heads", "rope", "tied", "gated_gelu", "every_sixth"),
        megatron={**_GEMMA, "qk_layernorm": True},
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "initializer_range": 0.02, "hidden_activation": "gelu_pytorch_tanh",
                  "max_position_embeddings": 131072, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "sliding_window": 4096, "query_pre_attn_scalar": 256},
        unsayable={"attention_bias": False},
    ),
}  # fmt: skip

# Megatron-LM 0.16.1 `arguments.py`: what an argument is where a checkpoint does not state it. Those that decide what a model
# computes; they are compared, all others are the job's own.
ARGUMENTS: Mapping[str, Any] = {
    "num_layers": None, "hidden_size": None, "ffn_hidden_size": None, "num_attention_heads": None, "kv_channels": None,
    "group_query_attention": False, "normalization": "LayerNorm", "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False, "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False,
    "qk_l2_norm": False, "swiglu": False, "squared_relu": False, "quick_geglu": False, "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0, "untie_embeddings_and_output_weights": False, "position_embedding_type": "learned_absolute",
    "multi_latent_attention": False, "num_experts": None, "mtp_num_layers": None, "window_size": None,
    "window_attn_skip_freq": None, "softmax_type": "vanilla", "attention_output_gate": False, "no_rope_freq": None,
    "apply_residual_connection_post_layernorm": False, "is_hybrid_model": False, "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None, "post_self_attn_layernorm": False, "post_mlp_layernorm": False,
    "geglu": False, "parallel_attention": False, "new_decoder_architecture": False,
}  # fmt: skip
ROPE_ARGUMENTS: Mapping[str, Any] = {
    "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False, "use_rope_scaling": False,
    "rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None,
}  # fmt: skip
EXPERT_ARGUMENTS: Mapping[str, Any] = {
    "moe_layer_freq": 1, "moe_ffn_hidden_size": None, "moe_router_topk": 2, "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None, "moe_router_group_topk": None, "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False, "moe_latent_size": None, "moe_apply_probs_on_input": False,
}  # fmt: skip
LATENT_ARGUMENTS: Mapping[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    "rope_type": None, "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
OLD_NAMES = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}  # core <= 0.15
