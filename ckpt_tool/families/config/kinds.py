"""Translates configs of models with two kinds of layers, each with its own heads and rope: Gemma 4, MiMo-V2-Flash.

    gemma4   global_head_dim = 512, top_k_experts = 8       global_kv_channels = 512, moe_router_topk = 8
    mimo_v2  hybrid_layer_pattern = [0, 1, 1], 128 tokens   window_size = (127, 0), window_attn_skip_freq = [0, 1, 1]
             swa_num_key_value_heads = 8                    swa_num_query_groups = 8

Megatron-LM has one number of query groups, one head width and one rope for all layers. For MiMo-V2-Flash its arguments
describe the layers with full attention, and the windowed layers have additional keys of Megatron-Bridge's provider; for
Gemma 4 it is the reverse (the rope is that of the full layers in both). Sources: Megatron-Bridge 0.6.2
`models/gemma/gemma4_{bridge,provider}.py`, `models/mimo_v2_flash`; transformers 5.23
`models/{gemma4,mimo_v2_flash}/configuration_*.py`. Cost: none. What it does not do: see `families.config.forms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.attention_window import window_pattern
from ckpt_tool.families.config.words import LAYERS, Arguments, ConfigWords, Form, Values, same

_LOCAL = 10000.0  # the base of both models' windowed layers, where nothing states it


def _local_base(model: ConfigWords) -> float:
    """The base of the rope of layers that look through a window."""
    ropes = model.config.get("rope_parameters")
    local = ropes.get("sliding_attention") if isinstance(ropes, Mapping) else None
    base = local.get("rope_theta") if isinstance(local, Mapping) else model.config.get("swa_rope_theta")
    return float(base) if isinstance(base, int | float) else _LOCAL


def _ropes(args: Arguments, kind: str, **local: Any) -> Values:
    """A rope for each kind of layers, as transformers 5 has it. kind: of the layers that see all."""
    base = args.get("rotary_base")
    every = {
        "rope_type": kind,
        "rope_theta": float(base) if type(base) is int else base,
        "partial_rotary_factor": args.get("rotary_percent"),
    }
    windowed = {"rope_type": "default", "rope_theta": args.get("sliding_window_rope_base") or _LOCAL, **local}
    return {"full_attention": every, "sliding_attention": windowed}


# -- Gemma 4 -----------------------------------------------------------------------------------------------------------


_GEMMA4 = same(
    ("attention_k_eq_v", "attention_k_eq_v"),
    ("num_kv_shared_layers", "num_kv_shared_layers"),
    ("use_double_wide_mlp", "use_double_wide_mlp"),
    ("hidden_size_per_layer_input", "per_layer_embed_dim"),
    ("vocab_size_per_layer_input", "per_layer_embed_vocab_size"),
    ("final_logit_softcapping", "final_logit_softcapping"),
)
_GEMMA4_EXPERTS = same(
    ("num_experts", "num_experts"),
    ("top_k_experts", "moe_router_topk"),
    ("moe_intermediate_size", "moe_ffn_hidden_size"),
)


def _read_full_attention_value(model: ConfigWords, released: str, key: str) -> int | None:
    """What layers that see all have: as released, or in transformers' `per_layer_config`, which leaves out what is as in
    the others."""
    by_layer = model.config.get("per_layer_config")
    rows = by_layer.values() if isinstance(by_layer, Mapping) else ()
    first_value = next((row[key] for row in rows if isinstance(row, Mapping) and type(row.get(key)) is int), None)
    return model.count(released) or first_value or (model.count(key) if rows else None)


def _gemma4_to(model: ConfigWords, out: Values) -> None:
    _GEMMA4.to(model, out)
    groups = _read_full_attention_value(model, "num_global_key_value_heads", "num_key_value_heads")
    out["num_global_query_groups"] = groups or model.count("num_key_value_heads")
    out["global_kv_channels"] = _read_full_attention_value(model, "global_head_dim", "head_dim") or 512
    out["sliding_window_rope_base"] = _local_base(model)
    if model.get("enable_moe_block"):
        _GEMMA4_EXPERTS.to(model, out)
        out |= {"moe_layer_freq": 1, "moe_router_pre_softmax": True}
        out["moe_shared_expert_intermediate_size"] = model.count("intermediate_size")
    model.lost(
        "layers that see all have heads of their own, attention is not scaled by their width, experts are next to an MLP, "
        "embeddings belong to layers: Megatron-LM's arguments have none of that; Megatron-Bridge's model has"
    )


def _gemma4_back(args: Arguments, out: Values) -> None:
    _GEMMA4.back(args, out)
    out |= {
        "global_head_dim": args.get("global_kv_channels"),
        "num_global_key_value_heads": args.get("num_global_query_groups"),
        "enable_moe_block": bool(args.get("num_experts")),
        "rope_parameters": _ropes(args, "proportional"),
    }
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        out.pop(key, None)
    for key in ("enable_moe_block", "hidden_size_per_layer_input"):  # Gemma 4 Unified's class has neither
        if not out.get(key) and key not in args.facts.defaults:
            out.pop(key, None)
    if args.get("num_experts"):
        _GEMMA4_EXPERTS.back(args, out)


# -- MiMo-V2-Flash -----------------------------------------------------------------------------------------------------


_MIMO = same(("v_head_dim", "v_head_dim"), ("attention_value_scale", "attention_value_scale"))
_EVERY = 6  # without a list, layer 0 and each sixth see all


def _mimo_v2_to(model: ConfigWords, out: Values) -> None:
    _MIMO.to(model, out)
    layers = min(model.count("num_hidden_layers") or 0, LAYERS)
    pattern = model.config.get("hybrid_layer_pattern")
    kinds = model.get("layer_types")

    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [int(bool(is_windowed)) for is_windowed in pattern]
    elif isinstance(kinds, list) and len(kinds) == layers:
        windowed = [int(kind == "sliding_attention") for kind in kinds]
    else:
        windowed = [int(i > 0 and (i + 1) % _EVERY != 0) for i in range(layers)]

    size = model.count("sliding_window_size") or (model.count("sliding_window") or 1) - 1
    out |= {"window_size": (max(size - 1, 0), 0), "window_attn_skip_freq": windowed}
    groups = model.count("num_key_value_heads") or 0
    out["swa_num_query_groups"] = model.count("swa_num_key_value_heads") or 2 * groups
    out["sliding_window_rope_base"] = _local_base(model)

    for key, target_name in (
        ("swa_num_attention_heads", "num_attention_heads"),
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", "v_head_dim"),
    ):
        if model.count(key) not in (None, model.count(target_name)):
            model.lost(
                f"{key} {model.get(key)}: Megatron-Bridge's layer has {model.get(target_name)}, as in layers that see all"
            )

    model.lost(
        "windowed layers have key-value heads, a rope and sinks of their own, values are narrower than keys and scaled: "
        "Megatron-LM's arguments have none of that; Megatron-Bridge's model has"
    )
    model.lost(f"sliding_window_size {size}: Megatron-Bridge's layer sees {size} tokens, transformers' {size + 1}")


def _mimo_v2_back(args: Arguments, out: Values) -> None:
    """As released, and as transformers 5 reads it where it has other keys."""
    _MIMO.back(args, out)
    window = args.get("window_size")
    size = window[0] + 1 if isinstance(window, tuple | list) and window and type(window[0]) is int else None
    windowed = window_pattern(args.get("window_attn_skip_freq"), args.get("num_layers") or 0)
    percent = args.get("rotary_percent")
    ropes = _ropes(args, "default", partial_rotary_factor=percent)
    out |= {
        "sliding_window": size,
        "sliding_window_size": size,
        "hybrid_layer_pattern": [int(is_windowed) for is_windowed in windowed],
        "layer_types": ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed],
        "rope_parameters": ropes,
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "swa_num_key_value_heads": args.get("swa_num_query_groups"),
        "swa_num_attention_heads": args.get("num_attention_heads"),
        "swa_head_dim": out.get("head_dim"),
        "swa_v_head_dim": args.get("v_head_dim"),
        "layernorm_epsilon": args.get("layernorm_epsilon"),
        "scoring_func": "sigmoid",
    }


KIND_FORMS: Mapping[str, Form] = {
    "gemma4": Form(_gemma4_to, _gemma4_back),
    "mimo_v2": Form(_mimo_v2_to, _mimo_v2_back),
}
