"""LFM2, dense and MoE: short convolutions or attention, one norm for the embedding at the end. transformers 5.23,
models/lfm2, lfm2_moe. `hf-fused`: experts as in memory (conversion_mapping.py).

LFM2's config rounds widths, so they are taken from the tensors. No project maps them to Megatron: there are only hub dialects.
"""

from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="lfm2_moe",
    classes=(ModelClass("lfm2_moe", "Lfm2MoeForCausalLM"), ModelClass("lfm2", "Lfm2ForCausalLM")),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "g": "num_key_value_heads",
        "r": "num_attention_heads // g", "d": "head_dim? or h // num_attention_heads",
        "e": "num_experts", "m": "moe_intermediate_size", "k": "conv_L_cache? or 3", "y": "h",
    },
    hub="""
        [model.embed_tokens|lm_head].weight : v h
        lm_head.weight ~ model.embed_tokens.weight if tie_embedding? != false and tie_word_embeddings? != false
        model.embedding_norm.weight : h
        model.layers.{i}.<operator_norm|ffn_norm>.weight : h
        model.layers.{i}.conv.conv.<weight|bias> : h 1 k, h
        model.layers.{i}.conv.in_proj.<weight|bias> : ((1 + 1 + 1) h) y, ((1 + 1 + 1) h)
        model.layers.{i}.conv.out_proj.<weight|bias> : h y, h
        model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.layers.{i}.self_attn.out_proj.weight : h (g r d)
        model.layers.{i}.self_attn.<q|k>_layernorm.weight : d
        model.layers.{i}.feed_forward.<w1|w3|w2>.weight : f h, f h, h f
        model.layers.{i}.feed_forward.<gate.weight|expert_bias> : e h, e
        model.layers.{i}.feed_forward.experts.{e}.<w1|w3|w2>.weight : m h, m h, h m
    """,
    dialects={
        "hf-fused": Variant("hf", over="""
            model.layers.{i}.feed_forward.experts.gate_up_proj : e ((1 + 1) m) h
                = model.layers.{i}.feed_forward.experts.{e}.<w1|w3>.weight : m h
            model.layers.{i}.feed_forward.experts.down_proj : e h m = model.layers.{i}.feed_forward.experts.{e}.w2.weight : h m
        """),
    },
    tiny={"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "num_dense_layers": 1,
          "conv_bias": True, "layer_types": ["conv", "full_attention"]},
)  # fmt: skip
