"""`paddle-flex`: .distcp folders of PaddlePaddle. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    """Its files are called by number: `0.metadata`, `1_0.distcp`."""
    names = (path.rpartition("/")[2] for path in tree.listing()) if tree.single is None else ()
    return any(
        name[:1].isdigit() and name.endswith((".metadata", ".lock", ".distcp", ".safetensors")) for name in names
    )


ENTRY = Entry(
    "paddle-flex",
    order=110,
    called=("flex", "flex-checkpoint"),
    en="`.distcp` with `.metadata`: the Trainer's folders and plain `paddle.distributed.save_state_dict`",
    zh="`.distcp` 加 `.metadata`：Trainer 的目录与普通的 `paddle.distributed.save_state_dict`",
    may_be=_may_be,
)
