"""This tool's own format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry, System

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be_sharded(tree: Tree) -> bool:
    names = tree.names()
    return "ckpt.index.json" in names or any(n.endswith(".safetensors") and n.count(".") > 1 for n in names)


SYSTEM = System(
    formats=(
        Entry(
            "sharded",
            "sharded",
            order=40,
            en="one safetensors file a state and rank with the boxes in its metadata, plus `ckpt.index.json`",
            zh="每个状态、每个 rank 一个 safetensors 文件，元数据记录各块位置，外加 `ckpt.index.json`",
            may_be=_may_be_sharded,
        ),
    ),
)
