"""Kimi Linear: Kimi's delta attention, every fourth layer latent attention without a low rank of the query; experts under
Mixtral's names, and shared experts.

The released config gives the kind of each layer in `linear_attn_config`, counted from one. transformers 5.23,
models/kimi_linear and conversion_mapping.py: in memory the experts and the three convolutions are fused (`hf-5`); it
saves a dense layer's MLP under the experts' name (`hf-saved`), the released files' own modeling_kimi.py has it under
`mlp`. Neither Megatron-Bridge 0.6.2 nor mcore-bridge 1.6.5 maps it.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="kimi_linear",
    classes=(ModelClass("kimi_linear", "KimiLinearForCausalLM"),),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size",
        "n": "num_attention_heads", "a": "n * (qk_nope_head_dim + qk_rope_head_dim)", "q": "q_lora_rank",
        "l": "kv_lora_rank", "b": "kv_lora_rank + qk_rope_head_dim", "c": "n * (qk_nope_head_dim + v_head_dim)",
        "u": "n * v_head_dim", "y": "linear_attn_config.num_heads? or linear_num_heads? or 32",
        "z": "linear_attn_config.head_dim? or linear_head_dim? or 128", "x": "z",
        "e": "num_experts? or num_local_experts? or n_routed_experts", "m": "moe_intermediate_size",
        "s": "m * (num_shared_experts? or n_shared_experts? or 1)",
    },
    kinds={
        "linear": "linear_attn_config? and i + 1 in linear_attn_config.kda_layers"
                  " or not linear_attn_config? and layer_types? and layer_types[i] == 'linear_attention'"
                  " or not linear_attn_config? and not layer_types? and (i == 0 or i % 4 != 0)",
    },
    hub=hub.MODEL + hub.NORMS + hub.MLP + hub.LATENT + hub.KDA + """
        model.layers.{i}.self_attn.A_log : 1 1 y 1
        model.layers.{i}.self_attn.<q|k|v|o>_proj.weight : (y z) h, (y z) h, (y z) h, h (y z) if linear
        model.layers.{i}.self_attn.<q|o>_proj.weight : a h, h u if not linear
        model.layers.{i}.block_sparse_moe.gate.<weight|e_score_correction_bias> : e h, e
        model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3|w2>.weight : m h, m h, h m
        model.layers.{i}.block_sparse_moe.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
    """,
    dialects={
        "hf-5": Variant("hf", over=hub.KDA_IN_MEMORY + """
            model.layers.{i}.self_attn.forget_gate.A_log : 1 1 y 1 = model.layers.{i}.self_attn.A_log : 1 1 y 1
            model.layers.{i}.mlp.gate.<weight|e_score_correction_bias> : e h, e
                = model.layers.{i}.block_sparse_moe.gate.<weight|e_score_correction_bias> : e h, e
            model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
                = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : m h
            model.layers.{i}.mlp.experts.down_proj : e h m = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h m
            model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
                = model.layers.{i}.block_sparse_moe.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
        """),
        "hf-saved": Variant("hf", over="""
            model.layers.{i}.block_sparse_moe.<gate|up|down>_proj.weight : f h, f h, h f
                = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
        """),
    },
    saved="hf-saved",
    tiny={"num_key_value_heads": 6, "num_experts": 4, "moe_intermediate_size": 5, "num_shared_experts": 2,
          "first_k_dense_replace": 1, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
          "linear_num_heads": 5, "linear_head_dim": 3, "num_experts_per_tok": 2, "pad_token_id": None,
          "bos_token_id": None, "eos_token_id": None},
)  # fmt: skip
