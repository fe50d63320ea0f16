"""Which weights `--quantize` quantises, by their hub names: the matrices of a model's layers.

    quantised    matrices of layers ("...layers.3.self_attn.q_proj.weight"), experts stacked in one tensor
    stays        vectors (norms, biases); tensors outside the layers (embeddings, heads, final projections);
                 routers and gates; norms and embeddings inside layers; vision and audio towers and the projectors that
                 connect them to the language model; tensors that are no floats, or whose name has no `.weight`

In doubt a weight stays: a layer too few costs bytes, one too many costs accuracy. `--quantize-skip PATTERN` excludes
more weights, `--quantize-only PATTERN` replaces the rule.
Sources: what deepseek-ai/DeepSeek-V3, Qwen/Qwen3-30B-A3B-FP8 and openai/gpt-oss-20b leave in bf16, and llm-compressor's
examples (`ignore`); `tests/families/test_quantised_rule.py` compares the rule with the `nn.Linear` of the real classes.
"""

from __future__ import annotations

import re

from ckpt_tool.core.tensor import LogicalTensor

_TOWER = re.compile(
    r"vision|visual|audio|tower|image|video|speech|project(or|ion)s?$|multi_modal|connector|aligner|patch"
)
_ASIDE = re.compile(r"norm|embed|router|lora|compressor|indexer|rel_pos")  # excludes a module and all modules inside it
_LAST = re.compile(  # excludes the module itself: it routes tokens, or decides how much of them passes
    r"^(gate|wg|\w+_gate|weights_proj|eh_proj|head|conv\w*|in_proj_(ba|a|b)|[bf]_proj|f_[ab]_proj)$"
)
_TURNED = re.compile(r"(^|\.)h\.\d+\.\w+\.(c_attn|q_attn|c_fc|c_proj)\.weight$")  # of GPT-2's Conv1D
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # `model_type`s with Conv1D in transformers
EXPERTS = ".experts."
SHORT = "vectors (norms, biases)"
OUTSIDE = "outside the layers (embeddings, heads)"
TOWERS = "of an image or audio tower"
SMALL = "routers, gates, norms and the like inside layers"
OTHER = "no weight of a projection"


def why_not(tensor: LogicalTensor) -> str:
    """The reason why a tensor is not quantised, "" if it is."""
    name = tensor.key.name
    dtype = tensor.dtype
    parts = name.split(".")
    if len(tensor.shape) < 2 or not all(tensor.shape):
        return SHORT
    if not dtype.is_float or dtype.bits < 16:
        return OTHER
    if any(map(_TOWER.search, parts)):
        return TOWERS
    if not any(part.isdigit() for part in parts):
        return OUTSIDE
    stacked = EXPERTS in name and len(tensor.shape) == 3
    modules = parts[:-1] if parts[-1] == "weight" else parts
    if any(map(_ASIDE.search, modules)) or _TURNED.search(name) or _LAST.search(modules[-1]):
        return SMALL
    return "" if stacked or (len(tensor.shape) == 2 and parts[-1] == "weight") else OTHER


def is_conv1d(name: str, model_type: object) -> bool:
    """Is it the weight of transformers' Conv1D, (inputs, outputs)? Other models use the same names for nn.Linear.

    >>> [is_conv1d("transformer.h.0.attn.c_attn.weight", each) for each in ("gpt2", "gpt_bigcode")]
    [True, False]
    """
    return model_type in _CONV1D and _TURNED.search(name) is not None


def module_of(name: str) -> str:
    """The name of the module that a weight belongs to."""
    return name.removesuffix(".weight")
