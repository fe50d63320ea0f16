"""Gemma 4, which sees and hears: gemma4_text inside. Released and in memory the same names. Megatron: Megatron-Bridge 0.6.2,
models/gemma_vl/gemma4_vl_bridge.py, whose towers are the hub's own modules. `megatron-swift`: mcore-bridge 1.6.5, mm_gpts/gemma4.py,
which keeps them one level down."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="gemma4",
    classes=(ModelClass("gemma4", "Gemma4ForConditionalGeneration"),),
    axes=hub.GEMMA4_AXES,
    kinds=hub.GEMMA4_KINDS,
    language="text_config",
    parts={"gemma4_text": {}},
    hub=hub.inside(hub.GEMMA4) + """
        model.vision_tower.**
        model.audio_tower.**
        model.embed_vision.embedding_projection.weight : h x
        model.embed_audio.embedding_projection.weight : h y
    """,
    dialects={
        "megatron": megatron.inside(megatron.GEMMA4) + """
            vision_tower.** = model.vision_tower.**
            audio_tower.** = model.audio_tower.**
            embed_vision.embedding_projection.weight : h x = model.embed_vision.embedding_projection.weight : h x
            embed_audio.embedding_projection.weight : h y = model.embed_audio.embedding_projection.weight : h y
        """,
        "megatron-swift": megatron.inside(megatron.SWIFT_GEMMA4) + """
            visual.vision_tower.** = model.vision_tower.**
            visual.audio_tower.** = model.audio_tower.**
            visual.embed_vision.embedding_projection.weight : h x = model.embed_vision.embedding_projection.weight : h x
            visual.embed_audio.embedding_projection.weight : h y = model.embed_audio.embedding_projection.weight : h y
        """,
    },
    tiny={"text_config": {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
                          "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
                          "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 3, "top_k_experts": 2,
                          "moe_intermediate_size": 5, "pad_token_id": 0},
          "vision_config": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
                            "head_dim": 4, "intermediate_size": 10, "patch_size": 2, "position_embedding_size": 16,
                            "pooling_kernel_size": 2},
          "audio_config": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "output_proj_dims": 12,
                           "subsampling_conv_channels": [4, 2]}},
)  # fmt: skip
