"""Cuts give each tensor what `held` gives it, and equal ones are one value."""

from __future__ import annotations

from ckpt_tool.core.cuts import Cuts
from ckpt_tool.core.layout import Layout, Placement, held
from ckpt_tool.core.mesh import Mesh

MESH = Mesh.of(tp=2, pp=3, ep=2, dp=2)
ROWS = ((0, ("tp",)),)


def test_a_tensors_cut_is_what_its_ranks_hold() -> None:
    placements = tuple(
        Placement(shard, at, padded=padded)
        for shard in ((), ROWS, ((1, ("tp", "dp")),))
        for at in ((), (("pp", 1),), (("pp", 2), ("ep", 1)))
        for padded in ((), (0,))
    )
    cuts = Cuts(Layout(MESH, placements))
    for index, placement in enumerate(placements):
        for shape in ((4, 8), (5, 4), (0, 2)):
            cut, first = cuts.of(index, shape)
            assert cut.shape == shape
            parts = [part._replace(rank=first + part.rank) for part in cut.parts]
            assert parts == list(held(shape, placement, MESH))


def test_stages_and_experts_share_a_cut() -> None:
    placements = tuple(Placement(ROWS, (("pp", stage), ("ep", rank))) for stage in range(3) for rank in range(2))
    cuts = Cuts(Layout(MESH, placements))
    placed = [cuts.of(index, (4, 8)) for index in range(6)]
    assert len({id(cut) for cut, _ in placed}) == 1 and len({first for _, first in placed}) == 6
    other = cuts.of(0, (8, 8))
    assert other.cut is not placed[0].cut and other.first == placed[0].first
    assert cuts.number(0, (4, 8)) == 0 and cuts.number(0, (8, 8)) == 6
