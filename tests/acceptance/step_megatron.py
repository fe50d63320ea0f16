"""Load a checkpoint into a real Megatron job, take one step, and write what it holds (run as a program, on gloo ranks).

    MEGATRON_LM=SOURCE python step_megatron.py CHECKPOINT WORLD "FLAGS" OUT.safetensors

FLAGS are Megatron's command line. The gradient of a parameter is a ramp that its name and place tell, the same for any
layout. OUT holds whole tensors by `before/STATE/NAME` and `after/STATE/NAME`: parameters, main weights and moments.
Tensor parallelism is 1, so that a rank holds a parameter whole or a range of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))
os.environ["ADAM"] = "apex"  # torch's AdamW cannot load what DistributedOptimizer stores

import megatron_lm as made
import megatron_muon  # noqa: F401  # chains of chains, gloo's uneven parts
import torch
import torch.distributed as dist
from ranks import on_ranks
from safetensors.torch import save_file

Held = list[tuple[str, tuple[int, ...], int, torch.Tensor]]  # key, whole shape, first element, the elements


def held(model: list[Any], optimizer: Any, moment: str) -> Held:
    found: dict[torch.Tensor, made.Part] = {}
    out: Held = []
    for chunk in model:
        for _, tensor, its in made.parts(chunk):
            out.append((f"{moment}/model/{its[0].name}", its[0].shape, 0, tensor.detach().flatten().clone()))
            if isinstance(tensor, torch.nn.Parameter):
                found[tensor] = its[0]
    for one in made.optimizers(optimizer):
        for param, main, start, _ in made.mains(one, found):
            for state, tensor in [("master", main), *one.optimizer.state[main].items()]:
                if isinstance(tensor, torch.Tensor) and tensor.numel() == main.numel():
                    key = f"{moment}/{state}/{found[param].name}"
                    out.append((key, found[param].shape, start, tensor.detach().flatten().clone()))
    return out


def body(rank: int, world: int, checkpoint: str, flags: str, out: str) -> None:
    words = f"{made.BASE} {flags} --load {checkpoint} --exit-on-missing-checkpoint"
    model, optimizer, _ = made.job(rank, world, words)
    mine = held(model, optimizer, "before")
    for chunk in model:
        for _, param, its in made.parts(chunk):
            if isinstance(param, torch.nn.Parameter):
                param.main_grad.copy_(made.full(its[0].name, "exp_avg", its[0].shape).view(param.shape))
    optimizer.step()
    mine += held(model, optimizer, "after")
    everyone: list[Held] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        whole: dict[str, torch.Tensor] = {}
        for key, shape, start, values in (row for one in everyone for row in one):
            line = whole.setdefault(key, torch.full((torch.Size(shape).numel(),), torch.nan, dtype=values.dtype))
            line[start : start + values.numel()] = values
        shapes = {key: shape for one in everyone for key, shape, _, _ in one}
        save_file({key: line.view(shapes[key]) for key, line in whole.items()}, out)


def main() -> None:
    checkpoint, world, flags, out = sys.argv[1:]
    on_ranks(int(world), body, str(Path(checkpoint).resolve()), flags, out)


if __name__ == "__main__":
    main()
