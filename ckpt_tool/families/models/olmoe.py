"""OLMoE: experts in every layer, norms over all heads of q and of k at once.

transformers 5.23, models/olmoe. Megatron: Megatron-Bridge 0.6.2, models/olmoe/olmoe_bridge.py, whose layer
(olmoe_provider.py) has those wide norms under Megatron's names, a copy on each rank. ms-swift's
mcore-bridge 1.6.5, gpts/olmoe.py, calls them as the hub does (`megatron-swift`).
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="olmoe",
    classes=(
        ModelClass(
            "olmoe", "OlmoeForCausalLM", (*DECODER_FORMS, "experts", "all_sparse", "softmax", "wide_norms"),
            keys={"moe_intermediate_size": "intermediate_size"},
            megatron={**GATED, "qk_layernorm": True},
            unsayable={"attention_bias": False, "clip_qkv": None},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096, "num_key_value_heads": 16,
                      "num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "norm_topk_prob": False},
        ),
    ),
    axes={**DECODER, "d": "h // num_attention_heads", "e": "num_experts? or num_local_experts", "m": "intermediate_size"},
    hub=hub.MODEL + hub.NORMS + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + hub.WIDE_QK_NORMS + hub.ROUTER + hub.EXPERTS,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + megatron.PROJ_BIAS + """
            decoder.layers.{i}.self_attention.q_layernorm.weight : (g r d)
                = model.layers.{i}.self_attn.q_norm.weight : (g r d)
            decoder.layers.{i}.self_attention.k_layernorm.weight : (g d) = model.layers.{i}.self_attn.k_norm.weight : (g d)
        """ + megatron.ROUTER + megatron.EXPERTS,
        "megatron-swift": Variant("megatron", over="""
            decoder.layers.{i}.self_attention.<q|k>_norm.weight : (g r d), (g d)
                = model.layers.{i}.self_attn.<q|k>_norm.weight : (g r d), (g d)
        """),
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.EXPERTS),
    },
    tiny={"num_experts": 3, "num_experts_per_tok": 2},
)  # fmt: skip
