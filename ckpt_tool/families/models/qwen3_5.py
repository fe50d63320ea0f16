"""Qwen3.5 and 3.6, dense, models that see: Qwen3-Next's hybrid, Qwen3-VL's tower without a deep stack. The released names
are those in memory too; the MTP layer is at the top level, and transformers does not read it.

Megatron-Bridge 0.6.2, models/qwen_vl/qwen35_vl_bridge.py; mcore-bridge 1.6.5, model/mm_gpts/qwen3_5_gdn.py: `megatron-swift`.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families import vision
from ckpt_tool.families.base import DECODER, DELTA_NET, Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_5",
    classes=(ModelClass("qwen3_5", "Qwen3_5ForConditionalGeneration"),),
    axes={**DECODER, **DELTA_NET, **vision.AXES},
    language="text_config",
    parts={"qwen3_5_text": {"position_embedding_type": "mrope", "mrope_section": [11, 11, 10]}},
    hub=hub.inside(hub.QWEN35 + hub.MLP + hub.ahead(hub.MLP)) + vision.QWEN3,
    centred=True,
    dialects={
        "megatron": megatron.inside(megatron.QWEN35 + megatron.MLP + megatron.ahead(megatron.MLP)) + vision.MEGATRON_QWEN3,
        "megatron-swift": Variant("megatron", over=megatron.inside(megatron.SWIFT35) + vision.SWIFT_QWEN3),
    },
    tiny={"text_config": {"full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 5,
                          "linear_value_head_dim": 7, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 0, 0],
                                              "partial_rotary_factor": 0.5}},
          "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
                            "out_hidden_size": 18, "num_position_embeddings": 4}},
)  # fmt: skip
