"""Mapping: the tensors of a checkpoint under another naming, with their bytes where they are.

A mapping says for each parameter which elements of which sources form it (`algebra.mapped`). A stored chunk is a
strided box, so each piece of a new tensor is one too, or a few: no byte moves, and planning goes on as for any other
tensor. Paddle's grouped `qkv_proj` of 2 groups, (in, out), as the hub's `q_proj`, (out, in):

    qkv_proj.weight (32, 64)         chunk: the whole array
    q_proj.weight   (32, 32)         chunks: rows 0..15 = columns 0..15 of it, rows 16..31 = columns 32..47, transposed

States follow their parameter: master, moments and EMA have its shape and its pieces; a counter of one element (`step`,
`beta1_pow_acc`) is taken from every source and must be the same in all of them, which the run compares. A state of any
other shape can't follow and is an error. That includes preconditioners (SOAP's `GG`, `Q`), which have the shape of a
square matrix by chance: those of other matrices reveal them (`shaped_otherwise`). Cost: some 20 us a piece and chunk.
What it does not do: change values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import PAD, Piece, Side, compact, narrow
from ckpt_tool.core.box import Box, contiguous_strides, whole
from ckpt_tool.core.catalog import mark_replicas
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.plan.moves import Stored

Shape = tuple[int, ...]


class Applied(NamedTuple):
    """A checkpoint after its tensors were renamed."""

    # The tensors under their new names, parameter by parameter in the mapping's order, then those that it does not
    # mention, unchanged.
    stored: tuple[Stored, ...]
    renewed: frozenset[TensorKey]  # keys under which the source had other values or none
    kept: tuple[str, ...]  # names that the mapping does not mention
    dropped: tuple[LogicalTensor, ...]  # tensors that the mapping drops
    names: Mapping[str, tuple[str, ...]]  # source parameter -> parameters that contain elements of it


def parameter_shapes(rows: Iterable[Stored]) -> dict[str, Shape]:
    """{parameter: shape}: the model's shape, else its master's, else that of its largest state."""
    shapes: dict[str, tuple[tuple[bool, bool, int], Shape]] = {}
    for row in rows:
        (name, state), shape = row.tensor.key, row.tensor.shape
        rank = (state == MODEL, state == MASTER, prod(shape))
        if name not in shapes or rank > shapes[name][0]:
            shapes[name] = (rank, shape)
    return {name: shape for name, (_, shape) in shapes.items()}


def shaped_otherwise(rows: Sequence[Stored]) -> frozenset[str]:
    """The optimizer states with some tensor that has neither its parameter's shape nor a single element."""
    shapes = parameter_shapes(rows)
    return frozenset(
        row.tensor.key.state
        for row in rows
        if row.tensor.key.state not in (MODEL, MASTER, EMA)
        and row.tensor.shape != shapes[row.tensor.key.name]
        and row.tensor.numel != 1
    )


def apply_mapping(rows: Sequence[Stored], mapped: Mapped, otherwise: Set[str] = frozenset()) -> Applied:
    """The tensors under the mapping's names. otherwise: `shaped_otherwise` of all tensors in the sources.

    Raises one InconsistentCheckpoint E2303 for all states that some sources of a tensor have and others lack, whose
    shape is neither the parameter's nor a single element, or whose dtypes differ.
    """
    shapes = parameter_shapes(rows)
    by_name: dict[str, dict[str, Stored]] = {}
    for row in rows:
        by_name.setdefault(row.tensor.key.name, {})[row.tensor.key.state] = row

    used: dict[str, list[str]] = {}
    stored: list[Stored] = []
    renewed: set[TensorKey] = set()
    faults: list[tuple[TensorKey, str]] = []

    for made_tensor in mapped.made:
        parts = _parts(made_tensor, shapes)
        sources = list(dict.fromkeys([piece.src.name for piece in parts]))
        for name in sources:
            used.setdefault(name, []).append(made_tensor.name)
        for key, state_row in _states(made_tensor, parts, sources, by_name, shapes, faults):
            if key.state in otherwise and state_row.tensor.numel != 1:
                faults.append((key, f"{key.state} does not have the shape of every parameter that has it"))
            stored.append(state_row)
            if not (
                len(parts) == 1
                and parts[0].src.name == made_tensor.name
                and state_row is by_name[made_tensor.name][key.state]
            ):
                renewed.add(key)

    if faults:
        (key, fault), states = faults[0], dict.fromkeys(key.state for key, _ in faults)
        raise InconsistentCheckpoint(
            f"{key}: {fault}",
            code="E2303",
            key=key.name,
            faults=[f"{key}: {fault}" for key, fault in faults[1:]],
            hint=f"leave out what has no place with --drop {','.join(states)}, or keep the source's names with "
            "--dialect keep",
        )

    # Tensors that no rule uses and that are not dropped stay under their names.
    dropped = set(mapped.dropped)
    kept_names = [name for name in by_name if name not in used and name not in dropped]
    taken_names = {row.tensor.key.name for row in stored}
    clash = [name for name in kept_names if name in taken_names]

    if clash:
        raise UsageError(
            f"the mapping makes {clash[0]} of another tensor, and the checkpoint has one of that name that "
            "no rule takes",
            code="E2301",
            key=clash[0],
            faults=clash[1:],
            hint="rename or drop it in the mapping",
        )

    stored += [row for name in kept_names for row in by_name[name].values()]
    dropped_tensors = tuple(row.tensor for name in mapped.dropped for row in by_name.get(name, {}).values())
    return Applied(
        tuple(stored), frozenset(renewed), tuple(kept_names), dropped_tensors, {n: tuple(to) for n, to in used.items()}
    )


def _parts(made: Made, shapes: Mapping[str, Shape]) -> list[Piece]:
    """The pieces of a tensor. Raises UsageError E1280 for pieces that this build can't make: padding, maps of
    values."""
    for piece in made.pieces:
        if piece.src.name == PAD or piece.maps or piece.src.name not in shapes:
            what = "elements made from nothing" if piece.src.name == PAD else "a change of values"
            if piece.src.name != PAD and piece.src.name not in shapes:
                what = f"a tensor that is not there, {piece.src.name}"
            raise UsageError(
                f"{made.name} wants {what}", code="E1280", key=made.name, hint="this build maps bits as they are"
            )
    return [piece for piece in made.pieces if 0 not in piece.ext or 0 in made.shape]


def _states(
    made: Made,
    pieces: Sequence[Piece],
    sources: Sequence[str],
    by_name: Mapping[str, Mapping[str, Stored]],
    shapes: Mapping[str, Shape],
    faults: list[tuple[TensorKey, str]],
) -> Iterator[tuple[TensorKey, Stored]]:
    """Each state of a made tensor that its `sources` have."""
    if len(sources) == 1 and all(row.tensor.shape == shapes[sources[0]] for row in by_name[sources[0]].values()):
        for state, (source, tensor) in by_name[sources[0]].items():
            key = TensorKey(made.name, state)
            yield key, Stored(source, _make_tensor(key, made, pieces, {sources[0]: tensor}))
        return
    for state in dict.fromkeys(state for name in sources for state in by_name[name]):
        key = TensorKey(made.name, state)
        rows = [by_name[name].get(state) for name in sources]
        present = [row for row in rows if row is not None]

        if len(present) < len(rows):
            lacking = next(name for name, row in zip(sources, rows, strict=True) if row is None)
            faults.append((key, f"{present[0].tensor.key.name} has {state}, {lacking} has none"))
            continue

        first_row = present[0]
        if any(row.tensor.dtype != first_row.tensor.dtype or row.source != first_row.source for row in present):
            other_row = next(
                row for row in present if row.tensor.dtype != first_row.tensor.dtype or row.source != first_row.source
            )
            faults.append(
                (
                    key,
                    f"{first_row.tensor.key.name} is {first_row.tensor.dtype.name},"
                    f" {other_row.tensor.key.name} is {other_row.tensor.dtype.name}",
                )
            )
            continue

        if all(row.tensor.shape == shapes[row.tensor.key.name] for row in present):
            yield (
                key,
                first_row._replace(
                    tensor=_make_tensor(key, made, pieces, {row.tensor.key.name: row.tensor for row in present})
                ),
            )
        elif all(row.tensor.numel == 1 for row in present):
            yield key, first_row._replace(tensor=_make_counter(key, [row.tensor for row in present]))
        else:
            wrong = next(row.tensor for row in present if row.tensor.shape != shapes[row.tensor.key.name])
            faults.append(
                (
                    key,
                    f"shape {list(wrong.shape)} of {wrong.key.name} is not its parameter's"
                    f" {list(shapes[wrong.key.name])}",
                )
            )


def _make_counter(key: TensorKey, tensors: Sequence[LogicalTensor]) -> LogicalTensor:
    """The counter of a tensor made of several sources: their counters become replicas, which the run compares."""
    first_tensor = tensors[0]
    if len(tensors) == 1 and first_tensor.key == key:
        return first_tensor
    same = [tensor for tensor in tensors if tensor.shape == first_tensor.shape]
    chunks = [chunk._replace(replica=0) for tensor in same for chunk in tensor.chunks]
    return LogicalTensor(key, first_tensor.shape, first_tensor.dtype, mark_replicas(chunks))


def _make_tensor(
    key: TensorKey, made: Made, pieces: Sequence[Piece], sources: Mapping[str, LogicalTensor]
) -> LogicalTensor:
    if len(pieces) == 1:
        (source,) = sources.values()
        if source.shape == made.shape and _is_whole(pieces[0], source):
            return source if source.key == key else source._replace(key=key, path=())

    tensor = next(iter(sources.values()))
    if tensor.dtype.bits < 8:
        raise UsageError(
            f"{key}: a {tensor.dtype.name} tensor can only be renamed, its elements are no bytes",
            code="E1280",
            key=key.name,
            hint="--dialect keep, or dequantise it first",
        )

    chunks: list[Chunk] = []
    for piece in pieces:
        if 0 not in piece.ext:
            source = sources[piece.src.name]
            for stored in source.chunks:
                chunks += _mapped_chunks(piece, source.shape, stored, made.shape)
    return LogicalTensor(key, made.shape, tensor.dtype, tuple(chunks))


def _is_whole(piece: Piece, tensor: LogicalTensor) -> bool:
    """Is every element at the same place on both sides?"""
    flat = piece if piece.src.strides == piece.dst.strides == (1,) else piece.merged()
    return (
        flat.numel == tensor.numel
        and flat.src.offset == flat.dst.offset == 0
        and (flat.src.strides == flat.dst.strides in ((), (1,)))
    )


def _mapped_chunks(piece: Piece, shape: Shape, chunk: Chunk, made: Shape) -> list[Chunk]:
    """The part of `piece` that a stored chunk of its source holds, as chunks of the tensor of shape `made`."""
    (ext, src, dst, _), (stored_box, array, _, replica) = piece, chunk
    return [
        Chunk(box, array.view(offset, box.shape, strides), within, replica)
        for box, within, offset, strides in _boxes(ext, src[1:], dst[1:], shape, stored_box, *chunk.region(), made)
    ]


_Place = tuple[int, Shape]  # a side of a piece without its tensor's name


@lru_cache(maxsize=4096)
def _boxes(
    ext: Shape, src: _Place, dst: _Place, shape: Shape, box: Box, start: int, strides: Shape, made: Shape
) -> tuple[tuple[Box, Box, int, Shape], ...]:
    """The parts of a piece inside `box` of its source: (box of the tensor of shape `made`, the same box at 0, the
    distance of its element 0 from the array's start, its strides there). Pieces come without names, so that layers and
    experts, which repeat, share cached results."""
    piece = Piece(ext, Side("", *src), Side("", *dst))
    return tuple(
        (into, whole(into.shape), offset, steps)
        for part in piece.cut("src", shape, box)
        for inner in part.along("src", shape)
        for into, offset, steps in _spread(inner.into("src", shape, box, start, strides), made)
    )


def _spread(piece: Piece, shape: Shape) -> Iterator[tuple[Box, int, Shape]]:
    """A piece as boxes of its destination of `shape`, each with the place of its element 0 in the source and the step
    along each dim there. Axes that leave gaps in a dim, or steps that differ, are listed index by index."""
    for part in piece.along("dst", shape):
        yield from _unroll(part, shape)


def _unroll(piece: Piece, shape: Shape) -> Iterator[tuple[Box, int, Shape]]:
    steps = contiguous_strides(shape)

    # By dim of the destination: (index stride, source stride, extent, axis) of the piece's axes that run along it.
    axes: list[list[tuple[int, int, int, int]]] = [[] for _ in shape]
    for axis, (extent, index_stride, source_stride) in enumerate(
        zip(piece.ext, piece.dst.strides, piece.src.strides, strict=True)
    ):
        dim = next(k for k, step in enumerate(steps) if shape[k] > 1 and index_stride >= step)
        axes[dim].append((index_stride // steps[dim], source_stride, extent, axis))

    extents = [1] * len(shape)
    strides = list(contiguous_strides(shape))
    for dim, dim_axes in enumerate(axes):
        dim_axes.sort()
        for index, (step, source, extent, axis) in enumerate(dim_axes):
            if index == 0 and step == 1:
                extents[dim], strides[dim] = extent, source
            elif step == extents[dim] and index and source == strides[dim] * extents[dim]:
                extents[dim] *= extent
            else:
                # steps that no single stride describes: index by index
                yield from (
                    box for k in range(extent) for box in _unroll(compact(narrow(piece, axis, k, k + 1)), shape)
                )
                return

    # What of the destination's offset falls to each dim.
    offset = []
    remaining = piece.dst.offset
    for step in steps:
        offset.append(remaining // step)
        remaining %= step
    yield Box(tuple(offset), tuple(extents)), piece.src.offset, tuple(strides)
