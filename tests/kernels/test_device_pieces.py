"""Parts of files through an image: every element arrives, nothing foreign is written, no piece is larger than the
image."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ckpt_tool.device.loading import FileSpans, fetches, stores
from ckpt_tool.plan.copy import Region

ROOM = 3 << 20


def a_region(rng: np.random.Generator) -> tuple[Region, int]:
    """Any region whose elements lie apart from each other, in the file and along the line; its dims in the line's
    order."""
    item = int(rng.choice([1, 2, 4, 8]))
    extents = tuple(map(int, rng.integers(1, 7, rng.integers(0, 4))))
    if extents and rng.random() < 0.3:
        extents = (*extents[:-1], int(rng.integers(50, 3000)))
    steps = []
    step = 1
    for extent in reversed(extents):
        steps.insert(0, step)
        step *= extent + int(rng.integers(0, 3))
    order = rng.permutation(len(extents)) if rng.random() < 0.4 else range(len(extents) - 1, -1, -1)
    strides = [0] * len(extents)
    stride = item
    for dim in order:
        strides[dim] = stride
        gap = int(rng.choice([0, 0, 0, 1, 5, 40_000, 200_000])) if stride < 1 << 22 else 0
        stride *= extents[dim]
        stride += gap * item
    return Region(0, int(rng.integers(0, 40)), 0, extents, tuple(strides), tuple(steps)), item


def places(region: Region, item: int) -> list[tuple[int, int]]:
    """(byte of the file, byte of the line) of each element, by arithmetic on indexes."""
    return [
        (
            region.offset + sum(i * s for i, s in zip(index, region.strides, strict=True)),
            sum(i * s for i, s in zip(index, region.steps, strict=True)) * item,
        )
        for index in product(*map(range, region.extents))
    ]


def elements(piece: FileSpans) -> list[tuple[int, int]]:
    """(byte of the file, byte of the line) of each element of a piece, by way of the image."""
    spans = [(low, at) for low, at in piece.spans()]
    found = []
    for index in product(*map(range, piece.copy.extents)):
        at = sum(i * s for i, s in zip(index, piece.copy.source_strides, strict=True))
        line = piece.copy.output_offset + sum(i * s for i, s in zip(index, piece.copy.output_strides, strict=True))
        (offset,) = [low + at - start for low, start in spans if start <= at < start + piece.span]
        found.append((offset, line))
    return found


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(100))
def test_what_is_fetched_is_the_region(seed: int) -> None:
    region, item = a_region(np.random.default_rng(seed))
    if region.numel > 600:
        region = region._replace(extents=(*region.extents[:-1], 12))
    pieces = list(fetches(region, item, ROOM))
    assert all(piece.nbytes <= ROOM for piece in pieces), f"{seed=}"
    assert sorted(pair for piece in pieces for pair in elements(piece)) == sorted(places(region, item)), (
        f"{seed=} {region}"
    )


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(100))
def test_what_is_stored_is_the_region_and_nothing_beside_it(seed: int) -> None:
    region, item = a_region(np.random.default_rng(1000 + seed))
    if region.numel > 600:
        region = region._replace(extents=(*region.extents[:-1], 12))
    pieces = list(stores(region, item, ROOM))
    want = sorted(places(region, item))
    assert sorted(pair for piece in pieces for pair in elements(piece)) == want
    written = sorted(byte for piece in pieces for low, _ in piece.spans() for byte in range(low, low + piece.span))
    assert written == sorted(byte for low, _ in want for byte in range(low, low + item)), "a foreign byte is written"
    assert all(piece.own and piece.nbytes <= ROOM for piece in pieces)


def test_columns_that_are_dense_in_their_file_are_one_span() -> None:
    region = Region(0, 100, 0, (2, 4), (16, 4), (8, 1))
    (piece,) = fetches(region, 4, ROOM)
    assert list(piece.spans()) == [(100, 0)] and piece.span == 32 and piece.own


def test_thin_rows_are_read_with_their_gaps() -> None:
    region = Region(0, 0, 0, (1000, 2), (4096, 4), (2, 1))  # 8 bytes of every 4 KiB: 4 MB for 8,000 bytes
    pieces = list(fetches(region, 4, ROOM))
    assert len(pieces) <= 5 and not any(piece.own for piece in pieces), "a call a row costs more than the gaps"
    far = Region(0, 0, 0, (1000, 2), (1 << 20, 4), (2, 1))
    (piece,) = fetches(far, 4, ROOM)
    assert piece.times == 1000 and piece.span == 8 and piece.pitch == 16 and piece.own


def test_a_broadcast_dim_is_read_once() -> None:
    (piece,) = fetches(Region(0, 8, 0, (5, 3), (0, 4), (3, 1)), 4, ROOM)
    assert list(piece.spans()) == [(8, 0)] and piece.span == 12


@pytest.mark.parametrize("room", [3 << 20, (3 << 20) + 1, 2_500_000])
def test_a_piece_and_what_aligns_it_fit_the_image(room: int) -> None:
    """Spans of nearly the whole image: the largest pieces that are worth reading at once."""
    for count in range(room // 3 - 3, room // 3 + 4):
        region = Region(0, 1, 0, (2, count), (room - count, 1), (count, 1))
        for piece in (*fetches(region, 1, room), *stores(region, 1, room)):
            assert piece.nbytes <= room
