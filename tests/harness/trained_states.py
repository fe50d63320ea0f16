"""Runs of the trainer for tests, and whole states put together from what its ranks say: by slices, not by the code
under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.launch import How, run_ranks
from ckpt_tool.harness.pieces import Read, State, TensorPiece
from ckpt_tool.harness.train import Trainer, TrainingJob

Whole = dict[tuple[str, str], torch.Tensor]


class Run(NamedTuple):
    steps: list[list[float]]
    whole: Whole
    scalars: dict[str, Any]


def run(job: TrainingJob, steps: int, folder: Path, *, backend: How = "sim", start: Run | None = None) -> Run:
    """Train and bring the ranks' pieces together. `start`: go on from another run's state."""

    def entry(comm: Comm) -> dict[str, Any]:
        trainer = Trainer(job, comm, steps=steps > 0)
        if start is not None:
            trainer.load(reader(start.whole), start.scalars)
        done = [list(step) for step in trainer.train(steps)]
        state = trainer.state()
        save_file({str(n): piece.tensor.clone() for n, piece in enumerate(state.pieces)}, folder / f"{comm.rank}.st")
        return {"steps": done, "pieces": [[*piece[:5], *piece[6:]] for piece in state.pieces], "scalars": state.scalars}

    said = run_ranks(job.layout.world, entry, groups=job.layout.groups(job.shape), backend=backend, timeout=120)
    assert all(rank["steps"] == said[0]["steps"] and rank["scalars"] == said[0]["scalars"] for rank in said)
    pieces = []
    for number, rank in enumerate(said):
        tensors = load_file(folder / f"{number}.st")
        for place, (name, state, shape, offset, box, flat, replica) in enumerate(rank["pieces"]):
            piece = TensorPiece(
                name, state, tuple(shape), tuple(offset), tuple(box), tensors[str(place)], flat, replica
            )
            pieces.append(piece)
    return Run(said[0]["steps"], together(pieces), said[0]["scalars"])


def together(pieces: list[TensorPiece]) -> Whole:
    """Whole tensors. Every element is held, and all that hold it agree; exactly one of them is replica 0."""
    whole: Whole = {}
    writers: dict[tuple[str, str], torch.Tensor] = {}
    for piece in pieces:
        key = piece.name, piece.state
        dtype = (
            torch.bfloat16 if piece.state == "model" and not piece.name.endswith("mlp.gate.weight") else torch.float32
        )
        assert piece.tensor.dtype == dtype and piece.tensor.is_contiguous(), piece
        full = whole.setdefault(key, torch.full(piece.shape, torch.nan, dtype=dtype))
        count = writers.setdefault(key, torch.zeros(piece.shape))
        where = tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.box, strict=True))
        start, stop = piece.flat or (0, full[where].numel())
        line = full[where].reshape(-1).clone()
        seen = count[where].reshape(-1).clone()
        before = line[start:stop]
        values = piece.tensor.reshape(-1)
        assert torch.all(before.isnan() | (before == values)), f"{key}: copies differ"
        line[start:stop] = values
        seen[start:stop] += piece.replica == 0
        full[where], count[where] = line.view(full[where].shape), seen.view(full[where].shape)
    for key, count in writers.items():
        assert torch.all(count == 1), f"{key}: written {count.min()} to {count.max()} times"
        assert not whole[key].isnan().any()
    return whole


def reader(whole: Whole) -> Read:
    def read(name: str, state: State, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return whole[name, state][tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))]

    return read


def differing(left: Whole, right: Whole) -> list[tuple[str, str]]:
    """Keys whose bits differ."""
    assert left.keys() == right.keys()

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)

    return [key for key in left if not torch.equal(bits(left[key]), bits(right[key]))]
