"""Resume a real DeepSpeed job and take one more step (run as a program, on gloo ranks).

    python resume_deepspeed.py CASE CHECKPOINT WORLD STAGE OUT.safetensors

CASE names the model, precision and groups (fixtures/make/deepspeed_zero.py); STAGE is the job's ZeRO stage. CHECKPOINT
is the folder that holds `latest`, or `-` for a run that was never interrupted, or `universal:FOLDER` for one that
DeepSpeed loads by `checkpoint.load_universal`. A resumed job starts with parameters that are all 7 and a wrong learning
rate, so nothing but the checkpoint can give the result. OUT holds what DeepSpeed's own functions say of the live
engine: `loaded/STATE/NAME` after loading (or after the steps of the case) and `stepped/STATE/NAME` after one more step,
and `counters` = [global steps, global samples].
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

import deepspeed_zero as made
import torch
import torch.distributed as dist
from ranks import on_ranks
from safetensors.torch import save_file


def gathered(engine: Any, prefix: str, world: int) -> dict[str, torch.Tensor]:
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, made.truth(engine))
    return {f"{prefix}/{key}": value.clone().contiguous() for one in everyone for key, value in one.items()}


def overwrite(engine: Any) -> None:
    """Nothing of the start may be left: parameters 7, learning rate 0.5."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.fill_(7.0)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.5


def body(rank: int, world: int, name: str, checkpoint: str, stage: int, out: str) -> None:
    made.environment(rank, world)
    case = made.CASES[name]
    config = dict(case.config)
    config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    folder = checkpoint.removeprefix("universal:")
    if folder != checkpoint:
        config["checkpoint"] = {"load_universal": True}
    engine = made.start(case._replace(config=config))
    if checkpoint == "-":
        made.train(engine, range(made.STEPS))
    else:
        overwrite(engine)
        path, client = engine.load_checkpoint(folder)
        if path is None:
            raise RuntimeError(f"DeepSpeed loads nothing from {folder}")
    found = gathered(engine, "loaded", world)
    made.train(engine, range(made.STEPS, made.STEPS + 1))
    found |= gathered(engine, "stepped", world)
    found["counters"] = torch.tensor([engine.global_steps, engine.global_samples])
    if rank == 0:
        save_file(found, out)


if __name__ == "__main__":
    name, checkpoint, world, stage, out = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    on_ranks(int(world), body, name, checkpoint, int(stage), out)
