"""Gemma's own library for JAX: names of its trees, as rules from which the families' tables are built.

    dialects={"gemma": gemma_library.GEMMA3}

The released trees are flat, one key for a module; trees that the library itself saves are nested, without `w` in the
MLP. Both are read; the flat form is written, which the library loads as well:

    transformer/layer_0/attn/q_einsum.w, transformer/layer_0/mlp/linear.w      layer_0.attn.q_einsum.w, layer_0.mlp.linear

Einsums have an axis for the heads. If each head has its own keys, q, k and v are one tensor, else k and v are. Norms are
the hub's, stored without the 1 that is added. `transpose_gating_einsum` transposes gate and up: in all of Gemma 3, and
in Gemma 2 except its 2B. There is no output head: it is tied to the embedding.

Sources: gemma of July 2026 `gm/nn/_modules.py`, `_gemma.py`, `gm/ckpts/_compat.py`; transformers 5 of 2025
`models/gemma3/convert_gemma3_weights.py` (`convert_transformer_weights`). Proof: `fixtures/make/gemma_trees.py`.
What it does not do: the vision encoder, whose embedding the hub makes 64 rows longer; layers stacked by kind of attention
(`stacked_layers/attention_type_0`); quantised trees.
"""

from __future__ import annotations

from ckpt_tool.families.base import OWN_KEYS, SHARED_KEYS

MODEL = f"""
    transformer/embedder.input_embedding : v h = model.embed_tokens.weight : v h
    transformer/final_norm.scale : h = model.norm.weight : h
    transformer/layer_{{i}}/attn/q_einsum.w : (g r) h d = model.layers.{{i}}.self_attn.q_proj.weight : (g r d) h if {SHARED_KEYS}
    transformer/layer_{{i}}/attn/kv_einsum.w : (1 + 1) g h d
        = model.layers.{{i}}.self_attn.<k|v>_proj.weight : (g d) h if {SHARED_KEYS}
    transformer/layer_{{i}}/attn/qkv_einsum.w : (1 + 1 + 1) g h d
        = model.layers.{{i}}.self_attn.<q|k|v>_proj.weight : (g d) h if {OWN_KEYS}
    transformer/layer_{{i}}/attn/attn_vec_einsum.w : (g r) d h = model.layers.{{i}}.self_attn.o_proj.weight : h (g r d)
    transformer/layer_{{i}}/mlp/linear.w : f h = model.layers.{{i}}.mlp.down_proj.weight : h f
"""
NORMS = """
    transformer/layer_{i}/<pre_attention|pre_ffw>_norm.scale : h
        = model.layers.{i}.<input|post_attention>_layernorm.weight : h
"""
SANDWICH = """
    transformer/layer_{i}/<pre_attention|post_attention|pre_ffw|post_ffw>_norm.scale : h
        = model.layers.{i}.<input|post_attention|pre_feedforward|post_feedforward>_layernorm.weight : h
"""
QK_NORMS = """
    transformer/layer_{i}/attn/<_query|_key>_norm.scale : d = model.layers.{i}.self_attn.<q|k>_norm.weight : d
"""
GATE = """
    transformer/layer_{i}/mlp/gating_einsum.w : (1 + 1) h f = model.layers.{i}.mlp.<gate|up>_proj.weight : f h
"""
TURNED_GATE = GATE.replace("h f =", "f h =")
# The library's class for Gemma 2 2B alone does not transpose; its hidden size of 2304 is unique
GATE_BY_SIZE = GATE.replace(" : f h", " : f h if hidden_size == 2304") + TURNED_GATE.replace(
    " : f h\n", " : f h if hidden_size != 2304\n"
)


def _both(text: str) -> str:
    """The rules of flat trees, followed by the same rules for nested ones.

    >>> _both("transformer/layer_{i}/mlp/linear.w : f h = b : f h")
    'transformer/layer_{i}/mlp/linear.w : f h = b : f h\\nlayer_{i}.mlp.linear : f h = b : f h'
    """
    nested = text.replace("transformer/", "").replace("/", ".")
    for each in ("mlp.linear", "mlp.gating_einsum"):
        nested = nested.replace(f"{each}.w", each)
    return f"{text}\n{nested}"


GEMMA = _both(MODEL + NORMS + GATE)
GEMMA2 = _both(MODEL + SANDWICH + GATE_BY_SIZE)
GEMMA3 = _both(MODEL + SANDWICH + QK_NORMS + TURNED_GATE)
