"""K-EXAONE: Qwen3's attention, GLM-4.5's experts, one dense MTP layer under `mtp.`. transformers 5.23, models/exaone_moe;
`hf-5` are its names in memory (conversion_mapping.py).

Megatron: Megatron-Bridge 0.6.2, models/exaone/exaone_moe/exaone_moe_bridge.py.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="exaone_moe",
    classes=(
        ModelClass(
            "exaone_moe", "ExaoneMoeForCausalLM",
            (*DECODER_FORMS, "every_fourth", "window_rope", "experts", "first_dense", "groups", "shared_experts", "ahead"),
            keys={"n_shared_experts": "num_shared_experts"},
            megatron={**GATED, **SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": True},
            unsayable={"norm_topk_prob": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_key_value_heads": 32,
                      "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64,
                      "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 1,
                      "topk_group": 1, "norm_topk_prob": True, "sliding_window": 4096},
            also=("ExaoneMoEForCausalLM",),
        ),
    ),
    axes={
        **DECODER, "e": "num_experts? or num_local_experts", "m": "moe_intermediate_size",
        "s": "m * (num_shared_experts? or 1)", "k": "num_nextn_predict_layers? or 1", "w": "2 * h", "z": "1",
    },
    hub=hub.SPARSE + hub.QK_NORMS + hub.SHARED_EXPERTS + """
        model.layers.{i}.mlp.e_score_correction_bias : e
        mtp.fc.weight : h w
        mtp.<norm|pre_fc_norm_hidden|pre_fc_norm_embedding>.weight : h
        mtp.layers.{k}.<input|post_attention>_layernorm.weight : h
        mtp.layers.{k}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        mtp.layers.{k}.self_attn.o_proj.weight : h (g r d)
        mtp.layers.{k}.self_attn.<q|k>_norm.weight : d
        mtp.layers.{k}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
    """,
    dialects={
        "megatron": megatron.SPARSE + megatron.QK_NORMS + megatron.SHARED_EXPERTS + """
            decoder.layers.{i}.mlp.router.expert_bias : e = model.layers.{i}.mlp.e_score_correction_bias : e
            mtp.layers.{z}.eh_proj.weight : h w = mtp.fc.weight : (z h) w
            mtp.layers.{z}.<final_layernorm|hnorm|enorm>.weight : h
                = mtp.<norm|pre_fc_norm_hidden|pre_fc_norm_embedding>.weight : (z h)
            mtp.layers.{k}.transformer_layer.<input|pre_mlp>_layernorm.weight : h
                = mtp.layers.{k}.<input|post_attention>_layernorm.weight : h
            mtp.layers.{k}.transformer_layer.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
                = mtp.layers.{k}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
            mtp.layers.{k}.transformer_layer.self_attention.linear_proj.weight : h (g r d)
                = mtp.layers.{k}.self_attn.o_proj.weight : h (g r d)
            mtp.layers.{k}.transformer_layer.self_attention.<q|k>_layernorm.weight : d
                = mtp.layers.{k}.self_attn.<q|k>_norm.weight : d
            mtp.layers.{k}.transformer_layer.mlp.linear_fc1.weight : ((1 + 1) f) h
                = mtp.layers.{k}.mlp.<gate|up>_proj.weight : f h
            mtp.layers.{k}.transformer_layer.mlp.linear_fc2.weight : h f = mtp.layers.{k}.mlp.down_proj.weight : h f
        """,
        "hf-5": Variant("hf", over=FUSED_EXPERTS + """
            model.layers.{i}.mlp.gate.e_score_correction_bias : e = model.layers.{i}.mlp.e_score_correction_bias : e
        """),
    },
    tiny={"num_experts": 4, "moe_intermediate_size": 5, "num_shared_experts": 2, "first_k_dense_replace": 1,
          "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
)  # fmt: skip
