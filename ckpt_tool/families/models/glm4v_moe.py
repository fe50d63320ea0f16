"""GLM-4.5V and 4.6V: GLM-4.5 inside, without layers of multi-token prediction. Megatron: Megatron-Bridge 0.6.2,
models/glm_vl/glm_45v_bridge.py, whose tower is the hub's own module; `megatron-swift`: mcore-bridge 1.6.5,
mm_gpts/glm.py, which keeps it one level down."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="glm4v_moe",
    classes=(
        ModelClass("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
        ModelClass(
            "glm4v_moe_text", "Glm4vMoeTextModel",
            (*DECODER_FORMS, "qkv_bias", "experts", "first_dense", "groups", "shared_experts"),
            keys={"num_experts": "n_routed_experts", "qkv_bias": "attention_bias"},
            megatron={**GATED, **SIGMOID, "moe_router_pre_softmax": False, "position_embedding_type": "mrope"},
            unsayable={"norm_topk_prob": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 65536, "qkv_bias": True,
                      "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
                      "num_experts": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0},
            part=True,
        ),
    ),
    axes={**DECODER, "e": "n_routed_experts", "m": "moe_intermediate_size", "s": "m * n_shared_experts"},
    language="text_config",
    hub=hub.inside(hub.SPARSE + hub.QKV_BIAS + hub.QK_NORMS + hub.EXPERT_BIAS + hub.SHARED_EXPERTS) + "model.visual.**\n",
    dialects={
        "megatron": megatron.inside(
            megatron.SPARSE + megatron.QKV_BIAS + megatron.QK_NORMS + megatron.EXPERT_BIAS + megatron.SHARED_EXPERTS
        ) + "visual.** = model.visual.**\n",
        "megatron-swift": Variant("megatron", over="visual.visual.** = model.visual.**\n"),
        "hf-fused": Variant("hf", over=hub.inside(FUSED_EXPERTS)),
    },
    tiny={"text_config": {"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
                          "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "attention_bias": True, "pad_token_id": None,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}},
          "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 10, "num_heads": 3, "patch_size": 2,
                            "image_size": 8, "out_hidden_size": 18}},
)  # fmt: skip
