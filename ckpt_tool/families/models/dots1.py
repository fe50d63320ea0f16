"""dots.llm1: GLM-4.5's layers without MTP, a norm a head of q and k. transformers 5.23, models/dots1.

Megatron: mcore-bridge 1.6.5, model/gpts/llm.py and bridge/gpt_bridge.py (`hf_expert_bias_key`); Megatron-Bridge has none.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="dots1",
    classes=(
        ModelClass(
            "dots1", "Dots1ForCausalLM",
            (*DECODER_FORMS, "window", "experts", "first_dense", "groups", "shared_experts"),
            keys={"num_experts": "n_routed_experts"},
            megatron={**GATED, **SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": False},
            unsayable={"attention_bias": False, "norm_topk_prob": True},
            defaults={**DEFAULTS, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_group": 1,
                      "topk_group": 1, "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0,
                      "norm_topk_prob": False},
        ),
    ),
    axes={**DECODER, "e": "n_routed_experts", "m": "moe_intermediate_size", "s": "m * n_shared_experts"},
    hub=hub.SPARSE + hub.QKV_BIAS + hub.PROJ_BIAS + hub.QK_NORMS + hub.EXPERT_BIAS + hub.SHARED_EXPERTS,
    dialects={
        "megatron": megatron.SPARSE + megatron.QKV_BIAS + megatron.PROJ_BIAS + megatron.QK_NORMS + megatron.EXPERT_BIAS
            + megatron.SHARED_EXPERTS,
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.DOTS_EXPERTS),
    },
    tiny={"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "num_experts_per_tok": 2},
)  # fmt: skip
