"""Qwen3-Next: gated delta nets, every fourth layer gated attention, experts and a shared expert, a layer of MTP.

transformers 5.23, models/qwen3_next (which leaves MTP's layer unread); Megatron-Bridge 0.6.2,
models/qwen/qwen3_next_bridge.py; mcore-bridge 1.6.5, model/gpts/qwen3_next_gdn.py: `megatron-swift`.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, DELTA_NET, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, EXPERT_DEFAULTS, QWEN_DELTA, QWEN_DELTA_DEFAULTS, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_next",
    classes=(
        ModelClass(
            "qwen3_next", "Qwen3NextForCausalLM",
            (*DECODER_FORMS, "delta_net", "experts", "sparse_layers", "softmax", "shared_expert", "ahead"),
            megatron={**QWEN_DELTA, "moe_shared_expert_gate": True},
            unsayable={"attention_bias": False},
            defaults={**EXPERT_DEFAULTS, **QWEN_DELTA_DEFAULTS, "partial_rotary_factor": 0.25, "num_key_value_heads": 2, "num_experts": 512,
                      "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                      "norm_topk_prob": True},
        ),
    ),
    axes={
        **DECODER, **DELTA_NET, "e": "num_experts", "m": "moe_intermediate_size", "s": "shared_expert_intermediate_size",
        **maxtext.IN_INTERVALS,
    },
    hub=hub.MODEL + hub.QWEN_ATTENTION + hub.DELTA_NET + hub.MLP + hub.QWEN_EXPERTS + hub.QWEN_AHEAD
    + hub.ahead(hub.QWEN_ATTENTION + hub.QWEN_EXPERTS) + """
        model.layers.{i}.linear_attn.in_proj_<qkvz|ba>.weight : (n (k + k + p u + p u)) h, (n (p + p)) h
    """,
    centred=True,
    dialects={
        "megatron": megatron.MODEL + megatron.QWEN_ATTENTION + megatron.DELTA_NET + megatron.MLP + megatron.QWEN_EXPERTS
        + megatron.QWEN_AHEAD + megatron.ahead(megatron.QWEN_ATTENTION + megatron.QWEN_EXPERTS) + """
            decoder.layers.{i}.self_attention.in_proj.weight : (n k + n k + n p u + n p u + n p + n p) h
                = model.layers.{i}.linear_attn.in_proj_<qkvz|ba>.weight : (n (k + k + p u + p u)) h, (n (p + p)) h
        """,
        "megatron-swift": Variant("megatron", over=megatron.SWIFT + megatron.ahead(megatron.SWIFT) + megatron.SWIFT_DELTA_NET + """
            decoder.layers.{i}.self_attention.in_proj.[weight_by_head|weight] : (n (k + k + p u + p u + p + p)) h
                = model.layers.{i}.linear_attn.in_proj_<qkvz|ba>.weight : (n (k + k + p u + p u)) h, (n (p + p)) h
        """),
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.QWEN3_NEXT),
        **maxtext.qwen3_next(),
    },
    tiny={"full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
          "linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
          "shared_expert_intermediate_size": 9, "mlp_only_layers": [0]},
)  # fmt: skip
