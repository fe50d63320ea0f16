"""What `ckpt verify` asks of all values, in one read of them: digests, replicas, and how many are not finite.

    digests, nonfinite = scanned(catalog, tree, device, threads=4, memory=1 << 30)

Each thread gathers tensors until they fill its lines, small ones by the hundred, reads them to the device and asks
there. A tensor that can't be read is read again by the CPU, so that what is said of it is the same wherever it was
noticed. Cost: one read of the values, where the CPU takes two; the bus.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.device.checks import hashes, nonfinite
from ckpt_tool.device.library import Device
from ckpt_tool.device.station import Station, Stations
from ckpt_tool.device.windows import Window, batches, compare_replicas, fill, is_device_fault, read_again, windows
from ckpt_tool.errors import CkptError, InputError, StorageError
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.digest import LEAF, root
from ckpt_tool.run.scan import Queue, readable, share_out
from ckpt_tool.run.stats import count_nonfinite
from ckpt_tool.storage.source import Tree

Fault = Callable[[CkptError], None]


@dataclass(slots=True)
class _Seen:
    """Of one tensor, as far as it was read."""

    leaves: bytearray = field(default_factory=bytearray)
    bad: int = 0


def scan_tensors(
    catalog: Catalog,
    tree: Tree,
    device: Device,
    *,
    keys: Sequence[TensorKey],
    threads: int,
    memory: int,
    advance: Callable[[int], None] | None = None,
    on_fault: Fault,
) -> tuple[dict[TensorKey, str], dict[str, int]]:
    """(the digest of every tensor without a fault, what `run.stats.count_nonfinite` counts). on_fault: takes faults of
    the input."""
    source = readable([catalog.tensors[key] for key in keys], tree)
    seen_of = {move.key: _Seen() for move in source.moves}
    broken: set[str] = set()
    lock = threading.Lock()

    def note(fault: CkptError) -> None:
        with lock:
            if fault.key:
                broken.add(fault.key)
            on_fault(fault)

    with Stations(device, threads=threads, memory=memory, work=sum(move.nbytes for move in source.moves)) as stations:

        def read(reader: BlockReader, queue: Queue) -> None:
            with stations.station() as station:
                scan = _Scan(station, reader, seen_of, note, advance, queue.stopped)
                for handful in gather_moves(source.moves, queue, station.line):
                    scan.read(handful)

        share_out(source, read, threads=stations.sizes.threads, waits=True, on_fault=note)
    digests = {
        move.key: root(move.dtype.name, move.shape, seen_of[move.key].leaves)
        for move in source.moves
        if str(move.key) not in broken
    }
    counts = {
        _name(move): seen_of[move.key].bad
        for move in source.moves
        if str(move.key) not in broken and seen_of[move.key].bad
    }
    if broken:
        counts |= count_nonfinite(catalog, tree, [key for key in keys if str(key) in broken])
    return digests, counts


def gather_moves(moves: Sequence[Move], queue: Iterator[int], room: int) -> Iterator[list[Move]]:
    """Moves in handfuls whose lines fit `room` together; one that is larger comes alone."""
    handful: list[Move] = []
    used = 0
    for index in queue:
        move = moves[index]
        need = move.nbytes + LEAF
        if handful and used + need > room:
            yield handful
            handful = []
            used = 0
        handful.append(move)
        used += need
    if handful:
        yield handful


def _name(move: Move) -> str:
    return f"bool:{move.key}" if move.dtype.name == "BOOL" else str(move.key)


class _Scan:
    """One thread's scan."""

    def __init__(
        self,
        station: Station,
        reader: BlockReader,
        seen: dict[TensorKey, _Seen],
        note: Fault,
        advance: Callable[[int], None] | None,
        stopped: Callable[[], bool],
    ) -> None:
        self._station = station
        self._reader = reader
        self._seen = seen
        self._note = note
        self._advance = advance
        self._stopped = stopped

    def read(self, moves: Sequence[Move], *, count: bool = True) -> None:
        """Read some tensors. A fault of one is reported and the others are read again without it."""
        all_windows = (
            window for move in moves for window in windows(move, 0, move.numel, move.numel, self._station.line)
        )
        try:
            for batch in batches(all_windows, self._station.line):
                self._batch(batch, count=count)
        except (InputError, StorageError) as fault:
            if is_device_fault(fault):
                raise
            if len(moves) > 1:  # they came in one batch, of which nothing was kept
                for move in moves:
                    self.read([move], count=False)
            else:
                self._note(self._as_the_cpu_says(moves[0], fault))

    def _batch(self, batch: Sequence[Window], *, count: bool) -> None:
        station = self._station
        reader = self._reader
        fill(station, reader, batch, station.first, stopped=self._stopped, count=count)
        compare_replicas(station, reader, batch, stopped=self._stopped, count=count)
        ranges = [
            (window, station.first + window.at + begin, min(LEAF, window.nbytes - begin))
            for window in batch
            for begin in range(0, window.nbytes, LEAF)
        ]
        digests = hashes(station, [(address, nbytes) for _, address, nbytes in ranges])
        for (window, _, _), digest in zip(ranges, digests, strict=True):
            self._seen[window.move.key].leaves += digest
        counts = nonfinite(station, [(window.move, station.first + window.at, window.nbytes) for window in batch])
        for window, bad in zip(batch, counts, strict=True):
            self._seen[window.move.key].bad += bad
        if self._advance and count:
            self._advance(sum(window.nbytes for window in batch))

    def _as_the_cpu_says(self, move: Move, fault: CkptError) -> CkptError:
        try:
            read_again(self._reader, move, 0, move.numel)
        except (InputError, StorageError) as by_cpu:
            return by_cpu
        return fault
