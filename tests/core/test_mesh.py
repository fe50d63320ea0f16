"""Meshes: the order of ranks, labels, and what is refused."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.mesh import DIMS, Mesh, divisors_near
from ckpt_tool.errors import UsageError

SIZES = st.dictionaries(st.sampled_from(DIMS), st.integers(1, 4), max_size=4)


@given(SIZES)
def test_ranks_are_every_coordinate_once(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(**sizes)
    ranks = list(mesh.ranks())
    assert len(ranks) == mesh.size == prod(sizes.values())
    assert len({tuple(sorted(rank.items())) for rank in ranks}) == len(ranks)
    for rank in ranks:
        assert set(rank) == {name for name, size in sizes.items() if size > 1}
        assert all(0 <= rank[name] < mesh[name] for name in rank)
    assert len({mesh.label(rank) for rank in ranks}) == len(ranks)


def test_rank_order_is_megatrons() -> None:
    """rank = tp + TP * (cp + CP * (ep + EP * (dp + DP * pp))), Megatron-Core's default order tp-cp-ep-dp-pp."""
    mesh = Mesh.of(pp=2, dp=3, ep=2, cp=2, tp=2)
    for number, rank in enumerate(mesh.ranks()):
        assert number == rank["tp"] + 2 * (rank["cp"] + 2 * (rank["ep"] + 2 * (rank["dp"] + 3 * rank["pp"])))


def test_dims_of_size_1_are_dropped_and_order_is_the_houses() -> None:
    mesh = Mesh.of(pp=2, tp=4, dp=1)
    assert mesh.dims == (("tp", 4), ("pp", 2))
    assert mesh == Mesh.of(tp=4, pp=2)
    assert (mesh["tp"], mesh["dp"], mesh["nonsense"]) == (4, 1, 1)
    assert mesh.to_json() == {"tp": 4, "pp": 2}
    assert hash(mesh) == hash(Mesh.of(tp=4, pp=2))


def test_labels() -> None:
    assert Mesh.of(tp=2, pp=12).label({"tp": 1, "pp": 10}) == "tp01_pp10"
    assert Mesh.of().label({}) == ""
    assert list(Mesh().ranks()) == [{}]
    assert Mesh().size == 1


@pytest.mark.parametrize(("sizes", "code"), [({"tq": 2}, "E0210"), ({"tp": 0}, "E0211"), ({"dp": -3}, "E0211")])
def test_refuses(sizes: dict[str, int], code: str) -> None:
    with pytest.raises(UsageError) as error:
        Mesh.of(**sizes)
    assert error.value.code == code


@pytest.mark.parametrize(
    ("degrees", "dims"),
    [
        ({}, {}),
        ({"tp": 2, "etp": 2, "ep": 2, "dp": 4}, {"tp": 2, "ep": 2, "dp": 2}),
        ({"tp": 2, "etp": 1, "ep": 2}, {"tp": 2, "ep": 2}),
        ({"tp": 1, "etp": 4, "dp": 3, "ep": 2}, {"ep": 2, "etp": 4, "dp": 3}),
    ],
)
def test_degrees_as_a_mesh(degrees: dict[str, int], dims: dict[str, int]) -> None:
    assert Mesh.of_degrees(degrees).to_json() == dims


def test_the_nearest_divisors() -> None:
    assert divisors_near(12, 5) == [3, 4, 6] and divisors_near(7, 3) == [1, 7] and divisors_near(0, 2) == []
    assert divisors_near(6, 4) == [2, 3, 6], "of two that are as near, the smaller one"
