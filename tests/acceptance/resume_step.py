"""Resume a real FSDP2 job from a DCP checkpoint and take one more AdamW step (run as a program, on gloo ranks).

    python resume_step.py CHECKPOINT WORLD OUT.safetensors

Model, optimizer and data are those of fixtures/make/tiny.py, which wrote `fixtures/dcp/fsdp2_dp4`. Every rank gets
the same batch, so that the mean of the gradients over 2 or 4 ranks is exact and the result does not depend on the
number of ranks. OUT holds the state after loading under `loaded/...` and after the step under `stepped/...`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from safetensors.torch import save_file
from tiny import Tiny, adamw, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from truth import training


def resume(rank: int, world: int, checkpoint: str, out: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = Tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # nothing of the fresh model may survive the loading
    for number, layer in enumerate(model.layers):
        model.layers[number] = fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.5

    weights, optim = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": optim}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
    loaded = training(*get_state_dict(model, optimizer))
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)

    train(model, optimizer, range(2, 3), 0, 1)
    stepped = training(*get_state_dict(model, optimizer))
    if rank == 0:
        found = {f"loaded/{k}": v for k, v in loaded.items()} | {f"stepped/{k}": v for k, v in stepped.items()}
        save_file({**found, "rates": rates}, out)


if __name__ == "__main__":
    on_ranks(int(sys.argv[2]), resume, sys.argv[1], sys.argv[3])
