"""Slices: a tensor of an AOA program as boxes of the source's tensors, followed through the steps without building any.

Statements split, concatenate and permute along complete dims, so that every intermediate value is a few boxes, each a
box of one source tensor with its dims in some order. `q` (8, 4), transposed and split in two along axis 1:

    Slice("q", start=(4, 0), at=(0, 0), shape=(4, 4), dims=(1, 0))      the second half: rows 4..7 of q, standing

Boxes that are adjacent on both sides are joined again, and rows of boxes at equal steps (the query heads of every group
of a fused QKV) become one strided piece. Cost: the number of boxes. What it does not do: names, codes of faults with
their statement (`program`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tool.algebra.piece import Piece, Side
from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.dtype import DType
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.paddle.aoa.steps import shown

Shape = tuple[int, ...]


class Slice(NamedTuple):
    """A box of a source tensor, and the box of a value that it becomes."""

    source: str
    start: Shape  # in the source tensor, by its dims
    at: Shape  # in the value, by its dims
    shape: Shape  # in the value, by its dims
    dims: Shape  # the source dim along which each dim of the value runs

    @property
    def box(self) -> Box:
        """The elements of the source, in its own dims."""
        extents = [0] * len(self.dims)
        for dim, n in zip(self.dims, self.shape, strict=True):
            extents[dim] = n
        return Box(self.start, tuple(extents))


class NamedValue(NamedTuple):
    """The value of a name while a program runs."""

    shape: Shape
    slices: tuple[Slice, ...]
    dtype: DType | None = None  # what its elements are cast to, None for nothing


def whole(source: str, shape: Shape) -> NamedValue:
    """A source tensor itself."""
    zero = (0,) * len(shape)
    return NamedValue(shape, (Slice(source, zero, zero, shape, tuple(range(len(shape)))),))


def split(value: NamedValue, parts: int, axis: int, name: str, why: str) -> list[NamedValue]:
    """`parts` equal parts along `axis`. Raises UsageError: E1216 no such axis, E1215 no equal parts."""
    _check_axis(value, axis, name)
    length, rest = divmod(value.shape[axis], parts)
    if rest:
        raise UsageError(
            f"`{shown(name)}` is {value.shape[axis]} long along axis {axis}, which {parts} parts don't divide"
            + (f" ({why})" if why else ""),
            code="E1215",
            hint=f"its shape is {list(value.shape)}: is it another axis?",
        )
    shape = _replace_axis(value.shape, axis, length)
    return [
        value._replace(shape=shape, slices=tuple(_cut(value.slices, axis, k * length, length))) for k in range(parts)
    ]


def _cut(slices: Iterable[Slice], axis: int, low: int, length: int) -> Iterator[Slice]:
    """The slices within [low, low + length) of the value's `axis`, with positions relative to `low`."""
    for piece in slices:
        first = max(piece.at[axis], low)
        last = min(piece.at[axis] + piece.shape[axis], low + length)
        if first < last or (length == piece.shape[axis] == 0):
            dim = piece.dims[axis]
            yield piece._replace(
                start=_replace_axis(piece.start, dim, piece.start[dim] + first - piece.at[axis]),
                at=_replace_axis(piece.at, axis, first - low),
                shape=_replace_axis(piece.shape, axis, last - first),
            )


def concat(values: Sequence[NamedValue], axis: int, names: Sequence[str], *, even: bool) -> NamedValue:
    """The values end to end along `axis`. Raises UsageError: E1216 other shapes, E1217 casts that differ."""
    first = values[0]
    _check_axis(first, axis, names[0])
    joined: list[Slice] = []
    at = 0

    for name, value in zip(names, values, strict=True):
        same = len(value.shape) == len(first.shape) and _replace_axis(value.shape, axis, 0) == _replace_axis(
            first.shape, axis, 0
        )
        if not same or (even and value.shape != first.shape):
            raise UsageError(
                f"`{shown(names[0])}` {list(first.shape)} and `{shown(name)}` {list(value.shape)} can't be joined along"
                f" axis {axis}",
                code="E1216",
                hint="a fusion wants parts of one size" if same else "all other dims must be the same",
            )
        if value.dtype != first.dtype:
            raise UsageError(
                f"`{shown(names[0])}` is cast to {_dtype(first)} and `{shown(name)}` to {_dtype(value)}",
                code="E1217",
                hint="cast after joining",
            )
        for piece in value.slices:
            _append(joined, piece._replace(at=_replace_axis(piece.at, axis, piece.at[axis] + at)), axis)
        at += value.shape[axis]

    return first._replace(shape=_replace_axis(first.shape, axis, at), slices=tuple(joined))


def _append(joined: list[Slice], piece: Slice, axis: int) -> None:
    """Append a slice, merged with the last one if they are adjacent along `axis` in both source and value."""
    if joined:
        last = joined[-1]
        dim = piece.dims[axis]
        if (
            last.source == piece.source
            and last.dims == piece.dims
            and _replace_axis(last.at, axis, last.at[axis] + last.shape[axis]) == piece.at
            and _replace_axis(last.start, dim, last.start[dim] + last.shape[axis]) == piece.start
            and _replace_axis(last.shape, axis, 0) == _replace_axis(piece.shape, axis, 0)
        ):
            piece = last._replace(shape=_replace_axis(last.shape, axis, last.shape[axis] + piece.shape[axis]))
            joined.pop()
    joined.append(piece)


def permute(value: NamedValue, dims: Sequence[int], name: str) -> NamedValue:
    """Dim i of the result is dim `dims[i]` of the value; () reverses them. Raises UsageError (E1216)."""
    order = tuple(dims) or tuple(reversed(range(len(value.shape))))
    if sorted(order) != list(range(len(value.shape))):
        raise UsageError(
            f"permute='{list(order)}' of `{shown(name)}` of shape {list(value.shape)}",
            code="E1216",
            hint=f"name each of its {len(value.shape)} dims once",
        )

    def turned(values: Shape) -> Shape:
        """One value for each dim, in the new order of dims."""
        return tuple(values[k] for k in order)

    slices = [s._replace(at=turned(s.at), shape=turned(s.shape), dims=turned(s.dims)) for s in value.slices]
    return value._replace(shape=turned(value.shape), slices=tuple(slices))


def cast(value: NamedValue, dtype: DType | None, name: str) -> NamedValue:
    """Raises UsageError (E1217) where an earlier cast has rounded to another dtype: one cast says what is meant."""
    if value.dtype not in (None, dtype) and _dtype(value) != "F32":
        raise UsageError(
            f"`{shown(name)}` is cast to {_dtype(value)} and then to {dtype.name if dtype else None}",
            code="E1217",
            hint="each cast would round: leave one of them out",
        )
    return value._replace(dtype=dtype)


def pieces_of(name: str, value: NamedValue, shapes: Mapping[str, Shape]) -> tuple[Piece, ...]:
    """The pieces that fill the tensor `name`. An empty tensor has one too, which says where it comes from."""
    steps = contiguous_strides(value.shape)
    out = []
    for run in _runs(sorted(value.slices, key=lambda s: s.at)):
        first = run[0]
        second = run[min(1, len(run) - 1)]
        there = contiguous_strides(shapes[first.source])
        strides = tuple(there[dim] for dim in first.dims)
        ext = first.shape
        src = _flat(first.start, there)
        dst = _flat(first.at, steps)
        if len(run) > 1:
            jump = _flat(second.start, there) - src
            out.append(
                Piece(
                    (len(run), *ext),
                    Side(first.source, src, (jump, *strides)),
                    Side(name, dst, (_flat(second.at, steps) - dst, *steps)),
                )
            )
        else:
            out.append(Piece(ext, Side(first.source, src, strides), Side(name, dst, steps)))
    return tuple(out)


def _runs(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Group slices into runs of one source, size and order of dims, at equal steps along one dim in source and target.

    Slices of a run need not be consecutive.
    """
    runs: list[list[Slice]] = []
    open_: dict[tuple[str, Shape, Shape], list[Slice]] = {}
    for piece in slices:
        kind = piece.source, piece.shape, piece.dims
        run = open_.get(kind)
        if run is not None and _follows(run, piece):
            run.append(piece)
            continue
        open_[kind] = [piece]
        runs.append(open_[kind])
    return runs


def _follows(run: Sequence[Slice], piece: Slice) -> bool:
    """Whether `piece` continues a run: at the run's step from its last slice, in the source and in the target.

    A run of one slice is continued by any step forwards along one axis.
    """
    step = _measure_step(run[-1], piece)
    if len(run) > 1:
        return step == _measure_step(run[-2], run[-1])

    return all(sum(map(bool, offsets)) == 1 and max(offsets) > 0 for offsets in step)


def _measure_step(first: Slice, second: Slice) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How far `second` is from `first` along each axis: in the target (`at`), and in the source (`start`)."""
    in_target = tuple(b - a for a, b in zip(first.at, second.at, strict=True))
    in_source = tuple(b - a for a, b in zip(first.start, second.start, strict=True))
    return in_target, in_source


def _flat(at: Shape, strides: Sequence[int]) -> int:
    return sum(k * step for k, step in zip(at, strides, strict=True))


def _replace_axis(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def _check_axis(value: NamedValue, axis: int, name: str) -> None:
    if axis >= len(value.shape):
        raise UsageError(
            f"`{shown(name)}` has shape {list(value.shape)}: there is no axis {axis}",
            code="E1216",
            hint="axes count from 0; fusions take axis=1 where nothing is said",
        )


def _dtype(value: NamedValue) -> str:
    return value.dtype.name if value.dtype else "nothing"


def numel(slices: Iterable[Slice]) -> int:
    """The total number of elements of the slices."""
    return sum(prod(piece.shape) for piece in slices)
