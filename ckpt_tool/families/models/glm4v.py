"""GLM-4.1V: GLM-4-0414 inside. Released and in memory the same names. Megatron: mcore-bridge 1.6.5, gpts/glm4.py and
mm_gpts/glm.py, whose norms after a module are that module's, and which keeps the hub's tower in its `visual`;
Megatron-Bridge 0.6.2 has none."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="glm4v",
    classes=(
        ModelClass("glm4v", "Glm4vForConditionalGeneration"),
        ModelClass(
            "glm4v_text", "Glm4vTextModel", DECODER_FORMS,
            megatron={**GATED, "add_qkv_bias": True, "position_embedding_type": "mrope", "rotary_interleaved": True,
                      "post_self_attn_layernorm": True, "post_mlp_layernorm": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 32768, "num_key_value_heads": 2},
            part=True,
        ),
    ),
    axes={**DECODER, "d": "h // num_attention_heads"},
    language="text_config",
    hub=hub.inside(hub.MODEL + hub.NORMS + hub.GLM4_NORMS + hub.ATTENTION + hub.QKV_BIAS + hub.FUSED_MLP) + """
        model.visual.**
    """,
    dialects={
        "megatron": megatron.inside(megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + megatron.FUSED_MLP
                                    + megatron.SWIFT_GLM4_NORMS) + "visual.visual.** = model.visual.**\n",
    },
    tiny={"text_config": {"pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
          "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 10, "num_heads": 3, "patch_size": 2,
                            "image_size": 8, "out_hidden_size": 18}},
)  # fmt: skip
