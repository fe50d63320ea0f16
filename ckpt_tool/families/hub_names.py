"""The hub: the rules that decoders share in Hugging Face's unfused names, as texts that the families' tables are put
together of. Blocks and axes have the names of `systems.megatron.names`, which maps most of them.

    hub=hub.DENSE                                                   # Llama without biases
    hub=hub.DENSE + hub.QKV_BIAS + hub.QK_NORMS + hub.PROJ_BIAS     # Qwen3

Source: transformers 5.23, `models/llama`, `qwen3_moe`, `glm4_moe`, `deepseek_v3`: the modules' names, which their
released files have too.
"""

from __future__ import annotations

import re


def inside(text: str, root: str = "model.language_model.", head: str = "lm_head") -> str:
    """The rules of a language model that is a part of another model, where that one has it and its head.

    >>> inside("[model.embed_tokens|lm_head].weight : v h", "language_model.model.", "language_model.lm_head")
    '[language_model.model.embed_tokens|language_model.lm_head].weight : v h'
    """
    names = {"model.": root, "lm_head": head}
    return re.sub(r"(?<![\w.])(model\.|lm_head\b)", lambda found: names[found[1]], text)


def ahead(text: str) -> str:
    """The rules of a decoder's layers as those of Qwen's layer of multi-token prediction.

    >>> ahead("model.layers.{i}.input_layernorm.weight : h")
    'mtp.layers.{t}.input_layernorm.weight : h'
    """
    return text.replace("model.layers.{i}.", "mtp.layers.{t}.")


EMBEDDING = """
    [model.embed_tokens|lm_head].weight : v h
    lm_head.weight ~ model.embed_tokens.weight if tie_word_embeddings?
"""
FINAL_NORM = """
    model.norm.weight : h
"""
MODEL = EMBEDDING + FINAL_NORM
TIED = MODEL.replace("tie_word_embeddings?", "tie_word_embeddings? != false")  # unless the config says otherwise
NORMS = """
    model.layers.{i}.<input|post_attention>_layernorm.weight : h
"""
# where norms are LayerNorms
NORM_BIASES = """
    model.norm.bias : h
    model.layers.{i}.<input|post_attention>_layernorm.bias : h
"""
# a norm before and one after each of the two modules
SANDWICH = """
    model.layers.{i}.<input|post_attention|pre_feedforward|post_feedforward>_layernorm.weight : h
"""
ATTENTION = """
    model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
    model.layers.{i}.self_attn.o_proj.weight : h (g r d)
"""
# multi-latent attention, but for what a layer of another kind calls alike; without `q_lora_rank` the query has one projection
LATENT = """
    model.layers.{i}.self_attn.<q_a_proj|q_b_proj|q_a_layernorm>.weight : q h, a q, q
    model.layers.{i}.self_attn.<kv_a_proj_with_mqa|kv_b_proj|kv_a_layernorm>.weight : b h, c l, l
    model.layers.{i}.self_attn.q_a_proj.bias : q
    model.layers.{i}.self_attn.<kv_a_proj_with_mqa|o_proj>.bias : b, h
"""
MLA = (
    LATENT
    + """
    model.layers.{i}.self_attn.<q|o>_proj.weight : a h, h u
"""
)
# Kimi's delta attention: y heads of z, a gate of rank x, convolutions of k
KDA = """
    model.layers.{i}.self_attn.<q|k|v>_conv1d.weight : (y z) 1 k
    model.layers.{i}.self_attn.<f|g>_a_proj.weight : x h
    model.layers.{i}.self_attn.<f|g>_b_proj.weight : (y z) x
    model.layers.{i}.self_attn.<dt_bias|b_proj.weight|o_norm.weight> : (y z), y h, z
"""
# the same in the memory of transformers 5
KDA_IN_MEMORY = """
    model.layers.{i}.self_attn.conv1d.weight : ((1 + 1 + 1) y z) 1 k
        = model.layers.{i}.self_attn.<q|k|v>_conv1d.weight : (y z) 1 k
    model.layers.{i}.self_attn.forget_gate.<f_a_proj.weight|f_b_proj.weight|dt_bias> : x h, (y z) x, (y z)
        = model.layers.{i}.self_attn.<f_a_proj.weight|f_b_proj.weight|dt_bias> : x h, (y z) x, (y z)
"""
QKV_BIAS = """
    model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
"""
PROJ_BIAS = """
    model.layers.{i}.self_attn.o_proj.bias : h
"""
QK_NORMS = """
    model.layers.{i}.self_attn.<q|k>_norm.weight : d
"""
# over all heads of q and of k at once
WIDE_QK_NORMS = """
    model.layers.{i}.self_attn.<q|k>_norm.weight : (g r d), (g d)
"""
# what files of old versions of transformers hold: made from the config, and mapped nowhere
INV_FREQ = """
    model.layers.{i}.self_attn.rotary_emb.inv_freq : n = _ : n
"""
MLP = """
    model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
# gate and up in one, [gate; up]
FUSED_MLP = """
    model.layers.{i}.mlp.gate_up_proj.weight : ((1 + 1) f) h
    model.layers.{i}.mlp.down_proj.weight : h f
"""
# one after each of the two modules, in GLM-4-0414
GLM4_NORMS = """
    model.layers.{i}.<post_self_attn|post_mlp>_layernorm.weight : h
"""
MLP_BIASES = """
    model.layers.{i}.mlp.<gate|up|down>_proj.bias : f, f, h
"""
ROUTER = """
    model.layers.{i}.mlp.gate.weight : e h
"""
EXPERT_BIAS = """
    model.layers.{i}.mlp.gate.e_score_correction_bias : e
"""
EXPERTS = """
    model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
MIXTRAL_EXPERTS = """
    model.layers.{i}.block_sparse_moe.gate.weight : e h
    model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
    model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
"""
SHARED_EXPERTS = """
    model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
"""
SHARED_EXPERT = """
    model.layers.{i}.mlp.shared_expert.<gate|up|down>_proj.weight : s h, s h, h s
    model.layers.{i}.mlp.shared_expert_gate.weight : 1 h
"""
# Qwen's gated attention: each query head is followed by a gate of the same width
GATED_ATTENTION = """
    model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r (1 + 1) d) h, (g d) h, (g d) h
    model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r (1 + 1) d), (g d), (g d)
    model.layers.{i}.self_attn.o_proj.<weight|bias> : h (g r d), h
"""
# Qwen's gated delta net, but for its input projections: n key heads of k, p value heads of u each, a kernel of c
DELTA_NET = """
    model.layers.{i}.linear_attn.conv1d.weight : (n k + n k + n p u) 1 c
    model.layers.{i}.linear_attn.<A_log|dt_bias> : (n p)
    model.layers.{i}.linear_attn.norm.weight : u
    model.layers.{i}.linear_attn.out_proj.weight : h (n p u)
"""
DELTA_NET_APART = """
    model.layers.{i}.linear_attn.in_proj_<qkv|z|b|a>.weight : (n k + n k + n p u) h, (n p u) h, (n p) h, (n p) h
"""
# what a layer of multi-token prediction has in addition to a decoder layer's tensors
AHEAD = """
    model.layers.{i}.<enorm|hnorm|shared_head.norm>.weight : h
    model.layers.{i}.<embed_tokens|shared_head.head>.weight : v h
    model.layers.{i}.eh_proj.weight : h w
"""
# the same of Qwen's one layer (t = 1), which has a root of its own (`ahead`)
QWEN_AHEAD = """
    mtp.fc.weight : (t h) w
    mtp.<pre_fc_norm_embedding|pre_fc_norm_hidden|norm>.weight : (t h)
"""

DENSE = MODEL + NORMS + ATTENTION + MLP
SPARSE = DENSE + ROUTER + EXPERTS
GEMMA = TIED + SANDWICH + ATTENTION + MLP + QKV_BIAS + PROJ_BIAS
BIASES = QKV_BIAS + PROJ_BIAS + MLP_BIASES
DEEPSEEK = MODEL + NORMS + MLA + MLP + ROUTER + EXPERTS + EXPERT_BIAS + SHARED_EXPERTS + AHEAD
QWEN_ATTENTION = NORMS + GATED_ATTENTION + QK_NORMS
QWEN_EXPERTS = ROUTER + EXPERTS + SHARED_EXPERT
QWEN35 = MODEL + QWEN_ATTENTION + DELTA_NET + DELTA_NET_APART + QWEN_AHEAD + ahead(QWEN_ATTENTION)
# Gemma 4: heads of windowed layers and of full attention differ; full layers may use their keys as values, the last layers
# the keys and values of others; per-layer embeddings, or experts in addition to the MLP
GEMMA4 = (
    TIED
    + SANDWICH
    + """
    model.layers.{i}.self_attn.<q_proj|o_proj|q_norm>.weight : (g r d) h, h (g r d), d if windowed
    model.layers.{i}.self_attn.<k_proj|v_proj|k_norm>.weight : (g d) h, (g d) h, d if windowed and own
    model.layers.{i}.self_attn.<q_proj|o_proj|q_norm>.weight : (gg gr gd) h, h (gg gr gd), gd if not windowed
    model.layers.{i}.self_attn.<k_proj|k_norm>.weight : (gg gd) h, gd if not windowed and own
    model.layers.{i}.self_attn.v_proj.weight : (gg gd) h if not windowed and own and not shared
    model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f if not wide
    model.layers.{i}.mlp.<gate|up|down>_proj.weight : ff h, ff h, h ff if wide
    model.layers.{i}.layer_scalar : 1
    model.layers.{i}.<per_layer_input_gate|per_layer_projection|post_per_layer_input_norm>.weight : p h, h p, h
    model.<embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm>.weight : vp lp, lp h, p
    model.layers.{i}.<post_feedforward_layernorm_1|post_feedforward_layernorm_2|pre_feedforward_layernorm_2>.weight : h
    model.layers.{i}.router.<scale|per_expert_scale|proj.weight> : h, e, e h
    model.layers.{i}.experts.<gate_up_proj|down_proj> : e ((1 + 1) m) h, e h m
"""
)
GEMMA4_KINDS = {
    "windowed": "layer_types[i] == 'sliding_attention'",
    "own": "not num_kv_shared_layers? or i < num_hidden_layers - num_kv_shared_layers",
    "wide": "use_double_wide_mlp? and num_kv_shared_layers? and i >= num_hidden_layers - num_kv_shared_layers",
    "shared": "attention_k_eq_v?",
    "sparse": "enable_moe_block?",
}  # fmt: skip
GEMMA4_AXES = {
    "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size", "ff": "2 * f",
    "g": "num_key_value_heads", "r": "num_attention_heads // g", "d": "head_dim",
    "gd": "global_head_dim? or per_layer_head_dim? or (per_layer_config? and head_dim) or 512",
    "gg": "(attention_k_eq_v? and (num_global_key_value_heads? or per_layer_num_key_value_heads?)) or g",
    "gr": "num_attention_heads // gg",
    "p": "hidden_size_per_layer_input", "lp": "num_hidden_layers * p", "vp": "vocab_size_per_layer_input? or v",
    "e": "num_experts", "m": "moe_intermediate_size",
}  # fmt: skip
