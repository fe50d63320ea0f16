"""Step 3.5 (text) and Step 3.7 (sees): a gate a head, more heads in layers that look through a window, a layer's experts in
three tensors, dense layers of multi-token prediction as layers N and on.

transformers 5.23, models/step3p7 and conversion_mapping.py: in memory (`hf-5`) the language model is `model.language_model`,
experts are fused, and the tower has other names and its queries and keys another order of rotary rows; Step 3.5's own class
is published with its files and has the same names. Names of MTP: Megatron-Bridge 0.6.2, models/stepfun/step35_bridge.py. There
are no rules for that bridge: with megatron-core 0.19.2, which has no gate per head, it repeats the gate's row for each element
of a head, which can't be reversed once a job has trained the copies.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="step3p5",
    classes=(ModelClass("step3p7", "Step3p7ForConditionalGeneration"), ModelClass("step3p5", "Step3p5ForCausalLM")),
    axes={
        "i": "num_hidden_layers + (num_nextn_predict_layers? or num_mtp_layers? or 3)", "v": "vocab_size", "h": "hidden_size",
        "f": "intermediate_size", "g": "num_attention_groups? or num_key_value_heads", "d": "head_dim", "a": "num_attention_heads",
        "x": "num_sliding_attention_heads? or attention_other_setting.num_attention_heads? or a",
        "e": "moe_num_experts? or n_routed_experts? or num_local_experts", "m": "moe_intermediate_size",
        "s": "share_expert_dim? or share_expert_dims", "w": "2 * h",
        "y": "vision_config.hidden_size? or vision_config.width", "n": "vision_config.num_attention_heads? or vision_config.heads", "p": "y // n // 2",
    },
    language="text_config",
    kinds={
        "windowed": "layer_types? and (i < num_hidden_layers or not mtp_layer_types?) and layer_types[i] == 'sliding_attention'"
                    " or mtp_layer_types? and i >= num_hidden_layers and mtp_layer_types[i - num_hidden_layers] == 'sliding_attention'",
    },
    hub=hub.MODEL + hub.NORMS + hub.MLP + hub.QK_NORMS + """
        vit_large_projector.**
        vision_model.<conv1.weight|positional_embedding> : y ya yb yc, yd y
        vision_model.ln_pre.<weight|bias> : y
        vision_model.transformer.resblocks.{j}.<ls_1.gamma|ls_2.gamma|ln_1.weight|ln_1.bias|ln_2.weight|ln_2.bias> : y
        vision_model.transformer.resblocks.{j}.attn.<in_proj_weight|in_proj_bias> : ((1 + 1 + 1) n p 2) y, ((1 + 1 + 1) n p 2)
        vision_model.transformer.resblocks.{j}.attn.out_proj.<weight|bias> : y yo, y
        vision_model.transformer.resblocks.{j}.mlp.<c_fc.weight|c_fc.bias|c_proj.weight|c_proj.bias> : yf y, yf, y yf, y
        vision_model.vit_downsampler1.<weight|bias> : ye y k 3, ye
        vision_model.vit_downsampler2.<weight|bias> : yg ye k 3, yg
        model.layers.{i}.self_attn.<q|k|v|g|o>_proj.weight : (x d) h, (g d) h, (g d) h, x h, h (x d) if windowed
        model.layers.{i}.self_attn.<q|k|v|g|o>_proj.weight : (a d) h, (g d) h, (g d) h, a h, h (a d) if not windowed
        model.layers.{i}.moe.<gate.weight|router_bias> : e h, e
        model.layers.{i}.moe.<gate|up|down>_proj.weight : e m h, e m h, e h m
        model.layers.{i}.share_expert.<gate|up|down>_proj.weight : s h, s h, h s
        model.layers.{i}.<enorm|hnorm|transformer.shared_head.norm>.weight : h
        model.layers.{i}.<eh_proj|transformer.shared_head.output>.weight : h w, v h
    """,
    dialects={
        "hf-5": Variant("hf", root="model.language_model.", instead="model.", over="""
            model.vision_model.<embeddings.patch_embedding.weight|embeddings.position_embedding.weight> : y ya yb yc, yd y
                = vision_model.<conv1.weight|positional_embedding> : y ya yb yc, yd y
            model.vision_model.pre_layernorm.<weight|bias> : y = vision_model.ln_pre.<weight|bias> : y
            model.vision_model.layers.{j}.<lambda_1|lambda_2|layernorm_before.weight|layernorm_before.bias|layernorm_after.weight|layernorm_after.bias> : y
                = vision_model.transformer.resblocks.{j}.<ls_1.gamma|ls_2.gamma|ln_1.weight|ln_1.bias|ln_2.weight|ln_2.bias> : y
            model.vision_model.layers.{j}.self_attn.<q|k|v>_proj.weight : (n 2 p) y, (n 2 p) y, (n p 2) y
                = vision_model.transformer.resblocks.{j}.attn.in_proj_weight : ((1 + 1 + 1) n p 2) y
            model.vision_model.layers.{j}.self_attn.<q|k|v>_proj.bias : (n 2 p), (n 2 p), (n p 2)
                = vision_model.transformer.resblocks.{j}.attn.in_proj_bias : ((1 + 1 + 1) n p 2)
            model.vision_model.layers.{j}.self_attn.out_proj.<weight|bias> : y yo, y = vision_model.transformer.resblocks.{j}.attn.out_proj.<weight|bias> : y yo, y
            model.vision_model.layers.{j}.mlp.<fc1.weight|fc1.bias|fc2.weight|fc2.bias> : yf y, yf, y yf, y
                = vision_model.transformer.resblocks.{j}.mlp.<c_fc.weight|c_fc.bias|c_proj.weight|c_proj.bias> : yf y, yf, y yf, y
            model.vision_model.downsampler1.<weight|bias> : ye y k 3, ye = vision_model.vit_downsampler1.<weight|bias> : ye y k 3, ye
            model.vision_model.downsampler2.<weight|bias> : yg ye k 3, yg = vision_model.vit_downsampler2.<weight|bias> : yg ye k 3, yg
            model.multi_modal_projector.** = vit_large_projector.**
            model.language_model.layers.{i}.mlp.gate.<weight|e_score_correction_bias> : e h, e
                = model.layers.{i}.moe.<gate.weight|router_bias> : e h, e
            model.language_model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
                = model.layers.{i}.moe.<gate|up>_proj.weight : e m h
            model.language_model.layers.{i}.mlp.experts.down_proj : e h m = model.layers.{i}.moe.down_proj.weight : e h m
            model.language_model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
                = model.layers.{i}.share_expert.<gate|up|down>_proj.weight : s h, s h, h s
        """),
    },
    unmapped={"megatron": "Megatron-Bridge repeats its gates' rows where Megatron-Core has no gate a head (0.19.2, main of 2026-08-22),"
             " which no way back undoes once a job has trained them"},
    tiny={"text_config": {"n_routed_experts": 4, "moe_intermediate_size": 5, "share_expert_dim": 7, "num_experts_per_tok": 2,
                          "num_sliding_attention_heads": 8, "sliding_window": 4, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1,
                          "moe_layers_enum": "1,3", "attention_bias": False},
          "vision_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8,
                            "image_size": 8, "patch_size": 2}},
)  # fmt: skip
