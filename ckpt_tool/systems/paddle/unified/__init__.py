"""`paddle-unified`: unified checkpoints of PaddleNLP and PaddleFormers. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is None and any(".safetensors" in name for name in tree.names())


ENTRY = Entry(
    "paddle-unified",
    order=100,
    called=("unified", "paddlenlp", "paddleformers"),
    en="unified checkpoints of PaddleNLP and PaddleFormers, merged or a file a rank, LoRA, quantised optimizers",
    zh="PaddleNLP 与 PaddleFormers 的统一检查点：合并的或每个 rank 一个文件，LoRA，量化的优化器",
    may_be=_may_be,
)
