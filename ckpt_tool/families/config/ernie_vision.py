"""The config of ERNIE 4.5 VL: one flat object in Paddle and in baidu's -PT files, three nested ones in transformers 5.

    flat  {"moe_num_experts": [64, 64], "moe_layer_start_index": [1, 1], "spatial_conv_size": 2, "im_patch_id": 100295,
      ...}
    nested  {"text_config": {"moe_num_experts": 64, "mlp_layer_types": ["dense", "sparse", ...]}, "vision_config":
              {"spatial_merge_size": 2}, "image_token_id": 100295}

Sources: transformers `models/ernie4_5_vl_moe/convert_ernie4_5_vl_moe_to_hf.py` (`convert_config`) and 5.23
`configuration_ernie4_5_vl_moe.py`; PaddleFormers 1.2.0 `transformers/ernie4_5_moe_vl/model/configuration.py`,
`dfnrope`. What the flat one leaves unsaid is Paddle's default, spelled out. Cost: none. What it does not do:
processors, tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.bounds import LEAST

KINDS = ("ernie4_5_vl_moe", "ernie4_5_moe_vl")
_TEXT: Mapping[str, Any] = {  # the same keys in both, and what Paddle takes where one is missing
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 11008,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_bias": False,
    "moe_k": 2,
    "moe_intermediate_size": None,
    "moe_num_shared_experts": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: Mapping[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
}


def is_flat(config: Mapping[str, Any]) -> bool:
    """Is it ERNIE 4.5 VL's, as Paddle has it?"""
    return config.get("model_type") in KINDS and "text_config" not in config


def is_nested(config: Mapping[str, Any]) -> bool:
    """Is it ERNIE 4.5 VL's, as transformers has it?"""
    return config.get("model_type") in KINDS and isinstance(config.get("text_config"), Mapping)


def is_sound(config: Mapping[str, Any]) -> bool:
    """Are the unchecked values of a flat config plausible, so that `nest_config` can compute with them?"""
    counts = ("num_hidden_layers", "hidden_size", "num_attention_heads", "moe_layer_interval", "freq_allocation")
    ends = [config.get(f"moe_layer_{end}_index", 0) for end in ("start", "end")]
    vision = config.get("vision_config") or {}
    return (
        all(type(config.get(key, 1)) is int and config.get(key, 1) > 0 for key in counts)
        and config.get("num_hidden_layers", 1) <= LEAST
        and (config.get("head_dim") is None or type(config["head_dim"]) is int)
        and all(type(end) is int or (isinstance(end, list) and {*map(type, end)} == {int}) for end in ends)
        and isinstance(vision, Mapping)
        and all(type(vision.get(key, 1)) in (int, float) for key in ("hidden_size", "mlp_ratio"))
    )


def nest_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of transformers 5 of a flat one."""
    text = {key: config.get(key, silent) for key, silent in _TEXT.items()}
    layers = text["num_hidden_layers"]
    start = config.get("moe_layer_start_index", 0)
    end = config.get("moe_layer_end_index", -1)
    first_sparse = min(start) if isinstance(start, list) else start
    if isinstance(end, list):
        last_sparse = max(end)
    else:
        last_sparse = end if end >= 0 else layers - 1
    interval = config.get("moe_layer_interval", 2)
    text["mlp_layer_types"] = [
        "sparse" if first_sparse <= i <= last_sparse and (i + 1) % interval == 0 else "dense" for i in range(layers)
    ]
    experts = config.get("moe_num_experts")
    text["moe_num_experts"] = experts[0] if isinstance(experts, list) else experts
    head = text["head_dim"] or text["hidden_size"] // text["num_attention_heads"]
    frames = min(config.get("freq_allocation", 20), head // 2)
    sections = [(head // 2 - frames) // 2] * 2 + [frames]
    theta = config.get("rope_theta", 10000.0)
    text |= {
        "head_dim": head,
        "hidden_act": "silu",
        "model_type": "ernie4_5_vl_moe_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "mrope_section": sections},
    }
    text["num_key_value_heads"] = text["num_key_value_heads"] or text["num_attention_heads"]
    seen = config.get("vision_config") or {}
    vision = {key: seen.get(key, silent) for key, silent in _VISION.items()}

    vision |= {
        "model_type": "ernie4_5_vl_moe_vision",
        "rms_norm_eps": 1e-6,
        "intermediate_size": int(vision["hidden_size"] * seen.get("mlp_ratio", 4)),
        "spatial_merge_size": config.get("spatial_conv_size", 2),
        "temporal_merge_size": config.get("temporal_conv_size", 2),
    }

    out = {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "model_type": "ernie4_5_vl_moe",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    if config.get("im_patch_id") is not None:
        out["image_token_id"] = config["im_patch_id"]

    dtype = config.get("dtype", config.get("torch_dtype"))
    return out if dtype is None else {**out, "dtype": dtype}


def flatten_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(Paddle's config of a nested one, lines about what it can't say)."""
    text = config["text_config"]
    seen = config.get("vision_config") or {}
    out: dict[str, Any] = {key: text[key] for key in _TEXT if text.get(key) is not None}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))

    out |= {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "model_type": "ernie4_5_moe_vl",
        "tie_word_embeddings": tied,
        "moe_gate": "topk",
        "moe_use_aux_free": True,
        "rope_3d": True,
    }
    if text.get("moe_num_experts") is not None:
        out["moe_num_experts"] = [text["moe_num_experts"]] * 2

    rope = text.get("rope_parameters") or {}
    out["rope_theta"] = rope.get("rope_theta", text.get("rope_theta", 500000.0))
    out["freq_allocation"] = (rope.get("mrope_section") or [22, 22, 20])[2]
    kinds = text.get("mlp_layer_types") or ["dense"] + ["sparse"] * (text.get("num_hidden_layers", 1) - 1)
    grid, notes = _layers(kinds)
    out |= grid
    vision = {key: seen[key] for key in _VISION if seen.get(key) is not None}
    hidden = vision.get("hidden_size", 1280)
    ratio = seen.get("intermediate_size", 4 * hidden) / hidden
    vision |= {
        "embed_dim": hidden,
        "hidden_size": hidden,
        "mlp_ratio": int(ratio) if ratio == int(ratio) else ratio,
        "spatial_merge_size": seen.get("spatial_merge_size", 2),
    }
    out |= {
        "vision_config": vision,
        "pixel_hidden_size": hidden,
        "spatial_conv_size": seen.get("spatial_merge_size", 2),
        "temporal_conv_size": seen.get("temporal_merge_size", 2),
    }
    if config.get("image_token_id") is not None:
        out["im_patch_id"] = config["image_token_id"]

    dtype = config.get("dtype", text.get("dtype"))
    return (out if dtype is None else {**out, "torch_dtype": dtype}), notes


def _layers(kinds: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Which layers have experts, as first, last and every how many."""
    sparse = [i for i, kind in enumerate(kinds) if kind == "sparse"]
    if not sparse:
        return {"moe_num_experts": [0, 0]}, ()
    first_sparse = sparse[0]
    last_sparse = sparse[-1]
    interval = sparse[1] - first_sparse if len(sparse) > 1 else 1
    if [i for i in range(first_sparse, last_sparse + 1) if (i + 1) % interval == 0] == sparse:
        return {
            "moe_layer_start_index": [first_sparse] * 2,
            "moe_layer_end_index": [last_sparse] * 2,
            "moe_layer_interval": interval,
        }, ()
    grid = {
        "moe_layer_start_index": [first_sparse] * 2,
        "moe_layer_end_index": [last_sparse] * 2,
        "moe_layer_interval": 1,
    }
    return grid, (f"mlp_layer_types {kinds} is no regular pattern: Paddle's config has one",)
