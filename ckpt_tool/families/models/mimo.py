"""MiMo 7B, whose code is published with its files: Qwen2, and layers of multi-token prediction under names of their own.

Megatron-Bridge 0.6.2, models/mimo/mimo_bridge.py: Megatron's eh_proj has the embedding's half first, `input_proj` second.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="mimo",
    classes=(
        ModelClass(
            "mimo", "MiMoForCausalLM", (*DECODER_FORMS, "window", "ahead"),
            megatron={**GATED, "add_qkv_bias": True},
            defaults={**DEFAULTS, "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28},
            like="Qwen2ForCausalLM",
        ),
    ),
    axes={**DECODER, "t": "num_nextn_predict_layers? or 1", "ho": "h"},
    hub=hub.DENSE + hub.QKV_BIAS + """
        model.mtp_layers.{t}.<input_layernorm|post_attention_layernorm|token_layernorm|hidden_layernorm|final_layernorm>.weight : h
        model.mtp_layers.{t}.input_proj.weight : h ((1 + 1) ho)
        model.mtp_layers.{t}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.mtp_layers.{t}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
        model.mtp_layers.{t}.self_attn.o_proj.weight : h (g r d)
        model.mtp_layers.{t}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
    """,
    dialects={
        "megatron": megatron.DENSE + megatron.QKV_BIAS + """
            mtp.layers.{t}.eh_proj.weight : h ((1 + 1 @ 2 1) ho) = model.mtp_layers.{t}.input_proj.weight : h ((1 + 1) ho)
            mtp.layers.{t}.<enorm|hnorm|final_layernorm>.weight : h
                = model.mtp_layers.{t}.<token_layernorm|hidden_layernorm|final_layernorm>.weight : h
            mtp.layers.{t}.transformer_layer.<input_layernorm|pre_mlp_layernorm>.weight : h
                = model.mtp_layers.{t}.<input_layernorm|post_attention_layernorm>.weight : h
            mtp.layers.{t}.transformer_layer.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
                = model.mtp_layers.{t}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
            mtp.layers.{t}.transformer_layer.self_attention.linear_qkv.bias : (g (r + 1 + 1) d)
                = model.mtp_layers.{t}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
            mtp.layers.{t}.transformer_layer.self_attention.linear_proj.weight : h (g r d)
                = model.mtp_layers.{t}.self_attn.o_proj.weight : h (g r d)
            mtp.layers.{t}.transformer_layer.mlp.linear_fc1.weight : ((1 + 1) f) h
                = model.mtp_layers.{t}.mlp.<gate|up>_proj.weight : f h
            mtp.layers.{t}.transformer_layer.mlp.linear_fc2.weight : h f = model.mtp_layers.{t}.mlp.down_proj.weight : h f
        """,
    },
)  # fmt: skip
