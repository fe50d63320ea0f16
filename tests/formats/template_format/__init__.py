"""`toy`: a file for each of two ranks. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return any(name.endswith(".toy") for name in tree.names())


ENTRY = Entry(
    "toy",
    order=1000,
    en="two files, `rank-0.toy` and `rank-1.toy`, each with half of the rows of every tensor",
    zh="两个文件 `rank-0.toy` 与 `rank-1.toy`，各含每个张量一半的行",
    may_be=_may_be,
)
