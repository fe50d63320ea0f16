"""MaxText: names and shapes of its trees, as rules from which the families' tables are built.

    dialects=maxtext.both(maxtext.MODEL + maxtext.LAYER + maxtext.MLP)      # maxtext, maxtext-unscanned

Kernels are (inputs, outputs); those of the attention have separate axes for the heads and their size: (hidden, heads,
size) for q, k and v, (heads, size, hidden) for the output. `scan_layers` (its default) stacks the layers of a decoder on
axis 1 (`param_scan_axis`), for experts after the axis of experts; without it each layer has its number,
`decoder.layers_0`. If a model has layers of several kinds, MaxText stacks those at the same place of a cycle (`cycles`),
pairs of them (Gemma 2), or each kind separately (DeepSeek, Gemma 4); layers after the last complete cycle are not
stacked. MaxText has no layers of multi-token prediction.

Values are those of the hub, only transposed, except
- queries of Llama, Mixtral and Gemma 2: times fp32(1 / sqrt(d)), in fp32 and rounded once to the stored dtype; back,
  times fp32(sqrt(d)), which is the same number only if d is a power of 4;
- embeddings of Gemma 2 to 4: times the root of the hidden size, in Gemma 3 that root rounded to bf16; back, divided by
  it;
- norms of Gemma 2 and 3: the hub's plus 1, in fp32 whatever the dtype of the others.
A Llama with the scaled rope of Llama 3.1 pairs neighbouring elements of a head, as Meta's files do.

The vocabulary has the length in MaxText's own config (Gemma 2 256,128 where the hub has 256,000, Gemma 3 262,144 where
models with vision have 262,208), which no checkpoint states: it is given by `--vocab-size`. Mistral is Llama without a
scaled rope.

Source: MaxText of August 2026 `checkpoint_conversion/utils/param_mapping.py`, `to_maxtext.py`, `to_huggingface.py`;
`standalone_scripts/llama_or_mistral_ckpt.py` for Llama 2 and 3 and Mistral, whose rotated pairs it reorders to halves. A
family is here if the output of these functions for a small model was equal to ours, byte for byte
(`fixtures/make/maxtext_trees.py`, and `maxtext_models.py`, which builds MaxText's own models too).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Variant

SCANNED = "maxtext"
UNSCANNED = "maxtext-unscanned"
MODEL = """
    token_embedder.embedding : v h = model.embed_tokens.weight : v h
    decoder.decoder_norm.scale : h = model.norm.weight : h
    decoder.logits_dense.kernel : h v = lm_head.weight : v h
"""
# In all rules below, {} is replaced by the axes along which layers are stacked, or by nothing (`MaxtextLayers.rules`)
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
# For families in which the config decides whether there are biases
SOME_QKV_BIAS = QKV_BIAS.rstrip() + " if attention_bias?\n"
QK_NORMS = """
    decoder.layers.self_attention.<query|key>_norm.scale : d {} = model.layers.{i}.self_attn.<q|k>_norm.weight : d
"""
# Llama: queries are divided by the root of a head's size. With the scaled rope of Llama 3.1 MaxText rotates pairs of
# neighbouring elements of a head, else pairs of the two halves, as the hub does.
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
# DeepSeek: LATENT has the rules of every layer, DEEPSEEK_EXPERTS those of layers with experts
LATENT = """
    decoder.layers.<pre|post>_self_attention_layer_norm.scale : h {}
        = model.layers.{i}.<input|post_attention>_layernorm.weight : h
    decoder.layers.self_attention.wq_a.kernel : h {} q = model.layers.{i}.self_attn.q_a_proj.weight : q h if q_lora_rank?
    decoder.layers.self_attention.q_norm.scale : q {} = model.layers.{i}.self_attn.q_a_layernorm.weight : q if q_lora_rank?
    decoder.layers.self_attention.wq_b.kernel : q {} heads qd = model.layers.{i}.self_attn.q_b_proj.weight : (heads qd) q if q_lora_rank?
    decoder.layers.self_attention.query.kernel : h {} heads qd = model.layers.{i}.self_attn.q_proj.weight : (heads qd) h if not q_lora_rank?
    decoder.layers.self_attention.wkv_a.kernel : h {} b = model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight : b h
    decoder.layers.self_attention.kv_norm.scale : l {} = model.layers.{i}.self_attn.kv_a_layernorm.weight : l
    decoder.layers.self_attention.wkv_b.kernel : l {} heads (nope + vd)
        = model.layers.{i}.self_attn.kv_b_proj.weight : (heads (nope + vd)) l
    decoder.layers.self_attention.out.kernel : heads {} vd h = model.layers.{i}.self_attn.o_proj.weight : h (heads vd)
"""
INDEXER = """
    decoder.layers.self_attention.indexer.<wq_b|wk|weights_proj>.kernel : q {} x y, h {} y, h {} x
        = model.layers.{i}.self_attn.indexer.<wq_b|wk|weights_proj>.weight : (x y) q, y h, x h
    decoder.layers.self_attention.indexer.k_norm.<scale|bias> : y {}
        = model.layers.{i}.self_attn.indexer.k_norm.<weight|bias> : y
"""
DEEPSEEK_EXPERTS = """
    decoder.layers.DeepSeekMoeBlock_0.shared_experts.<wi_0|wi_1|wo>.kernel : h {} s, h {} s, s {} h
        = model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
    decoder.layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.kernel : h {} e = model.layers.{i}.mlp.gate.weight : e h
    decoder.layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias : e {}
        = model.layers.{i}.mlp.gate.e_score_correction_bias : e if model_type? != 'deepseek_v2'
    decoder.layers.DeepSeekMoeBlock_0.MoeBlock_0.<wi_0|wi_1|wo> : e {} h m, e {} h m, e {} m h
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
# Sizes of axes from the config; o and p count the dense layers and those with experts
DEEPSEEK_AXES = {
    "heads": "num_attention_heads",
    "nope": "qk_nope_head_dim",
    "vd": "v_head_dim",
    "qd": "qk_nope_head_dim + qk_rope_head_dim",
    "o": "first_k_dense_replace",
    "p": "num_hidden_layers - first_k_dense_replace",
}
# Gemma 2, 3 and 4. `@` is replaced by _local or _global, as one layer of MaxText holds two of Gemma 2
TIED = """
    token_embedder.embedding : v h = model.embed_tokens.weight : v h * embed_scale(h)
    decoder.decoder_norm.scale : h = model.norm.weight : h
"""
# Norms stored as 1 + weight, in fp32
CENTRED = TIED.replace("norm.weight : h", "norm.weight : h * add_wide(1)")
SANDWICH = """
    decoder.layers.<pre_self_attention|post_self_attention|pre_ffw|post_ffw>_norm@.scale : h {}
        = model.layers.{i}.<input|post_attention|pre_feedforward|post_feedforward>_layernorm.weight : h * add_wide(1)
"""
GEMMA_MLP = MLP.replace(".mlp.<wi_0", ".mlp@.<wi_0")
GEMMA2_LAYER = (
    SANDWICH
    + GEMMA_MLP
    + """
    decoder.layers.self_attention@.query.kernel : h {} (g r) d
        = model.layers.{i}.self_attn.q_proj.weight : (g r d) h * over_root(d)
    decoder.layers.self_attention@.<key|value>.kernel : h {} g d, h {} g d
        = model.layers.{i}.self_attn.<k|v>_proj.weight : (g d) h
    decoder.layers.self_attention@.out.kernel : (g r) {} d h = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
"""
)
GPT_OSS_LAYER = (
    NORMS
    + (ATTENTION + QKV_BIAS).replace(".self_attention.", ".GptOssAttention.")
    + """
    decoder.layers.GptOssAttention.<out.bias|sinks> : h {}, (g r) {}
        = model.layers.{i}.self_attn.<o_proj.bias|sinks> : h, (g r)
    decoder.layers.GptOssMlp.gate.<kernel|bias> : h {} e, e {} = model.layers.{i}.mlp.router.<weight|bias> : e h, e
    decoder.layers.GptOssMlp.<wi_0|wi_1> : e {} h m = model.layers.{i}.mlp.experts.gate_up_proj : e h (m (1 + 1))
    decoder.layers.GptOssMlp.<wi_0_bias|wi_1_bias> : e {} m = model.layers.{i}.mlp.experts.gate_up_proj_bias : e (m (1 + 1))
    decoder.layers.GptOssMlp.<wo|wo_bias> : e {} m h, e {} h
        = model.layers.{i}.mlp.experts.<down_proj|down_proj_bias> : e m h, e h
"""
)
OLMO3_LAYER = (
    ATTENTION.replace(".self_attention.", ".attention.")
    + MLP
    + """
    decoder.layers.attention.<query|key>_norm.scale : (g r d) {}, (g d) {}
        = model.layers.{i}.self_attn.<q|k>_norm.weight : (g r d), (g d)
    decoder.layers.<post_self_attention|post_mlp>_layer_norm.scale : h {}
        = model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
"""
)
# Qwen's hybrids. `turn` is the axis that determines which layers have full attention (`MaxtextLayers.turn`)
QWEN_HYBRID = """
    decoder.layers.<input|post_attention>_layernorm.scale : h {}
        = model.layers.{i}.<input|post_attention>_layernorm.weight : h
    decoder.layers.attention.attention.<query|key|value>.kernel : h {} (g r) ((1 + 1) d), h {} g d, h {} g d
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r (1 + 1) d) h, (g d) h, (g d) h if (turn + 1) % interval == 0
    decoder.layers.attention.attention.out.kernel : (g r d) {} h
        = model.layers.{i}.self_attn.o_proj.weight : h (g r d) if (turn + 1) % interval == 0
    decoder.layers.attention.attention.<query|key>_norm.scale : d {}
        = model.layers.{i}.self_attn.<q|k>_norm.weight : d if (turn + 1) % interval == 0
    decoder.layers.attention.conv1d.kernel : c {} 1 (n k + n k + n p u)
        = model.layers.{i}.linear_attn.conv1d.weight : (n k + n k + n p u) 1 c if (turn + 1) % interval != 0
    decoder.layers.attention.<A_log|dt_bias> : (n p) {}
        = model.layers.{i}.linear_attn.<A_log|dt_bias> : (n p) if (turn + 1) % interval != 0
    decoder.layers.attention.norm.rms_norm.scale : u {}
        = model.layers.{i}.linear_attn.norm.weight : u if (turn + 1) % interval != 0
    decoder.layers.attention.out_proj.kernel : (n p u) {} h
        = model.layers.{i}.linear_attn.out_proj.weight : h (n p u) if (turn + 1) % interval != 0
    decoder.layers.mlp.routed_experts.gate.kernel : h {} e = model.layers.{i}.mlp.gate.weight : e h
    decoder.layers.mlp.shared_expert.<wi_0|wi_1|wo>.kernel : h {} s, h {} s, s {} h
        = model.layers.{i}.mlp.shared_expert.<gate|up|down>_proj.weight : s h, s h, h s
    decoder.layers.mlp.shared_expert_gate.kernel : h {} 1 = model.layers.{i}.mlp.shared_expert_gate.weight : 1 h
"""
QWEN3_NEXT_LAYER = (
    QWEN_HYBRID
    + """
    decoder.layers.attention.in_proj_<qkvz|ba>.kernel : h {} (n (k + k + p u + p u)), h {} (n (p + p))
        = model.layers.{i}.linear_attn.in_proj_<qkvz|ba>.weight : (n (k + k + p u + p u)) h, (n (p + p)) h
        if (turn + 1) % interval != 0
    decoder.layers.mlp.routed_experts.<wi_0|wi_1|wo> : e {} h m, e {} h m, e {} m h
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
)
QWEN35_EXPERTS_LAYER = (
    QWEN_HYBRID
    + """
    decoder.layers.attention.in_proj_qkvz.kernel : h {} (n (k + k + p u + p u))
        = model.layers.{i}.linear_attn.in_proj_<qkv|z>.weight : (n k + n k + n p u) h, (n p u) h if (turn + 1) % interval != 0
    decoder.layers.attention.in_proj_ba.kernel : h {} (n (p + p))
        = model.layers.{i}.linear_attn.in_proj_<b|a>.weight : (n p) h if (turn + 1) % interval != 0
    decoder.layers.mlp.routed_experts.<wi_0|wi_1> : e {} h m
        = model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
    decoder.layers.mlp.routed_experts.wo : e {} m h = model.layers.{i}.mlp.experts.down_proj : e h m
"""
)
# Gemma 4, whose norms include the 1 on the hub too. KIND, OWN and VALUE are replaced by conditions that depend on where
# the layers are stored; G, R and D by axes of the heads, which differ in global layers.
GEMMA4_HEADS = """
    decoder.layers.self_attention.<query.kernel|query_norm.scale> : h {} (G R) D, D {}
        = model.layers.{i}.self_attn.<q_proj|q_norm>.weight : (G R D) h, D if KIND
    decoder.layers.self_attention.out.kernel : (G R) {} D h = model.layers.{i}.self_attn.o_proj.weight : h (G R D) if KIND
    decoder.layers.self_attention.<key.kernel|key_norm.scale> : h {} G D, D {}
        = model.layers.{i}.self_attn.<k_proj|k_norm>.weight : (G D) h, D if KIND and OWN
    decoder.layers.self_attention.value.kernel : h {} G D
        = model.layers.{i}.self_attn.v_proj.weight : (G D) h if KIND and OWN and VALUE
"""
GEMMA4_LAYER = (
    SANDWICH.replace("@", "").replace(" * add_wide(1)", "")
    + """
    decoder.layers.layer_scalar : 1 {} = model.layers.{i}.layer_scalar : 1
    decoder.layers.mlp.<wi_0|wi_1|wo>.kernel : h {} f, h {} f, f {} h
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f if not WIDE and not sparse
    decoder.layers.mlp.moe_block.shared_experts.<wi_0|wi_1|wo>.kernel : h {} f, h {} f, f {} h
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f if sparse
    decoder.layers.mlp.<post_feedforward_layernorm_1|post_feedforward_layernorm_2|pre_feedforward_layernorm_2>.scale : h {}
        = model.layers.{i}.<post_feedforward_layernorm_1|post_feedforward_layernorm_2|pre_feedforward_layernorm_2>.weight : h if sparse
    decoder.layers.mlp.pre_forward_scale_2 : h {} = model.layers.{i}.router.scale : h if sparse
    decoder.layers.mlp.moe_block.MoeBlock_0.<per_expert_scale|gate.kernel> : e {}, h {} e
        = model.layers.{i}.router.<per_expert_scale|proj.weight> : e, e h if sparse
    decoder.layers.mlp.moe_block.MoeBlock_0.<wi_0|wi_1> : e {} h m
        = model.layers.{i}.experts.gate_up_proj : e ((1 + 1) m) h if sparse
    decoder.layers.mlp.moe_block.MoeBlock_0.wo : e {} m h = model.layers.{i}.experts.down_proj : e h m if sparse
"""
)
GEMMA4_SMALL = """
    decoder.layers_{i}.mlp.<wi_0|wi_1|wo>.kernel : h ff, h ff, ff h
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : ff h, ff h, h ff if wide
    decoder.layers_{i}.<per_layer_input_gate|per_layer_projection>.kernel : h p, p h
        = model.layers.{i}.<per_layer_input_gate|per_layer_projection>.weight : p h, h p if hidden_size_per_layer_input?
    decoder.layers_{i}.post_per_layer_input_norm.scale : h
        = model.layers.{i}.post_per_layer_input_norm.weight : h if hidden_size_per_layer_input?
    decoder.per_layer_embedder.embed_tokens_per_layer : vp lp = model.embed_tokens_per_layer.weight : vp lp
        if hidden_size_per_layer_input?
    decoder.per_layer_embedder.per_layer_model_projection.kernel : h lp = model.per_layer_model_projection.weight : lp h
        if hidden_size_per_layer_input?
    decoder.per_layer_embedder.per_layer_projection_norm.scale : p = model.per_layer_projection_norm.weight : p
        if hidden_size_per_layer_input?
"""
GEMMA3_LAYER = (SANDWICH + MLP + ATTENTION).replace("@", "") + QK_NORMS.replace(
    "weight : d", "weight : d * add_wide(1)"
)


class MaxtextLayers(NamedTuple):
    """A place in MaxText's tree where layers are stored."""

    at: str  # prefix of their names
    number: str  # the number of the hub's layer, as an expression of the axes
    stacked: str = ""  # the axes along which layers are stacked in each tensor, "" if they are not
    turn: str = "i"  # the axis that replaces the word `turn` in a condition

    def rules(self, text: str) -> str:
        """The rules `text` of a layer, adapted to the layers at this place.

        >>> MaxtextLayers("decoder.layers.", "{2 * cycle}", "cycle").rules("decoder.layers.w : h {} = model.layers.{i}.w : h")
        'decoder.layers.w : h cycle = model.layers.{2 * cycle}.w : h'
        """
        text = text.replace("model.layers.{i}.", f"model.layers.{self.number}.").replace("decoder.layers.", self.at)
        text = re.sub(r"\bturn\b", self.turn, text)
        return text.replace("{}", self.stacked) if self.stacked else re.sub(r" \{\}(?=[ ,\n])", "", text)


ALL = MaxtextLayers("decoder.layers.", "{i}", "i")  # `scan_layers`
EACH = MaxtextLayers("decoder.layers_{i}.", "{i}")  # without it


def trees(scanned: str, unscanned: str) -> dict[str, Variant]:
    """The variants of both dialects. Their tables are exact: they name every tensor that the model has."""
    return {SCANNED: Variant(scanned, exact=True), UNSCANNED: Variant(unscanned, exact=True)}


def both(model: str, layer: str) -> dict[str, Variant]:
    """The variants of both dialects for a decoder whose layers are all of one kind."""
    return trees(model + ALL.rules(layer), model + EACH.rules(layer))


def cycles(
    model: str, layer: str, length: int | str, name: str = "layers", *, rest: bool = False
) -> dict[str, Variant]:
    """The variants of both dialects for a decoder whose kinds of layers alternate in a cycle.

    Layers at the same place of the cycle are stacked. The axes in the rules are those of `IN_SIXES` and the like.

    Args:
        model: Rules outside of layers.
        layer: Rules of a layer.
        length: Layers of a cycle.
        name: What MaxText calls a place in the cycle.
        rest: The number of layers need not be a multiple of `length`; the remaining ones are not stacked.
    """
    turns = MaxtextLayers(f"decoder.layers.{name}_{{place}}.", f"{{{length} * cycle + place}}", "cycle", "place")
    scanned = model + turns.rules(layer)
    if rest:
        behind = MaxtextLayers("decoder.layers_remainder.layers_{after}.", "{num_hidden_layers - rest + after}")
        scanned += behind.rules(layer)
    return trees(scanned, model + EACH.rules(layer))


def _axes(length: str) -> dict[str, str]:
    """The sizes of the axes of `cycles` and of Gemma 4's blocks, for cycles of `length` layers."""
    rest = "num_hidden_layers % interval"
    cycle = {"interval": length, "cycle": "num_hidden_layers // interval", "place": "interval"}
    return {**cycle, "rest": rest, "after": rest, "local": "interval - 1"}


def deepseek(more: str = "") -> dict[str, Variant]:
    """The variants for DeepSeek, whose dense layers and layers with experts are stacked separately, each from 0.

    more: additional rules of the attention (the indexer of V3.2).
    """
    attention = LATENT + more
    kinds = (
        ("dense_layers", "o", "{o}", attention + MLP),
        ("moe_layers", "p", "{p + first_k_dense_replace}", attention + DEEPSEEK_EXPERTS),
    )
    scanned = unscanned = MODEL
    for kind, axis, number, text in kinds:
        scanned += MaxtextLayers(f"decoder.{kind}.", number, axis).rules(text)
        unscanned += MaxtextLayers(f"decoder.{kind}_{{{axis}}}.", number).rules(text)
    return trees(scanned, unscanned)


def gemma2() -> dict[str, Variant]:
    """The variants for Gemma 2: one layer of MaxText holds two of the model, one local and one global."""
    scanned = unscanned = CENTRED
    for kind, number in (("_local", "{2 * cycle}"), ("_global", "{2 * cycle + 1}")):
        text = GEMMA2_LAYER.replace("@", kind)
        scanned += MaxtextLayers("decoder.layers.", number, "cycle").rules(text)
        unscanned += MaxtextLayers("decoder.layers_{cycle}.", number).rules(text)
    return trees(scanned, unscanned)


def gemma4() -> dict[str, Variant]:
    """The variants for Gemma 4: blocks of local layers, stacked along two axes, and a global layer.

    The small models, which share keys and values and have embeddings for each layer, are never stacked.
    """
    local = {"G": "g", "R": "r", "D": "d", "VALUE": "true", "KIND": "windowed"}
    whole = {"G": "gg", "R": "gr", "D": "gd", "VALUE": "not shared", "KIND": "not windowed"}
    blocks = (
        (local, "local_layers", "{interval * cycle + local}", "cycle local"),
        (whole, "global_layer", "{interval * cycle + interval - 1}", "cycle"),
    )
    here = {"KIND": "true", "OWN": "not num_kv_shared_layers?", "WIDE": "use_double_wide_mlp?"}
    each = {"OWN": "own", "WIDE": "wide"}
    scanned = unscanned = TIED
    for words, name, number, stacked in blocks:
        place = MaxtextLayers(f"decoder.scanned_blocks.{name}.", number, stacked)
        scanned += place.rules(_replace_words(GEMMA4_HEADS + GEMMA4_LAYER, {**words, **here}))
        unscanned += EACH.rules(_replace_words(GEMMA4_HEADS, {**words, **each}))
    return trees(scanned, unscanned + EACH.rules(_replace_words(GEMMA4_LAYER, each)) + GEMMA4_SMALL)


def _replace_words(text: str, words: dict[str, str]) -> str:
    return re.sub(rf"\b(?:{'|'.join(words)})\b", lambda word: words[word[0]], text)


IN_PAIRS, IN_FOURS, IN_SIXES, IN_INTERVALS = map(_axes, ("2", "4", "6", "full_attention_interval? or 4"))


# -- decoders whose layers take turns: the families of one name --------------------------------------------------------


def gemma3() -> dict[str, Variant]:
    """The variants for Gemma 3: five local layers and a global one, and an incomplete last cycle."""
    return cycles(CENTRED.replace("embed_scale", "embed_scale_bf16"), GEMMA3_LAYER, 6, rest=True)


def gpt_oss() -> dict[str, Variant]:
    """The variants for gpt-oss: layers with and without a sliding window alternate."""
    return cycles(MODEL, GPT_OSS_LAYER, 2)


def olmo3() -> dict[str, Variant]:
    """The variants for OLMo 3: cycles of four layers."""
    return cycles(MODEL, OLMO3_LAYER, 4)


def qwen3_next() -> dict[str, Variant]:
    """The variants for Qwen3-Next: cycles of linear attention and one layer of full attention."""
    return cycles(MODEL, QWEN3_NEXT_LAYER, "interval", "layer")


def qwen3_5_experts() -> dict[str, Variant]:
    """The variants for Qwen 3.5 with experts: as Qwen3-Next, nested in a model with vision on the hub."""
    made = cycles(MODEL, QWEN35_EXPERTS_LAYER, "interval", "layer")
    return {name: table._replace(of=hub.inside(table.of)) for name, table in made.items()}
