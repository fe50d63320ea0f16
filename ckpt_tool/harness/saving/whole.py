"""Assembles the pieces of all ranks into complete logical tensors, and compares each replica with the first.

    whole = assemble(states)                            # of every rank, in any order
    whole.tensors["exp_avg", "model.norm.weight"]       # (64,) float32

The one idea: a checkpoint describes logical tensors, and how they are cut depends on the format. So the writers cut the
complete tensors again, as the ranks of their system would hold them. What must be true for any layout is checked here
once: pieces are inside their tensors, cover them, and agree bit for bit where several ranks hold one element.

Cost: one copy of the state. What it does not do: more than one machine's memory; a harness model is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_tool.core.box import Box, flat_boxes
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.harness.pieces import MUON_STATES, STATES, RankState, TensorPiece

DRIFT = "E1520"
HOLES = "E1521"
FOREIGN = "E1522"
HARNESS = "harness"  # the key under which the job's scalars are stored, in any format
Key = tuple[str, str]  # state, hub name
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class WholeState:
    """The whole job's tensors, and what each rank holds of them."""

    tensors: Mapping[Key, torch.Tensor]  # by (state, hub name), CPU, contiguous, in the order of registration
    ranks: Sequence[RankState]  # one state a rank, by rank number
    config: Mapping[str, Any]  # the model's hub config
    scalars: Mapping[str, Any]  # of the job

    @property
    def layout(self) -> Any:
        """The `harness.layout.HarnessLayout` of the job."""
        return self.ranks[0].layout

    @property
    def muon(self) -> Mapping[str, Any] | None:
        """Muon's constants in a job where it steps the matrices."""
        return self.scalars.get("muon")

    def state(self, state: str) -> dict[str, torch.Tensor]:
        """Name -> tensor of one state."""
        return {name: tensor for (owner, name), tensor in self.tensors.items() if owner == state}


def assemble(states: Sequence[RankState]) -> WholeState:
    """The whole of all ranks' states.

    Raises InconsistentCheckpoint E1520 (ranks that hold the same element disagree; scalars too), E1522 (a piece that
    does not fit its tensor), Incomplete E1521 (elements that no rank holds).
    """
    ranks = sorted(states, key=lambda state: state.at.rank)
    tensors: dict[Key, torch.Tensor] = {}
    covered: dict[Key, torch.Tensor] = {}

    for state in ranks:
        if state.scalars != ranks[0].scalars:
            raise _drift(f"rank {state.at.rank} has other scalars than rank {ranks[0].at.rank}", "scalars")
        for piece in state.pieces:
            key = (piece.state, piece.name)
            if key not in tensors:
                tensors[key] = torch.zeros(piece.shape, dtype=piece.tensor.dtype)
                covered[key] = torch.zeros(piece.shape, dtype=torch.bool)
            _lay(piece, tensors[key], covered[key], state.at.rank)

    expected_keys = [(state, name) for name, states in ranks[0].states().items() for state in states]
    expected_keys.sort(
        key=lambda key: (*STATES, *MUON_STATES).index(key[0])
    )  # state by state; names as they are registered
    holes = [f"{name} [{state}]" for state, name in expected_keys if (state, name) not in tensors]
    holes += [f"{name} [{state}]" for (state, name), mask in covered.items() if not bool(mask.all())]

    if holes:
        raise Incomplete(
            f"{len(holes)} tensors have elements that no rank holds: {', '.join(holes[:5])}",
            code=HOLES,
            key=holes[0],
            faults=holes[5:100],
            hint="a rank's state is missing, or the trainer lost a piece",
        )

    ordered: dict[Key, torch.Tensor] = {key: tensors[key] for key in expected_keys}
    return WholeState(ordered, ranks, dict(ranks[0].shape.config()), ranks[0].scalars)


def boxes(piece: TensorPiece) -> Iterator[tuple[Box, torch.Tensor]]:
    """The piece as boxes of its logical tensor, each with its values in its own shape; a flat one has up to 2n - 1."""
    if piece.flat is None:
        yield Box(piece.offset, piece.box), piece.tensor.reshape(piece.box)
        return
    position = 0
    for box in flat_boxes(piece.box, *piece.flat):
        shifted = Box(tuple(o + b for o, b in zip(piece.offset, box.offset, strict=True)), box.shape)
        yield shifted, piece.tensor.reshape(-1)[position : position + box.numel].reshape(box.shape)
        position += box.numel


def first_holders(whole: WholeState) -> Iterator[tuple[int, Key, Box, torch.Tensor]]:
    """(rank, key, box, values): every element once, by the first rank of the first stage that holds it."""
    stage: dict[Key, int] = {}
    for rank in whole.ranks:
        for piece in rank.pieces:
            key = (piece.state, piece.name)
            stage[key] = min(stage.get(key, rank.at.pp), rank.at.pp)
    taken_boxes: set[tuple[Key, Box]] = set()
    for number, rank in enumerate(whole.ranks):
        for piece in rank.pieces:
            key = (piece.state, piece.name)
            for box, _ in boxes(piece) if stage[key] == rank.at.pp else ():
                if (key, box) not in taken_boxes:
                    taken_boxes.add((key, box))
                    yield number, key, box, whole.tensors[key][region(box)]


def adam_group(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars in the words of torch's AdamW."""
    settings = scalars["optimizer"]
    return {
        "lr": scalars["lr"],
        "betas": (settings["beta1"], settings["beta2"]),
        "eps": settings["eps"],
        "weight_decay": settings["weight_decay"],
        "amsgrad": False,
        "foreach": None,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }


def muon_group(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of the matrices' group in the words of torch's Muon."""
    return {
        "lr": scalars["lr"],
        "weight_decay": scalars["optimizer"]["weight_decay"],
        "momentum": scalars["muon"]["momentum"],
        "nesterov": True,
    }


def region(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size: NaN equals itself, -0 is not 0."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _lay(piece: TensorPiece, tensor: torch.Tensor, covered: torch.Tensor, rank: int) -> None:
    label = f"{piece.name} [{piece.state}]"
    if tuple(tensor.shape) != piece.shape or tensor.dtype != piece.tensor.dtype:
        raise InconsistentCheckpoint(
            f"rank {rank} has it as {piece.tensor.dtype} {list(piece.shape)}, another as {tensor.dtype} "
            f"{list(tensor.shape)}",
            code=FOREIGN,
            key=label,
        )
    for box, values in boxes(piece):
        if not box.inside(piece.shape):
            raise InconsistentCheckpoint(
                f"rank {rank} holds a box at {list(box.offset)} of {list(box.shape)}, outside {list(piece.shape)}",
                code=FOREIGN,
                key=label,
            )
        target = tensor[region(box)]
        covered_part = covered[region(box)]
        cpu_values = values.detach().cpu()
        if bool(covered_part.any()) and not torch.equal(bits(cpu_values)[covered_part], bits(target)[covered_part]):
            raise _drift(f"rank {rank} holds other values than the ranks before it", label)
        target.copy_(cpu_values)
        covered_part.fill_(True)


def _drift(message: str, key: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        message,
        code=DRIFT,
        key=key,
        hint="replicas drifted apart in training: the checkpoint would depend on who writes it",
    )
