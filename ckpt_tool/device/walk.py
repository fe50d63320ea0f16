"""Executes the units of a plan on a device: the same plan, the same journal, the same bytes as `run/walk.py`.

A unit's items are cut into windows, the windows go in batches: spans of the source files to the device, from there to
the tensors' lines, compared with replicas, hashed, cast, and out to the output files. Only what a window is moved
through differs from the CPU: reading, writing, checksums of records and the bound on memory are those of `BlockReader`,
`Writer` and the run.

    file -> pinned -> image -> line -> (cast) -> image -> pinned -> file
                               |hash|   |hash|

Hashes are taken where the values are in order, on the device. So that they prove what arrived, every item is read back
from the output, out of the page cache, and hashed by the CPU: not with `--verify off`. Casts that the kernels do not
know are done by the CPU, tensor by tensor, and `left_to_cpu` names them. Cost: both copies over the bus; what it does
not do: keep anything on the device between units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.checks import hashes
from ckpt_tool.device.library import Device
from ckpt_tool.device.station import Station, Stations
from ckpt_tool.device.window_casts import can_cast_there, cast_there
from ckpt_tool.device.windows import Stopped, Window, batches, compare_replicas, drain, fill, windows
from ckpt_tool.errors import StorageError
from ckpt_tool.plan.plan import Move
from ckpt_tool.plan.schedule import MoveRange
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.digest import LEAF, LeafStream
from ckpt_tool.run.walk import Mover, Walk, WalkBuffers, Walked, read_back

_FILES = 8  # descriptors open while a unit is read back
_PANEL = 8 << 20  # bytes for what is the other way round


class DeviceItem:
    """One item of a unit while it passes through the device, and what the journal wants of it."""

    def __init__(self, move: Move, start: int, stop: int, *, hashing: bool) -> None:
        self.move = move
        self.start = start
        self.stop = stop
        self.hashing = hashing
        self.lost = 0
        self.casts = move.dtype != move.dtype_out
        self.source_leaves = self._stream(move.item)
        self.out_leaves = self._stream(move.item_out) if self.casts else self.source_leaves
        leaves = self.out_leaves
        self.pieces = leaves if leaves.aligned else self._stream(move.item_out, exact=True)
        ends = max(self.source_leaves.end // move.item, leaves.end // move.item_out)
        self.until = max(stop, ends) if hashing else stop

    def _stream(self, item: int, *, exact: bool = False) -> LeafStream:
        return LeafStream(self.start * item, self.stop * item, self.move.numel * item, exact=exact)

    def hash_written(self) -> str:
        """The hash of what was written, as `run.walk.read_back` computes it again."""
        return xxhash.xxh3_128_hexdigest(bytes(self.pieces.leaves))

    def ranges(self, window: Window, first: int, out: int) -> Iterator[tuple[LeafStream, int, int]]:
        """(stream, address, bytes) of all hashes that the window has whole. first, out: addresses of the lines."""
        move = self.move
        yield from _leaves(self.source_leaves, window, move.item, first, self.stop)
        if self.casts:
            yield from _leaves(self.out_leaves, window, move.item_out, out, self.stop)
        if self.pieces is not self.out_leaves:
            low = window.start * move.item_out
            stop = window.stop * move.item_out
            origin = out + window.at - low
            while low < stop:
                high = min((low // LEAF + 1) * LEAF, stop)
                yield self.pieces, origin + low, high - low
                low = high


def _leaves(
    stream: LeafStream, window: Window, item: int, line: int, stop: int
) -> Iterator[tuple[LeafStream, int, int]]:
    """The leaves of a stream that begin in the window and before element `stop`."""
    low = window.start * item
    high = window.end * item
    begin = ceil_div(low, LEAF) * LEAF
    while begin < min(high, stop * item):
        yield stream, line + window.at + begin - low, min(begin + LEAF, window.move.numel * item) - begin
        begin += LEAF


class DeviceMover:
    """One thread's units. `job`: its reader and writer."""

    def __init__(self, station: Station, job: WalkBuffers, moves: Sequence[Move]) -> None:
        self._station = station
        self._job = job
        self._moves = moves

    def move_unit(self, items: Sequence[MoveRange]) -> list[Walked] | None:
        """Carry out a unit; None when the run was stopped in it."""
        job = self._job
        walked = list[Walked]()
        here: list[DeviceItem] = []
        for index, start, stop in items:
            move = self._moves[index]
            if able(move):
                here.append(DeviceItem(move, start, stop, hashing=job.hashing))
                walked.append(here[-1])
            else:
                walk = Walk(job, move, start, stop)
                walk.run()
                walked.append(walk)
        try:
            self._run(here)
        except Stopped:
            return None
        if job.hashing:
            self._prove(here)
        return None if job.stopped() else walked

    def _prove(self, items: Sequence[DeviceItem]) -> None:
        """Raise StorageError E1567 where the output does not hold what the device hashed."""
        reader = BlockReader(self._job.writer.files(), _FILES, {}, panel=_PANEL)
        try:
            for item in items:
                if self._job.stopped():
                    return
                if read_back(reader, item.move, item.start, item.stop) != item.hash_written():
                    raise StorageError(
                        f"elements {item.start} to {item.stop} were not written as the device had them",
                        code="E1567",
                        key=str(item.move.key),
                        hint="ckpt kernels check tests the device; --device cpu does without it",
                    )
        finally:
            reader.close()

    def _run(self, items: Sequence[DeviceItem]) -> None:
        all_windows = (
            (item, window)
            for item in items
            for window in windows(item.move, item.start, item.stop, item.until, self._station.line)
        )
        owners: list[DeviceItem] = []  # of the windows, in their order

        def seen() -> Iterator[Window]:
            for item, window in all_windows:
                owners.append(item)
                yield window

        done = 0
        for batch in batches(seen(), self._station.line):
            self._batch(owners[done : done + len(batch)], batch)
            done += len(batch)

    def _batch(self, owners: Sequence[DeviceItem], batch: Sequence[Window]) -> None:
        station = self._station
        job = self._job
        fill(station, job.reader, batch, station.first, stopped=job.stopped)
        compare_replicas(station, job.reader, batch, stopped=job.stopped)
        lines = []
        for owner, lost in zip(owners, cast_there(station, batch), strict=True):
            lines.append(station.second if owner.casts else station.first)
            owner.lost += lost
        if job.hashing:
            wanted = [
                found
                for owner, window, out in zip(owners, batch, lines, strict=True)
                for found in owner.ranges(window, station.first, out)
            ]
            made = hashes(station, [(address, nbytes) for _, address, nbytes in wanted])
            for (stream, _, _), digest in zip(wanted, made, strict=True):
                stream.leaves += digest
        if job.stopped():
            raise Stopped
        drain(station, job.writer, list(zip(batch, lines, strict=True)))
        job.advance(sum((window.stop - window.start) * window.move.item for window in batch))

    def close(self) -> None:
        self._station.close()


def able(move: Move) -> bool:
    """Can the device do all that the move asks for?"""
    return move.dtype == move.dtype_out or can_cast_there(move.dtype, move.dtype_out)


def left_to_cpu(moves: Sequence[Move]) -> dict[tuple[DType, DType], int]:
    """The casts that the kernels do not know -> of how many tensors."""
    counts: dict[tuple[DType, DType], int] = {}
    for move in moves:
        if not able(move):
            kind = (move.dtype, move.dtype_out)
            counts[kind] = counts.get(kind, 0) + 1
    return counts


class DeviceMovers(Stations):
    """What the executor asks for movers: one a thread, within the bounds of the host and of the device."""

    def __init__(
        self, device: Device, *, threads: int, memory: int, work: int, pinned: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__(device, threads=threads, memory=memory, work=work, pinned=pinned)
        self.threads = self.sizes.threads

    def open(self, job: WalkBuffers, moves: Sequence[Move]) -> Mover:
        return DeviceMover(self.station(), job, moves)
