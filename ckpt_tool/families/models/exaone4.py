"""EXAONE 4.0: norms after the two modules, and one a head of q and k. transformers 5.23, models/exaone4.

Megatron: Megatron-Bridge 0.6.2, models/exaone/exaone4: its layer has the two norms behind `linear_proj` and `linear_fc2`, and
none before; it maps the tied 1.2B alone, the head of the 32B is where Megatron has it, and layers take turns as K-EXAONE's.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="exaone4",
    classes=(
        ModelClass(
            "exaone4", "Exaone4ForCausalLM", (*DECODER_FORMS, "norms_after", "every_fourth", "window_rope"),
            megatron={**GATED, "qk_layernorm": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_key_value_heads": 32,
                      "sliding_window": 4096},
        ),
    ),
    axes=DECODER,
    hub=hub.MODEL + hub.ATTENTION + hub.QK_NORMS + hub.MLP + """
        model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.ATTENTION + megatron.QK_NORMS + megatron.MLP + """
            decoder.layers.{i}.self_attention.linear_proj.post_layernorm.weight : h
                = model.layers.{i}.post_attention_layernorm.weight : h
            decoder.layers.{i}.mlp.linear_fc2.post_layernorm.weight : h = model.layers.{i}.post_feedforward_layernorm.weight : h
        """,
    },
)  # fmt: skip
