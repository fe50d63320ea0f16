"""Trains a small Llama for one step under FSDP2, on two gloo ranks, and saves it in three ways.

    python tests/guide/train_fsdp2.py FOLDER

`FOLDER/fsdp2` is what `torch.distributed.checkpoint.save` writes of model and AdamW, `FOLDER/training.pt` the same
values whole by `torch.save`, and `FOLDER/hub` what transformers saves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sources import SIZES

WORLD = 2


def train_and_save(rank: int, target: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{target}/store", rank=rank, world_size=WORLD)
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(32).reshape(2, 16) % SIZES["vocab_size"]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()

    states, optimizer_states = get_state_dict(model, optimizer)
    save({"model": states, "optim": optimizer_states, "step": 1}, checkpoint_id=f"{target}/fsdp2")

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states, optimizer_states = get_state_dict(model, optimizer, options=whole)
    if rank == 0:
        torch.save({"model": states, "optimizer": optimizer_states, "iteration": 1}, f"{target}/training.pt")
        plain = LlamaForCausalLM(LlamaConfig(**SIZES))
        plain.load_state_dict(states)
        plain.save_pretrained(f"{target}/hub")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(sys.argv[1], "store").unlink(missing_ok=True)
    mp.start_processes(train_and_save, args=(sys.argv[1],), nprocs=WORLD, start_method="fork")
