"""What is found out about the lines of a station: the hashes of ranges, whether boxes of the two lines hold the same,
what is not finite.

Each question is one launch for all windows of a batch. Complex values, whose distances the kernels do not measure, are
looked at by the CPU where they differ, and counted by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tool.device import comparisons
from ckpt_tool.device.descriptors import Strided
from ckpt_tool.device.digests import HASH, DigestLine, leaf_hashes
from ckpt_tool.device.station import Station
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.compare import Worst, differ
from ckpt_tool.run.stats import bad_values, may_be_bad


def hashes(station: Station, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The XXH3-128 of each (address, bytes), at most a leaf each, as `xxhash` prints them."""
    lines = [DigestLine(address, nbytes) for address, nbytes in ranges]
    digests = leaf_hashes(station.device, lines, stream=station.stream)
    return [digests[begin : begin + HASH] for begin in range(0, len(digests), HASH)]


def nonfinite(station: Station, lines: Sequence[tuple[Move, int, int]]) -> list[int]:
    """Of each (move, address, bytes of its line): values that are NaN or infinite, BOOL bytes other than 0 and 1; 0 for
    other types."""
    counts = [0] * len(lines)
    countable = [k for k, (move, _, nbytes) in enumerate(lines) if nbytes and may_be_bad(move.dtype)]
    comparable = [k for k in countable if comparisons.comparable(lines[k][0].dtype)]
    boxes = [_run(lines[k][1], 0, lines[k][2]) for k in comparable]
    dtypes = [lines[k][0].dtype for k in comparable]
    for k, count in zip(
        comparable, comparisons.count_bad(station.device, boxes, dtypes, stream=station.stream), strict=True
    ):
        counts[k] = count
    for k in set(countable) - set(comparable):
        move, address, nbytes = lines[k]
        counts[k] = bad_values(move, station.bytes_at(address, nbytes))
    return counts


class CheckBlock(NamedTuple):
    """Elements of a tensor from `start` on, `nbytes` from byte `at` of both lines on: what differs is counted by such
    blocks."""

    move: Move
    start: int
    at: int
    nbytes: int


def differences(station: Station, blocks: Sequence[CheckBlock]) -> Iterator[tuple[CheckBlock, Worst]]:
    """The blocks of which the two lines hold other bits, and how they differ."""
    boxes = [_run(station.first + block.at, station.second + block.at, block.nbytes) for block in blocks]
    worsts = comparisons.compare(station.device, boxes, [block.move.dtype for block in blocks], stream=station.stream)
    for block, difference in zip(blocks, worsts, strict=True):
        if not difference.elements:
            continue
        worst = Worst(block.move.shape)
        if comparisons.comparable(block.move.dtype):
            worst.first = block.start + difference.first
            worst.count = difference.elements
            worst.ulp = difference.ulp
            worst.gap = difference.max_abs if block.move.dtype.bits >= 8 else 0.0
        else:
            left, right = (station.bytes_at(line + block.at, block.nbytes) for line in (station.first, station.second))
            differ(worst, block.start, left, right, block.move.dtype, block.move.dtype, 0.0, 0.0)
        yield block, worst


def unequal(station: Station, boxes: Sequence[Strided]) -> list[int]:
    """The numbers of the boxes whose two sides differ in any byte."""
    return comparisons.unequal(station.device, boxes, stream=station.stream)


def _run(source: int, target: int, nbytes: int) -> Strided:
    return Strided(source, target, (), (), (), nbytes)
