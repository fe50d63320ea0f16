"""A tiny random model of every family, saved by transformers: even sizes, so that two ranks can share each part of
it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import EXPERTS, REMOTE, class_arguments, config_of, hub_shapes

from ckpt_tool.families.registry import by_name

__all__ = ["EXPERTS", "REMOTE", "hub_shapes", "logits", "tiny_config", "tiny_model", "tokens"]
EVEN = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 128,
}
EXPERT_SIZES = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
}
QUIET = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 64}


def tiny_config(family: str, **change: Any) -> dict[str, Any]:
    """A config.json of the family."""
    tiny = by_name(family).part(by_name(family).tiny) or by_name(family).tiny
    each = {key: tiny[key] for key in EXPERT_SIZES if key in tiny}
    own = {key: [EXPERT_SIZES[key]] * len(n) if isinstance(n, list) else EXPERT_SIZES[key] for key, n in each.items()}
    own |= {"num_experts_per_tok": 2, "moe_k": 2} if family in EXPERTS else {}
    own |= {key: tiny[key] for key in ("num_hidden_layers",) if key in tiny}  # of a pattern that the config spells out
    quiet = {key: value for key, value in QUIET.items() if key not in tiny}
    config = config_of(family, **{**EVEN, **own, **quiet, **change})
    if "mrope_section" in config.get("rope_parameters", {}):  # ERNIE's must fill a head of 8
        config["rope_parameters"] = {**config["rope_parameters"], "mrope_section": [1, 1, 2]}
    return config


def tiny_model(family: str, seed: int = 0, classes: tuple[str, str] | None = None, **change: Any) -> Any:
    """The model, of a fixed seed; buffers are random too, and norms are near one, so that nothing is alike by chance.

    classes: another (model_type, architecture) of the family."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = tiny_config(family, **change)
    kind, architecture = classes or (config["model_type"], config["architectures"][0])
    model = getattr(transformers, architecture)(
        transformers.AutoConfig.for_model(kind, **class_arguments(config))
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if "norm" in name and name.endswith("weight"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.is_floating_point():
            tensor.normal_(0.0, 0.1, generator=generator)
    return model


def tokens(config: Any) -> torch.Tensor:
    return torch.arange(3, 27).reshape(2, 12) % config.get_text_config().vocab_size


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens(model.config), use_cache=False).logits
    return found
