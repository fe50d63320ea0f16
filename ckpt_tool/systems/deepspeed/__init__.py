"""DeepSpeed: ZeRO folders (`zero`) and universal checkpoints (`universal`); the modules next to them serve both.

This file registers the two formats; it imports nothing heavy, because it is read at every start of the tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry, System

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be_deepspeed(tree: Tree) -> bool:
    return tree.single is None and any(name.endswith("_states.pt") for name in tree.names())


def _may_be_deepspeed_universal(tree: Tree) -> bool:
    return tree.single is None and any(path.startswith("zero/") for path in tree.listing())


SYSTEM = System(
    formats=(
        Entry(
            "deepspeed",
            "zero",
            order=70,
            called=("zero", "zero1", "zero2", "zero3", "ds"),
            en="ZeRO 0, 1, 2, 3, pipeline layer files, native MoE expert files",
            zh="ZeRO 0、1、2、3，流水线层文件，原生 MoE 专家文件",
            may_be=_may_be_deepspeed,
        ),
        Entry(
            "deepspeed-universal",
            "universal",
            order=80,
            called=("universal", "ds-universal"),
            en="what `ds_to_universal.py` makes: one folder a parameter",
            zh="`ds_to_universal.py` 的产物：每个参数一个目录",
            may_be=_may_be_deepspeed_universal,
        ),
    ),
)
