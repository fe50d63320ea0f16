"""Qwen3-Omni: a thinker (Qwen3-MoE with vision and audio), a talker with experts of its own, an audio decoder. `hf-5` is what
transformers 5 has in memory. Megatron: Megatron-Bridge 0.6.2, models/qwen_omni/qwen3_omni_bridge.py: the thinker, whose towers
are the hub's own modules. It has no place for the talker and the audio decoder, which keep their own names. `megatron-swift`:
mcore-bridge 1.6.5, mm_gpts/qwen3_omni.py, without `thinker.` and with both towers under `visual.`."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, EXPERT_DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_omni_moe",
    classes=(
        ModelClass("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration"),
        ModelClass(
            "qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextModel", (*DECODER_FORMS, "experts", "sparse_layers", "softmax"),
            megatron={**GATED, "qk_layernorm": True, "position_embedding_type": "mrope"},
            unsayable={"attention_bias": False},
            defaults={**DEFAULTS, **EXPERT_DEFAULTS, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
                      "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                      "norm_topk_prob": True},
            part=True,
        ),
    ),
    axes={
        **DECODER, "e": "num_local_experts? or num_experts", "m": "moe_intermediate_size",
        "te": "talker_config.text_config.num_local_experts? or talker_config.text_config.num_experts",
        "tm": "talker_config.text_config.moe_intermediate_size",
    },
    apart=("talker.", "code2wav."),
    language="thinker_config.text_config",
    hub=hub.inside(hub.SPARSE + hub.QK_NORMS, "thinker.model.", "thinker.lm_head") + """
        thinker.visual.**
        thinker.audio_tower.**
        talker.**
        code2wav.**
        talker.model.layers.{ti}.mlp.experts.{te}.<gate|up|down>_proj.weight : tm th, tm th, th tm
    """,
    dialects={
        "megatron": megatron.inside(megatron.SPARSE + megatron.QK_NORMS, "thinker.model.", "thinker.lm_head", "thinker.language_model.") + """
            thinker.visual.**
            thinker.audio_model.** = thinker.audio_tower.**
            talker.**
            code2wav.**
            talker.model.layers.{ti}.mlp.experts.{te}.<gate|up|down>_proj.weight : tm th, tm th, th tm
        """,
        "megatron-swift": megatron.inside(megatron.SPARSE + megatron.QK_NORMS, "thinker.model.", "thinker.lm_head") + """
            visual.visual.** = thinker.visual.**
            visual.audio_tower.** = thinker.audio_tower.**
            talker.**
            code2wav.**
            talker.model.layers.{ti}.mlp.experts.{te}.<gate|up|down>_proj.weight : tm th, tm th, th tm
        """,
        "hf-5": Variant("hf", instead="thinker.model.", root="thinker.model.language_model.", over="""
            thinker.model.visual.** = thinker.visual.**
            thinker.model.audio_tower.** = thinker.audio_tower.**
            thinker.model.language_model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
                = thinker.model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
            thinker.model.language_model.layers.{i}.mlp.experts.down_proj : e h m
                = thinker.model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
            talker.model.layers.{ti}.mlp.experts.gate_up_proj : te ((1 + 1) tm) th
                = talker.model.layers.{ti}.mlp.experts.{te}.<gate|up>_proj.weight : tm th
            talker.model.layers.{ti}.mlp.experts.down_proj : te th tm
                = talker.model.layers.{ti}.mlp.experts.{te}.down_proj.weight : th tm
        """),
    },
    tiny={
        "thinker_config": {
            "text_config": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "mlp_only_layers": [0],
                            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}},
            "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 10, "num_heads": 3, "patch_size": 2,
                              "out_hidden_size": 18, "num_position_embeddings": 4, "deepstack_visual_indexes": [0, 1]},
            "audio_config": {"d_model": 12, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 10,
                             "num_mel_bins": 8, "downsample_hidden_size": 8, "output_dim": 18, "max_source_positions": 20}},
        "talker_config": {
            "text_config": {"num_hidden_layers": 2, "vocab_size": 9, "hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 3,
                            "num_key_value_heads": 1, "head_dim": 4, "num_experts": 2, "moe_intermediate_size": 6,
                            "num_experts_per_tok": 1, "shared_expert_intermediate_size": 6},
            "code_predictor_config": {"num_hidden_layers": 2, "vocab_size": 9, "hidden_size": 12, "intermediate_size": 10,
                                      "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4, "num_code_groups": 2},
            "thinker_hidden_size": 18, "num_code_groups": 2, "spatial_merge_size": 2},
        "code2wav_config": {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 3,
                            "num_key_value_heads": 3, "num_quantizers": 2, "codebook_size": 8, "decoder_dim": 16,
                            "upsample_rates": [2], "upsampling_ratios": [2]},
    },
)  # fmt: skip
