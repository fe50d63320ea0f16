"""Hugging Face's hub: safetensors folders, PEFT adapters, MLX's variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Dialect, Entry, System

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be_safetensors(tree: Tree) -> bool:
    return tree.single is not None or any(".safetensors" in path for path in tree.listing())


def _may_be_peft(tree: Tree) -> bool:
    return tree.single is None and "adapter_config.json" in tree.names()


SYSTEM = System(
    formats=(
        Entry(
            "safetensors",
            "safetensors",
            order=10,
            called=("hf", "huggingface", "hub", "transformers", "st", "vllm", "sglang", "trtllm", "tensorrt-llm"),
            en="Hugging Face: single, sharded with index, and DCP's `shard-*-model-*`; read only: accelerate's and the "
            "Trainer's optimizer next to it",
            zh="Hugging Face：单文件、带索引的分片，以及 DCP 的 `shard-*-model-*`；只读：旁边的 accelerate 与 Trainer 优化器",
            may_be=_may_be_safetensors,
        ),
        Entry(
            "peft",
            "peft",
            order=130,
            called=("lora", "adapter"),
            en="adapter folders of PEFT: `adapter_config.json` with `adapter_model.safetensors` or `.bin`",
            zh="PEFT 的适配器目录：`adapter_config.json` 加 `adapter_model.safetensors` 或 `.bin`",
            may_be=_may_be_peft,
        ),
    ),
    dialects=(Dialect("hf", order=10),),
    source_names="passes.mlx_source:names_of_mlx",
)
