"""MaxText: the names and shapes of its trees, as texts that the families' tables are put together of.

    dialects={**maxtext.both(maxtext.MODEL + maxtext.LAYER + maxtext.MLP)}      # maxtext, maxtext-unscanned

Kernels are (inputs, outputs), those of the attention with the heads and their size apart: (hidden, heads, size) of q, k
and v, (heads, size, hidden) of the output. `scan_layers` (its default) stacks the layers of a decoder on axis 1
(`param_scan_axis`), of experts behind the experts; without it each layer has its number, `decoder.layers_0`. Elements
are those of the hub, only turned: families whose values MaxText changes on the way (Llama and Mixtral, whose queries it
divides by the root of the heads' size; Gemma, whose norms and embedding) are not here.

Source: MaxText of August 2026 `checkpoint_conversion/utils/param_mapping.py` (QWEN_*, `reshape_kernel`,
`reshape_expert_kernel`, `reshape_bias`), `to_maxtext.py`. A family is here if what these functions made of a small
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
MLP = """
    decoder.layers.mlp.<wi_0|wi_1|wo>.kernel : h {} f, h {} f, f {} h
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
EXPERTS = """
    decoder.layers.moe_block.gate.kernel : h {} e = model.layers.{i}.mlp.gate.weight : e h
    decoder.layers.moe_block.<wi_0|wi_1|wo> : e {} h m, e {} h m, e {} m h
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""


def both(text: str) -> dict[str, str]:
    """The tables of both dialects, of rules with `{}` where the layers are.

    >>> both("decoder.layers.w : h {} = model.layers.{i}.w : h")["maxtext-unscanned"]
    'decoder.layers_{i}.w : h = model.layers.{i}.w : h'
    """
    apart = re.sub(r" \{\}(?=[ ,\n])", "", text).replace("decoder.layers.", "decoder.layers_{i}.")
    return {SCANNED: text.replace("{}", "i"), UNSCANNED: apart}
