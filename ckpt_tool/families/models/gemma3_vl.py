"""Gemma 3, which sees: gemma3 inside; `--family gemma3` takes the language model alone. `hf-saved` is what transformers 5
saves, without a level of the tower's names; `hf-5` what it has in memory.

Megatron: Megatron-Bridge 0.6.2, models/gemma_vl/gemma3_vl_bridge.py, whose tower is the hub's own module and whose projection
is a layer of Megatron's. The norm before it is no norm of the decoder: it is alike in `megatron-1p`.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import GEMMA3_DEFAULTS, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="gemma3_vl",
    classes=(ModelClass("gemma3", "Gemma3ForConditionalGeneration", defaults=GEMMA3_DEFAULTS),),
    axes=DECODER,
    language="text_config",
    parts={"gemma3_text": {}},
    saved="hf-saved",
    hub=hub.inside(hub.GEMMA + hub.QK_NORMS, "language_model.model.", "language_model.lm_head") + """
        vision_tower.vision_model.**
        multi_modal_projector.mm_input_projection_weight : y h
        multi_modal_projector.mm_soft_emb_norm.**
    """,
    centred=True,
    dialects={
        "megatron": megatron.inside(megatron.GEMMA + megatron.QK_NORMS, "language_model.model.", "language_model.lm_head") + """
            vision_tower.** = vision_tower.vision_model.**
            multi_modal_projector.proj.weight : h y = multi_modal_projector.mm_input_projection_weight : y h
            multi_modal_projector.mm_soft_embed_norm.** = multi_modal_projector.mm_soft_emb_norm.**
        """,
        "hf-saved": Variant("hf", over="vision_tower.** = vision_tower.vision_model.**\n"),
        "hf-5": Variant("hf", instead="language_model.model.", root="model.language_model.", over="""
            lm_head.weight : v h = language_model.lm_head.weight : v h
            model.vision_tower.** = vision_tower.vision_model.**
            model.multi_modal_projector.mm_input_projection_weight : y h = multi_modal_projector.mm_input_projection_weight : y h
            model.multi_modal_projector.mm_soft_emb_norm.** = multi_modal_projector.mm_soft_emb_norm.**
        """),
    },
    unmapped={"maxtext": "its tower is mapped to none of MaxText's; --family gemma3 with --keep-keys 'language_model.*' takes the language"
                         " model alone"},
    tiny={"text_config": {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
                          "pad_token_id": 0},
          "vision_config": {"hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 3,
                            "image_size": 8, "patch_size": 2, "vision_use_head": False}, "mm_tokens_per_image": 4},
)  # fmt: skip
