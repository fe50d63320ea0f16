"""Ling 2.0 (Bailing MoE v2): q, k and v in one tensor, [Q | K | V]; a dense layer, then experts with a bias and shared ones;
MTP as layer N.

The model's code is published with its files; Megatron-Bridge 0.6.2 has a copy of it (models/bailing/modeling_bailing_moe_v2.py),
the source of the names, and its table for Megatron (bailing_moe2_bridge.py).
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="bailing_moe_v2",
    classes=(
        ModelClass(
            "bailing_moe_v2", "BailingMoeV2ForCausalLM",
            (*DECODER_FORMS, "qkv_bias", "experts", "first_dense", "groups", "shared_experts", "ahead"),
            keys={"n_shared_experts": "num_shared_experts", "qkv_bias": "use_qkv_bias"},
            megatron={**GATED, **SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": True},
            unsayable={"use_bias": False, "use_qk_norm": True, "norm_topk_prob": True, "moe_router_enable_expert_bias": True},
            defaults={**DEFAULTS, "rope_theta": 600000.0, "max_position_embeddings": 32768, "head_dim": 128,
                      "num_key_value_heads": 4, "qkv_bias": False, "num_experts": 256, "num_experts_per_tok": 8,
                      "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 512,
                      "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
        ),
    ),
    axes={
        **DECODER, "i": "num_hidden_layers + (num_nextn_predict_layers? or 1)", "w": "2 * h",
        "e": "num_experts", "m": "moe_intermediate_size", "s": "m * (num_shared_experts? or 1)",
    },
    hub=hub.FINAL_NORM + hub.NORMS + hub.MLP + hub.ROUTER + hub.EXPERTS + hub.SHARED_EXPERTS + """
        [model.word_embeddings|lm_head].weight : v h
        lm_head.weight ~ model.word_embeddings.weight if tie_word_embeddings?
        model.layers.{i}.attention.query_key_value.<weight|bias> : (g r d + g d + g d) h, (g r d + g d + g d)
        model.layers.{i}.attention.<query|key>_layernorm.weight : d
        model.layers.{i}.attention.dense.<weight|bias> : h (g r d), h
        model.layers.{i}.mlp.gate.expert_bias : e
        model.layers.{i}.<enorm|hnorm|final_layernorm>.weight : h
        model.layers.{i}.eh_proj.weight : h w
    """,
    dialects={
        "megatron": Variant(ahead=True, of=megatron.NORMS + megatron.MLP + megatron.ROUTER + megatron.EXPERTS + megatron.SHARED_EXPERTS + """
            embedding.word_embeddings.weight : v h = model.word_embeddings.weight : v h
            output_layer.weight : v h = lm_head.weight : v h if not tie_word_embeddings?
            decoder.final_layernorm.weight : h = model.norm.weight : h
            decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
                = model.layers.{i}.attention.query_key_value.weight : (g r d + g d + g d) h
            decoder.layers.{i}.self_attention.linear_qkv.bias : (g (r + 1 + 1) d)
                = model.layers.{i}.attention.query_key_value.bias : (g r d + g d + g d)
            decoder.layers.{i}.self_attention.<q_layernorm|k_layernorm|linear_proj>.weight : d, d, h (g r d)
                = model.layers.{i}.attention.<query_layernorm|key_layernorm|dense>.weight : d, d, h (g r d)
            decoder.layers.{i}.mlp.router.expert_bias : e = model.layers.{i}.mlp.gate.expert_bias : e
            mtp.layers.{i}.<enorm|hnorm|eh_proj|final_layernorm>.weight : h, h, h w, h
                = model.layers.{i}.<enorm|hnorm|eh_proj|final_layernorm>.weight : h, h, h w, h
        """),
    },
    tiny={"num_experts": 4, "moe_intermediate_size": 5, "num_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1,
          "topk_group": 1, "first_k_dense_replace": 1},
)  # fmt: skip
