"""Layout: which box of each tensor every rank holds.

A `Placement` says along which tensor dims the mesh cuts a tensor (`shard`) and at which coordinates it lives alone
(`at`: a pipeline stage, an expert's rank); over every other mesh dim it is replicated. Fallbacks (`core.fallback`) are
decided once a parameter: its states are placed with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.fallback import Choice, choose
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.errors import UsageError


def block(n: int, degree: int, index: int, *, granule: int = 1) -> tuple[int, int]:
    """(start, extent) in elements of block `index` of `degree` even blocks, the last ones short or empty (ceil
    rule)."""
    units = n // granule
    size = ceil_div(units, degree)
    start = min(index * size, units)
    return start * granule, (min(start + size, units) - start) * granule


class Placement(NamedTuple):
    """How the mesh cuts one logical parameter."""

    # (tensor dim, mesh dims major first), each mesh dim at most once
    shard: tuple[tuple[int, tuple[str, ...]], ...] = ()
    at: tuple[tuple[str, int], ...] = ()  # (mesh dim, coordinate) where it lives alone
    choices: tuple[Choice, ...] = ()  # what the fallback decided, one per tensor dim that was asked to be cut
    padded: tuple[int, ...] = ()  # tensor dims whose blocks are filled up with zeros to the same extent
    uneven: tuple[int, ...] = ()  # tensor dims cut as DTensor does
    # (tensor dim, elements that stay together) of those two kinds of dims; even blocks are whole granules anyway
    granules: tuple[tuple[int, int], ...] = ()


def place(
    shape: Sequence[int],
    wishes: Sequence[tuple[int, Sequence[str]]],
    mesh: Mesh,
    *,
    at: Sequence[tuple[str, int]] = (),
    granule: int = 1,
    policy: str = "largest-dim",
    spread: Sequence[str] = (),
) -> Placement:
    """Decide a parameter's placement from what is asked for: `wishes` = (tensor dim, mesh dims major first).

    granule: of the first dim wished for. spread: mesh dims that cut unevenly rather than not (`uneven` of `choose`).
    Raises UsageError (E0212) when a mesh dim is wished for twice (rule 1),
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

    shard = []
    choices = []
    padded = []
    uneven = []
    granules = []

    for dim, names in wishes:
        if not 0 <= dim < len(shape):
            if len(shape) == 0:
                continue  # a scalar is replicated
            raise UsageError(f"a rule shards dim {dim} of a tensor of rank {len(shape)}", code="E0216")
        dims = [(name, mesh[name]) for name in names]
        unit = granule if dim == wishes[0][0] else 1
        choice = choose(shape[dim], dims, granule=unit, policy=policy, uneven=spread)
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


class Held(NamedTuple):
    """What one rank holds of a tensor."""

    rank: int  # its number in the mesh
    box: Box
    shape: tuple[int, ...]  # the stored array's, larger than the box where it is padded
    replica: int  # 0 for the rank that writes the box where only one copy is kept


def held(shape: Sequence[int], placement: Placement, mesh: Mesh, *, granule: int = 1) -> Iterator[Held]:
    """What each rank holds of a tensor of `shape`, in rank order.

    Ranks where it is not placed (`placement.at`) are left out; those whose block is empty hold an empty box. Layers
    and experts repeat: writers ask `core.cuts`, which asks this once.

    Args:
        granule: elements that stay together in dims that are cut unevenly or padded, where the placement does not say.
    """
    sharding = {name for _, names in placement.shard for name in names}
    fixed = dict(placement.at)
    replicating = [name for name, _ in mesh.dims if name not in sharding and name not in fixed]
    blocks_by_dim = [
        (dim, names, _blocks(shape, dim, names, placement, mesh, granule)) for dim, names in placement.shard
    ]
    strides = mesh.strides()

    for coords in mesh.ranks(placement.at):
        offset = [0] * len(shape)
        extent = list(shape)
        stored = list(shape)
        for dim, names, blocks in blocks_by_dim:
            index = 0
            for name in names:
                index = index * mesh[name] + coords.get(name, 0)
            offset[dim], extent[dim], stored[dim] = blocks[index]

        replica = 0
        for name in replicating:
            replica = replica * mesh[name] + coords[name]
        rank = sum(coordinate * strides[name] for name, coordinate in coords.items())
        yield Held(rank, Box(tuple(offset), tuple(extent)), tuple(stored), replica)


def _blocks(
    shape: Sequence[int], dim: int, names: Sequence[str], placement: Placement, mesh: Mesh, granule: int
) -> list[tuple[int, int, int]]:
    """(start, extent, stored extent) of the blocks of a tensor dim that the mesh dims `names` cut, major first."""
    extent = shape[dim]
    sizes = [mesh[name] for name in names]
    degree = prod(sizes)
    if dim not in placement.uneven and dim not in placement.padded:
        return [(start, n, n) for start, n in (block(extent, degree, index) for index in range(degree))]

    unit = dict(placement.granules).get(dim, granule)
    if dim in placement.padded:
        full = ceil_div(extent // unit, degree) * unit
        return [(*block(extent, degree, index, granule=unit), full) for index in range(degree)]

    # torch.chunk for each mesh dim in turn, as DTensor does.
    parts = [(0, extent)]
    for size in sizes:
        finer: list[tuple[int, int]] = []
        for start, length in parts:
            inner = [block(length, size, index, granule=unit) for index in range(size)]
            finer += [(start + begin, n) for begin, n in inner]
        parts = finer
    return [(start, n, n) for start, n in parts]


class Layout(NamedTuple):
    """A mesh and a placement for each wanted tensor, in the same order."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    source: str = ""  # which rule gave them, for the report
