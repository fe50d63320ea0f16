"""`safetensors`: Hugging Face folders and single files. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is not None or any(".safetensors" in path for path in tree.listing())


ENTRY = Entry(
    "safetensors",
    order=10,
    called=("hf", "huggingface", "hub", "transformers", "st"),
    en="Hugging Face: single, sharded with index, and DCP's `shard-*-model-*`; read only: accelerate's and the "
    "Trainer's optimizer next to it",
    zh="Hugging Face：单文件、带索引的分片，以及 DCP 的 `shard-*-model-*`；只读：旁边的 accelerate 与 Trainer 优化器",
    may_be=_may_be,
)
