"""Meta: names of Meta's and Mistral AI's own checkpoints, as rules from which the families' tables are built.

    dialects={"meta": meta.MODEL + meta.MLP}            # Llama 1 to 3, Mistral
    dialects={"meta": meta.MODEL + meta.EXPERTS}        # Mixtral, as mistral-inference has it

Rotations. Meta rotates neighbouring rows of a head (2j, 2j + 1), the hub row j of its first half with row j of its
second, so query and key rows that Meta has as (c 2) the hub has as (2 c), c = d / 2. `rope.freqs` is a buffer that
loaders compute themselves: it is dropped, and never written. Meta always has an output layer: a tied one is written out
(`conversion/tied_head.py`). Sources: llama-models (July 2025) `models/llama3/model.py` `apply_rotary_emb`;
mistral-inference 1.6 `transformer_layers.py`, `moe.py`; transformers 4.45 `convert_llama_weights_to_hf.py` `permute`.
What it does not do: shards (`systems/meta/consolidated`).
"""

from __future__ import annotations

# Letters name axes: v vocabulary, h hidden size, g heads of keys, r queries for each of them, d head size
MODEL = """
    tok_embeddings.weight : v h = model.embed_tokens.weight : v h
    output.weight : v h = lm_head.weight : v h
    norm.weight : h = model.norm.weight : h
    rope.freqs : n = _ : n
    layers.{i}.attention.wq.weight : (g r c 2) h = model.layers.{i}.self_attn.q_proj.weight : (g r 2 c) h
    layers.{i}.attention.wk.weight : (g c 2) h = model.layers.{i}.self_attn.k_proj.weight : (g 2 c) h
    layers.{i}.attention.wv.weight : (g d) h = model.layers.{i}.self_attn.v_proj.weight : (g d) h
    layers.{i}.attention.wo.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
    layers.{i}.attention_norm.weight : h = model.layers.{i}.input_layernorm.weight : h
    layers.{i}.ffn_norm.weight : h = model.layers.{i}.post_attention_layernorm.weight : h
"""
MLP = """
    layers.{i}.feed_forward.<w1|w3|w2>.weight : f h, f h, h f
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
EXPERTS = """
    layers.{i}.feed_forward.gate.weight : e h = model.layers.{i}.block_sparse_moe.gate.weight : e h
    layers.{i}.feed_forward.experts.{e}.<w1|w3|w2>.weight : f h, f h, h f
        = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3|w2>.weight : f h, f h, h f
"""
