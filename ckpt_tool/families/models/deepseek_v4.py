"""DeepSeek V4: hyper-connections, one key and value for all heads, compressors of the past, indexers, a table of tokens' experts.

The released names are DeepSeek's own, without a root (Megatron-Bridge 0.6.2, models/deepseek/deepseek_v4_bridge.py).
transformers 5.23, models/deepseek_v4 and conversion_mapping.py: `hf-5` is what it has in memory, `hf-saved` what it saves, which is
neither. It leaves the layers of multi-token prediction unread. Megatron: Megatron-Bridge 0.6.2 with `dsv4_hybrid` of Megatron-Core,
which its dev of 2026-08-21 has, on one tensor-parallel rank, and 0.19.2 has not.
"""

from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

_IN_MEMORY = """
    model.layers.{i}.<input|post_attention>_layernorm.weight : h = layers.{i}.<attn|ffn>_norm.weight : h
    model.layers.{i}.[attn|ffn]_hc.<fn|base|scale> : z y, z, 3 = layers.{i}.hc_[attn|ffn]_<fn|base|scale> : z y, z, 3
    model.layers.{i}.self_attn.<q_a_proj|q_a_norm|q_b_proj>.weight : q h, q, a q = layers.{i}.attn.<wq_a|q_norm|wq_b>.weight : q h, q, a q
    model.layers.{i}.self_attn.<kv_proj|kv_norm>.weight : d h, d = layers.{i}.attn.<wkv|kv_norm>.weight : d h, d
    model.layers.{i}.self_attn.<o_a_proj|o_b_proj>.weight : u w, h u = layers.{i}.attn.<wo_a|wo_b>.weight : u w, h u
    model.layers.{i}.self_attn.sinks : n = layers.{i}.attn.attn_sink : n
    model.layers.{i}.self_attn.compressor.<position_bias|kv_proj.weight|gate_proj.weight|kv_norm.weight> : ca cb, cb h, cb h, d
        = layers.{i}.attn.compressor.<ape|wkv.weight|wgate.weight|norm.weight> : ca cb, cb h, cb h, d if compressed
    model.layers.{i}.self_attn.compressor.indexer.<position_bias|kv_proj.weight|gate_proj.weight|kv_norm.weight> : cc cd, cd h, cd h, p
        = layers.{i}.attn.indexer.compressor.<ape|wkv.weight|wgate.weight|norm.weight> : cc cd, cd h, cd h, p if sparse
    model.layers.{i}.self_attn.compressor.indexer.<q_b_proj|scorer.weights_proj>.weight : b q, c h
        = layers.{i}.attn.indexer.<wq_b|weights_proj>.weight : b q, c h if sparse
    model.layers.{i}.mlp.gate.weight : e h = layers.{i}.ffn.gate.weight : e h
    model.layers.{i}.mlp.gate.tid2eid : v k = layers.{i}.ffn.gate.tid2eid : v k if hashed
    model.layers.{i}.mlp.gate.e_score_correction_bias : e = layers.{i}.ffn.gate.bias : e if not hashed
    model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h = layers.{i}.ffn.experts.{e}.<w1|w3>.weight : m h
    model.layers.{i}.mlp.experts.down_proj : e h m = layers.{i}.ffn.experts.{e}.w2.weight : h m
    model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
        = layers.{i}.ffn.shared_experts.<w1|w3|w2>.weight : s h, s h, h s
    model.embed_tokens.weight : v h = embed.weight : v h
    model.norm.weight : h = norm.weight : h
    model.hc_head.hc_<fn|base|scale> : x y, x, 1 = hc_head_<fn|base|scale> : x y, x, 1
    lm_head.weight : v h = head.weight : v h
"""

FAMILY = Family(
    name="deepseek_v4",
    classes=(ModelClass("deepseek_v4", "DeepseekV4ForCausalLM"),),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "n": "num_attention_heads", "d": "head_dim",
        "a": "n * d", "q": "q_lora_rank", "u": "o_groups * o_lora_rank", "w": "a // o_groups", "c": "index_n_heads",
        "p": "index_head_dim", "b": "c * p", "e": "n_routed_experts", "m": "moe_intermediate_size",
        "s": "m * (n_shared_experts? or 1)", "k": "num_experts_per_tok", "x": "hc_mult", "y": "x * h",
        "z": "(2 + x) * x", "t": "num_nextn_predict_layers? or 1",
    },
    kinds={
        "compressed": "layer_types? and layer_types[i] != 'sliding_attention' or not layer_types? and compress_ratios[i] != 0",
        "sparse": "layer_types? and layer_types[i] == 'compressed_sparse_attention' or not layer_types? and compress_ratios[i] == 4",
        "hashed": "mlp_layer_types? and mlp_layer_types[i] == 'hash_moe' or not mlp_layer_types? and i < num_hash_layers",
    },
    own=("ca", "cb", "cc", "cd"),  # a layer's compressor is as wide, and looks as far back, as the layer's kind
    hub="""
        [embed|head].weight : v h
        norm.weight : h
        hc_head_<fn|base|scale> : x y, x, 1
        [layers.{i}|mtp.{t}].<attn_norm|ffn_norm>.weight : h
        [layers.{i}|mtp.{t}].hc_[attn|ffn]_<fn|base|scale> : z y, z, 3
        [layers.{i}|mtp.{t}].attn.<wq_a|q_norm|wq_b>.weight : q h, q, a q
        [layers.{i}|mtp.{t}].attn.<wkv|kv_norm>.weight : d h, d
        [layers.{i}|mtp.{t}].attn.<wo_a|wo_b>.weight : u w, h u
        [layers.{i}|mtp.{t}].attn.attn_sink : n
        layers.{i}.attn.compressor.<ape|wkv.weight|wgate.weight|norm.weight> : ca cb, cb h, cb h, d if compressed
        layers.{i}.attn.indexer.compressor.<ape|wkv.weight|wgate.weight|norm.weight> : cc cd, cd h, cd h, p if sparse
        layers.{i}.attn.indexer.<wq_b|weights_proj>.weight : b q, c h if sparse
        [layers.{i}|mtp.{t}].ffn.gate.weight : e h
        layers.{i}.ffn.gate.tid2eid : v k if hashed
        layers.{i}.ffn.gate.bias : e if not hashed
        mtp.{t}.ffn.gate.bias : e
        [layers.{i}|mtp.{t}].ffn.experts.{e}.<w1|w3|w2>.weight : m h, m h, h m
        [layers.{i}|mtp.{t}].ffn.shared_experts.<w1|w3|w2>.weight : s h, s h, h s
        mtp.{t}.<enorm|hnorm|norm|e_proj|h_proj>.weight : h, h, h, h j, h j
        mtp.{t}.hc_head_<fn|base|scale> : x y, x, 1
    """,
    dialects={
        "megatron": megatron.DEEPSEEK_V4,
        "hf-5": _IN_MEMORY,
        "hf-saved": Variant("hf", instead="layers.", root="model.layers.", over="""
            model.embed_tokens.weight : v h = embed.weight : v h
            model.norm.weight : h = norm.weight : h
            model.hc_head.hc_<fn|base|scale> : x y, x, 1 = hc_head_<fn|base|scale> : x y, x, 1
            model.layers.{i}.attn.norm.weight : d = layers.{i}.attn.kv_norm.weight : d
        """),
    },
    saved="hf-saved",
    tiny={"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 7,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "o_groups": 2, "o_lora_rank": 3,
          "index_n_heads": 2, "index_head_dim": 10, "hc_mult": 3, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
          "layer_types": ["sliding_attention", "heavily_compressed_attention", *2 * ["compressed_sparse_attention"]]},
)  # fmt: skip
