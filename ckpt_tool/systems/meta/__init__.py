"""Meta and Mistral AI: consolidated files, their names and params.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Dialect, Entry, System

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be_meta(tree: Tree) -> bool:
    return tree.single is None and any(name.startswith("consolidated") for name in tree.names())


SYSTEM = System(
    formats=(
        Entry(
            "meta",
            "consolidated",
            order=120,
            called=("llama", "consolidated"),
            en="`consolidated.NN.pth` with `params.json`, Llama 1 to 3 and Mistral's `consolidated.safetensors`, "
            "shards of any number",
            zh="`consolidated.NN.pth` 加 `params.json`，Llama 1 至 3，以及 Mistral 的 `consolidated.safetensors`，任意分片数",
            may_be=_may_be_meta,
        ),
    ),
    dialects=(Dialect("meta", order=40, hints="source_config:hints_of_config"),),
    config_reader="source_config:read_params",
)
