"""Qwen2.5-Omni: a thinker (Qwen2 with vision and audio), a talker, an audio decoder. `hf-5` is what transformers 5 has in
memory. Megatron: Megatron-Bridge 0.6.2, models/qwen_omni/qwen25_omni_bridge.py: the thinker, whose towers are the hub's own
modules. It has no place for the talker and the audio decoder, which keep their own names. `megatron-swift`: mcore-bridge 1.6.5,
mm_gpts/qwen.py, without `thinker.` and with both towers under `visual.`."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen2_5_omni",
    classes=(
        ModelClass("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration"),
        ModelClass(
            "qwen2_5_omni_text", "Qwen2_5OmniThinkerTextModel", (*DECODER_FORMS, "window"),
            megatron={**GATED, "add_qkv_bias": True, "position_embedding_type": "mrope"},
            defaults={**DEFAULTS, "rope_theta": 1000000.0, "max_position_embeddings": 32768, "num_key_value_heads": 4,
                      "use_sliding_window": False, "max_window_layers": 28},
            part=True,
        ),
    ),
    axes={**DECODER, "d": "h // num_attention_heads"},
    apart=("talker.", "token2wav."),
    language="thinker_config.text_config",
    hub=hub.inside(hub.DENSE + hub.QKV_BIAS, "thinker.model.", "thinker.lm_head") + """
        thinker.visual.**
        thinker.audio_tower.**
        talker.**
        token2wav.**
    """,
    dialects={
        "megatron": megatron.inside(megatron.DENSE + megatron.QKV_BIAS, "thinker.model.", "thinker.lm_head", "thinker.language_model.") + """
            thinker.visual.**
            thinker.audio_model.** = thinker.audio_tower.**
            talker.**
            token2wav.**
        """,
        "megatron-swift": megatron.inside(megatron.DENSE + megatron.QKV_BIAS, "thinker.model.", "thinker.lm_head") + """
            visual.visual.** = thinker.visual.**
            visual.audio_tower.** = thinker.audio_tower.**
            talker.**
            token2wav.**
        """,
        "hf-5": Variant("hf", instead="thinker.model.", root="thinker.model.language_model.", over="""
            thinker.model.visual.** = thinker.visual.**
            thinker.model.audio_tower.** = thinker.audio_tower.**
        """),
    },
    tiny={
        "thinker_config": {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}},
            "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 10, "num_heads": 3, "patch_size": 2, "out_hidden_size": 18},
            "audio_config": {"d_model": 12, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 10,
                             "num_mel_bins": 8, "output_dim": 18, "max_source_positions": 20}},
        "talker_config": {"num_hidden_layers": 2, "vocab_size": 9, "hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 3,
                          "num_key_value_heads": 1, "head_dim": 4, "embedding_size": 18},
        "token2wav_config": {
            "dit_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "ff_mult": 1, "emb_dim": 8,
                           "enc_channels": [8, 8, 8, 8, 24], "enc_kernel_sizes": [5, 3, 3, 3, 1], "enc_dilations": [1, 2, 3, 4, 1],
                           "enc_attention_channels": 4, "enc_res2net_scale": 2, "enc_se_channels": 4, "enc_dim": 8, "mel_dim": 8,
                           "enc_emb_dim": 8, "num_embeds": 9},
            "bigvgan_config": {"mel_dim": 8, "upsample_initial_channel": 16, "resblock_kernel_sizes": [3],
                               "resblock_dilation_sizes": [[1, 3, 5]], "upsample_rates": [2], "upsample_kernel_sizes": [4]}},
    },
)  # fmt: skip
