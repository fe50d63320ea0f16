"""`megatron-fsdp`: Megatron-FSDP's `fsdp_dtensor` folders. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is None and any(path.endswith(".metadata") for path in tree.listing())


ENTRY = Entry(
    "megatron-fsdp",
    order=65,
    called=("fsdp-dtensor",),
    en="Megatron-FSDP's `fsdp_dtensor`: gated fc1 in halves, fp32 main weights, groups a parameter",
    zh="Megatron-FSDP 的 `fsdp_dtensor`：门控 fc1 分为两半、fp32 主权重、逐参数的优化器组",
    may_be=_may_be,
)
