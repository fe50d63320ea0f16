"""`megatron-dist`: Megatron-Core's torch_dist folders. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    if tree.single is not None:
        return False
    return "metadata.json" in tree.names() or any(
        ".metadata" in path or path.endswith(".distcp") for path in tree.listing()
    )


ENTRY = Entry(
    "megatron-dist",
    order=60,
    called=("nemo", "torch-dist", "mcore", "megatron-core", "megatron-bridge"),
    en="Megatron-Core's `torch_dist`, every optimizer sharding type, written as `fully_reshardable`; adapters of "
    "Megatron-Bridge, NeMo 2's folders and `.nemo` archives",
    zh="Megatron-Core 的 `torch_dist`，各种优化器分片类型，写出为 `fully_reshardable`；"
    "Megatron-Bridge 的适配器，NeMo 2 目录与 `.nemo` 归档",
    may_be=_may_be,
)
