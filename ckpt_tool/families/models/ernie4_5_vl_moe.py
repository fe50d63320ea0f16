"""ERNIE 4.5 VL: text experts, then vision experts under one count, resampler and tower. The hub is what transformers 5
saves.

`hf-published`: baidu's -PT files, the tower at the root. Paddle: PaddleFormers 1.2.0, ernie4_5_moe_vl: nothing is
fused, routers are as in the hub. `paddle-ernie`: releases named -Paddle, as ERNIE's tools/paddle2torch/tran_4_5t_vl.py
reads them.
"""

from ckpt_tool.families import ernie_vision
from ckpt_tool.families.base import DECODER, NLP_HEAD, Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="ernie4_5_vl_moe",
    classes=(
        ModelClass("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration"),
        ModelClass("ernie4_5_moe_vl", "Ernie4_5_VL_MoeForConditionalGeneration"),
    ),
    axes={
        **DECODER, "x": "text_config.moe_num_experts? or moe_num_experts[0]", "e": "2 * x",
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
