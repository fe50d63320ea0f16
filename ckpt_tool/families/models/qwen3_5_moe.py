"""Qwen3.5 and 3.6 with experts, models that see. Released files hold a layer's experts in two tensors, as memory does;
`hf-split` is what transformers 5.23 saves, one by one. MTP's experts are one by one in Qwen3.5; `hf-packed`: in two tensors,
as in Qwen3.6.

Megatron-Bridge 0.6.2, models/qwen_vl/qwen35_vl_bridge.py; mcore-bridge 1.6.5, model/mm_gpts/qwen3_5_gdn.py: `megatron-swift`.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families import vision
from ckpt_tool.families.base import DECODER, DELTA_NET, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_5_moe",
    classes=(ModelClass("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),),
    axes={
        **DECODER, **DELTA_NET, **vision.AXES, "e": "num_experts", "m": "moe_intermediate_size",
        "s": "shared_expert_intermediate_size", **maxtext.IN_INTERVALS,
    },
    language="text_config",
    parts={"qwen3_5_moe_text": {"position_embedding_type": "mrope", "mrope_section": [11, 11, 10]}},
    saved="hf-split",
    hub=hub.inside(hub.QWEN35 + hub.ROUTER + hub.SHARED_EXPERT + hub.ahead(hub.QWEN_EXPERTS)) + vision.QWEN3 + """
        model.language_model.layers.{i}.mlp.experts.<gate_up_proj|down_proj> : e ((1 + 1) m) h, e h m
    """,
    centred=True,
    dialects={
        "megatron": megatron.inside(megatron.QWEN35 + megatron.ROUTER + megatron.SHARED_EXPERT
                                    + megatron.ahead(megatron.QWEN_EXPERTS)) + vision.MEGATRON_QWEN3 + """
            language_model.decoder.layers.{i}.mlp.experts.local_experts.{e}.<linear_fc1|linear_fc2>.weight : ((1 + 1) m) h, h m
                = model.language_model.layers.{i}.mlp.experts.<gate_up_proj|down_proj> : e ((1 + 1) m) h, e h m
        """,
        "megatron-swift": Variant("megatron", over=megatron.inside(megatron.SWIFT35) + vision.SWIFT_QWEN3),
        "hf-split": Variant("hf", over="""
            model.language_model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
                = model.language_model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
            model.language_model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
                = model.language_model.layers.{i}.mlp.experts.down_proj : e h m
        """),
        "hf-packed": Variant("hf", over=hub.ahead(FUSED_EXPERTS)),
        **maxtext.qwen3_5_experts(),
    },
    tiny={"text_config": {"full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 5,
                          "linear_value_head_dim": 7, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
                          "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
                          "shared_expert_intermediate_size": 9,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 0, 0],
                                              "partial_rotary_factor": 0.5}},
          "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
                            "out_hidden_size": 18, "num_position_embeddings": 4}},
)  # fmt: skip
