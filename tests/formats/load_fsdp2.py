"""Load a DCP folder into a real FSDP2 model and its AdamW, and write what the job then holds (run as a program).

    python load_fsdp2.py CHECKPOINT WORLD OUT.safetensors

Model and optimizer are those of fixtures/make/tiny.py, which wrote `fixtures/dcp/fsdp2_*`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from safetensors.torch import save_file
from tiny import Tiny, adamw
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from truth import training


def load(rank: int, world: int, checkpoint: str, out: str) -> None:
    model = Tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # nothing of the fresh model may survive
    mesh = init_device_mesh("cpu", (world,))
    for number, layer in enumerate(model.layers):
        model.layers[number] = fully_shard(layer, mesh=mesh)
    optimizer = adamw(fully_shard(model, mesh=mesh))
    weights, optim = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": optim}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
    held = training(*get_state_dict(model, optimizer))
    if rank == 0:
        save_file(held, out)


if __name__ == "__main__":
    on_ranks(int(sys.argv[2]), load, sys.argv[1], sys.argv[3])
