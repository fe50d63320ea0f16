"""Pieces: how a region's part of a file passes through an image, the staging buffer that has a twin on the device.

A part (a clipped `plan.copy.Region`) is read in spans: whole stretches of the file, laid end to end in the image, from
which `box_copy` takes the elements to the line. A column of 8 bytes out of rows of 64 KiB is one span a row; a shard of
columns, dense in its own file, is a single span however its rows are along the line:

    Region(offset=100, extents=(2, 4), strides=(16, 4), steps=(8, 1))      one span of 32 bytes from byte 100 on

Writing goes the other way, and only in runs that are the part's own: what is between them belongs to others.
`fetches` and `stores` give pieces of at most `room` bytes of image each. Cost: some microseconds a piece. What it does
not do: any IO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.plan.copy import Copy, Region
from ckpt_tool.run.blocks import GAP, SCRATCH

PITCH = 16  # bytes: spans begin at multiples of this where they are several


class _Dim(NamedTuple):
    extent: int
    stride: int  # bytes in the file
    step: int  # bytes along the line


class FileSpans(NamedTuple):
    """Spans of one file, the same number of bytes each, and where their elements are along the line."""

    file: int
    offset: int
    # (extent, bytes of the file from one to the next), each combination is one span
    outer: tuple[tuple[int, int], ...]
    span: int
    pitch: int  # bytes of the image from one span to the next
    copy: Copy  # image (from byte 0 of the piece) -> line (from byte 0 of the tensor), as a list takes it
    own: bool  # do the spans hold nothing but the elements?

    @property
    def times(self) -> int:
        """The number of spans of the piece."""
        return prod(extent for extent, _ in self.outer)

    @property
    def nbytes(self) -> int:
        """Bytes of the image that the piece takes."""
        return (self.times - 1) * self.pitch + self.span

    def spans(self) -> Iterator[tuple[int, int]]:
        """(offset in the file, offset in the image) of each span."""
        if not self.outer:
            yield self.offset, 0
            return
        for k, indexes in enumerate(product(*(range(extent) for extent, _ in self.outer))):
            yield (
                self.offset + sum(i * stride for i, (_, stride) in zip(indexes, self.outer, strict=True)),
                k * self.pitch,
            )


def fetches(part: Region, item: int, room: int) -> Iterator[FileSpans]:
    """The pieces by which a part is read. room: bytes of the image, more than 2 MiB."""
    dims = _sort_dims(part, item)
    low = len(dims)
    while low and _is_worth_reading(dims[low - 1 :], item, room):
        low -= 1
    outer = dims[:low]
    inner = dims[low:]
    if outer and 0 < outer[-1].stride <= GAP:  # thin rows: some MiB with gaps cost less than a call a row
        dim = outer.pop()
        many = max(1, min(dim.extent, SCRATCH // dim.stride))
        for i in range(0, dim.extent, many):
            rows = dim._replace(extent=min(many, dim.extent - i))
            yield from _split_to_fit(
                part.file,
                part.offset + i * dim.stride,
                part.at * item + i * dim.step,
                outer,
                [rows, *inner],
                item,
                room,
            )
        return
    yield from _split_to_fit(part.file, part.offset, part.at * item, outer, inner, item, room)


def stores(part: Region, item: int, room: int) -> Iterator[FileSpans]:
    """The pieces by which a part of at most `room` bytes is written: every span is a run of the part's own bytes."""
    dims = _sort_dims(part, item)
    low = len(dims)
    run = item
    while low and dims[low - 1].stride == run:
        low -= 1
        run *= dims[low].extent
    yield from _split_to_fit(part.file, part.offset, part.at * item, dims[:low], dims[low:], item, room, dense=True)


def _sort_dims(part: Region, item: int) -> list[_Dim]:
    """The dims in the order of the file, the slowest first."""
    dims = [_Dim(n, s, t * item) for n, s, t in zip(part.extents, part.strides, part.steps, strict=True) if n != 1]
    return sorted(dims, key=lambda dim: -dim.stride)


def _is_worth_reading(dims: Sequence[_Dim], item: int, room: int) -> bool:
    span = item + sum((dim.extent - 1) * dim.stride for dim in dims)
    useful = item * prod(dim.extent for dim in dims if dim.stride)
    return span <= room and (span <= GAP or span <= 2 * useful)


def _split_to_fit(
    file: int,
    offset: int,
    at: int,
    outer: Sequence[_Dim],
    inner: Sequence[_Dim],
    item: int,
    room: int,
    *,
    dense: bool = False,
) -> Iterator[FileSpans]:
    """Pieces of at most `room` bytes: the outermost dim is cut where it must be. at: bytes of the line."""
    span = item + sum((dim.extent - 1) * dim.stride for dim in inner)
    own = span == item * prod(dim.extent for dim in inner if dim.stride)
    pitch = span if dense or not outer else ceil_div(span, PITCH) * PITCH
    if prod(dim.extent for dim in outer) * pitch <= room or not outer:
        yield _make_piece(file, offset, at, outer, inner, span, pitch, own=own)
        return
    first = outer[0]
    rest = outer[1:]
    many = room // (pitch * prod(dim.extent for dim in rest))
    for i in range(0, first.extent, max(1, many)):
        place = (file, offset + i * first.stride, at + i * first.step)
        if many:
            rows = first._replace(extent=min(many, first.extent - i))
            yield _make_piece(*place, [rows, *rest], inner, span, pitch, own=own)
        else:
            yield from _split_to_fit(*place, rest, inner, item, room, dense=dense)


def _make_piece(
    file: int, offset: int, at: int, outer: Sequence[_Dim], inner: Sequence[_Dim], span: int, pitch: int, *, own: bool
) -> FileSpans:
    by = pitch
    images = list[int]()
    for dim in reversed(outer):
        images.insert(0, by)
        by *= dim.extent
    every = (*outer, *inner)
    copy = Copy(
        0,
        0,
        (*images, *(dim.stride for dim in inner)),
        0,
        at,
        tuple(dim.step for dim in every),
        tuple(dim.extent for dim in every),
    )
    return FileSpans(file, offset, tuple((dim.extent, dim.stride) for dim in outer), span, pitch, copy, own)
