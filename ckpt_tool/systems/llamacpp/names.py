"""llama.cpp: the names of GGUF files, as texts that the families' tables are put together of.

    dialects={"gguf": gguf.MODEL + gguf.ROTARY + gguf.NORMS + gguf.MLP}      # Llama, Mistral
    dialects={"gguf": gguf.MODEL + gguf.ATTENTION + gguf.QKV_BIAS + ...}     # Qwen2

Rotations. ggml's plain rope rotates neighbouring rows of a head, the hub row j of its first half with row j of its
second: query and key rows of architecture `llama` are (c 2) where the hub has (2 c), c = d / 2. Architectures with
ggml's NEOX rope have the hub's order. Experts are stacked; norms of Gemma are stored as 1 + weight; latent attention has
the two halves of kv_b as separate tensors, that of the keys transposed. `rope_freqs.weight` is computed from the config
(`systems.llamacpp.passes.gguf_metadata`) and has no counterpart on the hub. Layers of multi-token prediction of DeepSeek
are left out, as llama.cpp's converter does (`skip_mtp` in `conversion/deepseek.py`): `Variant.short`.

Sources: llama.cpp of October 2026 `conversion/{base,llama,qwen,gemma,deepseek,phi,gpt_oss}.py` (`modify_tensors`), gguf 0.19.0
`tensor_mapping.py`. A family is here if the output of that converter for a real small model was equal to ours, byte for
byte (`fixtures/make/gguf_models.py`).
"""

from __future__ import annotations

import re

EMBEDDING = """
    token_embd.weight : v h = model.embed_tokens.weight : v h
    output.weight : v h = lm_head.weight : v h
"""
MODEL = (
    EMBEDDING
    + """
    output_norm.weight : h = model.norm.weight : h
"""
)
ROPE_FREQS = """
    rope_freqs.weight : n = _ : n
"""
NORMS = """
    blk.{i}.<attn|ffn>_norm.weight : h = model.layers.{i}.<input|post_attention>_layernorm.weight : h
"""
SANDWICH = """
    blk.{i}.<attn_norm|post_attention_norm|ffn_norm|post_ffw_norm>.weight : h
        = model.layers.{i}.<input|post_attention|pre_feedforward|post_feedforward>_layernorm.weight : h
"""
OUTPUT = """
    blk.{i}.attn_output.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
"""
ATTENTION = (
    OUTPUT
    + """
    blk.{i}.attn_<q|k|v>.weight : (g r d) h, (g d) h, (g d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
"""
)
ROTARY = (
    OUTPUT
    + """
    blk.{i}.attn_q.weight : (g r c 2) h = model.layers.{i}.self_attn.q_proj.weight : (g r 2 c) h
    blk.{i}.attn_k.weight : (g c 2) h = model.layers.{i}.self_attn.k_proj.weight : (g 2 c) h
    blk.{i}.attn_v.weight : (g d) h = model.layers.{i}.self_attn.v_proj.weight : (g d) h
"""
)
ROTARY_BIAS = """
    blk.{i}.attn_q.bias : (g r c 2) = model.layers.{i}.self_attn.q_proj.bias : (g r 2 c)
    blk.{i}.attn_k.bias : (g c 2) = model.layers.{i}.self_attn.k_proj.bias : (g 2 c)
    blk.{i}.attn_v.bias : (g d) = model.layers.{i}.self_attn.v_proj.bias : (g d)
"""
QKV_BIAS = """
    blk.{i}.attn_<q|k|v>.bias : (g r d), (g d), (g d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
"""
PROJ_BIAS = """
    blk.{i}.attn_output.bias : h = model.layers.{i}.self_attn.o_proj.bias : h
"""
QK_NORMS = """
    blk.{i}.attn_<q|k>_norm.weight : d = model.layers.{i}.self_attn.<q|k>_norm.weight : d
"""
MLP = """
    blk.{i}.ffn_<gate|up|down>.weight : f h, f h, h f
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
MLP_BIASES = """
    blk.{i}.ffn_<gate|up|down>.bias : f, f, h = model.layers.{i}.mlp.<gate|up|down>_proj.bias : f, f, h
"""
FUSED_MLP = """
    blk.{i}.ffn_up.weight : ((1 + 1) f) h = model.layers.{i}.mlp.gate_up_proj.weight : ((1 + 1) f) h
    blk.{i}.ffn_down.weight : h f = model.layers.{i}.mlp.down_proj.weight : h f
"""
FUSED_ATTENTION = (
    OUTPUT
    + """
    blk.{i}.attn_qkv.weight : (g r d + g d + g d) h
        = model.layers.{i}.self_attn.qkv_proj.weight : (g r d + g d + g d) h
"""
)
ROUTER = """
    blk.{i}.ffn_gate_inp.weight : e h = model.layers.{i}.mlp.gate.weight : e h
"""
EXPERTS = """
    blk.{i}.ffn_<gate|up|down>_exps.weight : e m h, e m h, e h m
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
MIXTRAL_EXPERTS = """
    blk.{i}.ffn_gate_inp.weight : e h = model.layers.{i}.block_sparse_moe.gate.weight : e h
    blk.{i}.ffn_<gate|up|down>_exps.weight : e f h, e f h, e h f
        = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3|w2>.weight : f h, f h, h f
"""
SHARED_EXPERT = """
    blk.{i}.ffn_<gate|up|down>_shexp.weight : s h, s h, h s
        = model.layers.{i}.mlp.shared_expert.<gate|up|down>_proj.weight : s h, s h, h s
    blk.{i}.ffn_gate_inp_shexp.weight : 1 h = model.layers.{i}.mlp.shared_expert_gate.weight : 1 h
"""
# gpt-oss: gate and up are separate tensors, whose rows the hub interleaves in one
SINKS_AND_EXPERTS = """
    blk.{i}.<attn_norm|post_attention_norm>.weight : h = model.layers.{i}.<input|post_attention>_layernorm.weight : h
    blk.{i}.attn_sinks.weight : (g r) = model.layers.{i}.self_attn.sinks : (g r)
    blk.{i}.ffn_gate_inp.<weight|bias> : e h, e = model.layers.{i}.mlp.router.<weight|bias> : e h, e
    blk.{i}.ffn_<gate|up>_exps.weight : e m h = model.layers.{i}.mlp.experts.gate_up_proj : e h (m (1 + 1))
    blk.{i}.ffn_<gate|up>_exps.bias : e m = model.layers.{i}.mlp.experts.gate_up_proj_bias : e (m (1 + 1))
    blk.{i}.ffn_down_exps.<weight|bias> : e h m, e h
        = model.layers.{i}.mlp.experts.<down_proj|down_proj_bias> : e m h, e h
"""
# Latent attention. Axes: k heads, y elements of a key that are not rotated, z elements of a value
LATENT = """
    blk.{i}.attn_q.weight : a h = model.layers.{i}.self_attn.q_proj.weight : a h
    blk.{i}.<attn_q_a|attn_q_b|attn_q_a_norm>.weight : q h, a q, q
        = model.layers.{i}.self_attn.<q_a_proj|q_b_proj|q_a_layernorm>.weight : q h, a q, q
    blk.{i}.<attn_kv_a_mqa|attn_kv_a_norm|attn_output>.weight : b h, l, h u
        = model.layers.{i}.self_attn.<kv_a_proj_with_mqa|kv_a_layernorm|o_proj>.weight : b h, l, h u
    blk.{i}.attn_k_b.weight : k l y ; blk.{i}.attn_v_b.weight : k z l
        = model.layers.{i}.self_attn.kv_b_proj.weight : (k (y + z)) l
    blk.{i}.exp_probs_b.bias : e = model.layers.{i}.mlp.gate.e_score_correction_bias : e
    blk.{i}.ffn_<gate|up|down>_shexp.weight : s h, s h, h s
        = model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
"""
LATENT_AXES = {"k": "num_attention_heads", "y": "qk_nope_head_dim", "z": "v_head_dim"}

DENSE = MODEL + NORMS + ATTENTION + MLP
SPARSE = DENSE + ROUTER + EXPERTS
GPT_OSS = MODEL + ATTENTION + QKV_BIAS + PROJ_BIAS + SINKS_AND_EXPERTS
DEEPSEEK = MODEL + NORMS + LATENT + MLP + ROUTER + EXPERTS


def centred(text: str) -> str:
    """The same rules for a model whose norms are stored as 1 + weight.

    >>> centred("output_norm.weight : h = model.norm.weight : h")
    'output_norm.weight : h = model.norm.weight : h * add(1)'
    """
    return re.sub(r"(norm\.weight : \w+)(?=\s*$)", r"\1 * add(1)", text, flags=re.MULTILINE)


# Gemma's three generations
GEMMA = centred(MODEL + NORMS) + ATTENTION + MLP
GEMMA2 = centred(MODEL + SANDWICH) + ATTENTION + MLP
GEMMA3 = GEMMA2 + centred(QK_NORMS)
