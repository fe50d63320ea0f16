"""Layout: which box of each tensor every rank holds, and the largest-mesh-dim fallback in one function.

    >>> choose(12, [("dp", 2), ("tp", 4)]).used       # 12 does not divide by 8; tp is the largest that divides
    ('tp',)

A `Placement` says along which tensor dims the mesh cuts a tensor (`shard`) and at which coordinates it lives alone
(`at`: a pipeline stage, an expert's rank); over every other mesh dim it is replicated. Fallbacks are decided once a
parameter: its states are placed with it. Source of the rule: design.md, "The largest-mesh-dim fallback"; PaddlePaddle
(`dist_attr.cc`, August 2025), where the idea comes from, does not ask whether the dim divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from ckpt_tool.core.box import Box
from ckpt_tool.core.mesh import Mesh, divisors_near
from ckpt_tool.errors import UsageError

POLICIES = ("largest-dim", "prefix", "best-subset", "dtensor", "pad", "replicate", "error")
MeshDims = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The mesh dims that cut a tensor dim: `used` of `requested`, and why.

    reason: `even`, `fallback`, `replicated`, `uneven` (dtensor) or `padded`. better: the subset with a higher degree
    that `best-subset` would have taken, () when there is none.
    """

    requested: tuple[str, ...]
    used: tuple[str, ...]
    reason: str
    better: tuple[str, ...] = ()


def choose(n: int, dims: MeshDims, *, granule: int = 1, policy: str = "largest-dim") -> Choice:
    """Which of the mesh dims `dims` (name, size; major first) cut a tensor dim of `n` elements.

    granule: elements that may not be parted (head_dim, a 128-block). Raises UsageError (E0212) for a mesh dim named
    twice, (E0213) for a granule that does not divide `n`, (E0214) under `error` when the dims don't divide.
    """
    names = tuple(name for name, _ in dims)
    if len(set(names)) != len(names):
        raise UsageError(f"a mesh dim is named twice: {', '.join(names)}", code="E0212", hint="name each mesh dim once")
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", code="E0215", hint=f"one of {', '.join(POLICIES)}")
    if granule < 1 or n % granule:
        raise UsageError(f"{n} elements are no whole number of granules of {granule}", code="E0213")
    live = [(name, size) for name, size in dims if size > 1]
    units, degree = n // granule, prod(size for _, size in live)
    if not live:
        return Choice(names, (), "even")
    if units % degree == 0:
        return Choice(names, tuple(name for name, _ in live), "even")
    if policy == "error":
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
                best, degree = tuple(name for name, _ in subset), size
    return best


def block(n: int, degree: int, index: int, *, granule: int = 1) -> tuple[int, int]:
    """(start, extent) in elements of block `index` of `degree` even blocks, the last ones short or empty (ceil
    rule)."""
    units = n // granule
    size = -(-units // degree)
    start = min(index * size, units)
    return start * granule, (min(start + size, units) - start) * granule


@dataclass(frozen=True, slots=True)
class Placement:
    """How the mesh cuts one logical parameter.

    shard: (tensor dim, mesh dims major first), each mesh dim at most once. at: (mesh dim, coordinate) where it lives
    alone. choices: what the fallback decided, one per tensor dim that was asked to be cut. padded: tensor dims whose
    blocks are filled up with zeros to the same extent. uneven: tensor dims cut as DTensor does. granules: (tensor dim,
    elements that stay together) of those two kinds of dims; even blocks are whole granules anyway.
    """

    shard: tuple[tuple[int, tuple[str, ...]], ...] = ()
    at: tuple[tuple[str, int], ...] = ()
    choices: tuple[Choice, ...] = ()
    padded: tuple[int, ...] = ()
    uneven: tuple[int, ...] = ()
    granules: tuple[tuple[int, int], ...] = ()


def place(
    shape: Sequence[int],
    wishes: Sequence[tuple[int, Sequence[str]]],
    mesh: Mesh,
    *,
    at: Sequence[tuple[str, int]] = (),
    granule: int = 1,
    policy: str = "largest-dim",
) -> Placement:
    """Decide a parameter's placement from what is asked for: `wishes` = (tensor dim, mesh dims major first).

    granule: of the first dim wished for. Raises UsageError (E0212) when a mesh dim is wished for twice (rule 1),
    (E0216) for a tensor dim that is out of range, (E0209) for a coordinate that the mesh lacks, and as `choose`.
    """
    asked = [name for _, names in wishes for name in names]
    fixed = dict(at)
    if len(set(asked)) != len(asked) or any(name in fixed for name in asked):
        raise UsageError(
            f"a mesh dim is named twice for one tensor: {', '.join([*asked, *fixed])}",
            code="E0212",
            hint="each mesh dim cuts a tensor at most once",
        )
    for name, coordinate in at:
        if not 0 <= coordinate < mesh[name]:
            raise UsageError(
                f"a tensor is placed at {name} {coordinate}, but the mesh has {name} 0 to {mesh[name] - 1}",
                code="E0209",
                hint="no rank would hold it: check the stages and the experts' ranks",
            )
    shard, choices, padded, uneven, granules = [], [], [], [], []
    for dim, names in wishes:
        if not 0 <= dim < len(shape):
            if len(shape) == 0:
                continue  # a scalar is replicated
            raise UsageError(f"a rule shards dim {dim} of a tensor of rank {len(shape)}", code="E0216")
        dims = [(name, mesh[name]) for name in names]
        unit = granule if dim == wishes[0][0] else 1
        choice = choose(shape[dim], dims, granule=unit, policy=policy)
        choices.append(choice)
        if choice.used:
            shard.append((dim, choice.used))
        if choice.reason == "padded":
            padded.append(dim)
        if choice.reason == "uneven":
            uneven.append(dim)
        if unit > 1 and choice.reason in ("padded", "uneven"):
            granules.append((dim, unit))
    return Placement(tuple(shard), tuple(at), tuple(choices), tuple(padded), tuple(uneven), tuple(granules))


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor. shape: the stored array's, larger than the box where it is padded.

    replica: 0 for the rank that writes the box where only one copy is kept.
    """

    coords: dict[str, int]
    box: Box
    shape: tuple[int, ...]
    replica: int


def held(shape: Sequence[int], placement: Placement, mesh: Mesh, *, granule: int = 1) -> Iterator[Held]:
    """What each rank holds of a tensor of `shape`, in rank order.

    Ranks where it does not live (`placement.at`) are left out; those whose block is empty hold an empty box. granule:
    of the dims that are cut unevenly or padded, where the placement does not say.
    """
    cut = {name for _, names in placement.shard for name in names}
    fixed = dict(placement.at)
    free = [name for name, size in mesh.dims if name not in cut and name not in fixed]
    cuts = [(dim, names, _blocks(shape, dim, names, placement, mesh, granule)) for dim, names in placement.shard]
    for coords in mesh.ranks(placement.at):
        offset, extent, stored = [0] * len(shape), list(shape), list(shape)
        for dim, names, blocks in cuts:
            index = 0
            for name in names:
                index = index * mesh[name] + coords.get(name, 0)
            offset[dim], extent[dim], stored[dim] = blocks[index]
        replica = 0
        for name in free:
            replica = replica * mesh[name] + coords[name]
        yield Held(coords, Box(tuple(offset), tuple(extent)), tuple(stored), replica)


def _blocks(
    shape: Sequence[int], dim: int, names: Sequence[str], placement: Placement, mesh: Mesh, granule: int
) -> list[tuple[int, int, int]]:
    """(start, extent, stored extent) of the blocks of a tensor dim that the mesh dims `names` cut, major first."""
    whole, sizes = shape[dim], [mesh[name] for name in names]
    degree = prod(sizes)
    if dim not in placement.uneven and dim not in placement.padded:
        return [(start, n, n) for start, n in (block(whole, degree, index) for index in range(degree))]
    unit = dict(placement.granules).get(dim, granule)
    if dim in placement.padded:
        full = -(-whole // unit // degree) * unit
        return [(*block(whole, degree, index, granule=unit), full) for index in range(degree)]
    parts = [(0, whole)]  # torch.chunk for each mesh dim in turn, as DTensor does
    for size in sizes:
        parts = [
            (start + inner, n)
            for start, here in parts
            for inner, n in (block(here, size, index, granule=unit) for index in range(size))
        ]
    return [(start, n, n) for start, n in parts]


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and a placement for each wanted tensor, in the same order. source: which rule gave them, for the
    report."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    source: str = ""

    def held(self, index: int, shape: Sequence[int]) -> Iterator[Held]:
        return held(shape, self.placements[index], self.mesh)
