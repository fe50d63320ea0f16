"""GLM-4.7-Flash: GLM's experts, DeepSeek's latent attention, a layer of MTP that transformers leaves unread.

transformers 5.23, models/glm4_moe_lite; Megatron-Bridge 0.6.2, models/glm/glm47_flash_bridge.py.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import FUSED_EXPERTS, LATENT, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, GATED, LATENT_FORMS, SIGMOID, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="glm4_moe_lite",
    classes=(
        ModelClass(
            "glm4_moe_lite", "Glm4MoeLiteForCausalLM", LATENT_FORMS,
            keys={"num_experts": "n_routed_experts"},
            megatron={**GATED, **SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": True},
            unsayable={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 202752, "first_k_dense_replace": 1,
                      "n_group": 1, "topk_group": 1, "num_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1,
                      "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
                      "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
                      "v_head_dim": 256},
        ),
    ),
    axes={**LATENT, **mlx.LATENT_AXES},
    hub=hub.DEEPSEEK,
    dialects={
        "megatron": Variant(of=megatron.LATENT, ahead=True),
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.LATENT + mlx.EXPERTS, short=True),
    },
    tiny={"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
          "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
)  # fmt: skip
