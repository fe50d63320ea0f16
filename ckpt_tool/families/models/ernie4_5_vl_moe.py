"""ERNIE 4.5 VL: text experts, then vision experts under one count, resampler and tower. The hub is what transformers 5
saves.

`hf-published`: baidu's -PT files, the tower at the root. `hf-5`: what transformers 5 has in memory, experts of text and of images
apart. Megatron: Megatron-Bridge 0.6.2, models/ernie_vl/ernie45_vl_bridge.py, where the numbers of image experts start from
0 again. Paddle: PaddleFormers 1.2.0, ernie4_5_moe_vl: nothing is fused, routers are as in the hub. `paddle-ernie`: releases
named -Paddle, as ERNIE's tools/paddle2torch/tran_4_5t_vl.py reads them.
"""

from ckpt_tool.families import ernie_vision
from ckpt_tool.families.base import DECODER, NLP_HEAD, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="ernie4_5_vl_moe",
    classes=(
        ModelClass("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration"),
        ModelClass("ernie4_5_moe_vl", "Ernie4_5_VL_MoeForConditionalGeneration"),
        ModelClass(
            "ernie4_5_vl_moe_text", "Ernie4_5_VLMoeTextModel", part=True,
            forms=("sizes", "heads", "rope", "tied", "silu", "use_bias", "experts", "mlp_kinds", "two_pools"),
            keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", "n_shared_experts": "moe_num_shared_experts"},
            megatron={**GATED, "rotary_interleaved": True, "position_embedding_type": "mrope", "moe_router_enable_expert_bias": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": True,
                      "num_key_value_heads": 4, "use_bias": False, "num_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
                      "moe_intermediate_size": [1536, 512], "router_aux_loss_coef": 0.001, "first_k_dense_replace": 1},
        ),
    ),
    axes={
        **DECODER, "x": "text_config.moe_num_experts? or moe_num_experts[0]", "o": "x", "e": "2 * x",
        "m": "moe_intermediate_size[0]", "n": "moe_intermediate_size[1]",
        "b": "vision_config.depth", "k": "4", "y": "vision_config.hidden_size",
        "sa": "y * (vision_config.spatial_merge_size? or spatial_conv_size? or 2)"
              " * (vision_config.spatial_merge_size? or spatial_conv_size? or 2)", "sb": "sa",
        "ta": "sa * (vision_config.temporal_merge_size? or temporal_conv_size? or 2)",
    },
    language="text_config",
    hub=ernie_vision.TOWER + ernie_vision.RESAMPLER + """
        [model.embed_tokens|lm_head].weight : v h
        lm_head.weight ~ model.embed_tokens.weight if tie_word_embeddings?
        model.norm.weight : h
        model.layers.{i}.<input|post_attention>_layernorm.weight : h
        model.layers.{i}.self_attn.<q|k|v|o>_proj.weight : (g r d) h, (g d) h, (g d) h, h (g r d)
        model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
        model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
        model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m if e < x
        model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : n h, n h, h n if e >= x
        model.layers.{i}.mlp.<gate.weight|gate.weight_1|moe_statics.e_score_correction_bias> : h x, h x, 2 x
    """,
    dialects={
        "megatron": megatron.inside(megatron.DENSE + megatron.SHARED_EXPERTS, "model.") + ernie_vision.KEPT + """
            language_model.decoder.layers.{i}.mlp.<text|vision>_moe_layer.router.weight : x h
                = model.layers.{i}.mlp.gate.<weight|weight_1> : h x
            language_model.decoder.layers.{i}.mlp.<text|vision>_moe_layer.router.expert_bias : x
                = model.layers.{i}.mlp.moe_statics.e_score_correction_bias : (1 + 1) x
            language_model.decoder.layers.{i}.mlp.text_moe_layer.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
                = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h if e < x
            language_model.decoder.layers.{i}.mlp.text_moe_layer.experts.local_experts.{e}.linear_fc2.weight : h m
                = model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m if e < x
            language_model.decoder.layers.{i}.mlp.vision_moe_layer.experts.local_experts.{e - x}.linear_fc1.weight : ((1 + 1) n) h
                = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : n h if e >= x
            language_model.decoder.layers.{i}.mlp.vision_moe_layer.experts.local_experts.{e - x}.linear_fc2.weight : h n
                = model.layers.{i}.mlp.experts.{e}.down_proj.weight : h n if e >= x
        """,
        "hf-5": Variant("hf", instead="model.layers.", root="model.language_model.layers.", over=ernie_vision.KEPT_IN_MEMORY + """
            model.language_model.<embed_tokens|norm>.weight : v h, h = model.<embed_tokens|norm>.weight : v h, h
            model.language_model.layers.{i}.mlp.<text|vision>_moe.gate.weight : x h = model.layers.{i}.mlp.gate.<weight|weight_1> : h x
            model.language_model.layers.{i}.mlp.<text|vision>_moe.gate.moe_statics.e_score_correction_bias : 1 x
                = model.layers.{i}.mlp.moe_statics.e_score_correction_bias : (1 + 1) x
            model.language_model.layers.{i}.mlp.vision_moe.experts.gate_up_proj : o ((1 + 1) n) h
                = model.layers.{i}.mlp.experts.{o + x}.<gate|up>_proj.weight : n h
            model.language_model.layers.{i}.mlp.vision_moe.experts.down_proj : o h n
                = model.layers.{i}.mlp.experts.{o + x}.down_proj.weight : h n
            model.language_model.layers.{i}.mlp.text_moe.experts.gate_up_proj : o ((1 + 1) m) h
                = model.layers.{i}.mlp.experts.{o}.<gate|up>_proj.weight : m h
            model.language_model.layers.{i}.mlp.text_moe.experts.down_proj : o h m
                = model.layers.{i}.mlp.experts.{o}.down_proj.weight : h m
        """),
        "hf-published": Variant("hf", over=ernie_vision.TOWER_OUTSIDE),
        "paddle": NLP_HEAD + ernie_vision.TOWER_TURNED + ernie_vision.RESAMPLER_TURNED + """
            model.embed_tokens.weight : v h
            model.norm.weight : h
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k|v|o>_proj.weight : h (g r d), h (g d), h (g d), (g r d) h
                = : (g r d) h, (g d) h, (g d) h, h (g r d)
            model.layers.{i}.mlp.<gate|up|down>_proj.weight : h f, h f, f h = : f h, f h, h f
            model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : h s, h s, s h = : s h, s h, h s
            model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : h m, h m, m h = : m h, m h, h m if e < x
            model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : h n, h n, n h = : n h, n h, h n if e >= x
            model.layers.{i}.mlp.<gate.weight|gate.weight_1|moe_statics.e_score_correction_bias> : h x, h x, 2 x
        """,
        "paddle-ernie": Variant("paddle", root="ernie.", over=ernie_vision.FUSED),
    },
    tiny={"moe_num_experts": [3, 3], "moe_intermediate_size": [5, 7], "moe_num_shared_experts": 2,
          "vision_config": {"depth": 2, "hidden_size": 8, "intermediate_size": 11, "num_heads": 2, "patch_size": 2},
          "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [0, 0, 2]}},
)  # fmt: skip
