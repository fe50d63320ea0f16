"""GLM-4-0414 (`glm4`, norms after attention and MLP too) and GLM-4 in its `-hf` form (`glm`). PaddleFormers 1.2.0 has neither.

gate_up_proj is [gate; up], as Megatron's fc1. Megatron: slime's layer (slime_plugins/models/glm4.py, its patch of Megatron-LM:
--post-self-attn-layernorm --post-mlp-layernorm); plain Megatron-Core has no norm after a module. RoPE is interleaved in both.
"""

from ckpt_tool.families import megatron
from ckpt_tool.families.base import DECODER, Family

FAMILY = Family(
    name="glm4", model_types=("glm4", "glm"),
    architectures=("Glm4ForCausalLM", "Glm4Model", "GlmForCausalLM", "GlmModel"),
    axes=DECODER,
    hub="""
        [model.embed_tokens|lm_head].weight : v h
        lm_head.weight ~ model.embed_tokens.weight if tie_word_embeddings?
        model.norm.weight : h
        model.layers.{i}.<input|post_attention|post_self_attn|post_mlp>_layernorm.weight : h
        model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
        model.layers.{i}.self_attn.o_proj.weight : h (g r d)
        model.layers.{i}.mlp.gate_up_proj.weight : ((1 + 1) f) h
        model.layers.{i}.mlp.down_proj.weight : h f
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + """
            decoder.layers.{i}.<post_self_attn|post_mlp>_layernorm.weight : h
                = model.layers.{i}.<post_self_attn|post_mlp>_layernorm.weight : h
            decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) f) h = model.layers.{i}.mlp.gate_up_proj.weight : ((1 + 1) f) h
            decoder.layers.{i}.mlp.linear_fc2.weight : h f = model.layers.{i}.mlp.down_proj.weight : h f
        """,
    },
)  # fmt: skip
