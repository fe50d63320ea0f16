"""Tiny bases and adapters by transformers and PEFT, and what PEFT's own merge makes of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def model(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    import transformers as hf

    torch.manual_seed(1)
    if kind == "gpt2":
        made = hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=53,
                n_positions=16,
                n_embd=24,
                n_layer=2,
                n_head=2,
                bos_token_id=0,
                eos_token_id=0,
                tie_word_embeddings=True,
            )
        )
    elif kind == "moe":
        made = hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **SIZES, intermediate_size=40, moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2
            )
        )
    elif kind == "mixtral":
        made = hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, intermediate_size=20, num_local_experts=4))
    elif kind == "gpt_oss":
        made = hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, intermediate_size=24, num_local_experts=3))
    else:
        made = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **{**SIZES, "tie_word_embeddings": kind == "tied"}, intermediate_size=40, attention_bias=True
            )
        )
    return made.to(dtype)


def save_base(kind: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "8KB") -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(kind, dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def save_adapter(kind: str, folder: Path, seed: int = 2, **settings: object) -> Path:
    """An adapter with drawn values, as a training would leave it."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model(kind), LoraConfig(**settings))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, value in adapted.named_parameters():
                if "magnitude" in name:
                    value.mul_(1 + torch.rand_like(value))
                elif any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")) or (
                    value.requires_grad and name.endswith("bias")
                ):
                    value.copy_(torch.randn_like(value) * 0.3)
        adapted.save_pretrained(folder)
    return folder


def merged(base: Path, *adapters: Path, scales: tuple[float, ...] = ()) -> dict[str, torch.Tensor]:
    """PEFT's `merge_and_unload` of the adapters, one after another. scales: `set_scale` of each."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        adapted = PeftModel.from_pretrained(made, adapters[0], adapter_name="a0")
        for number, adapter in enumerate(adapters[1:], 1):
            adapted.load_adapter(adapter, f"a{number}")
        for number, scale in enumerate(scales):
            for module in adapted.modules():
                if hasattr(module, "set_scale"):
                    module.set_scale(f"a{number}", scale)
        out = adapted.merge_and_unload(adapter_names=[f"a{number}" for number in range(len(adapters))])
    return {name: value.detach().clone() for name, value in out.state_dict().items()}


def saved(merged_state: dict[str, torch.Tensor], kind: str, folder: Path) -> Path:
    """The merged model as transformers saves it (the hub's names, experts one by one)."""
    made = model(kind)
    made.load_state_dict(merged_state, strict=True)
    made.save_pretrained(folder)
    return folder


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            out.update({name: f.get_tensor(name) for name in f.keys()})
    return out


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in units in the last place of the dtype."""
    kind = {torch.float32: np.int32, torch.bfloat16: np.int16}[a.dtype]
    width = {np.int32: torch.int32, np.int16: torch.int16}[kind]
    x, y = (t.contiguous().view(width).numpy().astype(np.int64) for t in (a, b))
    top = np.int64(1) << (31 if kind is np.int32 else 15)
    x, y = (np.where(v < 0, -top - v, v) for v in (x, y))
    return int(np.abs(x - y).max(initial=0))
