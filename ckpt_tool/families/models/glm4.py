"""GLM-4-0414 (`glm4`, norms after attention and MLP too) and GLM-4 in its `-hf` form (`glm`). PaddleFormers 1.2.0 has neither.

gate_up_proj is [gate; up], as Megatron's fc1. Megatron: slime's layer (slime_plugins/models/glm4.py, its patch of Megatron-LM:
--post-self-attn-layernorm --post-mlp-layernorm); plain Megatron-Core has no norm after a module. RoPE is interleaved in both.
`megatron-swift`: mcore-bridge 1.6.5, gpts/glm4.py, where such a norm is its module's.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

_DEFAULTS = {
    **DEFAULTS, "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5,
    "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2,
}  # fmt: skip

FAMILY = Family(
    name="glm4",
    classes=(
        ModelClass(
            "glm4", "Glm4ForCausalLM", (*DECODER_FORMS, "qkv_bias"),
            keys={"qkv_bias": "attention_bias"},
            megatron={**GATED, "rotary_interleaved": True, "post_self_attn_layernorm": True,
                      "post_mlp_layernorm": True},
            defaults=_DEFAULTS,
        ),
        ModelClass(
            "glm", "GlmForCausalLM", (*DECODER_FORMS, "qkv_bias"),
            keys={"qkv_bias": "attention_bias"},
            megatron={**GATED, "rotary_interleaved": True},
            defaults=_DEFAULTS,
        ),
    ),
    axes=DECODER,
    hub=hub.MODEL + hub.NORMS + hub.GLM4_NORMS + hub.ATTENTION + hub.QKV_BIAS + hub.FUSED_MLP,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + megatron.FUSED_MLP + """
            decoder.layers.{i}.<post_self_attn|post_mlp>_layernorm.weight : h
                = model.layers.{i}.<post_self_attn|post_mlp>_layernorm.weight : h
        """,
        "megatron-swift": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + megatron.FUSED_MLP
                          + megatron.SWIFT_GLM4_NORMS,
    },
    tiny={"pad_token_id": None, "attention_bias": True},
)  # fmt: skip
