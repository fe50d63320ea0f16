"""FlexOlmo: OLMo 2's decoder with experts in every layer; what OLMo-core's MoE with reordered norms is on the hub (ai2-olmo-core
2.4.0, nn/hf/config.py). transformers 5.23, models/flex_olmo. No project maps it to Megatron or Paddle.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="flex_olmo",
    classes=(ModelClass("flex_olmo", "FlexOlmoForCausalLM"),),
    axes={**DECODER, "e": "num_experts", "m": "intermediate_size"},
    hub=hub.MODEL + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + hub.WIDE_QK_NORMS + hub.ROUTER + hub.EXPERTS + """
        model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
    """,
    dialects={
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "olmo-core": trainers.OLMO_MODEL + trainers.OLMO_NORMS + trainers.OLMO_EXPERTS,
    },
    tiny={"num_experts": 3, "num_experts_per_tok": 2, "pad_token_id": None},
)  # fmt: skip
