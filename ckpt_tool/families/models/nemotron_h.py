"""Nemotron-H and Nemotron 3: layers of one module each, a Mamba-2 mixer, attention, an MLP or (latent) experts, by a pattern
in the config: `hybrid_override_pattern` of the released files (M*-E), `layers_block_type` of transformers 5.23.

transformers 5.23, models/nemotron_h and conversion_mapping.py: in memory the root is `model` and the experts are fused
(`hf-5`). Megatron: Megatron-Bridge 0.6.2, models/nemotron_h/nemotron_h_bridge.py, core's HybridModel: each norm has its kind's name there; in_proj (z | x | B | C | dt) and conv1d (x | B | C) are the hub's at TP 1. It maps no biases, nor
does this. MTP is blocks of several layers, under one count on the hub: one, as released, or more (`mtp_use_repeated_layer` false).
"""

from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import SIGMOID, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx

FAMILY = Family(
    name="nemotron_h",
    classes=(
        ModelClass(
            "nemotron_h", "NemotronHForCausalLM", ("sizes", "heads", "tied", "dropout", "experts", "hybrid", "groups"),
            keys={"num_experts": "n_routed_experts", "rms_norm_eps": "layer_norm_epsilon"},
            megatron={"normalization": "RMSNorm", "squared_relu": True, "add_bias_linear": False, "position_embedding_type": "none",
                      "swiglu": False, "is_hybrid_model": True, **SIGMOID},
            unsayable={"attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "use_bias": False, "use_conv_bias": True,
                       "conv_kernel": 4, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "norm_topk_prob": True, "n_shared_experts": 1},
            defaults={"rms_norm_eps": 1e-05, "tie_word_embeddings": False, "initializer_range": 0.02, "attention_dropout": 0.0,
                      "max_position_embeddings": 4096, "head_dim": 128, "num_key_value_heads": 8, "ssm_state_size": 128,
                      "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "residual_in_fp32": False, "num_experts": 8,
                      "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
                      "moe_latent_size": None, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                      "num_nextn_predict_layers": 0, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
                      "mtp_layers_block_type": ["full_attention", "moe"]},
        ),
    ),
    axes={
        "i": "count of hybrid_override_pattern? or layers_block_type?", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size",
        "g": "num_key_value_heads? or num_attention_heads", "r": "num_attention_heads // g", "d": "head_dim? or attention_head_dim",
        "n": "mamba_num_heads", "p": "mamba_head_dim", "t": "n_groups? or mamba_n_groups", "y": "ssm_state_size",
        "k": "conv_kernel? or mamba_d_conv? or 4", "w": "2 * h", "e": "n_routed_experts? or num_local_experts", "m": "moe_intermediate_size",
        "l": "moe_latent_size? or h", "s": "moe_shared_expert_intermediate_size",
        "b": "count of mtp_hybrid_override_pattern? or mtp_layers_block_type? or '*E'",  # layers of the one block of MTP
    },
    kinds={
        "mamba": "hybrid_override_pattern? and hybrid_override_pattern[i] == 'M' or not hybrid_override_pattern? and layers_block_type? and layers_block_type[i] in ['linear_attention', 'mamba']",
        "attending": "hybrid_override_pattern? and hybrid_override_pattern[i] == '*' or not hybrid_override_pattern? and layers_block_type? and layers_block_type[i] in ['full_attention', 'attention']",
        "feeding": "hybrid_override_pattern? and hybrid_override_pattern[i] in '-E' or not hybrid_override_pattern? and layers_block_type? and layers_block_type[i] in ['mlp', 'moe']",
        "ahead_attending": "j < b and (mtp_hybrid_override_pattern? or mtp_layers_block_type? or '*E')[j] in ['*', 'full_attention', 'attention']",
        "ahead_feeding": "j < b and (mtp_hybrid_override_pattern? or mtp_layers_block_type? or '*E')[j] in ['-', 'E', 'mlp', 'moe']",
    },
    hub="""
        backbone.embeddings.weight : v h
        lm_head.weight : v h
        lm_head.weight ~ backbone.embeddings.weight if tie_word_embeddings?
        backbone.norm_f.weight : h
        [backbone.layers.{i}|mtp.layers.{j}].norm.weight : h
        [backbone.layers.{i}|mtp.layers.{j}].mixer.<q|k|v|o>_proj.weight : (g r d) h, (g d) h, (g d) h, h (g r d)
        [backbone.layers.{i}|mtp.layers.{j}].mixer.<up_proj.weight|down_proj.weight|up_proj.bias|down_proj.bias> : f h, h f, f, h
        [backbone.layers.{i}|mtp.layers.{j}].mixer.gate.<weight|e_score_correction_bias> : e h, e
        [backbone.layers.{i}|mtp.layers.{j}].mixer.experts.{e}.<up|down>_proj.weight : m l, l m
        [backbone.layers.{i}|mtp.layers.{j}].mixer.shared_experts.<up_proj.weight|down_proj.weight|up_proj.bias|down_proj.bias> : s h, h s, s, h
        [backbone.layers.{i}|mtp.layers.{j}].mixer.<fc1_latent_proj.weight|fc2_latent_proj.weight|fc1_latent_proj.bias|fc2_latent_proj.bias> : l h, h l, l, h
        backbone.layers.{i}.mixer.<A_log|D|dt_bias> : n
        backbone.layers.{i}.mixer.<in_proj|norm|out_proj>.weight : (n p + n p + t y + t y + n) h, (n p), h (n p)
        backbone.layers.{i}.mixer.<in_proj|out_proj>.bias : (n p + n p + t y + t y + n), h
        backbone.layers.{i}.mixer.conv1d.<weight|bias> : (n p + t y + t y) 1 k, (n p + t y + t y)
        mtp.layers.{j}.<eh_proj|enorm|hnorm|final_layernorm>.weight : h w, h, h, h
    """,
    dialects={
        "hf-5": Variant("hf", root="model.", instead="backbone.", over="""
            model.layers.{i}.mixer.experts.<up|down>_proj : e m l, e l m = backbone.layers.{i}.mixer.experts.{e}.<up|down>_proj.weight : m l, l m
        """),
        "mlx": Variant("hf", over=mlx.NEMOTRON_EXPERTS),
        "megatron": """
            embedding.word_embeddings.weight : v h = backbone.embeddings.weight : v h
            output_layer.weight : v h = lm_head.weight : v h if not tie_word_embeddings?
            decoder.final_norm.weight : h = backbone.norm_f.weight : h
            decoder.layers.{i}.norm.weight : h = backbone.layers.{i}.norm.weight : h if mamba
            decoder.layers.{i}.input_layernorm.weight : h = backbone.layers.{i}.norm.weight : h if attending
            decoder.layers.{i}.pre_mlp_layernorm.weight : h = backbone.layers.{i}.norm.weight : h if feeding
            decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h = backbone.layers.{i}.mixer.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
            decoder.layers.{i}.self_attention.linear_proj.weight : h (g r d) = backbone.layers.{i}.mixer.o_proj.weight : h (g r d)
            decoder.layers.{i}.mlp.<linear_fc1|linear_fc2>.weight : f h, h f = backbone.layers.{i}.mixer.<up|down>_proj.weight : f h, h f
            decoder.layers.{i}.mlp.router.<weight|expert_bias> : e h, e = backbone.layers.{i}.mixer.gate.<weight|e_score_correction_bias> : e h, e
            decoder.layers.{i}.mlp.experts.local_experts.{e}.<linear_fc1|linear_fc2>.weight : m l, l m = backbone.layers.{i}.mixer.experts.{e}.<up|down>_proj.weight : m l, l m
            decoder.layers.{i}.mlp.shared_experts.<linear_fc1|linear_fc2>.weight : s h, h s = backbone.layers.{i}.mixer.shared_experts.<up|down>_proj.weight : s h, h s
            decoder.layers.{i}.mlp.<fc1|fc2>_latent_proj.weight : l h, h l = backbone.layers.{i}.mixer.<fc1|fc2>_latent_proj.weight : l h, h l
            decoder.layers.{i}.mixer.<A_log|D|dt_bias> : n = backbone.layers.{i}.mixer.<A_log|D|dt_bias> : n
            decoder.layers.{i}.mixer.<in_proj|norm|out_proj>.weight : (n p + n p + t y + t y + n) h, (n p), h (n p) = backbone.layers.{i}.mixer.<in_proj|norm|out_proj>.weight : (n p + n p + t y + t y + n) h, (n p), h (n p)
            decoder.layers.{i}.mixer.<conv1d_weight|conv1d_bias> : (n p + t y + t y) 1 k, (n p + t y + t y) = backbone.layers.{i}.mixer.conv1d.<weight|bias> : (n p + t y + t y) 1 k, (n p + t y + t y)
            mtp.layers.{o}.<eh_proj|enorm|hnorm>.weight : h w, h, h = mtp.layers.{o * b}.<eh_proj|enorm|hnorm>.weight : h w, h, h
            mtp.layers.{o}.final_layernorm.weight : h = mtp.layers.{o * b + b - 1}.final_layernorm.weight : h
            mtp.layers.{o}.transformer_layer.layers.{j}.input_layernorm.weight : h = mtp.layers.{o * b + j}.norm.weight : h if ahead_attending
            mtp.layers.{o}.transformer_layer.layers.{j}.pre_mlp_layernorm.weight : h = mtp.layers.{o * b + j}.norm.weight : h if ahead_feeding
            mtp.layers.{o}.transformer_layer.layers.{j}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h = mtp.layers.{o * b + j}.mixer.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h if ahead_attending
            mtp.layers.{o}.transformer_layer.layers.{j}.self_attention.linear_proj.weight : h (g r d) = mtp.layers.{o * b + j}.mixer.o_proj.weight : h (g r d) if ahead_attending
            mtp.layers.{o}.transformer_layer.layers.{j}.mlp.<linear_fc1.weight|linear_fc2.weight|router.weight|router.expert_bias> : f h, h f, e h, e = mtp.layers.{o * b + j}.mixer.<up_proj.weight|down_proj.weight|gate.weight|gate.e_score_correction_bias> : f h, h f, e h, e if ahead_feeding
            mtp.layers.{o}.transformer_layer.layers.{j}.mlp.<fc1_latent_proj|fc2_latent_proj|shared_experts.linear_fc1|shared_experts.linear_fc2>.weight : l h, h l, s h, h s = mtp.layers.{o * b + j}.mixer.<fc1_latent_proj|fc2_latent_proj|shared_experts.up_proj|shared_experts.down_proj>.weight : l h, h l, s h, h s if ahead_feeding
            mtp.layers.{o}.transformer_layer.layers.{j}.mlp.experts.local_experts.{e}.<linear_fc1|linear_fc2>.weight : m l, l m = mtp.layers.{o * b + j}.mixer.experts.{e}.<up|down>_proj.weight : m l, l m if ahead_feeding
        """,
    },
    tiny={"hybrid_override_pattern": "ME*-ME*-", "num_hidden_layers": 8, "n_routed_experts": 4, "moe_intermediate_size": 5, "moe_shared_expert_intermediate_size": 14,
          "moe_latent_size": 12, "mamba_num_heads": 4, "mamba_head_dim": 3, "n_groups": 2, "ssm_state_size": 5, "num_experts_per_tok": 2},
)  # fmt: skip
