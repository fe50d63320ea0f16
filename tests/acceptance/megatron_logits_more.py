"""The same as megatron_logits.py for GPT-2, gpt-oss, Phi-3 and GLM-4 (`glm`): learned positions, biases, sinks, a clamped GLU.

python megatron_logits_more.py CHECKPOINT CONFIG.json TOKENS.safetensors OUT.safetensors TP EP
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import megatron_logits as plain
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.transformer import TransformerConfig

Config = dict[str, Any]


def of_gpt2(c: Config) -> Config:
    """GPT-2's config under the names of the others'."""
    heads = c["n_head"]
    return c | {
        "num_hidden_layers": c["n_layer"], "hidden_size": c["n_embd"], "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": c["n_inner"], "rms_norm_eps": c["layer_norm_epsilon"], "max_position_embeddings": c["n_positions"],
    }  # fmt: skip


def sizes(c: Config, tp: int, ep: int) -> Config:
    kind = c["model_type"]
    out = plain.sizes(c, tp, ep)
    if kind == "glm":
        out |= {"rotary_interleaved": True}
    if kind == "gpt2":
        out |= {
            "normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True,
            "activation_func": partial(torch.nn.functional.gelu, approximate="tanh"),
        }  # fmt: skip
    if kind == "gpt_oss":
        out |= {
            "add_bias_linear": True, "activation_func": quick_gelu, "glu_linear_offset": 1.0,
            "activation_func_clamp_value": c["swiglu_limit"], "softmax_type": "learnable", "moe_router_pre_softmax": False,
        }  # fmt: skip
    return out


def model_of(c: Config, tp: int, ep: int, rows: int) -> GPTModel:
    old = c["model_type"] == "gpt2"
    c = of_gpt2(c) if old else c
    told = sizes(c, tp, ep)
    norm = str(told["normalization"])
    spec = specs.get_gpt_decoder_block_spec(TransformerConfig(**told), use_transformer_engine=False, normalization=norm)
    rope = plain.rope(c)
    return GPTModel(
        config=TransformerConfig(**told), transformer_layer_spec=spec, vocab_size=rows, parallel_output=False,
        max_sequence_length=c["max_position_embeddings"], position_embedding_type="learned_absolute" if old else "rope",
        share_embeddings_and_output_weights=bool(c.get("tie_word_embeddings")), rotary_base=rope["rope_theta"] or 10000,
        rotary_percent=float(rope.get("partial_rotary_factor") or 1.0),
    ).eval()  # fmt: skip


if __name__ == "__main__":
    plain.model_of = model_of
    folder, config, tokens, out, *degrees = sys.argv[1:]
    tp, ep = map(int, degrees)
    plain.on_ranks(max(tp, ep), plain.body, folder, config, tokens, out, tp, ep)
