"""box_copy where numbers outgrow 32 bits: rows, offsets, runs, strides.

Nothing of that size is allocated. A list whose first tile number is -F (mod 2^64) makes the kernel begin with tile F of
its box, and a box whose base lies far off has only these tiles in a small buffer. The oracle is Python's integers.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import pytest
from box_cases import POISON, POOL, Bytes, Watched

from ckpt_tool.device.descriptors import PIECES, TILE, PackedDescriptors, Strided, pack
from ckpt_tool.device.kernels import box_copy
from ckpt_tool.device.library import Device

GIB = 1 << 30


def offset(row: int, extents: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Of row number `row`, by another road than the kernel's: from the innermost level up."""
    total = 0
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        row, index = divmod(row, extent)
        total += index * stride
    return total


class Span(NamedTuple):
    """What a tile moves of a row: offsets in the source and in the target, bytes, and how many beside them it may
    read."""

    source: int
    target: int
    nbytes: int
    before: int
    after: int


def spans_of(box: Strided, one: np.void, first: int, count: int) -> list[Span]:
    """What tiles first..first+count of the box move."""
    if one["op"] != PIECES:
        per = int(one["rows_per_tile"])
        rows = range(first * per, min((first + count) * per, prod(box.extents)))
        return [
            Span(*(offset(r, box.extents, s) for s in (box.source_strides, box.target_strides)), box.run, 0, 0)
            for r in rows
        ]
    found = []
    per = int(one["tiles_per_row"])
    size = int(one["aux"])
    for tile in range(first, first + count):
        row, piece = divmod(tile, per)
        from_, to = (offset(row, box.extents, strides) for strides in (box.source_strides, box.target_strides))
        skew = (box.target + to) % 16
        begin = piece * size - skew if piece else 0
        end = (piece + 1) * size - skew if piece + 1 < per else box.run
        found.append(Span(from_ + begin, to + begin, end - begin, min(16, begin), min(16, box.run - end)))
    return found


def check(device: Device, box: Strided, first: int, count: int) -> None:
    """Run tiles first..first+count of a box that lies at offsets `box.source`, `box.target` (0..15) of 16-aligned
    bases."""
    packed = pack([box]).packed
    moved = spans_of(box, packed[0], first, count)
    low = [min(span[side] for span in moved) // 256 * 256 for side in (0, 1)]
    room = [max(span[side] + span[2] for span in moved) - low[side] + 64 for side in (0, 1)]
    assert max(room) < 64 << 20
    source = np.resize(POOL, room[0])
    want = np.full(room[1], POISON, np.uint8)
    legal = np.zeros_like(source)
    for span in moved:
        at = span.source - low[0] + box.source
        into = span.target - low[1] + box.target
        want[into : into + span.nbytes] = source[at : at + span.nbytes]
        legal[max(at - span.before, 0) : at + span.nbytes + span.after] = 1
    with device.upload(source) as src, device.upload(np.full_like(want, POISON)) as dst:
        packed["src"], packed["dst"] = src.address - low[0] + box.source, dst.address - low[1] + box.target
        packed["tile0"] = -first % (1 << 64)
        with Watched(device, [(src.address, legal)], []) as watched:
            box_copy(device, PackedDescriptors(packed, count, 0), blocks=3)
        assert not watched.fault()
        got: Bytes = device.download(dst.address, len(want))
    assert np.array_equal(got, want), f"byte {np.flatnonzero(got != want)[0]} of the target's window"


@pytest.mark.parametrize(
    "box",
    [
        Strided(0, 0, ((1 << 32) - 1,), (1,), (2,), 1),
        Strided(0, 0, ((1 << 32) - 2,), (16,), (32,), 16),
        Strided(1, 3, ((1 << 31) + 9,), (64,), (80,), 64),
        Strided(0, 0, ((1 << 16) - 1, 1 << 15, 2), (3 << 16, 4, 2), (5 << 16, 6, 2), 2),
        Strided(5, 2, (3, (1 << 29) + 1, 2), (1 << 37, 200, 100), (1 << 38, 160, 80), 77),
    ],
    ids=["bytes", "vectors", "spans", "levels", "spans of levels"],
)
def test_more_rows_than_31_bits_count(device: Device, box: Strided) -> None:
    tiles = pack([box]).tiles
    assert prod(box.extents) > 1 << 31
    for first, count in ((0, 2), (tiles // 2 + 1, 2), (tiles - 2, 2)):
        check(device, box, first, count)


@pytest.mark.parametrize("skew", [0, 5])
def test_runs_beyond_4_gib(device: Device, skew: int) -> None:
    box = Strided(skew, 3, (3,), (7 * GIB + 1,), (9 * GIB + 2,), 5 * GIB + 77)
    per = int(pack([box]).packed["tiles_per_row"][0])
    for first in (0, per // 2, per - 2, 2 * per - 3, 3 * per - 2):
        check(device, box, first, 2)


@pytest.mark.parametrize("run", [130 * TILE + 5, (1 << 18) * TILE + 5, (1 << 18) * TILE + 14])
def test_the_last_piece_of_a_row_may_be_shorter_than_a_vector(device: Device, run: int) -> None:
    """Then the one before it may read no further than that."""
    for from_, to in ((0, 1), (1, 0), (9, 2), (2, 13), (15, 0), (6, 6)):
        box = Strided(from_, to, (), (), (), run)
        tiles = pack([box]).tiles
        check(device, box, tiles - 2, 2)


@pytest.mark.parametrize("run", [1, 16, 48, 100, 600])
def test_strides_beyond_4_gib(device: Device, run: int) -> None:
    """One tile a row, so that a window holds one row."""
    box = Strided(
        0,
        0,
        (3, 4, 5),
        (100 * GIB + 16, 20 * GIB + 32, 4 * GIB + 48),
        (90 * GIB + 64, 19 * GIB + 80, 4 * GIB + 16),
        run,
    )
    packed = pack([box]).packed
    for row in (0, 1, 7, 23, 59):
        from_ = offset(row, box.extents, box.source_strides)
        to = offset(row, box.extents, box.target_strides)
        source = POOL[: run + 32]
        want = np.full(run + 32, POISON, np.uint8)
        want[16 : 16 + run] = source[16 : 16 + run]
        with device.upload(source) as src, device.upload(np.full_like(want, POISON)) as dst:
            packed["src"], packed["dst"] = src.address + 16 - from_, dst.address + 16 - to
            packed["rows_per_tile"], packed["tile0"] = 1, -row % (1 << 64)
            box_copy(device, PackedDescriptors(packed, 1, 0))
            np.testing.assert_array_equal(device.download(dst.address, len(want)), want)
