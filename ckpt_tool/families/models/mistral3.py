"""Mistral Small 3.1 and Ministral 3: Mistral inside. `hf-5` is what transformers 5 has in memory.
Megatron: Megatron-Bridge 0.6.2, models/ministral3/ministral3_bridge.py, whose tower and projector are the hub's own modules.
`vision_tower.transformer.` is Pixtral's, and identifies the family if there is no config."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="mistral3",
    classes=(ModelClass("mistral3", "Mistral3ForConditionalGeneration"),),
    axes=DECODER,
    language="text_config",
    parts={"mistral": {}, "ministral3": {}},
    hub=hub.inside(hub.DENSE, "language_model.model.", "language_model.lm_head") + """
        vision_tower.**
        vision_tower.transformer.**
        multi_modal_projector.**
    """,
    dialects={
        "megatron": megatron.inside(megatron.DENSE, "language_model.model.", "language_model.lm_head") + """
            vision_tower.**
        vision_tower.transformer.**
            multi_modal_projector.**
        """,
        "hf-5": Variant("hf", instead="language_model.model.", root="model.language_model.", over="""
            lm_head.weight : v h = language_model.lm_head.weight : v h
            model.vision_tower.** = vision_tower.**
            model.multi_modal_projector.** = multi_modal_projector.**
        """),
    },
    tiny={"text_config": {"model_type": "mistral"},
          "vision_config": {"model_type": "pixtral", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
                            "intermediate_size": 10, "head_dim": 4, "image_size": 8, "patch_size": 2}},
)  # fmt: skip
