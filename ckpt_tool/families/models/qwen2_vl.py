"""Qwen2-VL: as qwen2_5_vl, and another tower. Megatron: mcore-bridge 1.6.5, mm_gpts/qwen.py, which keeps the hub's own
module in its `visual`; Megatron-Bridge 0.6.2 has none."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen2_vl",
    classes=(
        ModelClass("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        ModelClass(
            "qwen2_vl_text", "Qwen2VLTextModel", (*DECODER_FORMS, "window"),
            megatron={**GATED, "add_qkv_bias": True, "position_embedding_type": "mrope"},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
                      "num_key_value_heads": 8, "use_sliding_window": False, "max_window_layers": 80},
            part=True,
        ),
    ),
    axes={**DECODER, "d": "h // num_attention_heads"},
    language="text_config",
    hub=hub.DENSE + hub.QKV_BIAS + "visual.**\n",
    dialects={
        "megatron": megatron.inside(megatron.DENSE + megatron.QKV_BIAS, root="model.") + "visual.visual.** = visual.**\n",
        "hf-5": Variant("hf", root="model.language_model.", over="model.visual.** = visual.**\n"),
    },
    tiny={"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}},
          "vision_config": {"depth": 2, "embed_dim": 12, "hidden_size": 18, "num_heads": 3, "patch_size": 2}},
)  # fmt: skip
