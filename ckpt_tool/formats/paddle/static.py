"""Static names: what Paddle calls a parameter after the class that made it, as a new run of the same job would.

The one idea: a tensor's own name is its layer class and a counter of that class in the process, so a rank's names follow from
its parameters in the order in which they are made; a tied head has its embedding's.

    model.embed_tokens.weight                    embedding_0.w_0         VocabParallelEmbedding too
    ...layers.0.self_attn.q_proj.weight, .bias   linear_0.w_0, .b_0      column and row parallel layers too
    ...layers.0.input_layernorm.weight           create_parameter_0.w_0  RMSNorm; LayerNorm: layer_norm_0.w_0, .b_0
    ...layers.1.mlp.gate.weight                  moe_gate_0              ... moe_statics.e_score_correction_bias: mm_layer_1_corr_bias_0
    lm_head.weight                               lm_head_0.w_0           in a pipeline lm_head_pipe_0.w_0

The source's own names are kept where every rank holds what it held. Names that a run of other code would give may differ: a
sharding_io loader maps them by model_meta.json, the plain one takes them as they are.
Source: name tables of PaddleFormers 1.2.0 (Llama, ERNIE-4.5, ERNIE-4.5-MoE), `nn/norm.py`, `nn/lm_head.py`, `nn/moe/*.py`;
runs of paddlepaddle 3.3.1's parallel layers. Cost: a dict look-up a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_CLASSES = {
    **dict.fromkeys(("embed_tokens", "word_embeddings", "wte", "embed_positions", "position_embeddings"), "embedding"),
    **dict.fromkeys(("lm_head",), "lm_head"),
}
_NORM = re.compile(r"norm|^ln_|layernorm")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def static_names(names: Sequence[str], aliases: Mapping[str, str], *, pipeline: bool = False) -> dict[str, str]:
    """name -> static name of one rank's parameters, in the order in which they are made. aliases: tied name -> the one whose
    tensor it is. pipeline: are there several stages?"""
    counters: dict[str, int] = {}
    modules: dict[str, str] = {}
    known = frozenset(name for name in names if name.endswith(".bias"))
    out: dict[str, str] = {}
    for name in names:
        if name in aliases and aliases[name] in out:
            out[name] = out[aliases[name]]
            continue
        module, _, leaf = name.rpartition(".")
        kind = _kind(module, leaf, known)
        kind = "lm_head_pipe" if pipeline and kind == "lm_head" else kind
        if kind in ("moe_gate", "corr_bias"):
            found = _LAYER.search(name)
            front = f"mm_layer_{found[1]}_" if found and kind == "corr_bias" else ""
            out[name] = f"{front}{kind}_{_next(counters, front + kind)}"
            continue
        if module not in modules or kind == "create_parameter":
            modules[module] = f"{kind}_{_next(counters, kind)}"
        out[name] = f"{modules[module]}.{'b_0' if leaf == 'bias' else 'w_0'}"
    return out


def _next(counters: dict[str, int], kind: str) -> int:
    number = counters.get(kind, 0)
    counters[kind] = number + 1
    return number


def _kind(module: str, leaf: str, biases: frozenset[str]) -> str:
    """The layer class, in Paddle's spelling."""
    word = next((word for word in reversed(module.split(".")) if not word.isdecimal()), "")
    if leaf == "e_score_correction_bias":
        return "corr_bias"
    if word in ("gate", "router") and leaf == "weight":
        return "moe_gate"
    if leaf not in ("weight", "bias"):
        return "create_parameter"
    if _NORM.search(word):
        return "layer_norm" if f"{module}.bias" in biases else "create_parameter"
    return _CLASSES.get(word, "linear")
