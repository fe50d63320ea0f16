"""MaxText: the names and shapes of its trees, as texts that the families' tables are put together of.

    dialects={**maxtext.both(maxtext.MODEL + maxtext.LAYER + maxtext.MLP)}      # maxtext, maxtext-unscanned

Kernels are (inputs, outputs), those of the attention with the heads and their size apart: (hidden, heads, size) of q, k
and v, (heads, size, hidden) of the output. `scan_layers` (its default) stacks the layers of a decoder on axis 1
(`param_scan_axis`), of experts behind the experts; without it each layer has its number, `decoder.layers_0`. DeepSeek's
dense layers and those of experts are apart, each kind numbered from 0; layers of multi-token prediction it has none. Elements
are those of the hub, only turned, but for Llama's and Mixtral's queries: times fp32(1 / sqrt(d)), in fp32 and rounded
once to what they are stored as; back, times fp32(sqrt(d)), which is the same number only where d is a power of 4. Llama
whose rotations are scaled as Llama 3.1's are has neighbouring elements of a head turned, as Meta's files have them.

Not here: Gemma, whose embedding is multiplied by the root of the hidden size and cut or filled up to the vocabulary of
MaxText's own config; its decoders are stacked by kinds of attention. Mistral is Llama without a scaled rotation.

Source: MaxText of August 2026 `checkpoint_conversion/utils/param_mapping.py` (QWEN_*, DEEPSEEK_*, LLAMA31_*, MIXTRAL_*,
`reshape_kernel`, `adjust_rope`, `scale_query_layer`), `to_maxtext.py`; `standalone_scripts/llama_or_mistral_ckpt.py` for
Llama 2 and 3 and Mistral, whose rotations it turns to halves. A family is here if what these functions made of a small
model was equal to ours, byte for byte (`fixtures/make/maxtext_trees.py`).
"""

from __future__ import annotations

import re

SCANNED, UNSCANNED = "maxtext", "maxtext-unscanned"
MODEL = """
    token_embedder.embedding : v h = model.embed_tokens.weight : v h
    decoder.decoder_norm.scale : h = model.norm.weight : h
    decoder.logits_dense.kernel : h v = lm_head.weight : v h
"""
# {} stands for where the layers are: an axis of the shape, or nothing
NORMS = """
    decoder.layers.<pre|post>_self_attention_layer_norm.scale : h {}
        = model.layers.{i}.<input|post_attention>_layernorm.weight : h
"""
ATTENTION = """
    decoder.layers.self_attention.<query|key|value>.kernel : h {} (g r) d, h {} g d, h {} g d
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
    decoder.layers.self_attention.out.kernel : (g r) {} d h = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
"""
QKV_BIAS = """
    decoder.layers.self_attention.<query|key|value>.bias : (g r) {} d, g {} d, g {} d
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
"""
QK_NORMS = """
    decoder.layers.self_attention.<query|key>_norm.scale : d {} = model.layers.{i}.self_attn.<q|k>_norm.weight : d
"""
# Llama's: queries divided by the root of a head's size; with the scaled rotations of Llama 3.1 MaxText turns neighbouring
# elements of a head, else the halves, as the hub does
_SCALED = "(rope_scaling.rope_type? or rope_scaling.type? or rope_parameters.rope_type?) == 'llama3'"
LLAMA = f"""
    decoder.layers.self_attention.query.kernel : h {{}} (g r) (c 2)
        = model.layers.{{i}}.self_attn.q_proj.weight : (g r 2 c) h * over_root(d) if {_SCALED}
    decoder.layers.self_attention.key.kernel : h {{}} g (c 2) = model.layers.{{i}}.self_attn.k_proj.weight : (g 2 c) h if {_SCALED}
    decoder.layers.self_attention.query.kernel : h {{}} (g r) d
        = model.layers.{{i}}.self_attn.q_proj.weight : (g r d) h * over_root(d) if not ({_SCALED})
    decoder.layers.self_attention.key.kernel : h {{}} g d
        = model.layers.{{i}}.self_attn.k_proj.weight : (g d) h if not ({_SCALED})
    decoder.layers.self_attention.value.kernel : h {{}} g d = model.layers.{{i}}.self_attn.v_proj.weight : (g d) h
    decoder.layers.self_attention.out.kernel : (g r) {{}} d h = model.layers.{{i}}.self_attn.o_proj.weight : h (g r d)
"""
MIXTRAL = """
    decoder.layers.self_attention.query.kernel : h {} (g r) d
        = model.layers.{i}.self_attn.q_proj.weight : (g r d) h * over_root(d)
    decoder.layers.self_attention.<key|value>.kernel : h {} g d
        = model.layers.{i}.self_attn.<k|v>_proj.weight : (g d) h
    decoder.layers.self_attention.out.kernel : (g r) {} d h = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
    decoder.layers.MoeBlock_0.gate.kernel : h {} e = model.layers.{i}.block_sparse_moe.gate.weight : e h
    decoder.layers.MoeBlock_0.<wi_0|wi_1|wo> : e {} h f, e {} h f, e {} f h
        = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3|w2>.weight : f h, f h, h f
"""
MLP = """
    decoder.layers.mlp.<wi_0|wi_1|wo>.kernel : h {} f, h {} f, f {} h
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
EXPERTS = """
    decoder.layers.moe_block.gate.kernel : h {} e = model.layers.{i}.mlp.gate.weight : e h
    decoder.layers.moe_block.<wi_0|wi_1|wo> : e {} h m, e {} h m, e {} m h
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
# Of DeepSeek: rules of every layer, and of those with experts
LATENT = """
    decoder.layers.<pre|post>_self_attention_layer_norm.scale : h {}
        = model.layers.{i}.<input|post_attention>_layernorm.weight : h
    decoder.layers.self_attention.<wq_a|wkv_a>.kernel : h {} q, h {} b
        = model.layers.{i}.self_attn.<q_a_proj|kv_a_proj_with_mqa>.weight : q h, b h
    decoder.layers.self_attention.<q|kv>_norm.scale : q {}, l {}
        = model.layers.{i}.self_attn.<q|kv>_a_layernorm.weight : q, l
    decoder.layers.self_attention.wq_b.kernel : q {} k j = model.layers.{i}.self_attn.q_b_proj.weight : (k j) q
    decoder.layers.self_attention.query.kernel : h {} k j = model.layers.{i}.self_attn.q_proj.weight : (k j) h
    decoder.layers.self_attention.wkv_b.kernel : l {} k (y + z)
        = model.layers.{i}.self_attn.kv_b_proj.weight : (k (y + z)) l
    decoder.layers.self_attention.out.kernel : k {} z h = model.layers.{i}.self_attn.o_proj.weight : h (k z)
"""
DEEPSEEK_EXPERTS = """
    decoder.layers.DeepSeekMoeBlock_0.shared_experts.<wi_0|wi_1|wo>.kernel : h {} s, h {} s, s {} h
        = model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
    decoder.layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.kernel : h {} e = model.layers.{i}.mlp.gate.weight : e h
    decoder.layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias : e {}
        = model.layers.{i}.mlp.gate.e_score_correction_bias : e
    decoder.layers.DeepSeekMoeBlock_0.MoeBlock_0.<wi_0|wi_1|wo> : e {} h m, e {} h m, e {} m h
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
DEEPSEEK_AXES = {
    "j": "qk_nope_head_dim + qk_rope_head_dim",
    "o": "first_k_dense_replace",
    "p": "num_hidden_layers - first_k_dense_replace",
}


def _deepseek() -> dict[str, str]:
    """The tables of both dialects of DeepSeek's decoder, whose dense layers and layers of experts are apart, each
    numbered from 0."""
    kinds = (
        ("dense", "o", "{o}", LATENT + MLP),
        ("moe", "p", "{p + first_k_dense_replace}", LATENT + DEEPSEEK_EXPERTS),
    )
    out = {SCANNED: MODEL, UNSCANNED: MODEL}
    for kind, axis, number, text in kinds:
        text = text.replace("model.layers.{i}.", f"model.layers.{number}.")
        apart = re.sub(r" \{\}(?=[ ,\n])", "", text)
        out[SCANNED] += text.replace("decoder.layers.", f"decoder.{kind}_layers.").replace("{}", axis)
        out[UNSCANNED] += apart.replace("decoder.layers.", f"decoder.{kind}_layers_{{{axis}}}.")
    return out


def both(text: str) -> dict[str, str]:
    """The tables of both dialects, of rules with `{}` where the layers are.

    >>> both("decoder.layers.w : h {} = model.layers.{i}.w : h")["maxtext-unscanned"]
    'decoder.layers_{i}.w : h = model.layers.{i}.w : h'
    """
    apart = re.sub(r" \{\}(?=[ ,\n])", "", text).replace("decoder.layers.", "decoder.layers_{i}.")
    return {SCANNED: text.replace("{}", "i"), UNSCANNED: apart}


DEEPSEEK = _deepseek()
