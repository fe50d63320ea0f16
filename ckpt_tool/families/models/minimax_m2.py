"""MiniMax-M2 to M2.7: Mixtral's names, norms over all heads at once, an expert bias. The layers of MTP are not published.

transformers 5.23, models/minimax_m2 and conversion_mapping.py; Megatron-Bridge 0.6.2, models/minimax_m2/minimax_m2_bridge.py.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_MIXTRAL_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="minimax_m2",
    classes=(
        ModelClass(
            "minimax_m2", "MiniMaxM2ForCausalLM", (*DECODER_FORMS, "experts", "all_sparse", "wide_norms"),
            keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            megatron={**GATED, **SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": False},
            unsayable={"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
            defaults={**DEFAULTS, "rope_theta": 5000000.0, "max_position_embeddings": 196608, "head_dim": 128,
                      "num_key_value_heads": 8, "num_experts": 256, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
        ),
    ),
    axes={**DECODER, "e": "num_local_experts? or num_experts"},
    hub=hub.MODEL + hub.NORMS + hub.ATTENTION + hub.WIDE_QK_NORMS + hub.MIXTRAL_EXPERTS + """
        model.layers.{i}.block_sparse_moe.e_score_correction_bias : e
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.MIXTRAL_EXPERTS + """
            decoder.layers.{i}.self_attention.q_layernorm.weight : (g r d) = model.layers.{i}.self_attn.q_norm.weight : (g r d)
            decoder.layers.{i}.self_attention.k_layernorm.weight : (g d) = model.layers.{i}.self_attn.k_norm.weight : (g d)
            decoder.layers.{i}.mlp.router.expert_bias : e = model.layers.{i}.block_sparse_moe.e_score_correction_bias : e
        """,
        "hf-fused": Variant("hf", over=FUSED_MIXTRAL_EXPERTS + """
            model.layers.{i}.mlp.e_score_correction_bias : e = model.layers.{i}.block_sparse_moe.e_score_correction_bias : e
        """),
    },
    tiny={"num_local_experts": 3, "num_experts_per_tok": 2},
)  # fmt: skip
