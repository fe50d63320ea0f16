"""Qwen4-Exp (sees): gated delta nets, every fourth layer gated attention with a sparse indexer, hyper-connections around both
modules and in place of the last norm, experts and a gated shared one, and in some layers embeddings of n-grams in shards.

Released, by mcore-bridge 1.6.5 (gpts/qwen4_exp.py), a layer's experts are in two tensors. transformers 5.23, models/qwen4_exp and
conversion_mapping.py: `hf-split` is what it saves, experts one by one; `hf-5` what it has in memory, shards as one (those of
unequal height are refused there). Megatron: mcore-bridge, in layers of its own; that of MTP wants a Megatron-Core of after 0.19.2
(`e_proj`, `h_proj`). Megatron-Bridge 0.6.2 has none.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, DELTA_NET, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, QWEN_DELTA, QWEN_DELTA_DEFAULTS, ModelClass
from ckpt_tool.systems.megatron import names as megatron

_MIX = """
    model.layers.{i}.[attn|mlp]_hyper_connection.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
    model.layers.{i}.[attn|mlp]_hyper_connection.block_inject_weight.weight : hc hh
    model.layers.{i}.self_attn.indexer.<index_qk_proj|q_layernorm|k_layernorm>.weight : (xa xd + xb xd) h, xd, xd
    model.layers.{i}.mlp.experts.<gate_up_proj|down_proj> : e ((1 + 1) m) h, e h m
"""
_SWIFT_MIX = """
    decoder.layers.{i}.[attn|mlp]_hyper_connection.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
        = model.layers.{i}.[attn|mlp]_hyper_connection.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
    decoder.layers.{i}.[attn|mlp]_hyper_connection.block_inject_weight.weight : hc hh
        = model.layers.{i}.[attn|mlp]_hyper_connection.block_inject_weight.weight : hc hh
    decoder.layers.{i}.self_attention.indexer.<index_qk_proj|q_layernorm|k_layernorm>.weight : (xa xd + xb xd) h, xd, xd
        = model.layers.{i}.self_attn.indexer.<index_qk_proj|q_layernorm|k_layernorm>.weight : (xa xd + xb xd) h, xd, xd
    decoder.layers.{i}.self_attention.linear_proj.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
    decoder.layers.{i}.mlp.experts.local_experts.{e}.<linear_fc1|linear_fc2>.weight : ((1 + 1) m) h, h m
        = model.layers.{i}.mlp.experts.<gate_up_proj|down_proj> : e ((1 + 1) m) h, e h m
"""
_LAYER = hub.GATED_ATTENTION + hub.QK_NORMS + hub.ROUTER + hub.SHARED_EXPERT + _MIX
_SWIFT_LAYER = megatron.SWIFT + megatron.QK_NORMS + megatron.ROUTER + megatron.SHARED_EXPERT + _SWIFT_MIX

FAMILY = Family(
    name="qwen4_exp",
    classes=(
        ModelClass("qwen4_exp", "Qwen4ExpForConditionalGeneration"),
        ModelClass("qwen4_exp_text", "Qwen4ExpTextModel", part=True, keys={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
            forms=(*DECODER_FORMS, "delta_net", "experts", "all_sparse", "softmax", "shared_expert", "qwen4_exp", "ahead"),
            megatron={**QWEN_DELTA, "moe_shared_expert_gate": True, "linear_decoupled_in_proj": True}, unsayable={"attention_bias": False},
            defaults={**QWEN_DELTA_DEFAULTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size":
                      512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001, "norm_topk_prob": True, "hc_count": 4,
                      "hc_lowrank": 320, "ple_embed_dim": 2048, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
                      "ngram_vocab_size_base": 20000000, "split_ngram_parts": 512, "make_ngram_vocab_size_divisible_by": 128, "seed": 1234},
        ),
    ),
    axes={
        **DECODER, **DELTA_NET, "c": "linear_conv_kernel_dim? or 4", "ho": "h", "e": "num_experts? or num_local_experts",
        "m": "moe_intermediate_size", "s": "shared_expert_intermediate_size", "hc": "hc_count? or 4", "hl": "hc_lowrank? or 320", "hh": "hc * h",
        "xa": "indexer_n_heads? or 0", "xb": "indexer_kv_heads? or 1", "xd": "indexer_head_dim? or 0",
        "pe": "ple_embed_dim? or h", "pk": "ple_conv_kernel_size? or 4", "pn": "ngram_size? or 3",
        "ph": "(pn - 1) * (heads_per_ngram? or 8)", "pd": "pe // ph", "shard": "split_ngram_parts? or 512",
    },
    language="text_config",
    saved="hf-split",
    centred=True,
    own=("pv",),  # n-grams in a shard
    hub=hub.inside(hub.EMBEDDING + hub.DELTA_NET + hub.DELTA_NET_APART + _LAYER + hub.ahead(_LAYER) + """
        model.hyper_connection_mixer.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
        model.layers.{i}.ple.<conv1d|key_proj|value_proj|norm_conv|norm_key|norm_query>.weight : hh 1 pk, hh pe, h pe, hh, hh, hh
        model.layers.{i}.ple.ple_embedding.<layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes> : pn, ph, ph
        model.layers.{i}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight : pv pd
        mtp.<fc_embedding|fc_hidden|pre_fc_norm_embedding|pre_fc_norm_hidden>.weight : (t h) ho, (t h) ho, (t h), (t hh)
        mtp.hyper_connection_mixer.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : (t hh), (t hl) hh, (t hh) hl
    """) + "model.visual.**\n",
    dialects={
        "megatron": megatron.inside(
            megatron.EMBEDDING + megatron.DELTA_NET_HEADS + megatron.SWIFT_DELTA_NET + megatron.SWIFT_DECOUPLED + _SWIFT_LAYER
            + megatron.ahead(_SWIFT_LAYER) + """
            decoder.hyper_connection_mixer.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
                = model.hyper_connection_mixer.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
            decoder.layers.{i}.ple.<conv1d|key_proj|value_proj|norm_conv|norm_key|norm_query>.weight : hh 1 pk, hh pe, h pe, hh, hh, hh
                = model.layers.{i}.ple.<conv1d|key_proj|value_proj|norm_conv|norm_key|norm_query>.weight : hh 1 pk, hh pe, h pe, hh, hh, hh
            decoder.layers.{i}.ple.ple_embedding.<layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes> : pn, ph, ph
                = model.layers.{i}.ple.ple_embedding.<layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes> : pn, ph, ph
            decoder.layers.{i}.ple.ple_embedding.ngram_embedding.weight : (shard pv) pd
                = model.layers.{i}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight : pv pd
            mtp.layers.{t}.<e_proj|h_proj|enorm|hnorm>.weight : h ho, h ho, h, hh
                = mtp.<fc_embedding|fc_hidden|pre_fc_norm_embedding|pre_fc_norm_hidden>.weight : (t h) ho, (t h) ho, (t h), (t hh)
            mtp.layers.{t}.hyper_connection_mixer.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : hh, hl hh, hh hl
                = mtp.hyper_connection_mixer.<hc_norm|input_mix_weight_down|input_mix_weight_up>.weight : (t hh), (t hl) hh, (t hh) hl
        """) + "visual.visual.** = model.visual.**\n",
        "hf-split": Variant("hf", over=hub.inside("""
            model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h = model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
            model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m = model.layers.{i}.mlp.experts.down_proj : e h m
        """)),
        "hf-5": Variant("hf", over=hub.inside("""
            model.layers.{i}.ple.ple_embedding.ngram_embedding.weight : (shard pv) pd
                = model.layers.{i}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight : pv pd
        """)),
    },
    tiny={"text_config": {"linear_key_head_dim": 3, "linear_value_head_dim": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                          "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7, "num_experts": 4, "num_experts_per_tok": 2,
                          "hc_count": 2, "hc_lowrank": 3, "ple_layer_ids": [1, 3], "ple_embed_dim": 8, "heads_per_ngram": 2,
                          "ngram_vocab_size_base": 7, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2,
                          "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
                          "indexer_compress_ratio": 2, "num_hidden_layers": 8, "eos_token_id": 1, "pad_token_id": None},
          "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "patch_size": 2, "out_hidden_size": 18,
                            "num_position_embeddings": 16}},
)  # fmt: skip
