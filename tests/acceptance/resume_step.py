"""Resume a real FSDP job from a DCP checkpoint and take one more AdamW step (run as a program, on gloo ranks).

    python resume_step.py LAYOUT CHECKPOINT WORLD OUT.safetensors

LAYOUT says how the job spells its state: `states` ({"model", "optim"} of get_state_dict, FSDP2), `titan` (torchtitan's
flat keys, FSDP2), `accelerate` (accelerate's own load functions, FSDP2), `fsdp1` (ShardedTensors), `tp` (tensor
parallel 2 under FSDP2 over WORLD / 2).

Model, optimizer and data are those of fixtures/make/tiny.py, which wrote the fixtures. Every rank gets the same batch,
so that the mean of the gradients over 2 or 4 ranks is exact and the result does not depend on the number of ranks.
OUT holds the state after loading under `loaded/...` and after the step under `stepped/...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from safetensors.torch import save_file
from tiny import Tiny, adamw, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from truth import training


class Job:
    """A fresh model on `world` ranks with nothing of a checkpoint in it: weights all 7, learning rates all 0.5."""

    def __init__(self, layout: str, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        model: Any = Tiny(hidden=22) if layout == "tp" else Tiny()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        if layout == "fsdp1":
            self.model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            mesh = init_device_mesh("cpu", (world,))
            if layout == "tp":
                both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
                mesh = both["dp"]
                for layer in model.layers:
                    parallelize_module(layer, both["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
            for number, layer in enumerate(model.layers):
                model.layers[number] = fully_shard(layer, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        self.optimizer = adamw(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5

    # -- the ways to load ---------------------------------------------------------------------------------------------

    def states(self, checkpoint: str) -> None:
        weights, optim = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": weights, "optim": optim}, checkpoint_id=checkpoint)
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=optim)

    def titan(self, checkpoint: str) -> None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, optim = get_state_dict(self.model, self.optimizer, options=flat)
        state = {**weights, "optimizer": optim}
        dcp.load(state, checkpoint_id=checkpoint)
        weights = {name: state[name] for name in weights}
        optim = state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=optim, options=flat)

    def accelerate(self, checkpoint: str) -> None:
        from accelerate import PartialState
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

        os.environ |= {"RANK": f"{self.rank}", "WORLD_SIZE": f"{self.world}", "LOCAL_RANK": f"{self.rank}"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, not used: the group exists
        PartialState(cpu=True, backend="gloo")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        self.num_processes = self.world
        self.process_index = self.rank
        self.is_fsdp2 = True
        load_fsdp_model(plugin, self, self.model, checkpoint)
        load_fsdp_optimizer(plugin, self, self.optimizer, self.model, checkpoint)

    @staticmethod
    def wait_for_everyone() -> None:
        dist.barrier()

    def fsdp1(self, checkpoint: str) -> None:
        fsdp = FullyShardedDataParallel
        fsdp.set_state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
        weights = self.model.state_dict()
        dcp.load({"model": weights}, checkpoint_id=checkpoint)
        self.model.load_state_dict(weights)
        # FSDP1 has no optimizer state before a step: take one without gradient to have tensors to load into.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        optim = fsdp.optim_state_dict(self.model, self.optimizer)
        dcp.load({"optim": optim}, checkpoint_id=checkpoint)
        self.optimizer.load_state_dict(fsdp.optim_state_dict_to_load(self.model, self.optimizer, optim))

    tp = states

    def truth(self) -> dict[str, torch.Tensor]:
        if isinstance(self.model, FullyShardedDataParallel):
            optim = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
            return training(self.model.state_dict(), optim)
        return training(*get_state_dict(self.model, self.optimizer))


def resume(rank: int, world: int, layout: str, checkpoint: str, out: str) -> None:
    job = Job(layout, rank, world)
    load: Callable[[str], None] = getattr(job, layout)
    load(checkpoint)
    loaded = job.truth()
    rates = torch.tensor([group["lr"] for group in job.optimizer.param_groups], dtype=torch.float64)
    train(job.model, job.optimizer, range(2, 3), 0, 1)
    stepped = job.truth()
    if rank == 0:
        found = {f"loaded/{k}": v for k, v in loaded.items()} | {f"stepped/{k}": v for k, v in stepped.items()}
        save_file({**found, "rates": rates}, out)


if __name__ == "__main__":
    on_ranks(int(sys.argv[3]), resume, sys.argv[1], sys.argv[2], sys.argv[4])
