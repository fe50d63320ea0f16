"""Gemma 4 without towers: patches and sounds are projected at once. `hf-5` is what transformers 5 has in memory. Megatron:
mcore-bridge 1.6.5, mm_gpts/gemma4.py; Megatron-Bridge 0.6.2 has none."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import GEMMA4, GEMMA4_DEFAULTS, GEMMA4_FORMS, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="gemma4_unified",
    classes=(
        ModelClass("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"),
        ModelClass(
            "gemma4_unified_text", "Gemma4UnifiedTextModel", GEMMA4_FORMS, part=True,
            megatron=GEMMA4,
            unsayable={"attention_bias": False, "use_bidirectional_attention": None},
            defaults={**GEMMA4_DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024,
                      "use_bidirectional_attention": "vision"},
        ),
    ),
    axes=hub.GEMMA4_AXES,
    kinds=hub.GEMMA4_KINDS,
    language="text_config",
    hub=hub.inside(hub.GEMMA4) + """
        model.vision_embedder.**
        model.embed_vision.embedding_projection.weight : h x
        model.embed_audio.embedding_projection.weight : h y
    """,
    dialects={
        "megatron": megatron.inside(megatron.SWIFT_GEMMA4) + """
            visual.embed_vision.** = model.vision_embedder.**
            visual.embed_vision.multimodal_embedder.embedding_projection.weight : h x
                = model.embed_vision.embedding_projection.weight : h x
            visual.embed_audio.embedding_projection.weight : h y = model.embed_audio.embedding_projection.weight : h y
        """,
        "hf-5": Variant("hf", over="""
            model.embed_vision.** = model.vision_embedder.**
            model.embed_vision.multimodal_embedder.embedding_projection.weight : h x
                = model.embed_vision.embedding_projection.weight : h x
        """),
    },
    tiny={"text_config": {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8,
                          "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "attention_k_eq_v": True, "pad_token_id": 0},
          "vision_config": {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 12, "mm_posemb_size": 8, "output_proj_dims": 12},
          "audio_config": {"audio_embed_dim": 10}},
)  # fmt: skip
