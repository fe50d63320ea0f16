"""`dcp`: PyTorch distributed checkpoints. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is None and any(".metadata" in path or path.endswith(".distcp") for path in tree.listing())


ENTRY = Entry(
    "dcp",
    order=30,
    called=("fsdp", "fsdp2", "torch-dcp", "distributed"),
    en="PyTorch distributed checkpoint: FSDP1, FSDP2, TP; "
    "key layouts of torchtitan, accelerate, OLMo-core, prime-rl, VeOmni, torchtune",
    zh="PyTorch 分布式检查点：FSDP1、FSDP2、TP；"
    "torchtitan、accelerate、OLMo-core、prime-rl、VeOmni 与 torchtune 的键布局",
    may_be=_may_be,
)
