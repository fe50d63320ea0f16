"""Tiny models for merges: Llama's names, four of a kind grown from one, without transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "run" / "merging"))

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, **SIZES}
Tensors = dict[str, torch.Tensor]


def llama(seed: int, layers: int = 3) -> Tensors:
    """Model 0 is arange-like; the others are it with noise of their own."""
    v = 48
    h = 16
    f = 24
    q = 16
    k = 8
    shapes = {"model.embed_tokens.weight": (v, h)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (h,),
            f"{at}self_attn.q_proj.weight": (q, h),
            f"{at}self_attn.k_proj.weight": (k, h),
            f"{at}self_attn.v_proj.weight": (k, h),
            f"{at}self_attn.o_proj.weight": (h, q),
            f"{at}post_attention_layernorm.weight": (h,),
            f"{at}mlp.gate_proj.weight": (f, h),
            f"{at}mlp.up_proj.weight": (f, h),
            f"{at}mlp.down_proj.weight": (h, f),
        }
    shapes |= {"model.norm.weight": (h,), "lm_head.weight": (v, h)}
    out: Tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for number, (name, shape) in enumerate(shapes.items()):
        start = torch.linspace(-1, 1, int(torch.Size(shape).numel())).reshape(shape) + number / 100
        out[name] = start + torch.randn(shape, generator=generator) * 0.1 if seed else start
    return out


def save(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, tokenizer: Any = None) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Callable[..., list[str]]:
    """models(3) makes three folders; keywords as of `save`."""

    def make(count: int, **about: Any) -> list[str]:
        return [str(save(tmp_path / f"m{k}", llama(k), **about)) for k in range(count)]

    return make
