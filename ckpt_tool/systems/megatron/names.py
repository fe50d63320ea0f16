"""Megatron: the mapping rules that decoders share in the dialect `megatron`, as texts from which the families' tables
are built.

The dialect is what our Megatron formats read and write, however a job stored it: layers and experts under global
numbers, experts one by one, norms under the local spec's names, gated fc1 as [gate; up], vocabularies without padding.
Transformer Engine's fused norms, stacked and grouped experts and pipeline stages are handled by the formats
(`systems/megatron/stored_names.py`).

    dialects={"megatron": megatron.DENSE}                                # MODEL + NORMS + ATTENTION + MLP: Llama, Qwen2
    dialects={"megatron": Variant(of=megatron.LATENT, ahead=True)}       # DeepSeek: `ahead` adds the layers of MTP

Axes, by the names that the families give them: v vocabulary, h hidden, f feed-forward, g query groups, r heads per
group, d head, e experts, m feed-forward of an expert, s feed-forward of shared experts; MLA: a query, q and l latent, b
latent and rotary, c keys and values, u heads times values.

Rotary layouts. No family permutes rows: Megatron turns halves as Hugging Face does (Llama, Qwen, Mixtral, GLM-4.5);
with `rotary_interleaved` it turns pairs, as Hugging Face's ERNIE 4.5 and GLM-4 do; in latent attention it pulls the
pairs apart before it turns them, as Hugging Face's `rope_interleave` does. The weights are the same, the arguments
differ.

Sources: megatron-core 0.16.1 `core/transformer/attention.py`, `mlp.py`, `multi_latent_attention.py`, `moe/router.py`,
`moe/shared_experts.py`, `multi_token_prediction.py`, `core/models/common/embeddings/rope_utils.py`; Megatron-LM
`tools/checkpoint/loader_llama_mistral.py`, `loader_mixtral_hf.py`; Megatron-Bridge of August 2026
`models/*/*_bridge.py`. What it does not do: what a model computes (arguments: `rotary_base`,
`moe_router_score_function`, ...).
"""

from __future__ import annotations

import re

from ckpt_tool.families import hub_names as hub


def inside(text: str, root: str = "model.language_model.", head: str = "lm_head", here: str = "language_model.") -> str:
    """Return the rules of a language model that is a part of a larger model.

    Megatron-Bridge puts it under `here`, the hub under `root`, with its `head` (`hub.inside`).

    >>> inside("decoder.final_layernorm.weight : h = model.norm.weight : h")
    'language_model.decoder.final_layernorm.weight : h = model.language_model.norm.weight : h'
    """
    names = r"(?m)^(\s*)(decoder|embedding|mtp|output_layer)\."
    return re.sub(names, rf"\1{here}\2.", hub.inside(text, root, head))


def ahead(text: str) -> str:
    """Return the rules of a decoder's layers as those of Qwen's layer of multi-token prediction (`hub.ahead`).

    >>> ahead("decoder.layers.{i}.input_layernorm.weight : h = model.layers.{i}.input_layernorm.weight : h")
    'mtp.layers.{t}.transformer_layer.input_layernorm.weight : h = mtp.layers.{t}.input_layernorm.weight : h'
    """
    return hub.ahead(text).replace("decoder.layers.{i}.", "mtp.layers.{t}.transformer_layer.")


EMBEDDING = """
    embedding.word_embeddings.weight : v h = model.embed_tokens.weight : v h
    output_layer.weight : v h = lm_head.weight : v h if not tie_word_embeddings?
"""
MODEL = (
    EMBEDDING
    + """
    decoder.final_layernorm.weight : h = model.norm.weight : h
"""
)
TIED = MODEL.replace(
    "if not tie_word_embeddings?", "if tie_word_embeddings? == false"
)  # unless the config says otherwise
NORMS = """
    decoder.layers.{i}.input_layernorm.weight : h = model.layers.{i}.input_layernorm.weight : h
    decoder.layers.{i}.pre_mlp_layernorm.weight : h = model.layers.{i}.post_attention_layernorm.weight : h
"""
# where norms are LayerNorms
NORM_BIASES = """
    decoder.final_layernorm.bias : h = model.norm.bias : h
    decoder.layers.{i}.input_layernorm.bias : h = model.layers.{i}.input_layernorm.bias : h
    decoder.layers.{i}.pre_mlp_layernorm.bias : h = model.layers.{i}.post_attention_layernorm.bias : h
"""
# Query groups: r query heads, then their key, then their value.
ATTENTION = """
    decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
    decoder.layers.{i}.self_attention.linear_proj.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
"""
QKV_BIAS = """
    decoder.layers.{i}.self_attention.linear_qkv.bias : (g (r + 1 + 1) d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
"""
PROJ_BIAS = """
    decoder.layers.{i}.self_attention.linear_proj.bias : h = model.layers.{i}.self_attn.o_proj.bias : h
"""
QK_NORMS = """
    decoder.layers.{i}.self_attention.q_layernorm.weight : d = model.layers.{i}.self_attn.q_norm.weight : d
    decoder.layers.{i}.self_attention.k_layernorm.weight : d = model.layers.{i}.self_attn.k_norm.weight : d
"""
# Gated attention (`attention_output_gate`): a group's query heads, their gates, its key, its value
GATED_ATTENTION = """
    decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + r + 1 + 1) d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r (1 + 1) d) h, (g d) h, (g d) h
    decoder.layers.{i}.self_attention.linear_qkv.bias : (g (r + r + 1 + 1) d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r (1 + 1) d), (g d), (g d)
    decoder.layers.{i}.self_attention.linear_proj.<weight|bias> : h (g r d), h
        = model.layers.{i}.self_attn.o_proj.<weight|bias> : h (g r d), h
"""
# Gated delta net: all heads of a section end to end. Of its tensors only the last norm is zero-centred, hence add(-1).
DELTA_NET_HEADS = """
    decoder.layers.{i}.self_attention.<A_log|dt_bias> : (n p) = model.layers.{i}.linear_attn.<A_log|dt_bias> : (n p)
    decoder.layers.{i}.self_attention.out_proj.weight : h (n p u) = model.layers.{i}.linear_attn.out_proj.weight : h (n p u)
"""
DELTA_NET = (
    DELTA_NET_HEADS
    + """
    decoder.layers.{i}.self_attention.conv1d.weight : (n k + n k + n p u) 1 c
        = model.layers.{i}.linear_attn.conv1d.weight : (n k + n k + n p u) 1 c
    decoder.layers.{i}.self_attention.out_norm.weight : u = model.layers.{i}.linear_attn.norm.weight : u * add(-1)
"""
)
DELTA_NET_APART = """
    decoder.layers.{i}.self_attention.in_proj.weight : (n k + n k + n p u + n p u + n p + n p) h
        = model.layers.{i}.linear_attn.in_proj_<qkv|z|b|a>.weight : (n k + n k + n p u) h, (n p u) h, (n p) h, (n p) h
"""
# The same in mcore-bridge (ms-swift) 1.6.5, `bridge/gpt_bridge.py` (`_set_qkv`, `_set_linear_attn_state`): query and gate
# head by head, a delta net key head by key head, its norm as on the hub. A torch_dist has one key for such a projection,
# but one for each section of core's; our format marks the name. Bare state dicts don't show the difference.
SWIFT = """
    decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r (1 + 1) + 1 + 1) d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r (1 + 1) d) h, (g d) h, (g d) h
    decoder.layers.{i}.self_attention.linear_qkv.bias : (g (r (1 + 1) + 1 + 1) d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r (1 + 1) d), (g d), (g d)
"""
SWIFT_DELTA_NET = """
    decoder.layers.{i}.self_attention.conv1d.[weight_by_head|weight] : (n (k + k + p u)) 1 c
        = model.layers.{i}.linear_attn.conv1d.weight : (n k + n k + n p u) 1 c
    decoder.layers.{i}.self_attention.out_norm.weight : u = model.layers.{i}.linear_attn.norm.weight : u
"""
SWIFT_APART = """
    decoder.layers.{i}.self_attention.in_proj.[weight_by_head|weight] : (n (k + k + p u + p u + p + p)) h
        = model.layers.{i}.linear_attn.in_proj_<qkv|z|b|a>.weight : (n k + n k + n p u) h, (n p u) h, (n p) h, (n p) h
"""
# with `linear_decoupled_in_proj`
SWIFT_DECOUPLED = """
    decoder.layers.{i}.self_attention.in_proj_qkvz.weight : (n (k + k + p u + p u)) h
        = model.layers.{i}.linear_attn.in_proj_<qkv|z>.weight : (n k + n k + n p u) h, (n p u) h
    decoder.layers.{i}.self_attention.in_proj_ba.weight : (n (p + p)) h
        = model.layers.{i}.linear_attn.in_proj_<b|a>.weight : (n p) h, (n p) h
"""
# GLM-4's norms after a module; mcore-bridge stores them inside that module.
SWIFT_GLM4_NORMS = """
    decoder.layers.{i}.self_attention.post_self_attn_layernorm.weight : h
        = model.layers.{i}.post_self_attn_layernorm.weight : h
    decoder.layers.{i}.mlp.post_mlp_layernorm.weight : h = model.layers.{i}.post_mlp_layernorm.weight : h
"""
# Multi-latent attention; without `q_lora_rank` the query has one projection
MLA = """
    decoder.layers.{i}.self_attention.linear_q_proj.weight : a h = model.layers.{i}.self_attn.q_proj.weight : a h
    decoder.layers.{i}.self_attention.linear_q_down_proj.weight : q h = model.layers.{i}.self_attn.q_a_proj.weight : q h
    decoder.layers.{i}.self_attention.linear_q_up_proj.weight : a q = model.layers.{i}.self_attn.q_b_proj.weight : a q
    decoder.layers.{i}.self_attention.q_layernorm.weight : q = model.layers.{i}.self_attn.q_a_layernorm.weight : q
    decoder.layers.{i}.self_attention.linear_kv_down_proj.weight : b h
        = model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight : b h
    decoder.layers.{i}.self_attention.linear_kv_up_proj.weight : c l = model.layers.{i}.self_attn.kv_b_proj.weight : c l
    decoder.layers.{i}.self_attention.kv_layernorm.weight : l = model.layers.{i}.self_attn.kv_a_layernorm.weight : l
    decoder.layers.{i}.self_attention.linear_proj.weight : h u = model.layers.{i}.self_attn.o_proj.weight : h u
    decoder.layers.{i}.self_attention.linear_q_down_proj.bias : q = model.layers.{i}.self_attn.q_a_proj.bias : q
    decoder.layers.{i}.self_attention.linear_kv_down_proj.bias : b
        = model.layers.{i}.self_attn.kv_a_proj_with_mqa.bias : b
    decoder.layers.{i}.self_attention.linear_proj.bias : h = model.layers.{i}.self_attn.o_proj.bias : h
"""
MLP = """
    decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) f) h = model.layers.{i}.mlp.<gate|up>_proj.weight : f h
    decoder.layers.{i}.mlp.linear_fc2.weight : h f = model.layers.{i}.mlp.down_proj.weight : h f
"""
FUSED_MLP = """
    decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) f) h = model.layers.{i}.mlp.gate_up_proj.weight : ((1 + 1) f) h
    decoder.layers.{i}.mlp.linear_fc2.weight : h f = model.layers.{i}.mlp.down_proj.weight : h f
"""
MLP_BIASES = """
    decoder.layers.{i}.mlp.linear_fc1.bias : ((1 + 1) f) = model.layers.{i}.mlp.<gate|up>_proj.bias : f
    decoder.layers.{i}.mlp.linear_fc2.bias : h = model.layers.{i}.mlp.down_proj.bias : h
"""
ROUTER = """
    decoder.layers.{i}.mlp.router.weight : e h = model.layers.{i}.mlp.gate.weight : e h
"""
EXPERT_BIAS = """
    decoder.layers.{i}.mlp.router.expert_bias : e = model.layers.{i}.mlp.gate.e_score_correction_bias : e
"""
EXPERTS = """
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
        = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h m
        = model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
"""
MIXTRAL_EXPERTS = """
    decoder.layers.{i}.mlp.router.weight : e h = model.layers.{i}.block_sparse_moe.gate.weight : e h
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) f) h
        = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h f
        = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
"""
SHARED_EXPERTS = """
    decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) s) h
        = model.layers.{i}.mlp.shared_experts.<gate|up>_proj.weight : s h
    decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h s
        = model.layers.{i}.mlp.shared_experts.down_proj.weight : h s
"""
SHARED_EXPERT = """
    decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) s) h
        = model.layers.{i}.mlp.shared_expert.<gate|up>_proj.weight : s h
    decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h s
        = model.layers.{i}.mlp.shared_expert.down_proj.weight : h s
    decoder.layers.{i}.mlp.shared_experts.gate_weight : 1 h = model.layers.{i}.mlp.shared_expert_gate.weight : 1 h
"""
SHARED_EXPERTS_BIASES = """
    decoder.layers.{i}.mlp.shared_experts.linear_fc1.bias : ((1 + 1) s)
        = model.layers.{i}.mlp.shared_experts.<gate|up>_proj.bias : s
    decoder.layers.{i}.mlp.shared_experts.linear_fc2.bias : h = model.layers.{i}.mlp.shared_experts.down_proj.bias : h
"""
# What MTP layers have in addition to a decoder layer's tensors; `Variant(ahead=True)` renames layers to `mtp.layers`.
# Megatron has one embedding and one output layer for all layers, so the hub's copies are dropped (`_`).
AHEAD = """
    mtp.layers.{i}.<enorm|hnorm>.weight : h = model.layers.{i}.<enorm|hnorm>.weight : h
    mtp.layers.{i}.eh_proj.weight : h w = model.layers.{i}.eh_proj.weight : h w
    mtp.layers.{i}.final_layernorm.weight : h = model.layers.{i}.shared_head.norm.weight : h
    _ : v h = model.layers.{i}.embed_tokens.weight : v h
    _ : v h = model.layers.{i}.shared_head.head.weight : v h
"""
# The same of Qwen's one layer (t = 1): `hub.QWEN_AHEAD`
QWEN_AHEAD = """
    mtp.layers.{t}.eh_proj.weight : h w = mtp.fc.weight : (t h) w
    mtp.layers.{t}.<enorm|hnorm|final_layernorm>.weight : h
        = mtp.<pre_fc_norm_embedding|pre_fc_norm_hidden|norm>.weight : (t h)
"""
# Gemma 2 and 3 in Megatron-Bridge's layer: a norm before and a norm after each of the two modules.
SANDWICH = """
    decoder.layers.{i}.input_layernorm.weight : h = model.layers.{i}.input_layernorm.weight : h
    decoder.layers.{i}.self_attention.linear_proj.post_layernorm.weight : h
        = model.layers.{i}.post_attention_layernorm.weight : h
    decoder.layers.{i}.pre_mlp_layernorm.weight : h = model.layers.{i}.pre_feedforward_layernorm.weight : h
    decoder.layers.{i}.mlp.linear_fc2.post_layernorm.weight : h = model.layers.{i}.post_feedforward_layernorm.weight : h
"""

DENSE = MODEL + NORMS + ATTENTION + MLP
SPARSE = DENSE + ROUTER + EXPERTS
GLM = SPARSE + QKV_BIAS + QK_NORMS + EXPERT_BIAS + SHARED_EXPERTS + AHEAD
GEMMA = TIED + SANDWICH + ATTENTION + QKV_BIAS + PROJ_BIAS + MLP
BIASES = QKV_BIAS + PROJ_BIAS + MLP_BIASES
QWEN_ATTENTION = NORMS + GATED_ATTENTION + QK_NORMS
QWEN_EXPERTS = ROUTER + EXPERTS + SHARED_EXPERT
QWEN35 = MODEL + QWEN_ATTENTION + DELTA_NET + DELTA_NET_APART + QWEN_AHEAD + ahead(QWEN_ATTENTION)
SWIFT35 = SWIFT + ahead(SWIFT) + SWIFT_DELTA_NET + SWIFT_APART
LATENT = MODEL + NORMS + MLA + MLP + ROUTER + EXPERTS + EXPERT_BIAS + SHARED_EXPERTS + AHEAD
# Gemma 4, what the layers of both bridges have. Words of conditions: `hub.GEMMA4_KINDS`
_GEMMA4 = (
    EMBEDDING.replace("if not tie_word_embeddings?", "if tie_word_embeddings? == false")
    + """
    decoder.final_layernorm.weight : h = model.norm.weight : h
    decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h if windowed and own
    decoder.layers.{i}.self_attention.linear_qkv.weight : (gg (gr + 1 + 1) gd) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (gg gr gd) h, (gg gd) h, (gg gd) h
        if not windowed and own and not shared
    decoder.layers.{i}.self_attention.linear_proj.weight : h (g r d)
        = model.layers.{i}.self_attn.o_proj.weight : h (g r d) if windowed
    decoder.layers.{i}.self_attention.linear_proj.weight : h (gg gr gd)
        = model.layers.{i}.self_attn.o_proj.weight : h (gg gr gd) if not windowed
    decoder.layers.{i}.self_attention.<q_layernorm|k_layernorm>.weight : d
        = model.layers.{i}.self_attn.<q_norm|k_norm>.weight : d if windowed and own
    decoder.layers.{i}.self_attention.<q_layernorm|k_layernorm>.weight : gd
        = model.layers.{i}.self_attn.<q_norm|k_norm>.weight : gd if not windowed and own
    decoder.layers.{i}.input_layernorm.weight : h = model.layers.{i}.input_layernorm.weight : h
    decoder.layers.{i}.layer_scalar : 1 = model.layers.{i}.layer_scalar : 1
    decoder.layers.{i}.<per_layer_input_gate|per_layer_projection|post_per_layer_input_norm>.weight : p h, h p, h
        = model.layers.{i}.<per_layer_input_gate|per_layer_projection|post_per_layer_input_norm>.weight : p h, h p, h
"""
)
# In Megatron-Bridge's two kinds of layers, dense and with experts. Keys that are also values are stored twice (`q|k|k`);
# a layer that uses the keys and values of another has zeros there (`_`).
GEMMA4 = (
    _GEMMA4
    + """
    decoder.layers.{i}.self_attention.linear_qkv.weight : (gg (gr + 1 + 1) gd) h
        = model.layers.{i}.self_attn.<q|k|k>_proj.weight : (gg gr gd) h, (gg gd) h, (gg gd) h if not windowed and own and shared
    decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
        = model.layers.{i}.self_attn.q_proj.weight : (g r d) h; _ : (g d) h; _ : (g d) h if windowed and not own
    decoder.layers.{i}.self_attention.linear_qkv.weight : (gg (gr + 1 + 1) gd) h
        = model.layers.{i}.self_attn.q_proj.weight : (gg gr gd) h; _ : (gg gd) h; _ : (gg gd) h if not windowed and not own
    decoder.layers.{i}.self_attention.<q_layernorm|k_layernorm>.weight : d
        = model.layers.{i}.self_attn.q_norm.weight : d; _ : d if windowed and not own
    decoder.layers.{i}.self_attention.<q_layernorm|k_layernorm>.weight : gd
        = model.layers.{i}.self_attn.q_norm.weight : gd; _ : gd if not windowed and not own
    decoder.layers.{i}.post_self_attn_layernorm.weight : h
        = model.layers.{i}.post_attention_layernorm.weight : h if not sparse
    decoder.layers.{i}.pre_mlp_layernorm.weight : h = model.layers.{i}.pre_feedforward_layernorm.weight : h if not sparse
    decoder.layers.{i}.post_mlp_layernorm.weight : h = model.layers.{i}.post_feedforward_layernorm.weight : h if not sparse
    decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) f) h
        = model.layers.{i}.mlp.<gate|up>_proj.weight : f h if not sparse and not wide
    decoder.layers.{i}.mlp.linear_fc2.weight : h f
        = model.layers.{i}.mlp.down_proj.weight : h f if not sparse and not wide
    decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) ff) h
        = model.layers.{i}.mlp.<gate|up>_proj.weight : ff h if not sparse and wide
    decoder.layers.{i}.mlp.linear_fc2.weight : h ff
        = model.layers.{i}.mlp.down_proj.weight : h ff if not sparse and wide
    per_layer_<embedding|model_proj|proj_norm>.weight : vp lp, lp h, p
        = model.<embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm>.weight : vp lp, lp h, p
    decoder.layers.{i}.self_attention.linear_proj.post_layernorm.weight : h
        = model.layers.{i}.post_attention_layernorm.weight : h if sparse
    decoder.layers.{i}.pre_mlp_layernorm.weight : h = model.layers.{i}.pre_feedforward_layernorm_2.weight : h if sparse
    decoder.layers.{i}.pre_shared_expert_layernorm.weight : h
        = model.layers.{i}.pre_feedforward_layernorm.weight : h if sparse
    decoder.layers.{i}.mlp.post_shared_expert_layernorm.weight : h
        = model.layers.{i}.post_feedforward_layernorm_1.weight : h
    decoder.layers.{i}.mlp.post_moe_layernorm.weight : h = model.layers.{i}.post_feedforward_layernorm_2.weight : h
    decoder.layers.{i}.post_ffn_layernorm.weight : h = model.layers.{i}.post_feedforward_layernorm.weight : h if sparse
    decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) f) h
        = model.layers.{i}.mlp.<gate|up>_proj.weight : f h if sparse
    decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h f
        = model.layers.{i}.mlp.down_proj.weight : h f if sparse
    decoder.layers.{i}.mlp.router.<scale|per_expert_scale|weight> : h, e, e h
        = model.layers.{i}.router.<scale|per_expert_scale|proj.weight> : h, e, e h
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
        = model.layers.{i}.experts.gate_up_proj : e ((1 + 1) m) h
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h m = model.layers.{i}.experts.down_proj : e h m
"""
)
# In mcore-bridge 1.6.5, mm_gpts/gemma4.py: a tensor that the hub's layer lacks is absent, and experts are a module of
# their own next to the MLP (`experts_mlp`).
SWIFT_GEMMA4 = (
    _GEMMA4
    + """
    decoder.layers.{i}.self_attention.linear_qkv.weight : (gg (gr + 1) gd) h
        = model.layers.{i}.self_attn.<q|k>_proj.weight : (gg gr gd) h, (gg gd) h if not windowed and own and shared
    decoder.layers.{i}.self_attention.linear_qkv.weight : (g r d) h
        = model.layers.{i}.self_attn.q_proj.weight : (g r d) h if windowed and not own
    decoder.layers.{i}.self_attention.linear_qkv.weight : (gg gr gd) h
        = model.layers.{i}.self_attn.q_proj.weight : (gg gr gd) h if not windowed and not own
    decoder.layers.{i}.self_attention.q_layernorm.weight : d
        = model.layers.{i}.self_attn.q_norm.weight : d if windowed and not own
    decoder.layers.{i}.self_attention.q_layernorm.weight : gd
        = model.layers.{i}.self_attn.q_norm.weight : gd if not windowed and not own
    decoder.layers.{i}.pre_mlp_layernorm.weight : h = model.layers.{i}.pre_feedforward_layernorm.weight : h
    decoder.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
        = model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
    decoder.layers.{i}.<post_feedforward_layernorm_1|post_feedforward_layernorm_2>.weight : h
        = model.layers.{i}.<post_feedforward_layernorm_1|post_feedforward_layernorm_2>.weight : h
    decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) f) h
        = model.layers.{i}.mlp.<gate|up>_proj.weight : f h if not wide
    decoder.layers.{i}.mlp.linear_fc2.weight : h f = model.layers.{i}.mlp.down_proj.weight : h f if not wide
    decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) ff) h = model.layers.{i}.mlp.<gate|up>_proj.weight : ff h if wide
    decoder.layers.{i}.mlp.linear_fc2.weight : h ff = model.layers.{i}.mlp.down_proj.weight : h ff if wide
    decoder.layers.{i}.experts_mlp.<scale|per_expert_scale|router.weight|pre_feedforward_layernorm_2.weight> : h, e, e h, h
        = model.layers.{i}.<router.scale|router.per_expert_scale|router.proj.weight|pre_feedforward_layernorm_2.weight> : h, e, e h, h
    decoder.layers.{i}.experts_mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
        = model.layers.{i}.experts.gate_up_proj : e ((1 + 1) m) h
    decoder.layers.{i}.experts_mlp.experts.local_experts.{e}.linear_fc2.weight : h m
        = model.layers.{i}.experts.down_proj : e h m
    language_model.embed_tokens_per_layer.weight : vp lp = model.embed_tokens_per_layer.weight : vp lp
    language_model.per_layer_<model_projection|projection_norm>.weight : lp h, p
        = model.per_layer_<model_projection|projection_norm>.weight : lp h, p
"""
)
# GLM-5.3-Flash in mcore-bridge 1.6.5, mm_gpts/glm5_next.py (`Glm5NextBridge`) on core's HybridModel: a layer is two, of
# attention and of an MLP, each inside hyper-connections; the layer of MTP is a block of two without those
_OF_ATTENTION = """
input_layernorm.weight : h = input_layernorm.weight : h
self_attention.linear_q_down_proj.weight : q h = self_attn.q_a_proj.weight : q h
self_attention.linear_q_up_proj.weight : a q = self_attn.q_b_proj.weight : a q
self_attention.q_layernorm.weight : q = self_attn.q_a_layernorm.weight : q
self_attention.linear_kv_down_proj.weight : b h = self_attn.kv_a_proj_with_mqa.weight : b h
self_attention.linear_kv_up_proj.weight : c l = self_attn.kv_b_proj.weight : c l
self_attention.kv_layernorm.weight : l = self_attn.kv_a_layernorm.weight : l
self_attention.linear_proj.weight : h u = self_attn.o_proj.weight : h u if not linear
self_attention.<linear_q_down_proj|linear_kv_down_proj|linear_proj>.bias : q, b, h = self_attn.<q_a_proj|kv_a_proj_with_mqa|o_proj>.bias : q, b, h
self_attention.core_attention.indexer.linear_wq_b.weight : (t d) q = self_attn.indexer.wq_b.weight : (t d) q
self_attention.core_attention.indexer.linear_wk.weight : d h = self_attn.indexer.wk.weight : d h
self_attention.core_attention.indexer.linear_weights_proj.weight : t h = self_attn.indexer.weights_proj.weight : t h
self_attention.core_attention.indexer.k_norm.<weight|bias> : d = self_attn.indexer.k_norm.<weight|bias> : d
self_attention.core_attention.indexer.index_kpool_compress_<ape|gate> : p d, d h = self_attn.indexer.index_kpool_compress_<ape|gate> : p d, d h
"""
_OF_MLP = """
pre_mlp_layernorm.weight : h = post_attention_layernorm.weight : h
mlp.linear_fc1.weight : ((1 + 1) f) h = mlp.<gate|up>_proj.weight : f h
mlp.linear_fc2.weight : h f = mlp.down_proj.weight : h f
mlp.router.<weight|expert_bias> : e h, e = mlp.gate.<weight|e_score_correction_bias> : e h, e
mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h = mlp.experts.{e}.<gate|up>_proj.weight : m h
mlp.experts.local_experts.{e}.linear_fc2.weight : h m = mlp.experts.{e}.down_proj.weight : h m
mlp.shared_experts.linear_fc1.weight : ((1 + 1) s) h = mlp.shared_experts.<gate|up>_proj.weight : s h
mlp.shared_experts.linear_fc2.weight : h s = mlp.shared_experts.down_proj.weight : h s
"""


def _sublayer(rules: str, here: str, condition: str) -> str:
    """Return the rules of half a hub layer, one on each line, as those of the Megatron layer `here`.

    `condition` is added to each rule's own conditions.
    """
    sides = (line.split(" = ") for line in rules.strip().splitlines())
    whole = (f"{here}{left} = model.layers.{{i}}.{right}" for left, right in sides)
    return "".join(f"    {line}{' and' if ' if ' in line else ' if'} {condition}\n" for line in whole)


SWIFT_GLM5 = (
    EMBEDDING
    + _sublayer(_OF_ATTENTION, "decoder.layers.{2 * i}.inner_layer.", "i < num_hidden_layers")
    + _sublayer(_OF_MLP, "decoder.layers.{2 * i + 1}.inner_layer.", "i < num_hidden_layers")
    + _sublayer(
        _OF_ATTENTION, "mtp.layers.{i - num_hidden_layers}.transformer_layer.layers.{0}.", "i >= num_hidden_layers"
    )
    + _sublayer(_OF_MLP, "mtp.layers.{i - num_hidden_layers}.transformer_layer.layers.{1}.", "i >= num_hidden_layers")
    + """
    decoder.final_norm.weight : h = model.norm.weight : h
    decoder.layers.{2 * i}.inner_layer.self_attention.in_proj.weight : ((1 + 1 + 1) y z) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (y z) h
    decoder.layers.{2 * i}.inner_layer.self_attention.conv1d.weight : ((1 + 1 + 1) y z) 1 k
        = model.layers.{i}.self_attn.<q|k|v>_conv1d.weight : (y z) 1 k
    decoder.layers.{2 * i}.inner_layer.self_attention.<beta_proj|f_a_proj|f_b_proj|g_a_proj|g_b_proj>.weight : y h, x h, (y z) x, x h, (y z) x
        = model.layers.{i}.self_attn.<b_proj|f_a_proj|f_b_proj|g_a_proj|g_b_proj>.weight : y h, x h, (y z) x, x h, (y z) x
    decoder.layers.{2 * i}.inner_layer.self_attention.<A_log|dt_bias|out_norm.weight> : y, (y z), z
        = model.layers.{i}.self_attn.<A_log|dt_bias|o_norm.weight> : y, (y z), z
    decoder.layers.{2 * i}.inner_layer.self_attention.out_proj.weight : h (y z)
        = model.layers.{i}.self_attn.o_proj.weight : h (y z) if linear
    decoder.layers.{2 * i}.hyper_connection.<mapping_proj.weight|bias> : ha hb, ha = model.layers.{i}.hc_attn_<fn|base> : ha hb, ha
    decoder.layers.{2 * i}.hyper_connection.<alpha_pre|alpha_post|alpha_res> : 1 = model.layers.{i}.hc_attn_scale : (1 + 1 + 1)
    decoder.layers.{2 * i + 1}.hyper_connection.<mapping_proj.weight|bias> : ha hb, ha = model.layers.{i}.hc_ffn_<fn|base> : ha hb, ha
    decoder.layers.{2 * i + 1}.hyper_connection.<alpha_pre|alpha_post|alpha_res> : 1 = model.layers.{i}.hc_ffn_scale : (1 + 1 + 1)
    mtp.layers.{i - num_hidden_layers}.<enorm|hnorm|final_layernorm>.weight : h
        = model.layers.{i}.<enorm|hnorm|shared_head.norm>.weight : h
    mtp.layers.{i - num_hidden_layers}.eh_proj.weight : h w = model.layers.{i}.eh_proj.weight : h w
    _ : v h = model.layers.{i}.embed_tokens.weight : v h
    _ : v h = model.layers.{i}.shared_head.head.weight : v h
"""
)
# DeepSeek V4 in Megatron-Core's dev of 2026-08-21 (`dsv4_hybrid`), as Megatron-Bridge 0.6.2 maps it: an attention with one
# key and value for all heads, each module inside hyper-connections, whose `scale` is three tensors
_V4_LAYER = """
    decoder.layers.{i}.<input_layernorm|pre_mlp_layernorm>.weight : h = layers.{i}.<attn_norm|ffn_norm>.weight : h
    decoder.layers.{i}.self_attention_hyper_connection.<mapping_proj.weight|bias> : z y, z
        = layers.{i}.hc_attn_<fn|base> : z y, z
    decoder.layers.{i}.self_attention_hyper_connection.<alpha_pre|alpha_post|alpha_res> : 1
        = layers.{i}.hc_attn_scale : (1 + 1 + 1)
    decoder.layers.{i}.mlp_hyper_connection.<mapping_proj.weight|bias> : z y, z = layers.{i}.hc_ffn_<fn|base> : z y, z
    decoder.layers.{i}.mlp_hyper_connection.<alpha_pre|alpha_post|alpha_res> : 1 = layers.{i}.hc_ffn_scale : (1 + 1 + 1)
    decoder.layers.{i}.self_attention.<linear_q_down_proj|q_layernorm|linear_q_up_proj>.weight : q h, q, a q
        = layers.{i}.attn.<wq_a|q_norm|wq_b>.weight : q h, q, a q
    decoder.layers.{i}.self_attention.<linear_kv_proj|kv_layernorm>.weight : d h, d
        = layers.{i}.attn.<wkv|kv_norm>.weight : d h, d
    decoder.layers.{i}.self_attention.<linear_o_group_proj|linear_proj.weight> : u w, h u
        = layers.{i}.attn.<wo_a|wo_b>.weight : u w, h u
    decoder.layers.{i}.self_attention.core_attention.attn_sink : n = layers.{i}.attn.attn_sink : n
    decoder.layers.{i}.mlp.router.weight : e h = layers.{i}.ffn.gate.weight : e h
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
        = layers.{i}.ffn.experts.{e}.<w1|w3>.weight : m h
    decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h m
        = layers.{i}.ffn.experts.{e}.w2.weight : h m
    decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) s) h
        = layers.{i}.ffn.shared_experts.<w1|w3>.weight : s h
    decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h s = layers.{i}.ffn.shared_experts.w2.weight : h s
"""
DEEPSEEK_V4 = (
    _V4_LAYER
    + _V4_LAYER.replace("decoder.layers.{i}", "mtp.layers.{t}.transformer_layer").replace("= layers.{i}", "= mtp.{t}")
    + """
    embedding.word_embeddings.weight : v h = embed.weight : v h
    output_layer.weight : v h = head.weight : v h
    decoder.final_layernorm.weight : h = norm.weight : h
    decoder.hc_head_<fn|base|scale> : x y, x, 1 = hc_head_<fn|base|scale> : x y, x, 1
    mtp.layers.{t}.hc_head_<fn|base|scale> : x y, x, 1 = mtp.{t}.hc_head_<fn|base|scale> : x y, x, 1
    decoder.layers.{i}.self_attention.core_attention.compressor.<ape|linear_wkv.weight|linear_wgate.weight|norm.weight> : ca cb, cb h, cb h, d
        = layers.{i}.attn.compressor.<ape|wkv.weight|wgate.weight|norm.weight> : ca cb, cb h, cb h, d if compressed
    decoder.layers.{i}.self_attention.core_attention.indexer.compressor.<ape|linear_wkv.weight|linear_wgate.weight|norm.weight> : cc cd, cd h, cd h, p
        = layers.{i}.attn.indexer.compressor.<ape|wkv.weight|wgate.weight|norm.weight> : cc cd, cd h, cd h, p if sparse
    decoder.layers.{i}.self_attention.core_attention.indexer.<linear_wq_b|linear_weights_proj>.weight : b q, c h
        = layers.{i}.attn.indexer.<wq_b|weights_proj>.weight : b q, c h if sparse
    decoder.layers.{i}.mlp.router.tid2eid : v k = layers.{i}.ffn.gate.tid2eid : v k if hashed
    decoder.layers.{i}.mlp.router.expert_bias : e = layers.{i}.ffn.gate.bias : e if not hashed
    mtp.layers.{t}.transformer_layer.mlp.router.expert_bias : e = mtp.{t}.ffn.gate.bias : e
    mtp.layers.{t}.<enorm|hnorm|final_layernorm|e_proj|h_proj>.weight : h, h, h, h j, h j
        = mtp.{t}.<enorm|hnorm|norm|e_proj|h_proj>.weight : h, h, h, h j, h j
"""
)
