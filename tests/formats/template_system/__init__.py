"""A made-up system: one format, two dialects, an option and a pass of its own. The template of a system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Dialect, Entry, System, SystemPass

if TYPE_CHECKING:
    from ckpt_tool.sources.chosen import Chosen, Conversion
    from ckpt_tool.storage.source import Tree


def _may_be_toy(tree: Tree) -> bool:
    return any(name.endswith(".toy") for name in tree.names())


def _has_comment(chosen: Chosen, job: Conversion) -> bool:
    """--toy-comment"""
    from ckpt_tool.systems.toy.options import ToyOptions

    return job.writing.of(ToyOptions).toy_comment is not None


SYSTEM = System(
    formats=(
        Entry(
            "toy",
            "rank_files",
            order=1000,
            en="two files, `rank-0.toy` and `rank-1.toy`, each with half of the rows of every tensor",
            zh="两个文件 `rank-0.toy` 与 `rank-1.toy`，各含每个张量一半的行",
            may_be=_may_be_toy,
        ),
    ),
    dialects=(Dialect("toy", order=1000), Dialect("toy-short", order=1010, variant_of="toy")),
    passes=(
        SystemPass(
            "comment",
            "--toy-comment: a line of text among the extras",
            _has_comment,
            "passes.comment:with_comment",
            "after fitting",
        ),
    ),
    options="ToyOptions",
)
