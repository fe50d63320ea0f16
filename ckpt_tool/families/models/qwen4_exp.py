"""Qwen4-Exp (sees): gated delta nets, every fourth layer gated attention with a sparse indexer, hyper-connections around both
modules and in place of the last norm, experts and a gated shared one, and in some layers embeddings of n-grams in shards.

transformers 5.23, models/qwen4_exp and conversion_mapping.py: in memory experts and the shards are fused (`hf-fused`; shards
of unequal height are refused there). MTP keeps its names. mcore-bridge 1.6.5 (gpts/qwen4_exp.py) maps it to layers of its own, Megatron-Bridge 0.6.2 not at all:
the hub dialects alone.
"""

from ckpt_tool.families import hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="qwen4_exp",
    classes=(ModelClass("qwen4_exp", "Qwen4ExpForConditionalGeneration"),),
    axes={
        **DECODER, "e": "num_experts? or num_local_experts", "m": "moe_intermediate_size", "s": "shared_expert_intermediate_size",
        "x": "linear_num_key_heads", "y": "linear_num_value_heads", "p": "linear_key_head_dim", "q": "linear_value_head_dim",
        "k": "linear_conv_kernel_dim? or 4", "hc": "hc_count? or 4", "hl": "hc_lowrank? or 320", "hh": "hc * h",
        "xa": "indexer_n_heads? or 0", "xb": "indexer_kv_heads? or 1", "xd": "indexer_head_dim? or 0",
        "pe": "ple_embed_dim? or h", "pk": "ple_conv_kernel_size? or 4", "pn": "ngram_size? or 3",
        "ph": "(pn - 1) * (heads_per_ngram? or 8)", "pd": "pe // ph", "shard": "split_ngram_parts? or 512",
    },
    language="text_config",
    own=("pv",),  # n-grams in a shard
    hub=hub.inside(hub.EMBEDDING + hub.QK_NORMS + hub.ROUTER + hub.EXPERTS + """
        model.hyper_connection_mixer.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
        model.layers.{i}.[attn|mlp]_hyper_connection.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
        model.layers.{i}.[attn|mlp]_hyper_connection.block_inject_weight.weight : hc hh
        model.layers.{i}.linear_attn.<A_log|dt_bias|in_proj_a.weight|in_proj_b.weight> : y, y, y h, y h
        model.layers.{i}.linear_attn.<in_proj_qkv|in_proj_z|out_proj|norm>.weight : (x p + x p + y q) h, (y q) h, h (y q), q
        model.layers.{i}.linear_attn.conv1d.weight : (x p + x p + y q) 1 k
        model.layers.{i}.self_attn.<q|k|v|o>_proj.weight : (g r 2 d) h, (g d) h, (g d) h, h (g r d)
        model.layers.{i}.self_attn.indexer.<index_qk_proj|q_layernorm|k_layernorm>.weight : (xa xd + xb xd) h, xd, xd
        model.layers.{i}.mlp.shared_expert.<gate|up|down>_proj.weight : s h, s h, h s
        model.layers.{i}.mlp.shared_expert_gate.weight : 1 h
        model.layers.{i}.ple.<conv1d|key_proj|value_proj|norm_conv|norm_key|norm_query>.weight : hh 1 pk, hh pe, h pe, hh, hh, hh
        model.layers.{i}.ple.ple_embedding.<layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes> : pn, ph, ph
        model.layers.{i}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight : pv pd
    """) + "model.visual.**\n",
    dialects={
        "hf-fused": Variant("hf", over=hub.inside(FUSED_EXPERTS + """
            model.layers.{i}.ple.ple_embedding.ngram_embedding.weight : (shard pv) pd
                = model.layers.{i}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight : pv pd
        """)),
    },
    tiny={"text_config": {"linear_key_head_dim": 3, "linear_value_head_dim": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                          "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7, "num_experts": 4, "num_experts_per_tok": 2,
                          "hc_count": 2, "hc_lowrank": 3, "ple_layer_ids": [1, 3], "ple_embed_dim": 8, "heads_per_ngram": 2,
                          "ngram_vocab_size_base": 7, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2, "indexer_n_heads": 2,
                          "indexer_kv_heads": 1, "indexer_head_dim": 4, "indexer_budget": 4, "indexer_compress_ratio": 2,
                          "num_hidden_layers": 8, "eos_token_id": 1, "pad_token_id": None},
          "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "patch_size": 2, "out_hidden_size": 18,
                            "num_position_embeddings": 16}},
)  # fmt: skip
