"""Llama 4: a layer's experts in two tensors (inputs, outputs), [gate | up], as released and in memory; `hf-split`: one by one. Norms
of q and k have no weights. Megatron: mcore-bridge 1.6.5, mm_gpts/llama4.py, which keeps the hub's tower and projector in its
`visual`; Megatron-Bridge 0.6.2 has none. RoPE is interleaved in both."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="llama4",
    classes=(
        ModelClass("llama4", "Llama4ForConditionalGeneration"),
        ModelClass(
            "llama4_text", "Llama4TextModel", (*DECODER_FORMS, "no_rope", "experts", "interleaved", "chunks"),
            keys={"num_experts": "num_local_experts", "intermediate_size": "intermediate_size_mlp",
                  "moe_intermediate_size": "intermediate_size"},
            megatron={**GATED, "rotary_interleaved": True, "moe_router_score_function": "sigmoid",
                      "moe_apply_probs_on_input": True},
            unsayable={"attention_bias": False},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                      "head_dim": 128, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 1,
                      "interleave_moe_layer_step": 1, "router_aux_loss_coef": 0.001, "use_qk_norm": True,
                      "attention_chunk_size": 8192, "attn_temperature_tuning": True, "no_rope_layer_interval": 4},
            part=True,
        ),
    ),
    axes={**DECODER, "f": "intermediate_size_mlp", "m": "intermediate_size", "e": "num_local_experts"},
    language="text_config",
    hub=hub.inside(hub.MODEL + hub.NORMS + hub.ATTENTION + """
        model.layers.{i}.feed_forward.<gate|up|down>_proj.weight : f h, f h, h f
        model.layers.{i}.feed_forward.shared_expert.<gate|up|down>_proj.weight : m h, m h, h m
        model.layers.{i}.feed_forward.router.weight : e h
        model.layers.{i}.feed_forward.experts.<gate_up_proj|down_proj> : e h ((1 + 1) m), e m h
    """, "language_model.model.", "language_model.lm_head") + """
        vision_model.**
        multi_modal_projector.**
    """,
    dialects={
        "megatron": megatron.inside(megatron.MODEL + megatron.NORMS + megatron.ATTENTION + """
            decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) f) h = model.layers.{i}.feed_forward.<gate|up>_proj.weight : f h
            decoder.layers.{i}.mlp.linear_fc2.weight : h f = model.layers.{i}.feed_forward.down_proj.weight : h f
            decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) m) h
                = model.layers.{i}.feed_forward.shared_expert.<gate|up>_proj.weight : m h
            decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h m
                = model.layers.{i}.feed_forward.shared_expert.down_proj.weight : h m
            decoder.layers.{i}.mlp.router.weight : e h = model.layers.{i}.feed_forward.router.weight : e h
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
                = model.layers.{i}.feed_forward.experts.gate_up_proj : e h ((1 + 1) m)
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h m
                = model.layers.{i}.feed_forward.experts.down_proj : e m h
        """, "language_model.model.", "language_model.lm_head") + """
            visual.vision_model.** = vision_model.**
            visual.multi_modal_projector.** = multi_modal_projector.**
        """,
        "torchtune": hub.inside(trainers.TUNE4, "language_model.model.", "language_model.lm_head"),
        "hf-split": Variant("hf", over="""
            language_model.model.layers.{i}.feed_forward.experts.{e}.<gate|up>_proj.weight : m h
                = language_model.model.layers.{i}.feed_forward.experts.gate_up_proj : e h ((1 + 1) m)
            language_model.model.layers.{i}.feed_forward.experts.{e}.down_proj.weight : h m
                = language_model.model.layers.{i}.feed_forward.experts.down_proj : e m h
        """),
    },
    tiny={"text_config": {"num_local_experts": 3, "intermediate_size_mlp": 14, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
          "vision_config": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10, "image_size": 8,
                            "patch_size": 2, "vision_output_dim": 12, "projector_input_dim": 12, "projector_output_dim": 12}},
)  # fmt: skip
