"""Mesh: the named parallel dims of a job, and the order of its ranks.

    >>> Mesh.of(tp=2, pp=2).size
    4
    >>> Mesh.of(tp=2, dp=2).label({"tp": 1, "dp": 0})
    'tp01_dp00'

Expert parallel ranks are carved out of the data parallel ones, as Megatron and Paddle do: `--dp 4 --ep 2` is 4
data ranks, which the mesh holds as ep 2 x dp 2, so that `dp` below is the expert-data degree. Dense tensors take
their data shards over both dims, experts over `dp` alone. Rank order, fastest first: tp, cp, ep, dp, pp
(Megatron-Core 0.16 `parallel_state.RankGenerator`, default order "tp-cp-ep-dp-pp").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, prod

from ckpt_tool.errors import UsageError

DIMS = ("tp", "cp", "pp", "ep", "etp", "dp", "vpp")  # the order in file names and reports
SLOWEST_FIRST = ("vpp", "pp", "dp", "ep", "etp", "cp", "tp")  # the order of ranks

Coords = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ordered named dims, sizes >= 1. A dim that is absent has size 1."""

    dims: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """The mesh of some sizes, in the order of `DIMS`, without dims of size 1. Raises UsageError for a bad one."""
        for name, size in sizes.items():
            if name not in DIMS:
                raise UsageError(f"unknown mesh dim {name!r}", code="E0210", hint=f"the dims are {', '.join(DIMS)}")
            if size < 1:
                raise UsageError(f"--{name} is {size}, want at least 1", code="E0211")
        return Mesh(tuple((name, sizes[name]) for name in DIMS if sizes.get(name, 1) > 1))

    @staticmethod
    def of_degrees(degrees: Mapping[str, int]) -> Mesh:
        """The mesh of a job whose `dp` counts all data ranks: expert ranks are carved out of those where they divide
        them, and experts that are cut as everything else have no tensor dim of their own.

        >>> Mesh.of_degrees({"tp": 2, "etp": 2, "ep": 2, "dp": 4}).to_json()
        {'tp': 2, 'ep': 2, 'dp': 2}
        """
        sizes = dict(degrees)
        dp = sizes.get("dp", 1)
        ep = sizes.get("ep", 1)
        sizes["dp"] = dp // ep if dp % ep == 0 else dp
        if sizes.get("etp", 1) == sizes.get("tp", 1):
            sizes.pop("etp", None)
        return Mesh.of(**sizes)

    def __getitem__(self, name: str) -> int:
        for dim, size in self.dims:
            if dim == name:
                return size
        return 1

    @property
    def size(self) -> int:
        """Ranks."""
        return prod(size for _, size in self.dims)

    def ranks(self, at: Sequence[tuple[str, int]] = ()) -> Iterator[dict[str, int]]:
        """Coordinates of every rank, in rank order (rank 0 first, tp fastest); with `at` of those at its
        coordinates."""
        fixed = dict(at)
        if any(not 0 <= index < self[name] for name, index in at):
            return
        names = [name for name in SLOWEST_FIRST if self[name] > 1]
        for index in product(*((fixed[name],) if name in fixed else range(self[name]) for name in names)):
            yield dict(zip(names, index, strict=True))

    def strides(self) -> dict[str, int]:
        """Mesh dim -> how many ranks apart its neighbours are, for the dims larger than 1.

        >>> Mesh.of(tp=2, pp=4, dp=3).strides()
        {'pp': 6, 'dp': 2, 'tp': 1}
        """
        strides: dict[str, int] = {}
        ranks = 1
        for name in reversed(SLOWEST_FIRST):
            if self[name] > 1:
                strides[name] = ranks
                ranks *= self[name]
        return dict(reversed(strides.items()))

    def label(self, coords: Coords) -> str:
        """`tp00_pp01`: the coordinates of the dims larger than 1, in the mesh's order; "" for one rank."""
        return "_".join(f"{name}{coords[name]:02d}" for name, size in self.dims if size > 1)

    def to_json(self) -> dict[str, int]:
        """The sizes by the dims' names."""
        return dict(self.dims)


def divisors(n: int) -> list[int]:
    """The divisors of `n`, ascending; [] for n < 1.

    Cost: at most 65,536 trials; of an `n` above 2^32 those are known that are no larger, and what they leave over.
    """
    small = [d for d in range(1, min(isqrt(max(n, 0)), 1 << 16) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def divisors_near(n: int, wanted: int) -> list[int]:
    """The three divisors of `n` nearest to `wanted`, ascending: degrees that divide where `wanted` does not; [] for n <
    1."""
    return sorted(sorted(divisors(n), key=lambda d: abs(d - wanted))[:3])
