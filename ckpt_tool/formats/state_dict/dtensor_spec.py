"""Computes which boxes of a DTensor a rank holds, from the tensor's mesh and placements.

The one idea: a pickled DTensor names the whole tensor's shape, the mesh of ranks and how each mesh dim cuts the tensor;
with the rank's number (the file's name has it) its box follows. `Shard(d)` over n ranks cuts a line of length S into
pieces of ceil(S/n), so the last ones may be short or empty. Several mesh dims may cut one tensor dim, one after the
other: `_StridedShard(0, split_factor=2), Shard(0)` on a mesh dp 2 x tp 2 says that tp cut first, then dp:

    14 rows: tp 0 has 0..6, tp 1 has 7..13; dp cuts 7 rows as 4 + 3
    (dp 0, tp 0) rows 0..3   (dp 0, tp 1) rows 7..10   (dp 1, tp 0) rows 4..6   (dp 1, tp 1) rows 11..13

Specification, by torch 2.13 `distributed/tensor/{_dtensor_spec,placement_types,_utils}.py` and
`distributed/device_mesh.py`, `distributed/_mesh_layout.py`, in our own words:

* `DTensorSpec`: `mesh`, `placements` (one a mesh dim), `tensor_meta`, since 2.9 `shard_order`: per tensor dim the mesh
  dims in the order in which they cut. Where it is absent, split factors give it: `_StridedShard(d, s)` on mesh dim m
  cut after those mesh dims behind m whose sizes multiply to s. Where no order gives the factors, the placements are
  carried out from left to right, a `_StridedShard` cutting s pieces first and taking its share of each.
* `DeviceMesh`, 2.13: `_layout.axes`, an axis a mesh dim of (shapes, strides) into `_flatten_rank_map`; 2.9 to 2.12:
  `_layout.shape` and `.stride`; before: `mesh`, an int tensor of ranks. Names in `_mesh_dim_names` or `mesh_dim_names`.
* `Partial` is a sum that was not finished: no rank has values, it is refused.

Cost: a few tuples a tensor. What it does not do: read files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from math import prod
from operator import mul
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.errors import InputError
from ckpt_tool.storage.pickles.pickle_values import PickledRecord, TensorRef

UNPLACED = "E0399"
RANKS_LIMIT = 1 << 17
BOXES_LIMIT = 1 << 14  # of one rank's part of one tensor; real ones have one
_DIMS = {
    "tp": "tp",
    "tensor": "tp",
    "tensor_parallel": "tp",
    "model": "tp",
    "mp": "tp",
    "cp": "cp",
    "sp": "cp",
    "ep": "ep",
    "pp": "pp",
}


class RankMesh(NamedTuple):
    """shape: the mesh dims' sizes. ranks: the rank at each coordinate, row-major. names: of the dims, () if none."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """The index of `rank` in each mesh dim; None if it is not in the mesh."""
        if rank not in self.ranks:
            return None
        at = self.ranks.index(rank)
        out = []
        for size in reversed(self.shape):
            at, index = divmod(at, size)
            out.append(index)
        return tuple(reversed(out))

    def degrees(self) -> dict[str, int]:
        """The size of each of this package's mesh dims; dims of other names (`fsdp`, `ddp`, none) count as `dp`."""
        sizes: dict[str, int] = {}
        for size, name in zip(self.shape, self.names or ("dp",) * len(self.shape), strict=True):
            dim = _DIMS.get(name.lower(), "dp")
            sizes[dim] = sizes.get(dim, 1) * size
        return sizes

    def mesh(self) -> Mesh:
        return Mesh.of(**self.degrees())


class DTensorCut(NamedTuple):
    """How one mesh dim cuts: along tensor dim `dim`, after cutting `factor` pieces first (1: none)."""

    dim: int
    factor: int = 1


class DTensorPlacement(NamedTuple):
    """A DTensor's layout."""

    mesh: RankMesh
    cuts: tuple[DTensorCut | None, ...]  # one a mesh dim, None for Replicate
    order: tuple[int, ...]  # mesh dims, in the order in which they cut


def read_mesh(record: Any, load: Callable[[TensorRef], Sequence[int]], rank: int | None) -> RankMesh:
    """The mesh of a DeviceMesh record. load: gives an int tensor's values. rank: whose file it is in, for a mesh that
    is one of several slices of a larger one. Raises InputError E0399."""
    if not isinstance(record, PickledRecord):
        raise _unplaced("its mesh is no DeviceMesh")
    fields = record.state or {}
    names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
    known = tuple(map(str, names)) if isinstance(names, list | tuple) else ()
    tensor = fields.get("mesh")
    if isinstance(tensor, TensorRef):
        shape = tensor.shape
        ranks = tuple(load(tensor))
    else:
        shape, ranks = _by_layout(fields, load, rank)
    if (
        not 0 < prod(shape) == len(ranks) <= RANKS_LIMIT
        or len(set(ranks)) != len(ranks)
        or len(known) not in (0, len(shape))
    ):
        raise _unplaced(f"its mesh of shape {list(shape)[:8]} lists {len(ranks)} ranks")
    return RankMesh(shape, ranks, known)


def _by_layout(
    fields: dict[str, Any], load: Callable[[TensorRef], Sequence[int]], rank: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A mesh as torch >= 2.9 keeps it: strides into the flat list of the ranks of the mesh that it is a slice of."""
    listed = fields.get("_flatten_rank_map")
    layout = fields.get("_layout")
    stored = fields.get("_rank_map")
    flat: tuple[Any, ...] = ()
    if isinstance(listed, list | tuple):
        flat = tuple(listed)
    elif isinstance(stored, TensorRef):
        flat = tuple(load(stored))
    axes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    if isinstance(layout, PickledRecord):
        if "axes" in layout:
            parts = [(axis.get("shape"), axis.get("stride")) for axis in layout.get("axes", (list, tuple))]
        else:
            shape = _line(layout.get("shape"))
            stride = _line(layout.get("stride"))
            parts = list(zip(shape, stride, strict=False)) if len(shape) == len(stride) else []
        axes = [(_ints(shape), _ints(stride)) for shape, stride in parts]

    if (
        not axes
        or prod(n or 1 for shape, _ in axes for n in shape) > RANKS_LIMIT
        or any(len(a) != len(b) for a, b in axes)
    ):
        raise _unplaced("its mesh has no layout that is known here")

    at = [0]
    for shape, stride in axes:
        for n, step in zip(shape, stride, strict=True):
            at = [base + i * step for base in at for i in range(n)]

    if not at or max(at) >= len(flat) or len(flat) > RANKS_LIMIT or not all(type(r) is int for r in flat):
        raise _unplaced("its mesh's layout leaves its list of ranks")

    taken: set[int] = set()
    for base in range(len(flat) - max(at)):  # the slices: the layout moved to each place that none has yet
        if base in taken:
            continue
        ranks = tuple(flat[base + i] for i in at)
        if rank in ranks or len(at) == len(flat):
            return tuple(prod(shape) for shape, _ in axes), ranks
        taken.update(base + i for i in at)

    raise _unplaced(f"rank {rank} is not in its mesh, of ranks {list(flat)[:20]}")


def _line(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _ints(value: Any) -> tuple[int, ...]:
    """Nested tuples of ints, flat."""
    out: list[int] = []
    for item in _line(value):
        if isinstance(item, list | tuple):
            out += _ints(item)
        elif type(item) is int and 0 <= item <= RANKS_LIMIT:
            out.append(item)
        else:
            raise _unplaced("its mesh's layout holds something other than sizes")
    return tuple(out)


def read_placed(spec: Any, mesh: RankMesh, rank: int) -> DTensorPlacement:
    """The layout that a DTensorSpec record states for a tensor of `rank` dims. Raises InputError E0399."""
    placements = spec.get("placements", (list, tuple)) if isinstance(spec, PickledRecord) else ()
    if len(placements) != len(mesh.shape):
        raise _unplaced(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dims")
    cuts: list[DTensorCut | None] = []
    for item in placements:
        name = item.name.rpartition(".")[2] if isinstance(item, PickledRecord) else type(item).__name__
        if name == "Replicate":
            cuts.append(None)
        elif name in ("Shard", "_StridedShard"):
            dim = item.get("dim", int)
            factor = item.get("split_factor", int) if name == "_StridedShard" else 1
            if not 0 <= dim < rank or not 1 <= factor <= BOXES_LIMIT:
                raise _unplaced(f"{name}({dim}) of a tensor with {rank} dims")
            cuts.append(DTensorCut(dim, factor))
        else:
            raise _unplaced(
                f"its placement is {name}: the ranks' values were not summed up yet, none of them has the tensor's"
            )
    return DTensorPlacement(mesh, tuple(cuts), _order(spec, cuts, mesh))


def _order(spec: PickledRecord, cuts: Sequence[DTensorCut | None], mesh: RankMesh) -> tuple[int, ...]:
    """The mesh dims in the order in which they cut; () if the split factors must be applied from left to right."""
    stated = (spec.state or {}).get("shard_order")
    usual = [m for m, cut in enumerate(cuts) if cut]
    if all(cut is None or cut.factor == 1 for cut in cuts):
        if isinstance(stated, list | tuple):
            listed = [m for entry in stated if isinstance(entry, PickledRecord) for m in _line(entry.get("mesh_dims"))]
            if all(type(m) is int for m in listed) and sorted(listed) == usual:
                return tuple(listed)
        return tuple(usual)
    order: list[int] = []
    for dim in dict.fromkeys(cut.dim for cut in cuts if cut):
        found: list[int] = []
        for m in reversed(range(len(cuts))):
            cut = cuts[m]
            if cut is None or cut.dim != dim:
                continue
            before = list(accumulate((mesh.shape[i] for i in found), mul, initial=1))
            if cut.factor not in before:
                return ()
            found.insert(before.index(cut.factor), m)
        order += found
    return tuple(order)


def boxes(
    shape: Sequence[int], placed: DTensorPlacement, at: Sequence[int]
) -> tuple[tuple[int, ...], list[tuple[Box, Box]]]:
    """(the shape of the part at mesh coordinates `at`, its boxes: (in the whole tensor, in the part)).

    A part whose lines are not one run (undecodable split factors) has several boxes; an empty part has none.
    """
    lines = [[(0, n)] for n in shape]  # per tensor dim: (start, length) runs, in the part's order
    for m in placed.order or range(len(placed.cuts)):
        cut = placed.cuts[m]
        if cut is not None:
            factor = 1 if placed.order else cut.factor
            lines[cut.dim] = _share(lines[cut.dim], placed.mesh.shape[m], at[m], factor)
        if prod(map(len, lines)) > BOXES_LIMIT:
            raise _unplaced(f"its split factors cut it into more than {BOXES_LIMIT} pieces")

    placed_lines = []  # per tensor dim: (start in the whole tensor, start in the part, length)
    for runs in lines:
        begin = 0
        placed_runs = []
        for start, length in runs:
            placed_runs.append((start, begin, length))
            begin += length
        placed_lines.append(placed_runs)

    local = tuple(runs[-1][1] + runs[-1][2] if runs else 0 for runs in placed_lines)
    if 0 in local:
        return local, []

    pairs: list[tuple[Box, Box]] = []
    for corner in product(*placed_lines):
        lengths = tuple(length for _, _, length in corner)
        in_whole = Box(tuple(start for start, _, _ in corner), lengths)
        in_part = Box(tuple(begin for _, begin, _ in corner), lengths)
        pairs.append((in_whole, in_part))
    return local, pairs


def _share(runs: Sequence[tuple[int, int]], parts: int, index: int, factor: int) -> list[tuple[int, int]]:
    """The share `index` of `parts` of a line made of runs; with a factor, that share of each of `factor` pieces."""
    length = sum(n for _, n in runs)
    wide = ceil_div(length, factor)
    out: list[tuple[int, int]] = []
    for piece in range(min(factor, length)):
        low = min(piece * wide, length)
        high = min((piece + 1) * wide, length)
        step = ceil_div(high - low, parts)
        out += _cut(runs, min(low + index * step, high), min(low + (index + 1) * step, high))
    merged: list[tuple[int, int]] = []
    for start, n in out:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + n)
        else:
            merged.append((start, n))
    return merged


def _cut(runs: Sequence[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Elements `low` to `high` of the line."""
    out = []
    at = 0
    for start, n in runs:
        first = max(low, at)
        last = min(high, at + n)
        if first < last:
            out.append((start + first - at, last - first))
        at += n
    return out


def _unplaced(what: str) -> InputError:
    return InputError(
        f"a DTensor that can't be placed: {what}",
        code=UNPLACED,
        hint="save with torch.distributed.checkpoint, which records where every part is stored",
    )
