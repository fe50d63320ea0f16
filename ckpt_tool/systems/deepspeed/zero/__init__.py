"""`deepspeed`: ZeRO, pipeline and expert files. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is None and any(name.endswith("_states.pt") for name in tree.names())


ENTRY = Entry(
    "deepspeed",
    order=70,
    called=("zero", "zero1", "zero2", "zero3", "ds"),
    en="ZeRO 0, 1, 2, 3, pipeline layer files, native MoE expert files",
    zh="ZeRO 0、1、2、3，流水线层文件，原生 MoE 专家文件",
    may_be=_may_be,
)
