"""InternVL 3 and 3.5 in their `-HF` form, with Qwen2, Qwen3 or Qwen3-MoE inside. `hf-5` is what transformers 5 has in memory.
Megatron: mcore-bridge 1.6.5, mm_gpts/internvl.py (`InternvlHfVit`), which keeps the hub's tower and projector in its `visual`;
Megatron-Bridge 0.6.2 has none."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="internvl",
    classes=(ModelClass("internvl", "InternVLForConditionalGeneration"),),
    axes={**DECODER, "e": "num_experts? or num_local_experts", "m": "moe_intermediate_size"},
    language="text_config",
    parts={"qwen2": {}, "qwen3": {}, "llama": {}},
    hub=hub.inside(hub.SPARSE + hub.QKV_BIAS + hub.QK_NORMS, "language_model.model.", "language_model.lm_head") + """
        vision_tower.**
        multi_modal_projector.**
    """,
    dialects={
        "megatron": megatron.inside(megatron.SPARSE + megatron.QKV_BIAS + megatron.QK_NORMS, "language_model.model.", "language_model.lm_head") + """
            visual.vision_tower.** = vision_tower.**
            visual.multi_modal_projector.** = multi_modal_projector.**
        """,
        "hf-5": Variant("hf", instead="language_model.model.", root="model.language_model.", over="""
            lm_head.weight : v h = language_model.lm_head.weight : v h
            model.vision_tower.** = vision_tower.**
            model.multi_modal_projector.** = multi_modal_projector.**
            model.language_model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
                = language_model.model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
            model.language_model.layers.{i}.mlp.experts.down_proj : e h m
                = language_model.model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
        """),
    },
    tiny={"text_config": {"model_type": "qwen3", "attention_bias": False},
          "vision_config": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10,
                            "image_size": [8, 8], "patch_size": [2, 2]}},
)  # fmt: skip
