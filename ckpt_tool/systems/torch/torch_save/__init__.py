"""`torch`: files of torch.save, nested training states, a file a rank. `format` is the specification; `content` serves
every format made of such files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    """By the names of its files; or a file's content speaks for it, where none beside it is of another format."""
    if tree.single is not None:
        return True
    names = tree.names()
    if any("pytorch_model" in name or "_rank_" in name or name.endswith(".bin.index.json") for name in names):
        return True
    others = any(name.endswith((".safetensors", ".distcp", ".metadata")) for name in names)
    return not others and any(tree.listing()[name] >= 16 for name in names)  # bytes, of the shortest pickle or zip


ENTRY = Entry(
    "torch",
    order=20,
    called=("pytorch", "pt", "pth", "bin"),
    en="`.pt`, `.bin`, `.pth`: state dicts and nested training states, zip and the stream before torch 1.6; "
    "read only: one file a rank of DTensors (`model_world_size_W_rank_R.pt`)",
    zh="`.pt`、`.bin`、`.pth`：state dict 与嵌套的训练状态，zip 格式与 torch 1.6 之前的流格式；"
    "只读：每 rank 一个 DTensor 文件（`model_world_size_W_rank_R.pt`）",
    may_be=_may_be,
)
