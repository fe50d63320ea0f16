"""Ling 3.0 (Bailing hybrid): Kimi's delta attention with full-rank gates, every sixth layer latent attention with a gate a
head; experts with a bias and shared ones.

transformers 5.23, models/bailing_hybrid and conversion_mapping.py: in memory the names are Llama's, the experts and the three
convolutions are fused (`hf-5`). MTP is layer N of the released files, which transformers leaves out. mcore-bridge 1.6.5 maps
an older model of this `model_type` (Ling 2.5: lightning attention), Megatron-Bridge 0.6.2 none: the hub dialects alone.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="bailing_hybrid",
    classes=(ModelClass("bailing_hybrid", "BailingHybridForCausalLM"),),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size",
        "n": "num_attention_heads", "a": "n * (qk_nope_head_dim + qk_rope_head_dim)", "l": "kv_lora_rank",
        "b": "kv_lora_rank + qk_rope_head_dim", "c": "n * (qk_nope_head_dim + v_head_dim)", "u": "n * v_head_dim",
        "d": "linear_head_dim? or head_dim", "e": "num_experts? or num_local_experts? or n_routed_experts",
        "m": "moe_intermediate_size", "s": "m * (num_shared_experts? or n_shared_experts? or 1)",
    },
    kinds={
        "linear": "layer_types? and layer_types[i] == 'linear_attention'"
                  " or not layer_types? and (i + 1) % (layer_group_size? or 6) != 0",
    },
    hub=hub.FINAL_NORM + hub.NORMS + hub.MLP + hub.ROUTER + hub.EXPERTS + hub.SHARED_EXPERTS + """
        [model.word_embeddings|lm_head].weight : v h
        lm_head.weight ~ model.word_embeddings.weight if tie_word_embeddings?
        model.layers.{i}.mlp.gate.expert_bias : e
        model.layers.{i}.attention.<q|k|v|g|f>_proj.weight : (n d) h if linear
        model.layers.{i}.attention.<q|k|v>_conv1d.weight : (n d) 1 k if linear
        model.layers.{i}.attention.<A_log|dt_bias|b_proj.weight|o_norm.weight> : n, (n d), n h, d if linear
        model.layers.{i}.attention.dense.weight : h (n d) if linear
        model.layers.{i}.attention.<q|g>_proj.weight : a h, n h if not linear
        model.layers.{i}.attention.<kv_a_proj_with_mqa|kv_b_proj|kv_a_layernorm|dense>.weight : b h, c l, l, h u if not linear
        model.layers.{i}.attention.<kv_a_proj_with_mqa|dense>.bias : b, h if not linear
    """,
    dialects={
        "hf-5": hub.FINAL_NORM + hub.NORMS + hub.MLP + hub.ROUTER + hub.SHARED_EXPERTS + """
            model.embed_tokens.weight : v h = model.word_embeddings.weight : v h
            lm_head.weight : v h
            model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
                = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
            model.layers.{i}.mlp.experts.down_proj : e h m = model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
            model.layers.{i}.mlp.gate.e_score_correction_bias : e = model.layers.{i}.mlp.gate.expert_bias : e
            model.layers.{i}.self_attn.<q|k|v|g>_proj.weight : (n d) h
                = model.layers.{i}.attention.<q|k|v|g>_proj.weight : (n d) h if linear
            model.layers.{i}.self_attn.conv1d.weight : ((1 + 1 + 1) n d) 1 k
                = model.layers.{i}.attention.<q|k|v>_conv1d.weight : (n d) 1 k if linear
            model.layers.{i}.self_attn.forget_gate.<f_proj.weight|A_log|dt_bias> : (n d) h, n, (n d)
                = model.layers.{i}.attention.<f_proj.weight|A_log|dt_bias> : (n d) h, n, (n d) if linear
            model.layers.{i}.self_attn.<b_proj|o_norm|o_proj>.weight : n h, d, h (n d)
                = model.layers.{i}.attention.<b_proj|o_norm|dense>.weight : n h, d, h (n d) if linear
            model.layers.{i}.self_attn.<q|g>_proj.weight : a h, n h
                = model.layers.{i}.attention.<q|g>_proj.weight : a h, n h if not linear
            model.layers.{i}.self_attn.<kv_a_proj_with_mqa|kv_b_proj|kv_a_layernorm|o_proj>.weight : b h, c l, l, h u
                = model.layers.{i}.attention.<kv_a_proj_with_mqa|kv_b_proj|kv_a_layernorm|dense>.weight : b h, c l, l, h u
                if not linear
            model.layers.{i}.self_attn.<kv_a_proj_with_mqa|o_proj>.bias : b, h
                = model.layers.{i}.attention.<kv_a_proj_with_mqa|dense>.bias : b, h if not linear
        """,
    },
    unmapped={"megatron": "mcore-bridge maps an older model of this name, Ling 2.5"},
    tiny={"num_key_value_heads": 6, "num_experts": 4, "moe_intermediate_size": 5, "num_shared_experts": 2, "layer_group_size": 2,
          "first_k_dense_replace": 1, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
          "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "pad_token_id": None, "eos_token_id": None},
)  # fmt: skip
