"""Qwen3.5 with experts, the language model alone, as transformers saves its text class. Released files are those of
`qwen3_5_moe`.

transformers 5.23, models/qwen3_5_moe; Megatron-Bridge 0.6.2, models/qwen/qwen35_bridge.py.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, DELTA_NET, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, QWEN_DELTA, QWEN_DELTA_DEFAULTS, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_5_moe_text",
    classes=(
        ModelClass(
            "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
            (*DECODER_FORMS, "delta_net", "experts", "all_sparse", "shared_expert", "ahead"),
            keys={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
            megatron={**QWEN_DELTA, "moe_shared_expert_gate": True, "moe_router_pre_softmax": False},
            unsayable={"attention_bias": False, "norm_topk_prob": True},
            defaults={**QWEN_DELTA_DEFAULTS, "partial_rotary_factor": 0.25, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001},
        ),
    ),
    axes={
        **DECODER, **DELTA_NET, "e": "num_experts", "m": "moe_intermediate_size", "s": "shared_expert_intermediate_size",
    },
    hub=hub.QWEN35 + hub.QWEN_EXPERTS + hub.ahead(hub.QWEN_EXPERTS),
    centred=True,
    dialects={
        "megatron": megatron.QWEN35 + megatron.QWEN_EXPERTS + megatron.ahead(megatron.QWEN_EXPERTS),
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "hf-packed": Variant("hf-fused", over=hub.ahead(FUSED_EXPERTS)),
    },
    tiny={"full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
          "linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_experts": 3, "num_experts_per_tok": 2,
          "moe_intermediate_size": 5, "shared_expert_intermediate_size": 9},
)  # fmt: skip
