"""Cuts: which rank holds which box, as one value for all tensors that are cut alike.

Layers and experts repeat. 184,732 tensors on 2,048 ranks are 1.9 million boxes, but 15 cuts: a `Cut` counts its ranks
from the first one that has a part of the tensor, so that the stage or the rank of an expert does not make another cut.

    layers.0.experts.0.w1 (2048, 7168) at ep 0    Cut 3, its rank 0 is rank 0 of the mesh
    layers.0.experts.9.w1 (2048, 7168) at ep 1    the same Cut 3, its rank 0 is rank 8

So a format asks once a cut what it would ask of every tensor's boxes. Cost: a lookup a tensor, `held` once a cut.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tool.core.layout import Held, Layout, held


class Cut(NamedTuple):
    """What the ranks hold of every tensor of one shape that is cut in one way."""

    shape: tuple[int, ...]
    parts: tuple[Held, ...]  # in rank order; their `rank` is counted from the tensor's first rank


class PlacedCut(NamedTuple):
    """A cut, and the number that its rank 0 has in the mesh."""

    cut: Cut
    first: int


class Cuts:
    """The cuts of one layout, each made when the first tensor needs it."""

    def __init__(self, layout: Layout) -> None:
        self.placed: list[PlacedCut] = []
        self._layout = layout  # keeps its placements, whose ids are keys below
        self._strides = layout.mesh.strides()
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._cuts: dict[tuple[object, ...], Cut] = {}

    def number(self, index: int, shape: tuple[int, ...]) -> int:
        """The number in `placed` that represents all tensors with the boxes of wanted tensor number `index`.

        Placements are compared by identity: hashing one for each of a million tensors would take longer than all else.
        """
        placement = self._layout.placements[index]
        key = (id(placement), shape)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.placed)
            self.placed.append(self._place(index, shape))
        return number

    def of(self, index: int, shape: tuple[int, ...]) -> PlacedCut:
        """The cut of wanted tensor number `index`, which has that shape."""
        return self.placed[self.number(index, shape)]

    def _place(self, index: int, shape: tuple[int, ...]) -> PlacedCut:
        placement = self._layout.placements[index]
        fixed = {name: coordinate for name, coordinate in placement.at if name in self._strides}
        first = sum(coordinate * self._strides[name] for name, coordinate in fixed.items())

        key = (shape, placement.shard, placement.padded, placement.uneven, placement.granules, tuple(fixed))
        cut = self._cuts.get(key)
        if cut is None:
            parts = held(shape, placement, self._layout.mesh)
            cut = self._cuts[key] = Cut(shape, tuple([part._replace(rank=part.rank - first) for part in parts]))
        return PlacedCut(cut, first)
