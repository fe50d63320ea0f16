"""Names of trainers that have models of their own: torchtune and OLMo-core, as rules from which the families' tables
are built.

    dialects={"torchtune": trainers.TUNE + trainers.TUNE_ROTARY}      # Llama, Mistral, Gemma: rotations as Meta's files have them
    dialects={"torchtune": trainers.TUNE + trainers.TUNE_HALVES}      # Qwen 2 and 3: as the hub has them

A norm in torchtune has a `scale`. Meta's order of rotated rows: `systems.meta.names`. A tied head has no tensor.

Sources: torchtune bd2a0fc7 `models/convert_weights.py` (`tune_to_hf`), `models/{gemma2,llama4,phi3,qwen2,qwen3}/
_convert_weights.py`, and which of them `FullModelHFCheckpointer` calls; ai2-olmo-core 2.4.0 `nn/hf/convert.py`, and
`nn/attention` for biases, which the converter leaves out. What it does not do: the vision encoders of Llama 3.2 and 4;
dropless experts of OLMo-core, shared ones, and blocks with both an MLP and experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.core.bounds import numeral

TUNE_MODEL = """
    tok_embeddings.weight : v h = model.embed_tokens.weight : v h
    output.weight : v h = lm_head.weight : v h
    norm.scale : h = model.norm.weight : h
"""
TUNE_NORMS = """
    layers.{i}.<sa_norm|mlp_norm>.scale : h = model.layers.{i}.<input|post_attention>_layernorm.weight : h
"""
TUNE_ATTENTION = """
    layers.{i}.attn.v_proj.weight : (g d) h = model.layers.{i}.self_attn.v_proj.weight : (g d) h
    layers.{i}.attn.output_proj.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
"""
TUNE_MLP = """
    layers.{i}.mlp.<w1|w3|w2>.weight : f h, f h, h f = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
TUNE = TUNE_MODEL + TUNE_NORMS + TUNE_ATTENTION + TUNE_MLP
# Rotated rows in Meta's order: neighbouring rows form a pair (`c 2`), where the hub pairs two halves (`2 c`)
TUNE_ROTARY = """
    layers.{i}.attn.q_proj.weight : (g r c 2) h = model.layers.{i}.self_attn.q_proj.weight : (g r 2 c) h
    layers.{i}.attn.k_proj.weight : (g c 2) h = model.layers.{i}.self_attn.k_proj.weight : (g 2 c) h
"""
# Rotated rows in the hub's order
TUNE_QK = """
    layers.{i}.attn.<q|k>_proj.weight : (g r d) h, (g d) h
        = model.layers.{i}.self_attn.<q|k>_proj.weight : (g r d) h, (g d) h
"""
TUNE_HALVES = (
    TUNE_QK
    + """
    layers.{i}.attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
"""
)
TUNE_QK_NORMS = """
    layers.{i}.attn.<q|k>_norm.scale : d = model.layers.{i}.self_attn.<q|k>_norm.weight : d
"""
# Gemma 2 has a norm after each of the two modules, which torchtune calls a scale; the last norm is nested in another
# module. Up to 0.6.1 torchtune's converter exchanged the norms before and after the MLP (torchtune #2853), so what a
# job's names mean depends on the weights that it started from.
TUNE_GEMMA2 = (
    TUNE_MODEL.replace("norm.scale", "norm.rms_norm.scale")
    + TUNE_ATTENTION
    + TUNE_ROTARY
    + TUNE_MLP
    + """
    layers.{i}.<sa_norm|sa_scale|mlp_norm|mlp_scale>.scale : h
        = model.layers.{i}.<input|post_attention|pre_feedforward|post_feedforward>_layernorm.weight : h
"""
)
# Phi: projections that are fused on the hub are separate tensors
TUNE_PHI = (
    TUNE_MODEL
    + TUNE_NORMS
    + """
    layers.{i}.attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        = model.layers.{i}.self_attn.qkv_proj.weight : (g r d + g d + g d) h
    layers.{i}.attn.output_proj.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
    layers.{i}.mlp.<w1|w3>.weight : f h = model.layers.{i}.mlp.gate_up_proj.weight : ((1 + 1) f) h
    layers.{i}.mlp.w2.weight : h f = model.layers.{i}.mlp.down_proj.weight : h f
"""
)
# Llama 4 without its vision encoder: gate and up of the experts are separate tensors
TUNE4 = (
    re.sub(r"(?m)^    (?=\S)", "    decoder.", TUNE + TUNE_QK)
    + """
    decoder.layers.{i}.mlp.shared_expert.<w1|w3|w2>.weight : m h, m h, h m
        = model.layers.{i}.feed_forward.shared_expert.<gate|up|down>_proj.weight : m h, m h, h m
    decoder.layers.{i}.mlp.router.gate.weight : e h = model.layers.{i}.feed_forward.router.weight : e h
    decoder.layers.{i}.mlp.experts.<gate|up>_proj : e h m
        = model.layers.{i}.feed_forward.experts.gate_up_proj : e h ((1 + 1) m)
    decoder.layers.{i}.mlp.experts.down_proj : e m h = model.layers.{i}.feed_forward.experts.down_proj : e m h
"""
).replace(".mlp.<gate|up|down>_proj.weight", ".feed_forward.<gate|up|down>_proj.weight")
# Parts of torchtune's names in the order in which its modules register parameters (0.6.1 `modules/{transformer,attention,
# feed_forward}.py`); a Linear has its weight before its bias. Optimizers number parameters in this order.
_TUNE_ORDER = """
    tok_embeddings layers norm output attn q_proj k_proj v_proj output_proj q_norm k_norm mlp w1 w2 w3 sa_norm mlp_norm
    sa_scale mlp_scale rms_norm weight bias scale
""".split()


def tune_order(names: Iterable[str]) -> list[str] | None:
    """The names in the order in which torchtune's model yields its parameters; None if one is not a known decoder's.

    >>> tune_order(["output.weight", "layers.0.sa_norm.scale", "layers.0.attn.k_proj.weight"])
    ['layers.0.attn.k_proj.weight', 'layers.0.sa_norm.scale', 'output.weight']
    """
    ranks = {part: rank for rank, part in enumerate(_TUNE_ORDER)}
    keys: dict[str, list[int]] = {}
    for name in names:
        keys[name] = [int(part) if numeral(part) else ranks.get(part, -1) for part in name.split(".")]
    if any(-1 in key for key in keys.values()):
        return None
    return sorted(keys, key=lambda name: keys[name])


OLMO_MODEL = """
    embeddings.weight : v h = model.embed_tokens.weight : v h
    lm_head.w_out.weight : v h = lm_head.weight : v h
    lm_head.norm.weight : h = model.norm.weight : h
    blocks.{i}.attention.<w_q|w_k|w_v>.weight : (g r d) h, (g d) h, (g d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
    blocks.{i}.attention.<w_q|w_k|w_v>.bias : (g r d), (g d), (g d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
    blocks.{i}.attention.w_out.<weight|bias> : h (g r d), h = model.layers.{i}.self_attn.o_proj.<weight|bias> : h (g r d), h
"""
OLMO_MLP = """
    blocks.{i}.feed_forward.<w1|w3|w2>.weight : f h, f h, h f
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
# OLMo 2: each norm comes after its module (`reordered_norm`), and those of q and k cover all heads
OLMO_NORMS = """
    blocks.{i}.attention.<q|k>_norm.weight : (g r d), (g d)
        = model.layers.{i}.self_attn.<q|k>_norm.weight : (g r d), (g d)
    blocks.{i}.<attention|feed_forward>_norm.weight : h
        = model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
"""
OLMO_LLAMA_NORMS = """
    blocks.{i}.<attention|feed_forward>_norm.weight : h = model.layers.{i}.<input|post_attention>_layernorm.weight : h
"""
# All experts of a layer are one matrix, transposed (`MoEMLP`; `DroplessMoEMLP` has w1 and w3 exchanged)
OLMO_EXPERTS = """
    blocks.{i}.feed_forward_moe.router.weight : (e h) = model.layers.{i}.mlp.gate.weight : e h
    blocks.{i}.feed_forward_moe.experts.mlp.<w1|w3> : (e h) m = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
    blocks.{i}.feed_forward_moe.experts.mlp.w2 : (e m) h = model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
"""
