"""Kimi K2.5: DeepSeek-V3 inside. Released experts are INT4: --dequantize first. `hf-5` is what transformers 5 has in memory: the tower's
qkv apart, queries and keys in another order of rotary rows. `hf-saved` is what 5.23 saves: its rename of the tower's blocks touches
the language model's layers and the tower's first convolution too, and none brings `pre_norm` back.
Where the config does not say the tower's heads and width, they are the defaults of transformers' class.

Megatron: Megatron-Bridge 0.6.2, models/kimi_vl/kimi_k25_vl_bridge.py, whose tower and projector are the hub's own modules.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="kimi_k25",
    classes=(ModelClass("kimi_k25", "Kimi_K25ForConditionalGeneration", also=("KimiK25ForConditionalGeneration",)),),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size",
        "a": "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)", "q": "q_lora_rank", "l": "kv_lora_rank",
        "b": "kv_lora_rank + qk_rope_head_dim", "c": "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
        "u": "num_attention_heads * v_head_dim", "e": "n_routed_experts", "m": "moe_intermediate_size", "s": "m * n_shared_experts",
        "y": "vision_config.hidden_size? or 1152", "n": "vision_config.num_attention_heads? or 16", "p": "y // n // 2",
    },
    language="text_config",
    parts={"deepseek_v3": {}, "kimi_k2": {}},
    saved="hf-saved",
    hub=hub.inside(hub.MODEL + hub.NORMS + hub.MLA + hub.MLP + hub.ROUTER + hub.EXPERTS + hub.EXPERT_BIAS + hub.SHARED_EXPERTS,
                   "language_model.model.", "language_model.lm_head") + """
        vision_tower.encoder.final_layernorm.<weight|bias> : y
        vision_tower.patch_embed.proj.<weight|bias> : y ya yb yc, y
        vision_tower.patch_embed.pos_emb.weight : yd ye y
        vision_tower.encoder.blocks.{j}.[norm0|norm1].<weight|bias> : y
        vision_tower.encoder.blocks.{j}.wqkv.<weight|bias> : ((1 + 1 + 1) n p 2) y, ((1 + 1 + 1) n p 2)
        vision_tower.encoder.blocks.{j}.wo.<weight|bias> : y yo, y
        vision_tower.encoder.blocks.{j}.mlp.<fc0.weight|fc0.bias|fc1.weight|fc1.bias> : yf y, yf, y yf, y
        mm_projector.**
    """,
    dialects={
        "megatron": megatron.inside(
            megatron.MODEL + megatron.NORMS + megatron.MLA + megatron.MLP + megatron.ROUTER + megatron.EXPERTS + megatron.EXPERT_BIAS
            + megatron.SHARED_EXPERTS, "language_model.model.", "language_model.lm_head") + """
            vision_tower.encoder.final_layernorm.<weight|bias> : y
            vision_tower.patch_embed.<proj.weight|proj.bias|pos_emb.weight> : y ya yb yc, y, yd ye y
            vision_tower.encoder.blocks.{j}.[norm0|norm1].<weight|bias> : y
            vision_tower.encoder.blocks.{j}.wqkv.<weight|bias> : ((1 + 1 + 1) n p 2) y, ((1 + 1 + 1) n p 2)
            vision_tower.encoder.blocks.{j}.wo.<weight|bias> : y yo, y
            vision_tower.encoder.blocks.{j}.mlp.<fc0.weight|fc0.bias|fc1.weight|fc1.bias> : yf y, yf, y yf, y
            mm_projector.**
        """,
        "hf-saved": Variant("hf", instead="language_model.model.layers.", root="language_model.model.blocks.", over="""
            vision_tower.encoder.patch_embed.proj.<weight|bias> : y ya yb yc, y = vision_tower.patch_embed.proj.<weight|bias> : y ya yb yc, y
            model.mm_projector.pre_norm.** = mm_projector.pre_norm.**
        """),
        "hf-5": Variant("hf", instead="language_model.model.", root="model.language_model.", over="""
            lm_head.weight : v h = language_model.lm_head.weight : v h
            model.language_model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
                = language_model.model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
            model.language_model.layers.{i}.mlp.experts.down_proj : e h m
                = language_model.model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
            model.vision_tower.final_layernorm.<weight|bias> : y = vision_tower.encoder.final_layernorm.<weight|bias> : y
            model.vision_tower.patch_embed.<proj.weight|proj.bias|pos_emb.position_embeddings> : y ya yb yc, y, yd ye y
                = vision_tower.patch_embed.<proj.weight|proj.bias|pos_emb.weight> : y ya yb yc, y, yd ye y
            model.vision_tower.layers.{j}.norm1.<weight|bias> : y = vision_tower.encoder.blocks.{j}.norm0.<weight|bias> : y
            model.vision_tower.layers.{j}.norm2.<weight|bias> : y = vision_tower.encoder.blocks.{j}.norm1.<weight|bias> : y
            model.vision_tower.layers.{j}.attn.<q|k|v>_proj.weight : (n 2 p) y, (n 2 p) y, (n p 2) y
                = vision_tower.encoder.blocks.{j}.wqkv.weight : ((1 + 1 + 1) n p 2) y
            model.vision_tower.layers.{j}.attn.<q|k|v>_proj.bias : (n 2 p), (n 2 p), (n p 2)
                = vision_tower.encoder.blocks.{j}.wqkv.bias : ((1 + 1 + 1) n p 2)
            model.vision_tower.layers.{j}.attn.proj.<weight|bias> : y yo, y = vision_tower.encoder.blocks.{j}.wo.<weight|bias> : y yo, y
            model.vision_tower.layers.{j}.mlp.<fc1.weight|fc1.bias|fc2.weight|fc2.bias> : yf y, yf, y yf, y
                = vision_tower.encoder.blocks.{j}.mlp.<fc0.weight|fc0.bias|fc1.weight|fc1.bias> : yf y, yf, y yf, y
            model.mm_projector.pre_norm.** = mm_projector.pre_norm.**
            model.mm_projector.in_proj.** = mm_projector.proj.0.**
            model.mm_projector.out_proj.** = mm_projector.proj.2.**
        """),
    },
    tiny={"text_config": {"model_type": "deepseek_v3", "n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2,
                          "first_k_dense_replace": 1, "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                          "v_head_dim": 5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
          "vision_config": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10, "patch_size": 2,
                            "pos_emb_height": 4, "pos_emb_width": 4}, "projection_hidden_size": 12},
)  # fmt: skip
