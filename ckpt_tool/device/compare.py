"""`ckpt diff` on a device: pairs of tensors in two lines, compared with each other there.

    compared([(a, b)], left, right, device, ...)[0]     # None, or {"first_index": [3, 1], "max_ulp": 2, ...}

Small pairs are processed by the hundred. The device finds the pairs with equal bits; the CPU compares the others, and
pairs of two dtypes, since norms and tolerances are only implemented there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.device.checks import CheckBlock, differences
from ckpt_tool.device.library import Device
from ckpt_tool.device.station import Station, Stations
from ckpt_tool.device.verify import gather_moves
from ckpt_tool.device.windows import Window, batches, compare_replicas, fill, windows
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.compare import Difference, Worst, compare
from ckpt_tool.run.records import CheckedRecords
from ckpt_tool.run.scan import Queue, readable, share_out
from ckpt_tool.run.walk import STRIDED_BLOCK
from ckpt_tool.storage.source import Tree

Pairs = Sequence[tuple[LogicalTensor, LogicalTensor]]
Advance = Callable[[int], None]


def compared(
    pairs: Pairs,
    left: Tree,
    right: Tree,
    device: Device,
    *,
    rtol: float,
    atol: float,
    threads: int,
    memory: int,
    advance: Advance | None = None,
) -> list[Difference | None]:
    """For every pair of equal shape: None when equal, else what differs, as `run.compare.compare` says it."""
    alike = [k for k, (a, b) in enumerate(pairs) if a.dtype == b.dtype]
    differences: list[Difference | None] = [None] * len(pairs)
    worst = _bits([pairs[k] for k in alike], left, right, device, threads, memory, advance)
    again = [k for k, (a, b) in enumerate(pairs) if a.dtype != b.dtype]
    for k, one in zip(alike, worst, strict=True):
        if one.report() is not None:
            again.append(k)
    if again:
        by_cpu = compare([pairs[k] for k in again], left, right, rtol=rtol, atol=atol)
        for k, difference in zip(again, by_cpu, strict=True):
            differences[k] = difference
    return differences


def _bits(
    pairs: Pairs, left: Tree, right: Tree, device: Device, threads: int, memory: int, advance: Advance | None
) -> list[Worst]:
    """The differences in bits of pairs of one type and shape each."""
    mine = readable([a for a, _ in pairs], left)
    theirs = readable([b for _, b in pairs], right)
    twins = {id(a): b for a, b in zip(mine.moves, theirs.moves, strict=True)}
    found = {id(move): Worst(move.shape) for move in mine.moves}
    beside = CheckedRecords(theirs.files, theirs.records)
    with Stations(device, threads=threads, memory=memory, work=sum(move.nbytes for move in mine.moves)) as stations:

        def read(reader: BlockReader, queue: Queue) -> None:
            right_reader = beside.reader(16)
            try:
                with stations.station() as station:
                    two = _Two(station, (reader, right_reader), twins, found, queue.stopped)
                    for handful in gather_moves(mine.moves, queue, station.line):
                        two.compare(handful, advance)
            finally:
                beside.done(right_reader)

        share_out(mine, read, threads=stations.sizes.threads, beside=beside, waits=True)
    return [found[id(move)] for move in mine.moves]


class _Two:
    """One thread's comparisons: the first line holds ours, the second theirs."""

    def __init__(
        self,
        station: Station,
        readers: tuple[BlockReader, BlockReader],
        twins: dict[int, Move],
        found: dict[int, Worst],
        stopped: Callable[[], bool],
    ) -> None:
        self._station = station
        self._twins = twins
        self._found = found
        self._stopped = stopped
        self._ours, self._theirs = readers

    def compare(self, moves: Sequence[Move], advance: Advance | None) -> None:
        """Compare some tensors with their twins."""
        all_windows = (
            window for move in moves for window in windows(move, 0, move.numel, move.numel, self._station.line)
        )
        for batch in batches(all_windows, self._station.line):
            self._batch(batch)
            if advance:
                advance(2 * sum(window.nbytes for window in batch))

    def _batch(self, batch: Sequence[Window]) -> None:
        station = self._station
        stopped = self._stopped
        twins = [window._replace(move=self._twins[id(window.move)]) for window in batch]
        doubled = [window for window in twins if any(region.replica for region in window.move.sources)]
        if doubled:  # their replicas are looked at where both lines are free for them
            fill(station, self._theirs, doubled, station.first, stopped=stopped)
            compare_replicas(station, self._theirs, doubled, stopped=stopped)
        fill(station, self._ours, batch, station.first, stopped=stopped)
        compare_replicas(station, self._ours, batch, stopped=stopped)
        fill(station, self._theirs, twins, station.second, stopped=stopped)
        blocks = [block for window in batch for block in _blocks(window)]
        for block, difference in differences(station, blocks):
            self._found[id(block.move)].merge(difference)


def _blocks(window: Window) -> Iterator[CheckBlock]:
    """A window in the blocks in which the CPU looks at it."""
    move = window.move
    step = STRIDED_BLOCK // window.move.item
    position = window.start
    while position < window.end:
        end = min((position // step + 1) * step, window.end)
        yield CheckBlock(
            move, position, window.at + (position - window.start) * move.item, (end - position) * move.item
        )
        position = end
