"""Region and Copy: strided bijections between the bytes of a file and the elements of a tensor.

Every tensor has one line: its elements in row-major order, numbered from 0. If the files on both sides store the dims
in another order, the line has that order (`common_order`). A `Region` maps a strided set of bytes in a file to a
strided set of elements of the line; sources and outputs are both regions. A TP shard that holds columns 4..7 of a
(2, 8) fp32 tensor, stored from byte 100:

    Region(file=0, offset=100, at=4, extents=(2, 4), strides=(16, 4), steps=(8, 1))

The executor walks the line in blocks, clips the source regions to the block (`clip`), reads them into it, and writes
the clipped output regions out of it. So each element is moved exactly once for any pair of layouts, and a digest over
the line is the same for every layout. For a device that needs plain source-to-destination copies, `intersect` gives
them as `Copy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import Chunk
from ckpt_tool.errors import InputError


class Region(NamedTuple):
    """Element (i, j, ...) is stored at byte `offset + i*strides[0] + j*strides[1] + ...` of file number `file` and is
    element `at + i*steps[0] + j*steps[1] + ...` of the line.

    Dims are ordered by `steps`, largest first, so that steps[d] >= extents[d+1] * steps[d+1]: the clipping relies on
    it."""

    file: int
    offset: int
    at: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]
    replica: int = 0  # 0 for the regions that tile the line; the others hold the same elements again

    @property
    def numel(self) -> int:
        """Number of elements of the region."""
        return prod(self.extents)

    def reach(self, item: int) -> int:
        """Bytes from the first element to the end of the last one. item: bytes of an element. Strides are positive."""
        return sum((n - 1) * stride for n, stride in zip(self.extents, self.strides, strict=True)) + item

    def row(self, index: int) -> Region:
        """The part of the region with that index along the first dim."""
        file, offset, at, extents, strides, steps, replica = self
        offset = offset + index * strides[0]
        at = at + index * steps[0]
        return Region(file, offset, at, extents[1:], strides[1:], steps[1:], replica)

    def in_file_order(self) -> Region:
        """The same region with its dims in the file's order, the largest stride first. It can't be used with `clip`."""
        file, offset, at, extents, strides, steps, replica = self
        if strides == tuple(sorted(strides, reverse=True)):
            return self
        dims = sorted(zip(strides, extents, steps, strict=True), key=lambda dim: -dim[0])
        strides, extents, steps = zip(*dims, strict=True)
        return Region(file, offset, at, extents, strides, steps, replica)


class Copy(NamedTuple):
    """A strided source range and a strided destination range of the same extents: bytes, files by number."""

    source: int
    source_offset: int
    source_strides: tuple[int, ...]
    output: int
    output_offset: int
    output_strides: tuple[int, ...]
    extents: tuple[int, ...]


def byte_view(shape: Sequence[int], box: Box, dtype: DType) -> tuple[tuple[int, ...], Box, int]:
    """(shape, box, item size in bytes) to move a tensor by: sub-byte dtypes are moved as bytes.

    A box of F4 or F6 must cut the last dim at whole bytes; else InputError E0306.
    """
    if dtype.bits >= 8:
        return tuple(shape), box, dtype.bits // 8
    if box.shape == tuple(shape):
        line = (dtype.nbytes(prod(shape)),)
        return line, Box((0,), line), 1
    numbers = (shape[-1], box.offset[-1], box.shape[-1])
    if any(n * dtype.bits % 8 for n in numbers):
        raise InputError(
            f"a {dtype.name} tensor is cut inside a byte: last dim {numbers[0]}, box at {numbers[1]} of {numbers[2]}",
            code="E0306",
            hint="choose a degree that leaves whole bytes, or shard another dim",
        )
    last, start, count = (n * dtype.bits // 8 for n in numbers)
    return (*shape[:-1], last), Box((*box.offset[:-1], start), (*box.shape[:-1], count)), 1


def refuse_strides(dtype: DType, what: str) -> None:
    """Raise InputError E1390: elements of less than a byte can't be moved one by one."""
    raise InputError(
        f"{what} holds {dtype.name}, {dtype.bits} bits an element, and is not stored row by row: its "
        "elements can't "
        "be moved one by one",
        code="E1390",
        hint="store it contiguous (torch: .contiguous()), or leave it out with --remove-keys",
    )


def common_order(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...]:
    """The order of a tensor's dims in which all arrays are stored; () if it is the tensor's own, or there is none.

    boxes: (extents, strides) of each array's box. A line in that order runs through every file in storage order: two
    transpositions, into the tensor's order and out of it again, cancel.
    >>> common_order([((8, 3), (1, 8)), ((4, 3), (1, 4))])
    (1, 0)
    """
    widest = max(boxes, key=lambda box: sum(n > 1 for n in box[0]))
    own = tuple(range(len(widest[1])))
    order = tuple(sorted(own, key=lambda dim: -widest[1][dim]))

    def lie(order: Sequence[int]) -> bool:
        falls = ([strides[dim] for dim in order if extents[dim] > 1] for extents, strides in boxes)
        return all(a > b > 0 for steps in falls for a, b in pairwise(steps))

    return () if lie(own) or not lie(order) else order


def in_order(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The values of the dims, rearranged to the order of the line; () is the tensor's own order."""
    return tuple([values[dim] for dim in order]) if order else tuple(values)


def source_region(chunk: Chunk, shape: Sequence[int], file: int, order: Sequence[int] = ()) -> Region:
    """The region of a stored chunk of a tensor of `shape`, whose line has the dims in `order`. InputError E1390 for
    strides among bits."""
    dtype = chunk.array.dtype
    if dtype.bits < 8:
        if chunk.array.strides not in (None, contiguous_strides(chunk.array.shape)):
            refuse_strides(dtype, f"an array of {chunk.array.path}, byte {chunk.array.offset},")
        line, box, size = byte_view(shape, chunk.box, dtype)
        return box_region(line, box, size, file, chunk.array.offset, replica=chunk.replica)
    size = dtype.bits // 8
    start, strides = chunk.region()
    at = chunk.array.offset + start * size
    return box_region(shape, chunk.box, size, file, at, strides=strides, replica=chunk.replica, order=order)


def box_region(
    shape: Sequence[int],
    box: Box,
    size: int,
    file: int,
    offset: int,
    *,
    stored: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    replica: int = 0,
    order: Sequence[int] = (),
) -> Region:
    """The region of a row-major array of `stored` shape (default: the box's) at byte `offset` that holds `box`; with
    `strides` (elements) of an array that is not row-major."""
    stored = stored and tuple(stored)
    strides = strides and tuple(strides)
    return Region(file, offset, *_form(tuple(shape), box, stored, strides, size, tuple(order)), replica)


@lru_cache(maxsize=4096)
def _form(
    shape: tuple[int, ...],
    box: Box,
    stored: tuple[int, ...] | None,
    strides: tuple[int, ...] | None,
    size: int,
    order: tuple[int, ...],
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(at, extents, strides, steps) of the region of `box_region`. Layers and experts repeat: thousands of regions have
    few forms."""
    start, extents = box
    strides = contiguous_strides(extents if stored is None else stored) if strides is None else strides
    strides = tuple([stride * size for stride in strides])
    if order:
        shape, start, extents, strides = (in_order(values, order) for values in (shape, start, extents, strides))
    steps = contiguous_strides(shape)
    at = sum(o * s for o, s in zip(start, steps, strict=True))
    return (at, *collapse(extents, strides, steps))


def collapse(
    extents: Sequence[int], strides: Sequence[int], steps: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Drop dims of extent 1 and merge neighbours that run on without a gap on both sides.

    >>> collapse((2, 3, 4), (48, 16, 4), (12, 4, 1))
    ((24,), (4,), (1,))
    """
    out: list[list[int]] = []
    for extent, stride, step in zip(extents, strides, steps, strict=True):
        if extent == 1:
            continue
        if out and out[-1][1] == extent * stride and out[-1][2] == extent * step:
            out[-1] = [out[-1][0] * extent, stride, step]
        else:
            out.append([extent, stride, step])
    return tuple(d[0] for d in out), tuple(d[1] for d in out), tuple(d[2] for d in out)


def is_transposed(region: Region) -> bool:
    """Is the dim that runs fastest in the file another than the one that runs fastest along the line?"""
    return len(region.strides) > 1 and 0 < min(region.strides) < region.strides[-1]


def row_of(region: Region) -> int:
    """Elements of the line from one element of a transposed region to the next one in the file."""
    return region.steps[region.strides.index(min(region.strides))]


def clip(region: Region, start: int, stop: int) -> Iterable[Region]:
    """The parts of `region` whose elements are in [start, stop) of the line. Disjoint, in line order.

    Cost: O(dims) for a range that cuts at rows, at most two more parts a dim where it cuts inside one.
    """
    file, offset, at, extents, strides, steps, replica = region
    if start >= stop or not extents or len(extents) > 2:
        return _clip(offset, at, 0, region, start, stop)
    rows = extents[0]
    step = steps[0]
    low = start - at
    high = stop - 1 - at
    inner = (extents[1] - 1) * steps[1] if len(extents) == 2 else 0  # from the first to the last element of a row
    first = max(0, ceil_div(low, step))
    end = min(rows, (high - inner) // step + 1)
    if inner and (first > max(0, ceil_div(low - inner, step)) or end < min(rows, high // step + 1)):
        return _clip(offset, at, 0, region, start, stop)  # a row is split
    if first >= end:
        return ()
    where = offset + first * strides[0], at + first * step  # the common cases, and the hot ones: runs and whole rows
    return (Region(file, *where, (end - first, *extents[1:]), strides, steps, replica),)


def _clip(offset: int, at: int, dim: int, region: Region, start: int, stop: int) -> Iterator[Region]:
    extents = region.extents[dim:]
    strides = region.strides[dim:]
    steps = region.steps[dim:]
    last = at
    for n, s in zip(extents, steps, strict=True):
        last += (n - 1) * s
    if start >= stop or last < start or at >= stop or 0 in extents:
        return

    if at >= start and last < stop:
        yield Region(region.file, offset, at, extents, strides, steps, region.replica)
        return

    step = steps[0]
    stride = strides[0]
    n = extents[0]
    inner = last - at - (n - 1) * step  # the distance from the first to the last element of one row
    first_whole = max(0, ceil_div(start - at, step))
    end_whole = min(n, (stop - 1 - at - inner) // step + 1)
    first_touched = max(0, ceil_div(start - at - inner, step))
    end_touched = min(n, (stop - 1 - at) // step + 1)
    end_whole = max(end_whole, first_whole)
    for i in range(first_touched, min(first_whole, end_touched)):
        yield from _clip(offset + i * stride, at + i * step, dim + 1, region, start, stop)

    if end_whole > first_whole:
        rows = (end_whole - first_whole, *extents[1:])
        yield Region(
            region.file, offset + first_whole * stride, at + first_whole * step, rows, strides, steps, region.replica
        )

    for i in range(max(end_whole, min(first_whole, end_touched)), end_touched):
        yield from _clip(offset + i * stride, at + i * step, dim + 1, region, start, stop)


def hull(region: Region) -> tuple[int, int]:
    """[first, last + 1) of the line that the region touches; (at, at) when it is empty."""
    if 0 in region.extents:
        return region.at, region.at
    last = region.at + sum((n - 1) * s for n, s in zip(region.extents, region.steps, strict=True))
    return region.at, last + 1


def intersect(source: Region, output: Region) -> Iterator[Copy]:
    """The copies that move the elements two regions share, source to output.

    Walks the output's innermost runs when both sides are strided; one copy where one side is a plain run.
    """
    if not output.extents or (len(output.extents) == 1 and output.steps == (1,)):
        for part in clip(source, *hull(output)):
            by = output.strides[0] if output.strides else 0
            yield Copy(
                source.file,
                part.offset,
                part.strides,
                output.file,
                output.offset + (part.at - output.at) * by,
                tuple(step * by for step in part.steps),
                part.extents,
            )
        return
    low, high = hull(source)
    length = hull(output.row(0))[1] - output.at
    first = max(0, ceil_div(low - output.at - length + 1, output.steps[0]))
    last = min(output.extents[0], (high - 1 - output.at) // output.steps[0] + 1)
    for i in range(first, last):
        yield from intersect(source, output.row(i))
