"""`paddle-flex`: .distcp folders of PaddlePaddle. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    ends = (".metadata", ".lock", ".distcp", ".safetensors")
    return tree.single is None and any(path.endswith(ends) for path in tree.listing())


ENTRY = Entry(
    "paddle-flex",
    order=110,
    en="`.distcp` with `.metadata`: the Trainer's folders and plain `paddle.distributed.save_state_dict`",
    zh="`.distcp` 加 `.metadata`：Trainer 的目录与普通的 `paddle.distributed.save_state_dict`",
    may_be=_may_be,
)
