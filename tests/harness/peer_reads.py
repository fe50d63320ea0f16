"""Run in another system's Python: reads what the harness saved with that system's own functions, writes plain
safetensors.

python peer_reads.py deepspeed|megatron-dist|megatron|paddle-flex FOLDER OUT.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def deepspeed(folder: Path) -> dict[str, Any]:
    """Masters, as DeepSpeed's own script joins them."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(folder), lazy_mode=False)
    return {f"master/{name}": tensor.detach().clone().contiguous() for name, tensor in found.items()}


def megatron_dist(folder: Path) -> dict[str, Any]:
    """Every tensor under its key, and the common state's iteration."""
    import torch
    from megatron.core import dist_checkpointing

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    inner = folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    common = dist_checkpointing.load_common_state_dict(str(inner))
    metadata = dist_checkpointing.load_tensors_metadata(str(inner))
    tensors = dist_checkpointing.load_plain_tensors(str(inner))
    assert set(metadata) == {key for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    found = {key: value.contiguous() for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    return {**found, "iteration": torch.tensor(common["iteration"]), "step": torch.tensor(common["harness"]["step"])}


def megatron(folder: Path) -> dict[str, Any]:
    """Each rank's model and flat lines, as torch unpickles them beside Megatron."""
    import torch

    found = {}
    for path in sorted(folder.glob("iter_*/mp_rank_*")):
        state = torch.load(path / "model_optim_rng.pt", weights_only=False)
        assert state["args"].tensor_model_parallel_size >= 1
        found |= {f"{path.name}/{name}": value for name, value in state["model"].items() if value is not None}
    return found


def paddle_flex(folder: Path) -> dict[str, Any]:
    """Every key of the four folders, joined by Paddle."""
    import numpy as np
    import paddle
    from paddle.distributed.flex_checkpoint.dcp.load_state_dict import load_merged_state_dict

    found = {}
    for name in ("model_state", "optimizer_state", "master_weight", "ema_state"):
        for key, value in load_merged_state_dict(str(folder / name), offload=True).items():
            found[f"{name}/{key}"] = np.ascontiguousarray(paddle.cast(value, "float32").numpy())
    scheduler = paddle.load(str(folder / "scheduler.pdparams"))
    return {**found, "step": np.array(scheduler["harness"]["step"])}


def main() -> None:
    which = sys.argv[1]
    folder = Path(sys.argv[2])
    out = sys.argv[3]
    readers = {"deepspeed": deepspeed, "megatron-dist": megatron_dist, "megatron": megatron, "paddle-flex": paddle_flex}
    found = readers[which](folder)
    if which == "paddle-flex":  # this Python has no torch
        from safetensors.numpy import save_file

        save_file(found, out)
    else:
        from safetensors.torch import save_file

        save_file({key: value.clone() for key, value in found.items()}, out)


if __name__ == "__main__":
    main()
