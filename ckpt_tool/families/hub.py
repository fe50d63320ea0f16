"""The hub: the rules that decoders share in Hugging Face's unfused names, as texts that the families' tables are put
together of. Blocks and axes have the names of `families.megatron`, which maps most of them.

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
QKV_BIAS = """
    model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
"""
PROJ_BIAS = """
    model.layers.{i}.self_attn.o_proj.bias : h
"""
QK_NORMS = """
    model.layers.{i}.self_attn.<q|k>_norm.weight : d
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
SHARED_EXPERTS = """
    model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
"""
# what a layer of multi-token prediction has beside a decoder layer's
AHEAD = """
    model.layers.{i}.<enorm|hnorm|shared_head.norm>.weight : h
    model.layers.{i}.<embed_tokens|shared_head.head>.weight : v h
    model.layers.{i}.eh_proj.weight : h w
"""

DENSE = MODEL + NORMS + ATTENTION + MLP
SPARSE = DENSE + ROUTER + EXPERTS
GEMMA = TIED + SANDWICH + ATTENTION + MLP + QKV_BIAS + PROJ_BIAS
BIASES = QKV_BIAS + PROJ_BIAS + MLP_BIASES
