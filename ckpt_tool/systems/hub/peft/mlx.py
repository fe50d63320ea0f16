"""mlx-lm's adapters, read as PEFT's: the same names in another file, another config, and transposed factors.

    adapter_config.json      {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 3.0, ...}, ...}
    adapters.safetensors     model.layers.0.self_attn.q_proj.lora_a (in, r)  ->  ....lora_A.weight (r, in), as strides
                             model.layers.0.self_attn.q_proj.lora_b (r, out) ->  ....lora_B.weight (out, r)
                             model.layers.0.self_attn.q_proj.m (out,)        ->  ....lora_magnitude_vector (DoRA)

mlx-lm adds `scale * lora_a @ lora_b`, so alpha is scale times the rank. For an embedding `lora_a` has a row for each
token: PEFT's lora_embedding_A, transposed. `0000100_adapters.safetensors` are older steps of the same adapter.
Refused by name: whole layers (`fine_tune_type` full) and stacked experts (SwitchLinear), whose factors have three dims.

Source: mlx-lm 0.29 and later `tuner/{lora,dora,utils}.py`. Cost: the header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.tensor import LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.errors import UsageError
from ckpt_tool.storage.safetensors_files.safetensors_file import read_header
from ckpt_tool.storage.safetensors_files.safetensors_table import HeaderTable
from ckpt_tool.storage.source import Tree

FILE = "adapters.safetensors"
NOT_READ = "E2937"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings")
_PREFIX = "base_model.model."


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json was written by mlx-lm."""
    return "peft_type" not in config and ("fine_tune_type" in config or "lora_parameters" in config)


def read_mlx(tree: Tree, config: Mapping[str, Any]) -> tuple[dict[TensorKey, LogicalTensor], dict[str, Any]]:
    """An adapter of mlx-lm as PEFT has it: (tensors, config). Raises UsageError E2937 for a kind that PEFT lacks."""
    kind = config.get("fine_tune_type", "lora")
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if kind not in ("lora", "dora"):
        raise _not_read(tree, f"fine_tune_type {str(kind)[:40]}: only lora and dora are sums with the base")
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise _not_read(tree, f"its lora_parameters state no scale: {str(scale)[:40]}")

    # mlx writes `__metadata__: null` into the header, which changes nothing.
    table = HeaderTable([read_header(tree, FILE, lenient=True)])
    tensors: dict[TensorKey, LogicalTensor] = {}
    ranks: dict[str, int] = {}
    for key, tensor in table.items():
        module, _, part = key.name.rpartition(".")
        name = _name_of(module, part)
        if name is None:
            raise _not_read(tree, f"{key.name} is no factor of a LoRA")
        if len(tensor.shape) != (1 if part == "m" else 2):
            raise _not_read(tree, f"{key.name} has the shape {list(tensor.shape)}: factors of stacked experts")
        if part == "lora_a":
            ranks[module] = tensor.shape[1]
        array = tensor.chunks[0].array
        # The transposition costs nothing: the same bytes with other strides.
        if part != "m":
            array = array._replace(shape=array.shape[::-1], strides=contiguous_strides(array.shape)[::-1])
        own = TensorKey(name)
        tensors[own] = simple_tensor(own, array)
    return tensors, _peft_config(config, ranks, float(scale), is_dora=kind == "dora")


def _name_of(module: str, part: str) -> str | None:
    """PEFT's name of a tensor of mlx-lm; None if it is no part of an adapter."""
    is_embedding = module.rpartition(".")[2] in _EMBEDDINGS
    ends = {
        "lora_a": "lora_embedding_A" if is_embedding else "lora_A.weight",
        "lora_b": "lora_embedding_B" if is_embedding else "lora_B.weight",
        "m": "lora_magnitude_vector",
    }
    return f"{_PREFIX}{module}.{ends[part]}" if part in ends and module else None


def _peft_config(config: Mapping[str, Any], ranks: Mapping[str, int], scale: float, *, is_dora: bool) -> dict[str, Any]:
    """The adapter_config.json of PEFT. ranks: {module: rank}; scale: what mlx-lm multiplies the product by."""
    rank = max(ranks.values(), default=8)
    alpha = scale * rank  # PEFT multiplies by alpha / r
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": config.get("model") if isinstance(config.get("model"), str) else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {module: other for module, other in ranks.items() if other != rank},
        # Full names, because mlx-lm may adapt only the last layers (`num_layers`).
        "target_modules": sorted(ranks),
        "task_type": "CAUSAL_LM",
        "use_dora": is_dora,
        "use_rslora": False,
    }


def _not_read(tree: Tree, what: str) -> UsageError:
    return UsageError(
        f"this is an adapter of mlx-lm's, and {what}",
        code=NOT_READ,
        path=tree.display(),
        hint="fuse it with mlx-lm itself (mlx_lm.fuse)",
    )
