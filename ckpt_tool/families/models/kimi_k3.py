"""Kimi K3 (sees): Kimi Linear's decoder with attention residuals, an output gate of latent attention, experts between two
latent projections and a norm.

The model's code is published with its files (moonshotai/Kimi-K3, modeling_kimi_k3.py, modeling_kimi_linear.py), and
transformers 5.23 has none: the hub's names are those of that code. `linear_attn_config` gives the kind of each layer, counted
from one. Released experts are MXFP4 of compressed-tensors: --dequantize first. The released `A_log` is padded with zeros from
the number of heads to the width of a head; in the model's class it is not, and both forms are read.

Megatron: Megatron-Bridge of 2026-08-22 (067f987), models/kimi/kimi_k3_bridge.py and kimi_k3_layers.py: the language model
alone, in modules of its own with the hub's names; what the last layer's residuals end in is that layer's.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="kimi_k3",
    classes=(ModelClass("kimi_k3", "KimiK3ForConditionalGeneration"),),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size",
        "n": "num_attention_heads", "a": "n * (qk_nope_head_dim + qk_rope_head_dim)", "q": "q_lora_rank",
        "l": "kv_lora_rank", "b": "kv_lora_rank + qk_rope_head_dim", "c": "n * (qk_nope_head_dim + v_head_dim)",
        "u": "n * v_head_dim", "y": "linear_attn_config.num_heads", "z": "linear_attn_config.head_dim", "x": "z",
        "p": "z > y and z - y or 0", "e": "num_experts", "m": "moe_intermediate_size",
        "w": "routed_expert_hidden_size? or h", "s": "m * (num_shared_experts? or 1)",
    },
    own=("p",),
    apart=("vision_tower.", "mm_projector."),
    language="text_config",
    kinds={"linear": "i + 1 in linear_attn_config.kda_layers"},
    hub=hub.inside(hub.MODEL + hub.NORMS + hub.MLP + hub.LATENT + hub.KDA + """
        model.output_attn_res_<norm|proj>.weight : h, 1 h
        model.layers.{i}.[self_attention|mlp]_res_<norm|proj>.weight : h, 1 h
        model.layers.{i}.self_attn.A_log : (y + p)
        model.layers.{i}.self_attn.<q|k|v|g|o>_proj.weight : (y z) h, (y z) h, (y z) h, (y z) h, h (y z) if linear
        model.layers.{i}.self_attn.<q|g|o>_proj.weight : a h, u h, h u if not linear
        model.layers.{i}.block_sparse_moe.gate.<weight|e_score_correction_bias> : e h, e
        model.layers.{i}.block_sparse_moe.routed_expert_<down_proj|norm|up_proj>.weight : w h, w, h w
        model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3|w2>.weight : m w, m w, w m
        model.layers.{i}.block_sparse_moe.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
    """, "language_model.model.", "language_model.lm_head") + """
        vision_tower.**
        mm_projector.**
    """,
    dialects={
        "megatron": megatron.inside(megatron.MODEL + megatron.NORMS + megatron.MLP + """
            decoder.layers.{num_hidden_layers - 1}.output_attn_res_norm.weight : h = model.output_attn_res_norm.weight : h
            decoder.layers.{num_hidden_layers - 1}.output_attn_res_proj.weight : 1 h = model.output_attn_res_proj.weight : 1 h
            decoder.layers.{i}.[self_attention|mlp]_res_<norm|proj>.weight : h, 1 h
                = model.layers.{i}.[self_attention|mlp]_res_<norm|proj>.weight : h, 1 h
            decoder.layers.{i}.self_attention.A_log : y; _ : p = model.layers.{i}.self_attn.A_log : (y + p)
            decoder.layers.{i}.self_attention.<q|k|v>_conv1d.weight : (y z) 1 k
                = model.layers.{i}.self_attn.<q|k|v>_conv1d.weight : (y z) 1 k
            decoder.layers.{i}.self_attention.<f_a_proj.weight|f_b_proj.weight|dt_bias|b_proj.weight|o_norm.weight> : x h, (y z) x, (y z), y h, z
                = model.layers.{i}.self_attn.<f_a_proj.weight|f_b_proj.weight|dt_bias|b_proj.weight|o_norm.weight> : x h, (y z) x, (y z), y h, z
            decoder.layers.{i}.self_attention.<q|k|v|g|o>_proj.weight : (y z) h, (y z) h, (y z) h, (y z) h, h (y z)
                = model.layers.{i}.self_attn.<q|k|v|g|o>_proj.weight : (y z) h, (y z) h, (y z) h, (y z) h, h (y z) if linear
            decoder.layers.{i}.self_attention.<q_a_proj|q_a_layernorm|q_b_proj>.weight : q h, q, a q
                = model.layers.{i}.self_attn.<q_a_proj|q_a_layernorm|q_b_proj>.weight : q h, q, a q
            decoder.layers.{i}.self_attention.<kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj>.weight : b h, l, c l
                = model.layers.{i}.self_attn.<kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj>.weight : b h, l, c l
            decoder.layers.{i}.self_attention.<g|o>_proj.weight : u h, h u
                = model.layers.{i}.self_attn.<g|o>_proj.weight : u h, h u if not linear
            decoder.layers.{i}.mlp.router.<weight|expert_bias> : e h, e
                = model.layers.{i}.block_sparse_moe.gate.<weight|e_score_correction_bias> : e h, e
            decoder.layers.{i}.mlp.<fc1_latent_proj|routed_expert_norm|fc2_latent_proj>.weight : w h, w, h w
                = model.layers.{i}.block_sparse_moe.routed_expert_<down_proj|norm|up_proj>.weight : w h, w, h w
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) w
                = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : m w
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : w m
                = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : w m
            decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) s) h
                = model.layers.{i}.block_sparse_moe.shared_experts.<gate|up>_proj.weight : s h
            decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h s
                = model.layers.{i}.block_sparse_moe.shared_experts.down_proj.weight : h s
        """, "language_model.model.", "language_model.lm_head", here=""),
    },
    tiny={"text_config": {"model_type": "kimi_linear", "num_hidden_layers": 3, "num_key_value_heads": 6, "num_experts": 4,
                          "moe_intermediate_size": 5, "num_shared_experts": 2, "routed_expert_hidden_size": 8, "latent_moe_use_norm": True,
                          "first_k_dense_replace": 1, "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                          "v_head_dim": 5, "mla_use_nope": True, "mla_use_output_gate": True, "attn_res_block_size": 2,
                          "linear_attn_config": {"kda_layers": [1, 3, 5], "full_attn_layers": [2, 4, 6], "num_heads": 4, "head_dim": 3,
                                                 "short_conv_kernel_size": 2, "use_full_rank_gate": True}},
          "vision_config": {"vt_hidden_size": 8, "vt_intermediate_size": 10, "vt_num_hidden_layers": 2, "qkv_hidden_size": 12,
                            "patch_size": 2, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "text_hidden_size": 18}},
)  # fmt: skip
