"""What a rank holds of a training state: pieces of logical tensors, and the scalars of the job.

The one idea: a rank never says "my tensor number 7" but "of `model.layers.1.mlp.down_proj.weight [exp_avg]`, which is
(64, 128) as a whole, I hold the box at (0, 64) of (64, 64), and of that box's row-major line the elements 1024..2048".
So whoever saves need not know how the trainer is laid out, and whoever loads asks for boxes of logical tensors.
Example: TP 2 cuts `w` (4, 6) along dim 1, ZeRO over 2 ranks cuts the line of each half:

    rank tp 1, dp 0:  TensorPiece("w", "exp_avg", (4, 6), offset=(0, 3), box=(4, 3), tensor=<6 elements>, flat=(0, 6))
    rank tp 1, dp 1:  TensorPiece("w", "exp_avg", (4, 6), offset=(0, 3), box=(4, 3), tensor=<6 elements>, flat=(6, 12))

Names are the hub's (family `ernie4_5_moe`): experts one by one, layers by their global number. Tensors are views of the
live state: copy them before the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

State = Literal["model", "master", "exp_avg", "exp_avg_sq", "ema", "momentum_buffer"]
STATES: tuple[State, ...] = ("model", "master", "exp_avg", "exp_avg_sq", "ema")  # of AdamW
MUON_STATES: tuple[State, ...] = ("model", "master", "momentum_buffer", "ema")
EVERY_STATE = tuple(dict.fromkeys((*STATES, *MUON_STATES)))  # of a job whose matrices Muon steps

# read(name, state, offset, shape) -> the values of that box of the logical tensor, in any float dtype that holds them
# exactly
Read = Callable[[str, State, tuple[int, ...], tuple[int, ...]], torch.Tensor]


def states_of(param: Any, *, muon: bool) -> tuple[State, ...]:
    """The states of a parameter (`harness.shape.ParameterShape`), in a job where Muon steps the matrices or in one
    without."""
    return MUON_STATES if muon and param.is_matrix else STATES


class TensorPiece(NamedTuple):
    """A part of a logical tensor. `tensor` is contiguous; it has the shape `box`, or is 1-d where `flat` is given.

    `model` is bf16 (the router fp32), all other states are fp32. `flat` is (start, stop) on the row-major line of
    the box at `offset` of shape `box`; it may be empty (start == stop). `replica` counts the ranks that hold the same
    piece: 0 is the one that writes. A parameter that lives on one rank under two roles (a tied embedding) is listed
    once.
    """

    name: str
    state: State
    shape: tuple[int, ...]  # of the logical tensor
    offset: tuple[int, ...]
    box: tuple[int, ...]
    tensor: torch.Tensor
    flat: tuple[int, int] | None = None
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank sits: `ep` is dp % EP, so expert data ranks are dp // EP. `chunks` are the global layer numbers it
    holds by virtual stage: `((0,), (2,))` for pp 0 of two ranks with two chunks each over four layers."""

    rank: int
    tp: int
    pp: int
    dp: int
    ep: int
    chunks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankState:
    """All that a rank would save. `layout` is a `harness.layout.HarnessLayout`, `shape` a `harness.layout.ModelShape`
    (the config).

    `scalars`: step (int, optimizer steps done), consumed (int, samples), seed (int), lr (float, of the last step),
    scheduler ({"warmup": int, "total": int, "peak": float, "floor": float}), optimizer ({"beta1", "beta2", "eps",
    "weight_decay", "clip", "ema"}), muon (`harness.optimizer.Muon`'s constants; only where it steps the matrices).
    Plain JSON values; equal on all ranks.
    """

    layout: Any
    shape: Any
    at: Coordinates
    pieces: list[TensorPiece]
    scalars: dict[str, Any] = field(default_factory=dict)

    def states(self) -> dict[str, tuple[State, ...]]:
        """Name of each parameter of the model -> its states."""
        return {param.name: states_of(param, muon="muon" in self.scalars) for param in self.shape.parameters()}
