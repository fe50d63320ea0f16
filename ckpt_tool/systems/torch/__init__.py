"""PyTorch: files of torch.save and the folders of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry, System

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be_torch(tree: Tree) -> bool:
    """Whether the PyTorch reader should look at this tree.

    True for file names that only PyTorch uses. Otherwise any file might be a `torch.save` file, unless the folder also
    contains files of safetensors or DCP.
    """
    if tree.single is not None:
        return True  # any extension is possible, so the reader has to look at the first bytes
    names = tree.names()
    if any("pytorch_model" in name or "_rank_" in name or name.endswith(".bin.index.json") for name in names):
        return True
    others = any(name.endswith((".safetensors", ".distcp", ".metadata")) for name in names)

    # 16 bytes: no pickle or zip with a tensor is shorter.
    return not others and any(tree.listing()[name] >= 16 for name in names)


def _may_be_dcp(tree: Tree) -> bool:
    # A data file alone counts too: the reader then reports a save that was not finished.
    return tree.single is None and any(".metadata" in path or path.endswith(".distcp") for path in tree.listing())


SYSTEM = System(
    formats=(
        Entry(
            "torch",
            "torch_save",
            order=20,
            called=("pytorch", "pt", "pth", "bin", "lightning"),
            en="`.pt`, `.bin`, `.pth`: state dicts and nested training states, zip and the stream before torch 1.6; "
            "read only: one file a rank of DTensors (`model_world_size_W_rank_R.pt`)",
            zh="`.pt`、`.bin`、`.pth`：state dict 与嵌套的训练状态，zip 格式与 torch 1.6 之前的流格式；"
            "只读：每 rank 一个 DTensor 文件（`model_world_size_W_rank_R.pt`）",
            may_be=_may_be_torch,
        ),
        Entry(
            "dcp",
            "dcp",
            order=30,
            called=("fsdp", "fsdp2", "torch-dcp", "distributed", "distcp"),
            en="PyTorch distributed checkpoint: FSDP1, FSDP2, TP; "
            "key layouts of torchtitan, accelerate, OLMo-core, prime-rl, VeOmni, torchtune",
            zh="PyTorch 分布式检查点：FSDP1、FSDP2、TP；"
            "torchtitan、accelerate、OLMo-core、prime-rl、VeOmni 与 torchtune 的键布局",
            may_be=_may_be_dcp,
        ),
    ),
)
