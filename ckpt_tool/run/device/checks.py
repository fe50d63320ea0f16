"""What is asked about bytes that lie on the device: their hashes, whether two boxes hold the same, what is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import xxhash

from ckpt_tool.plan.plan import Move
from ckpt_tool.run.compare import Worst, differ
from ckpt_tool.run.device.descriptors import Strided
from ckpt_tool.run.device.station import Station
from ckpt_tool.run.stats import bad_values


def hashes(station: Station, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The XXH3-128 of each (address, bytes), as `xxhash` prints them."""
    return [xxhash.xxh3_128_digest(station.bytes_at(address, nbytes).data) for address, nbytes in ranges]


def nonfinite(station: Station, lines: Sequence[tuple[Move, int, int]]) -> list[int]:
    """Of each (move, address, bytes of its line): values that are NaN or infinite, BOOL bytes other than 0 and 1; 0 for other types."""
    return [bad_values(move, station.bytes_at(address, nbytes)) for move, address, nbytes in lines]


class Block(NamedTuple):
    """Elements of a tensor from `start` on, `nbytes` from byte `at` of both lines on: what differs is counted by such blocks."""

    move: Move
    start: int
    at: int
    nbytes: int


def differences(station: Station, blocks: Sequence[Block]) -> Iterator[tuple[Block, Worst]]:
    """The blocks of which the two lines hold other bits, and how they differ."""
    pairs = [Strided(station.first + block.at, station.second + block.at, (), (), (), block.nbytes) for block in blocks]
    for number in unequal(station, pairs):
        block = blocks[number]
        mine, theirs = (station.bytes_at(line + block.at, block.nbytes) for line in (station.first, station.second))
        worst = Worst(block.move.shape)
        differ(worst, block.start, mine, theirs, block.move.dtype, block.move.dtype, 0.0, 0.0)
        yield block, worst


def unequal(station: Station, boxes: Sequence[Strided]) -> list[int]:
    """The numbers of the boxes whose two sides differ in any byte."""
    found = []
    for number, box in enumerate(boxes):
        if not prod(box.extents) * box.run:
            continue
        sides = []
        for address, strides in ((box.source, box.source_strides), (box.target, box.target_strides)):
            span = box.run + sum((n - 1) * s for n, s in zip(box.extents, strides, strict=True))
            data = station.bytes_at(address, span)
            sides.append(np.lib.stride_tricks.as_strided(data, (*box.extents, box.run), (*strides, 1)))
        if not np.array_equal(sides[0], sides[1]):
            found.append(number)
    return found
