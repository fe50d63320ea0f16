"""The same as megatron_logits.py for GPT-2, gpt-oss, Phi-3, GLM-4 (`glm`) and DeepSeek-V2: learned positions, biases,
sinks, a clamped GLU, latent attention with a softmax router.

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
        "num_hidden_layers": c["n_layer"],
        "hidden_size": c["n_embd"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": c["n_inner"],
        "rms_norm_eps": c["layer_norm_epsilon"],
        "max_position_embeddings": c["n_positions"],
    }


sizes_of = plain.sizes
model_of = plain.model_of


def sizes(c: Config, tp: int, ep: int) -> Config:
    kind = c["model_type"]
    out = sizes_of({**c, "model_type": "deepseek_v3"} if kind == "deepseek_v2" else c, tp, ep)
    if kind == "deepseek_v2":
        out |= {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": False,
            "moe_router_topk_scaling_factor": c["routed_scaling_factor"],
        }
    if kind == "glm":
        out |= {"rotary_interleaved": True}
    if kind == "gpt2":
        out |= {
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "add_bias_linear": True,
            "activation_func": partial(torch.nn.functional.gelu, approximate="tanh"),
        }
    if kind == "gpt_oss":
        out |= {
            "add_bias_linear": True,
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": c["swiglu_limit"],
            "softmax_type": "learnable",
            "moe_router_pre_softmax": False,
        }
    return out


def any_model_of(c: Config, tp: int, ep: int, rows: int) -> GPTModel:
    if c["model_type"] != "gpt2":
        return model_of(c, tp, ep, rows)
    c = of_gpt2(c)
    told = sizes(c, tp, ep)
    spec = specs.get_gpt_decoder_block_spec(
        TransformerConfig(**told), use_transformer_engine=False, normalization="LayerNorm"
    )
    return GPTModel(
        config=TransformerConfig(**told),
        transformer_layer_spec=spec,
        vocab_size=rows,
        parallel_output=False,
        max_sequence_length=c["max_position_embeddings"],
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=bool(c.get("tie_word_embeddings")),
    ).eval()


if __name__ == "__main__":
    plain.sizes = sizes
    plain.model_of = any_model_of
    folder, config, tokens, out, *degrees = sys.argv[1:]
    tp, ep = map(int, degrees)
    plain.on_ranks(max(tp, ep), plain.body, folder, config, tokens, out, tp, ep)
