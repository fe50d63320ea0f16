"""Load a checkpoint into a real Megatron job and look at every value (run as a program, on gloo ranks).

    MEGATRON_LM=SOURCE python load_megatron.py CHECKPOINT WORLD "FLAGS" REPORT.json

FLAGS are Megatron's command line; words in capitals stand for those of fixtures/make/megatron_lm.py (`BASE LLAMA BF16
ADAM DIST`). The job is built anew (its parameters all 7, no moments), `megatron.training.load_checkpoint` loads, and
each live tensor of each rank is compared with the number that its name and place tell, which is what the maker put
there. REPORT holds {"compared": tensors, "wrong": ["rank 0 exp_avg NAME ..."], "iteration", "step": [...],
"samples"}. Rows of a vocabulary padded further than the source's are left out: they are not in the source.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

if __name__ == "__main__" and " ADAM " in f" {sys.argv[3]} ":
    os.environ["ADAM"] = "apex"  # torch's AdamW cannot load what DistributedOptimizer stores (Megatron 0.16.1)

import megatron_lm as made
import torch
import torch.distributed as dist
from megatron.training import get_args
from ranks import on_ranks


def spelled(flags: str) -> str:
    return " ".join(getattr(made, word) if word.isupper() else word for word in flags.split())


def known(part: made.Part, place: made.Place, rows: int) -> torch.Tensor:
    """Which elements of a rank's part of a vocabulary tensor the source has: a flat mask like `place.values`."""
    count = part.shape[0] // part.size
    width = part.shape[1]
    has = torch.arange(count * part.rank, count * (part.rank + 1)) < rows
    return has.repeat_interleave(width)[place.start : place.start + place.values.numel()]


def wrong(state: str, its: list[made.Part], place: made.Place, rows: int) -> str | None:
    have = place.where.detach().reshape(-1)
    want = place.values.reshape(-1).to(have.dtype)
    if its[0].name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        mask = known(its[0], place, rows)
        have = have[mask]
        want = want[mask]
    if torch.equal(have, want):
        return None
    return f"{state} {its[0].name}: {int((have != want).sum())} of {have.numel()} differ"


def body(rank: int, world: int, checkpoint: str, flags: str, report: str) -> None:
    words = spelled(flags)
    rows = made.ROWS
    model, optimizer, scheduler = made.job(rank, world, f"{words} --load {checkpoint} --exit-on-missing-checkpoint")
    found = []
    compared = 0
    for state, its, place in made.places(model, optimizer):
        compared += 1
        fault = wrong(state, its, place, rows)
        if fault:
            found.append(f"rank {rank} {fault}")
    args = get_args()
    groups = [group for one in made.optimizers(optimizer) for group in one.optimizer.param_groups]
    steps = [float(group["step"]) for group in groups if "step" in group]
    states = [state for one in made.optimizers(optimizer) for state in one.optimizer.state.values()]
    steps += [float(state["step"]) for state in states if "step" in state]
    mine: dict[str, Any] = {
        "compared": compared,
        "wrong": found,
        "iteration": args.iteration,
        "samples": args.consumed_train_samples,
        "scheduler": scheduler.num_steps,
        "step": sorted(set(steps)),
    }
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        whole = mine | {
            "compared": sum(one["compared"] for one in everyone),
            "wrong": [fault for one in everyone for fault in one["wrong"]],
            "step": sorted({step for one in everyone for step in one["step"]}),
        }
        Path(report).write_text(json.dumps(whole))


if __name__ == "__main__":
    checkpoint, world, flags, report = sys.argv[1:]
    on_ranks(int(world), body, checkpoint, flags, report)
