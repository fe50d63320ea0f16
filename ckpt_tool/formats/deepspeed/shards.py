"""The flat tensors of all ranks as chunks of whole parameters: ZeRO 1, 2 and 3, experts and pipeline stages alike.

    rank 0 [embed 0..370 | up 0..86]  rank 1 [up 86..230 | ...]   ->   up = chunk of rank 0 + chunk of rank 1

`Flat` collects the pieces of every (name, state) over all ranks; a parameter that two pipeline stages hold (a tied one)
is cut at both stages' borders, so that equal boxes are replicas and get compared. Pure: arrays in, chunks out. Cost: a
few microseconds a piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box, flat_boxes
from ckpt_tool.core.catalog import mark_replicas
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.formats.deepspeed.flat import Piece

Shape = tuple[int, ...]


class Lying(NamedTuple):
    """Elements [start, stop) of a parameter's line lie at element `at` of `array`. stage: who says so."""

    start: int
    stop: int
    array: StoredArray
    at: int
    stage: int


class Flat:
    """Pieces of parameters, by key in order of first sight."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self._lying: dict[TensorKey, list[Lying]] = {}

    def declare(self, name: str, shape: Shape) -> bool:
        """Note a parameter's shape; False when another one is known."""
        return self.shapes.setdefault(name, shape) == shape

    def add(self, names: Sequence[str], pieces: Sequence[Piece], state: str, array: StoredArray, stage: int) -> None:
        """The pieces that lie in `array`, a rank's flat tensor. names: by `Piece.param`."""
        for piece in pieces:
            key = TensorKey(names[piece.param], state)
            self._lying.setdefault(key, []).append(Lying(piece.start, piece.stop, array, piece.at, stage))

    def tensors(self, states: Sequence[str]) -> dict[TensorKey, LogicalTensor]:
        """Whole parameters, state by state. Gaps are left to the catalog's check."""
        out = {}
        order = {name: number for number, name in enumerate(self.shapes)}
        rank = {state: number for number, state in enumerate(states)}
        for key in sorted(self._lying, key=lambda key: (rank[key.state], order[key.name])):
            lying = self._lying[key]
            shape = self.shapes[key.name]
            out[key] = LogicalTensor(key, shape, lying[0].array.dtype, tuple(chunks_of(shape, lying)))
        return out | self._empty(states)

    def _empty(self, states: Sequence[str]) -> dict[TensorKey, LogicalTensor]:
        """Parameters without elements lie nowhere in the flat tensors; they have the states that the others have."""
        dtypes = {key.state: lying[0].array.dtype for key, lying in reversed(self._lying.items())}
        names = [name for name, shape in self.shapes.items() if not prod(shape)]
        keys = [TensorKey(name, state) for state in states for name in names]
        return {
            key: LogicalTensor(key, self.shapes[key.name], dtypes.get(key.state, DTYPES["F32"]), ())
            for key in keys
            if key not in self._lying
        }


def chunks_of(shape: Shape, lying: Sequence[Lying]) -> tuple[Chunk, ...]:
    """The pieces as chunks: each a run of boxes without gaps in the parameter's line."""
    stages = {piece.stage for piece in lying}
    cuts = sorted({end for piece in lying for end in (piece.start, piece.stop)}) if len(stages) > 1 else []
    chunks: list[Chunk] = []
    for piece in lying:
        inner = [cut for cut in cuts if piece.start < cut < piece.stop]
        for start, stop in zip([piece.start, *inner], [*inner, piece.stop], strict=True):
            at = piece.at + start - piece.start
            for box in flat_boxes(shape, start, stop):
                chunks.append(Chunk(box, piece.array, Box((at,), (box.numel,))))
                at += box.numel
    return mark_replicas(chunks) if len(stages) > 1 else tuple(chunks)


def numels(shapes: Mapping[str, Shape]) -> list[int]:
    """Elements of each parameter."""
    return [prod(shape) for shape in shapes.values()]
