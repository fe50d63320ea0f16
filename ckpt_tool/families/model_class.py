"""ModelClass: one class of transformers, described by the keys of its config and by Megatron's arguments.

The one idea: a class of transformers is a point among Megatron's arguments. `megatron` are the coordinates that the
class fixes (a Qwen2 always has biases at q, k and v), `forms` those that its config states, `defaults` what it takes
where config.json is silent. So arguments name a class when the class, translated back, gives the same arguments
(`families.config.translation`).

    qk_layernorm, RMSNorm, swiglu, rope, no biases, no experts      -> qwen3
    the same without qk_layernorm                                   -> llama

The module ends with values that classes share, for the tables in `families/models`. Sources: transformers 5.23
`models/*/configuration_*.py` and `modeling_*.py`; Megatron-LM core 0.16.1; NVIDIA-NeMo/Megatron-Bridge of August 2026
`models/*/..._bridge.py`; PaddleFormers 1.2.0 `transformers/*/configuration.py`. What it does not do: translate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENDS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # of the names of classes that have a head


@dataclass(frozen=True, slots=True)
class ModelClass:
    """One class of models of a family."""

    # model_type, architecture: its names in config.json
    model_type: str
    architecture: str
    # names in `families.config.forms`, in order; () for a class whose config has no translation: its tensors convert,
    # its config.json is copied
    forms: tuple[str, ...] = ()
    # its own name for a key (`num_experts` -> `num_local_experts`)
    keys: Mapping[str, str] = field(default_factory=dict)
    # what transformers takes where config.json is silent
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # megatron, paddle: what the class fixes in Megatron's arguments, in a Paddle config
    megatron: Mapping[str, Any] = field(default_factory=dict)
    paddle: Mapping[str, Any] = field(default_factory=dict)
    # what PaddleFormers takes where transformers takes another
    paddle_defaults: Mapping[str, Any] = field(default_factory=dict)
    # {key: the value that Megatron computes with}; another value is reported as lost
    unsayable: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()  # other names of the architecture (Paddle's, an inner model's)
    # a class of transformers with the same tensors, if the class's own code is only published with its files: the tests
    # build that one
    like: str = ""
    # this is only the language model of a multimodal model, whose class is the family's first; Megatron's arguments
    # describe that part
    part: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """Every name that config.json may give the class: `LlamaForCausalLM`, and without a head `LlamaModel`."""
        stem = self.architecture
        for end in ENDS:
            stem = stem.removesuffix(end)
        return (self.architecture, f"{stem}Model", *self.also)


DECODER_FORMS = ("sizes", "heads", "rope", "tied", "silu", "dropout")
GEMMA4_FORMS = ("sizes", "heads", "rope", "tied", "dropout", "gated_gelu", "every_sixth", "gemma4")
LATENT_FORMS = (  # of DeepSeek V3 and those like it
    *("sizes", "latent", "rope", "tied", "silu", "dropout", "experts", "first_dense", "groups", "shared_experts"),
    "ahead",
)
# In Megatron's arguments: a decoder with RMSNorm, gated MLP and rotary positions; a router by sigmoids; Gemma's
GATED: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
SIGMOID: Mapping[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GEMMA: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": True,
    "swiglu": False,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
GEMMA4: Mapping[str, Any] = {**GEMMA, "layernorm_zero_centered_gamma": False, "qk_layernorm": True}
QWEN_DELTA: Mapping[str, Any] = {  # Qwen3-Next's and Qwen3.5's: gated delta nets, gated attention
    **GATED,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
}
# What the config classes of transformers take where config.json is silent
DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
EXPERT_DEFAULTS: Mapping[str, Any] = {"norm_topk_prob": False, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1}
GEMMA3_DEFAULTS: Mapping[str, Any] = {  # of the text alone, whose config the models that see have inside
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
QWEN_DELTA_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
GEMMA4_DEFAULTS: Mapping[str, Any] = {  # of the text alone
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "partial_rotary_factor": 0.25,
    "rope_scaling": {"rope_type": "proportional"},
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
