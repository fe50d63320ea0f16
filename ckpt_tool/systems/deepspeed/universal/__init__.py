"""`deepspeed-universal`: one folder a parameter. `format` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is None and any(path.startswith("zero/") for path in tree.listing())


ENTRY = Entry(
    "deepspeed-universal",
    order=80,
    called=("universal", "ds-universal"),
    en="what `ds_to_universal.py` makes: one folder a parameter",
    zh="`ds_to_universal.py` 的产物：每个参数一个目录",
    may_be=_may_be,
)
