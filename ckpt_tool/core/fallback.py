"""Which mesh dims cut a tensor dim, and what happens where they don't divide it: the largest-mesh-dim fallback.

    >>> choose(12, [("dp", 2), ("tp", 4)]).used       # 12 does not divide by 8; tp is the largest that divides
    ('tp',)

Source of the rule: design.md, "The largest-mesh-dim fallback"; PaddlePaddle (`dist_attr.cc`, August 2025), where the
idea comes from, does not ask whether the dim divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

from ckpt_tool.errors import UsageError

POLICIES = ("largest-dim", "prefix", "best-subset", "dtensor", "pad", "replicate", "error")
MeshDims = Sequence[tuple[str, int]]


class Choice(NamedTuple):
    """The mesh dims that cut a tensor dim: `used` of `requested`, and why."""

    requested: tuple[str, ...]
    used: tuple[str, ...]
    reason: str  # `even`, `fallback`, `replicated`, `uneven` (dtensor) or `padded`
    # the subset with a higher degree that `best-subset` would have taken, () when there is none
    better: tuple[str, ...] = ()


def choose(
    n: int, dims: MeshDims, *, granule: int = 1, policy: str = "largest-dim", uneven: Sequence[str] = ()
) -> Choice:
    """Which of the mesh dims `dims` (name, size; major first) cut a tensor dim of `n` elements.

    granule: elements that stay together (head_dim, a 128-block). uneven: mesh dims that cut as DTensor does if
    all together do not divide (data ranks); the policy is for the others then. Raises UsageError (E0212) for a mesh dim
    named twice, (E0213) for a granule that does not divide `n`, (E0214) under `error` when the dims don't divide.
    """
    names = tuple(name for name, _ in dims)
    if len(set(names)) != len(names):
        raise UsageError(f"a mesh dim is named twice: {', '.join(names)}", code="E0212", hint="name each mesh dim once")
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", code="E0215", hint=f"one of {', '.join(POLICIES)}")
    if granule < 1 or n % granule:
        raise UsageError(f"{n} elements are no whole number of granules of {granule}", code="E0213")
    live = [(name, size) for name, size in dims if size > 1]
    units = n // granule
    degree = prod(size for _, size in live)
    if not live:
        return Choice(names, (), "even")
    if units % degree == 0:
        return Choice(names, tuple(name for name, _ in live), "even")
    spread = [name for name, _ in live if name in uneven]
    if spread and policy != "error":
        remaining = choose(n, [dim for dim in live if dim[0] not in spread], granule=granule, policy=policy)
        cutting = [dim for dim in live if dim[0] in (*remaining.used, *spread)]
        even = units % prod(size for _, size in cutting) == 0
        return Choice(
            names, tuple(name for name, _ in cutting), remaining.reason if even else "uneven", remaining.better
        )
    if policy == "error":
        from ckpt_tool.core.mesh import divisors_near  # the help, which lists the policies, needs no mesh

        near = divisors_near(units, degree) if units < 1 << 20 else []
        raise UsageError(
            f"a dim of {units} units does not divide by {' x '.join(f'{a} {b}' for a, b in live)}",
            code="E0214",
            hint=f"degrees that divide it: {', '.join(map(str, near))}; or drop --strict-shard" if near else None,
        )
    if policy == "dtensor":
        return Choice(names, tuple(name for name, _ in live), "uneven")
    if policy == "pad":
        return Choice(names, tuple(name for name, _ in live), "padded")
    if policy == "replicate":
        return Choice(names, (), "replicated")
    best = _best_subset(units, live)
    if policy == "prefix":
        used = live[:]
        while used and units % prod(size for _, size in used):
            used.pop()
        return Choice(names, tuple(name for name, _ in used), "fallback" if used else "replicated")
    if policy == "best-subset":
        return Choice(names, best, "fallback" if best else "replicated")
    dividing = [(size, name) for name, size in live if units % size == 0]
    if not dividing:
        return Choice(names, (), "replicated", best)
    largest = max(size for size, _ in dividing)
    winner = next(name for size, name in dividing if size == largest)
    sizes = dict(live)
    better = best if prod(sizes[name] for name in best) > largest else ()
    return Choice(names, (winner,), "fallback", better)


def _best_subset(units: int, dims: MeshDims) -> tuple[str, ...]:
    """The dims, in order, whose product is the highest that divides `units`; the fewest, first listed on ties."""
    best: tuple[str, ...] = ()
    degree = 1
    for count in range(1, len(dims) + 1):
        for subset in combinations(dims, count):
            size = prod(s for _, s in subset)
            if units % size == 0 and size > degree:
                best = tuple(name for name, _ in subset)
                degree = size
    return best
