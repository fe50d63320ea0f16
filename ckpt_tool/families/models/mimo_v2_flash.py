"""MiMo-V2-Flash: layers that look through a window have key-value heads of their own number, and sinks; values are narrower
than keys; MTP layers are such layers, under `model.mtp`.

The released config states both numbers of heads and the layers' kinds; transformers 5.23 (models/mimo_v2_flash) has another
spelling of the kinds, twice the heads in windowed layers, and none of MTP. In memory the experts are fused and the sinks
have another name (`hf-5`, conversion_mapping.py). Megatron: Megatron-Bridge 0.6.2, models/mimo_v2_flash.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="mimo_v2_flash",
    classes=(
        ModelClass(
            "mimo_v2_flash", "MiMoV2FlashForCausalLM", (*DECODER_FORMS, "experts", "listed", "groups", "mimo_v2"),
            keys={"num_experts": "n_routed_experts"},
            megatron={**GATED, **SIGMOID, "moe_router_pre_softmax": True},
            unsayable={"attention_bias": False, "norm_topk_prob": True, "scoring_func": "sigmoid",
                       "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 5000000.0, "partial_rotary_factor": 0.334,
                      "max_position_embeddings": 131072, "head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4,
                      "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1,
                      "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "sliding_window": 129,
                      "attention_value_scale": 0.707, "first_k_dense_replace": 1},
        ),
    ),
    axes={
        **DECODER, "a": "num_attention_heads", "p": "v_head_dim? or d",  # of a value
        "y": "swa_num_key_value_heads? or 2 * g", "z": "a // y",  # groups of a windowed layer, heads in each
        "w": "2 * h", "e": "n_routed_experts? or num_local_experts", "m": "moe_intermediate_size",
    },
    kinds={
        "windowed": "hybrid_layer_pattern? and hybrid_layer_pattern[i] == 1"
        " or not hybrid_layer_pattern? and layer_types? and layer_types[i] == 'sliding_attention'"
        " or not hybrid_layer_pattern? and not layer_types? and i > 0 and (i + 1) % 6 != 0",
    },
    hub=hub.MODEL + hub.NORMS + hub.MLP + hub.ROUTER + hub.EXPERTS + hub.EXPERT_BIAS + """
        model.layers.{i}.self_attn.<q|k|v>_proj.weight : (y z d) h, (y d) h, (y p) h if windowed
        model.layers.{i}.self_attn.<q|k|v>_proj.bias : (y z d), (y d), (y p) if windowed
        model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g p) h if not windowed
        model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g p) if not windowed
        model.layers.{i}.self_attn.o_proj.weight : h (a p)
        model.layers.{i}.self_attn.attention_sink_bias : a if windowed
        model.mtp.layers.{n}.<enorm|hnorm|final_layernorm|input_layernorm|pre_mlp_layernorm>.weight : h
        model.mtp.layers.{n}.eh_proj.weight : h w
        model.mtp.layers.{n}.self_attn.<q|k|v|o>_proj.weight : (y z d) h, (y d) h, (y p) h, h (a p)
        model.mtp.layers.{n}.self_attn.attention_sink_bias : a
        model.mtp.layers.{n}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.MLP + megatron.ROUTER + megatron.EXPERTS
        + megatron.EXPERT_BIAS + """
            decoder.layers.{i}.self_attention.linear_qkv.weight : (y (z d + d + p)) h
                = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (y z d) h, (y d) h, (y p) h if windowed
            decoder.layers.{i}.self_attention.linear_qkv.bias : (y (z d + d + p))
                = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (y z d), (y d), (y p) if windowed
            decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r d + d + p)) h
                = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g p) h if not windowed
            decoder.layers.{i}.self_attention.linear_qkv.bias : (g (r d + d + p))
                = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g p) if not windowed
            decoder.layers.{i}.self_attention.linear_proj.weight : h (a p) = model.layers.{i}.self_attn.o_proj.weight : h (a p)
            decoder.layers.{i}.self_attention.core_attention.softmax_offset : a
                = model.layers.{i}.self_attn.attention_sink_bias : a if windowed
            mtp.layers.{n}.<enorm|hnorm|final_layernorm|eh_proj>.weight : h, h, h, h w
                = model.mtp.layers.{n}.<enorm|hnorm|final_layernorm|eh_proj>.weight : h, h, h, h w
            mtp.layers.{n}.transformer_layer.<input_layernorm|pre_mlp_layernorm>.weight : h
                = model.mtp.layers.{n}.<input_layernorm|pre_mlp_layernorm>.weight : h
            mtp.layers.{n}.transformer_layer.self_attention.linear_qkv.weight : (y (z d + d + p)) h
                = model.mtp.layers.{n}.self_attn.<q|k|v>_proj.weight : (y z d) h, (y d) h, (y p) h
            mtp.layers.{n}.transformer_layer.self_attention.linear_proj.weight : h (a p)
                = model.mtp.layers.{n}.self_attn.o_proj.weight : h (a p)
            mtp.layers.{n}.transformer_layer.self_attention.core_attention.softmax_offset : a
                = model.mtp.layers.{n}.self_attn.attention_sink_bias : a
            mtp.layers.{n}.transformer_layer.mlp.linear_fc1.weight : ((1 + 1) f) h
                = model.mtp.layers.{n}.mlp.<gate|up>_proj.weight : f h
            mtp.layers.{n}.transformer_layer.mlp.linear_fc2.weight : h f = model.mtp.layers.{n}.mlp.down_proj.weight : h f
        """,
        "hf-5": Variant("hf", over=FUSED_EXPERTS + """
            model.layers.{i}.self_attn.sinks : a = model.layers.{i}.self_attn.attention_sink_bias : a if windowed
        """),
    },
    tiny={"num_attention_heads": 8, "n_routed_experts": 4, "moe_intermediate_size": 5, "v_head_dim": 3, "num_experts_per_tok": 2},
)  # fmt: skip
