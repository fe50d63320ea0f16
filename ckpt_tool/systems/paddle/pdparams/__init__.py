"""`paddle`: PaddlePaddle's files of ranks. `format` is the specification; files, rules and layout serve the other two
formats too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return any(name.endswith((".pdparams", ".pdopt", ".pd", ".pdema")) for name in tree.names())


ENTRY = Entry(
    "paddle",
    order=90,
    called=("pdparams", "paddlepaddle"),
    en="PaddlePaddle's files of ranks: `.pdparams`, `.pdopt`, sharding v1 and v2, `sharding_io`, both pickle encodings",
    zh="PaddlePaddle 每个 rank 的文件：`.pdparams`、`.pdopt`，分片 v1 与 v2，`sharding_io`，两种 pickle 编码",
    may_be=_may_be,
)
