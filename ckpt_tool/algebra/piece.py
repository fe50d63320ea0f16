"""Piece: a strided block of elements of one tensor that equals a strided block of another, one to one.

Element `k = (k0, k1, ...)`, `0 <= kj < ext[j]`, is at `offset + sum(kj * strides[j])` of each side's tensor, counted
in elements of that tensor's row-major space. The K heads of a fused QKV of 2 groups, 3 + 1 + 1 heads of 4 rows, 10
columns:

    Piece(ext=(2, 4, 10), src=Side("qkv", 120, (200, 10, 1)), dst=Side("k", 0, (40, 10, 1)))

Pieces are closed under `swap`, `cut` (by a box of either side's tensor, or by a range of its row-major space) and
`compose`. The one idea is mixed radix: a piece is *aligned* to a step `t` when no run of its elements crosses a
multiple of `t`; then `index // t` and `index % t` belong to different axes and are cut like coordinates. What does not
divide is split into head, body and tail, or unrolled index by index, so the arithmetic is exact for any sizes; regular
layouts never need it.

Cost: some 10 us a cut. Plain ints, no NumPy at import. What it does not do: join pieces end to end
(`algebra.compose`), move bytes or know files (`apply` is the reference for tests), or pick the states that an element
map applies to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckpt_tool.algebra.element_map import ElementMap, inverse
from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.errors import InternalError

if TYPE_CHECKING:
    import numpy as np

PAD = "_"  # the name of what is made (zeros) or dropped (counted in the report)
SideName = Literal["src", "dst"]


class Side(NamedTuple):
    """The place of a piece in one of its two tensors."""

    name: str
    # offset, strides: in elements of the tensor's row-major space
    offset: int
    strides: tuple[int, ...]


class Piece(NamedTuple):
    """A strided block bijection. See the module."""

    ext: tuple[int, ...]
    src: Side
    dst: Side
    maps: tuple[ElementMap, ...] = ()  # applied to values on the way from src to dst

    @property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return prod(self.ext)

    def span(self, side: SideName) -> tuple[int, int]:
        """(first, last + 1) element of `side` that the piece touches."""
        at: Side = getattr(self, side)
        return at.offset, at.offset + sum((n - 1) * s for n, s in zip(self.ext, at.strides, strict=True)) + 1

    def swap(self) -> Piece:
        """The way back."""
        return Piece(self.ext, self.dst, self.src, inverse(self.maps) if self.maps else ())

    def merged(self) -> Piece:
        """The same bijection with the fewest axes: those contiguous on both sides are one, by falling dst stride."""
        axes = sorted(zip(self.dst.strides, self.src.strides, self.ext, strict=True), reverse=True)
        out: list[tuple[int, int, int]] = []
        for d, s, n in axes:
            if n == 1:
                continue
            if out and out[-1][0] == d * n and out[-1][1] == s * n:
                n *= out.pop()[2]
            out.append((d, s, n))
        d_strides, s_strides, ext = zip(*out, strict=True) if out else ((), (), ())
        src = self.src._replace(strides=s_strides)
        dst = self.dst._replace(strides=d_strides)
        return Piece(ext, src, dst, self.maps)

    def cut(self, side: SideName, shape: Sequence[int], box: Box) -> list[Piece]:
        """The part of the piece inside `box` of that side's tensor of `shape`, as disjoint pieces; [] if there is none.

        At most two pieces more for each axis; one if the box cuts between complete runs. Each axis of the result
        runs along one dim of `shape`, so that `into` can follow.
        """
        if side == "dst":
            return [piece.swap() for piece in self.swap().cut("src", shape, box)]
        parts = [self]
        for step, extent, low, count in zip(contiguous_strides(shape), shape, box.offset, box.shape, strict=True):
            if count < extent:
                parts = [inner for part in parts for inner in _cut_dim(part, step, extent, low, low + count)]
        return parts

    def along(self, side: SideName, shape: Sequence[int]) -> list[Piece]:
        """The piece as disjoint pieces each of whose axes runs along one dim of that side's tensor of `shape`.

        One piece if no axis crosses a dim's end (an axis of both rows and columns is split into the two).
        """
        if side == "dst":
            return [piece.swap() for piece in self.swap().along("src", shape)]
        parts = [self]
        for step, extent in zip(contiguous_strides(shape), shape, strict=True):
            parts = [inner for part in parts for inner in _cut_dim(part, step, extent, 0, extent)]
        return parts

    def cut_range(self, side: SideName, start: int, stop: int) -> list[Piece]:
        """The part of the piece in elements [start, stop) of that side's row-major space, as disjoint pieces."""
        if side == "dst":
            return [piece.swap() for piece in self.swap().cut_range("src", start, stop)]
        return [compact(part) for part in _clip(self, 1, self.src.offset, start, stop)]

    def into(self, side: SideName, shape: Sequence[int], box: Box, offset: int, strides: Sequence[int]) -> Piece:
        """The piece with one side given in an array that stores `box` of that side's tensor of `shape`.

        Args:
            offset, strides: of the array, in elements: the place of the box's first element, and a step along each dim
                (as `Chunk.region` gives them).
        Returns: the piece whose side counts in elements of that array. The piece must be inside the box: `cut` first.
        """
        at: Side = getattr(self, side)
        steps = contiguous_strides(shape)
        for step, n, low, stride in zip(steps, shape, box.offset, strides, strict=True):
            offset += (at.offset // step % max(n, 1) - low) * stride
        moved = []
        for n, s in zip(self.ext, at.strides, strict=True):
            dim = next((d for d, step in enumerate(steps) if shape[d] > 1 and s >= step), None)
            if dim is None or s % steps[dim] or (n - 1) * s >= shape[dim] * steps[dim]:
                raise InternalError(f"a piece of {at.name!r} crosses the dims of {list(shape)}: cut it before `into`")
            moved.append(s // steps[dim] * strides[dim])
        moved_side = Side(at.name, offset, tuple(moved))
        return self._replace(src=moved_side) if side == "src" else self._replace(dst=moved_side)


# One piece, cut along the row-major space of its source. (The destination is cut by swapping first.)


def narrow(piece: Piece, axis: int, start: int, stop: int) -> Piece:
    """Indices [start, stop) of one axis."""
    ext, src, dst, maps = piece
    return Piece(
        (*ext[:axis], stop - start, *ext[axis + 1 :]),
        Side(src.name, src.offset + start * src.strides[axis], src.strides),
        Side(dst.name, dst.offset + start * dst.strides[axis], dst.strides),
        maps,
    )


def compact(piece: Piece) -> Piece:
    """Without axes of extent 1."""
    ext, src, dst, maps = piece
    if 1 not in ext:
        return piece
    keep = [j for j, n in enumerate(ext) if n > 1]
    return Piece(
        tuple(ext[j] for j in keep),
        Side(src.name, src.offset, tuple(src.strides[j] for j in keep)),
        Side(dst.name, dst.offset, tuple(dst.strides[j] for j in keep)),
        maps,
    )


def _split(piece: Piece, axis: int, block: int) -> Piece:
    """One axis as (blocks, block); `block` divides it."""
    ext, src, dst, maps = piece
    if ext[axis] == block:
        return piece

    def pair(side: Side) -> Side:
        step = side.strides[axis]
        return Side(side.name, side.offset, (*side.strides[:axis], step * block, step, *side.strides[axis + 1 :]))

    return Piece((*ext[:axis], ext[axis] // block, block, *ext[axis + 1 :]), pair(src), pair(dst), maps)


def aligned(piece: Piece, step: int) -> Iterator[Piece]:
    """`piece` in pieces none of whose source runs crosses a multiple of `step`.

    Then `index // step` depends only on the axes that step by multiples of `step`, and `index % step` on the others.
    """
    ext = piece.ext
    offset = piece.src.offset
    strides = piece.src.strides
    low = [j for j, stride in enumerate(strides) if stride % step and ext[j] > 1]
    if offset % step + sum((ext[j] - 1) * strides[j] for j in low) < step:
        yield piece
        return

    for j in low:
        if step % strides[j]:  # no whole number of its steps fills `step`: one index at a time
            for k in range(ext[j]):
                yield from aligned(narrow(piece, j, k, k + 1), step)
            return

    j = max(low, key=strides.__getitem__)
    stride = strides[j]
    n = ext[j]

    if offset % stride + sum((ext[i] - 1) * strides[i] for i in low if i != j) >= stride:
        for part in aligned(piece, stride):
            yield from aligned(part, step)
        return

    block = step // stride
    first = offset % step // stride
    head = min(block - first, n) if first else 0
    body = head + (n - head) // block * block
    if head:
        yield narrow(piece, j, 0, head)
    if body > head:
        yield _split(narrow(piece, j, head, body), j, block)
    if n > body:
        yield narrow(piece, j, body, n)


def _cut_dim(piece: Piece, step: int, extent: int, low: int, high: int) -> Iterator[Piece]:
    """What of the piece has its source coordinate `index // step % extent` in [low, high)."""
    for outer in aligned(piece, step * extent):
        for part in aligned(outer, step):
            for inner in _clip(part, step, part.src.offset // step % extent, low, high, modulo=step * extent):
                yield compact(inner)


def _clip(piece: Piece, step: int, base: int, low: int, high: int, *, modulo: int = 0) -> Iterator[Piece]:
    """What of the piece has `base + sum(k * stride / step)` in [low, high).

    The sum runs over the source axes that step by multiples of `step` but not of `modulo`.
    """
    axes = [
        (stride // step, j)
        for j, stride in enumerate(piece.src.strides)
        if stride >= step and piece.ext[j] > 1 and (not modulo or stride % modulo)
    ]
    span = sum((piece.ext[j] - 1) * stride for stride, j in axes)
    if base >= high or base + span < low:
        return

    if base >= low and base + span < high:
        yield piece
        return

    stride, j = max(axes)
    n = piece.ext[j]
    below = span - (n - 1) * stride

    # wholly inside
    first = max(0, -((base - low) // stride))
    last = min(n, (high - 1 - below - base) // stride + 1)

    # touching
    start = max(0, -((base - low + below) // stride))
    stop = min(n, (high - 1 - base) // stride + 1)
    edges: Iterable[int] = range(start, stop)
    if first < last:
        yield narrow(piece, j, first, last)
        edges = (*range(start, first), *range(last, stop))

    for k in edges:
        yield from _clip(narrow(piece, j, k, k + 1), step, base + k * stride, low, high, modulo=modulo)


def apply(
    pieces: Iterable[Piece], arrays: Mapping[str, np.ndarray[Any, Any]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, np.ndarray[Any, Any]]:
    """The destination tensors of `shapes` from source `arrays`, in memory: the reference that the plan is tested with.

    Source arrays in any layout, read row-major; what no piece reaches stays zero. The dtype follows the first piece.
    """
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    flat = {name: np.ascontiguousarray(array).reshape(-1) for name, array in arrays.items()}
    out: dict[str, np.ndarray[Any, Any]] = {}

    def view(array: np.ndarray[Any, Any], piece: Piece, side: Side) -> np.ndarray[Any, Any]:
        steps = [s * array.itemsize for s in side.strides]
        return as_strided(array[side.offset :], piece.ext, steps)

    for piece in pieces:
        if piece.src.name == PAD or piece.dst.name == PAD or not piece.numel:
            continue
        source = flat[piece.src.name]
        if piece.dst.name not in out:
            out[piece.dst.name] = np.zeros(prod(shapes[piece.dst.name]), source.dtype)
        values = view(source, piece, piece.src)
        for change in piece.maps:
            values = change(values)
        view(out[piece.dst.name], piece, piece.dst)[...] = values
    empty = np.zeros(0, next(iter(flat.values())).dtype if flat else np.float32)
    return {
        name: out[name].reshape(shape) if name in out else np.zeros(shape, empty.dtype)
        for name, shape in shapes.items()
    }
