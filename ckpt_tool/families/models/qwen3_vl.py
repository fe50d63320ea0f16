"""Qwen3-VL, dense: Qwen3 inside, and a tower with a deep stack. The released names are those in memory too.

Megatron: Megatron-Bridge 0.6.2, models/qwen_vl/qwen3_vl_bridge.py. `megatron-swift`: mcore-bridge 1.6.5, which keeps the hub's tower.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families import vision
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_vl",
    classes=(
        ModelClass("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        ModelClass(
            "qwen3_vl_text", "Qwen3VLTextModel", DECODER_FORMS,
            megatron={**GATED, "qk_layernorm": True, "position_embedding_type": "mrope"},
            unsayable={"attention_bias": False},
            defaults={**DEFAULTS, "rope_theta": 500000.0, "max_position_embeddings": 128000, "head_dim": 128,
                      "num_key_value_heads": 32},
            part=True,
        ),
    ),
    axes={**DECODER, **vision.AXES},
    language="text_config",
    hub=hub.inside(hub.DENSE + hub.QKV_BIAS + hub.PROJ_BIAS + hub.QK_NORMS) + vision.QWEN3 + vision.DEEPSTACK,
    dialects={
        "megatron": megatron.inside(megatron.DENSE + megatron.QKV_BIAS + megatron.PROJ_BIAS + megatron.QK_NORMS)
                    + vision.MEGATRON_QWEN3 + vision.MEGATRON_DEEPSTACK,
        "megatron-swift": Variant("megatron", over=vision.SWIFT_QWEN3 + vision.SWIFT_DEEPSTACK),
    },
    tiny={"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 1, 1]}},
          "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
                            "out_hidden_size": 18, "num_position_embeddings": 4, "deepstack_visual_indexes": [0, 1]}},
)  # fmt: skip
