"""`megatron`: Megatron-LM's legacy folders of ranks. `format` is the specification; names, rules and stages serve
`megatron_dist` too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is None and any("mp_rank_" in path for path in tree.listing())


ENTRY = Entry(
    "megatron",
    order=50,
    called=("megatron-lm", "mcore-legacy", "mp-rank"),
    en="Megatron-LM's legacy `mp_rank_*` folders, with `distrib_optim.pt` or without, every expert container, "
    "`layer_wise_optimizer_R.pt` (read); veRL's adapters, a file a rank (read)",
    zh="Megatron-LM 旧式 `mp_rank_*` 目录，含或不含 `distrib_optim.pt`，各种专家容器，"
    "`layer_wise_optimizer_R.pt`（只读）；veRL 每个 rank 一个文件的适配器（只读）",
    may_be=_may_be,
)
