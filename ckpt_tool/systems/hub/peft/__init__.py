"""Format `peft`: adapter folders of Hugging Face's PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is None and "adapter_config.json" in tree.names()


ENTRY = Entry(
    "peft",
    order=130,
    called=("lora", "adapter"),
    en="adapter folders of PEFT: `adapter_config.json` with `adapter_model.safetensors` or `.bin`",
    zh="PEFT 的适配器目录：`adapter_config.json` 加 `adapter_model.safetensors` 或 `.bin`",
    may_be=_may_be,
)
