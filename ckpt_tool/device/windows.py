"""Windows of tensors on the device: filled from files, compared with their replicas, written to files.

A window is elements [start, end) of one tensor's line; a batch is as many windows as the lines of a station hold, of
one large tensor or of hundreds of small ones, so that a small tensor needs no launch of its own. Spans of files
are gathered in the image until it is full; then one upload and one launch of `box_copy` distribute them.

    fill(station, reader, [Window(w, 0, 512, 512, at=0), Window(b, 0, 64, 64, at=2048)], station.first)

Replicas are filled into a second line and compared there. The device only detects that they differ; the error is made
by the CPU, which reads them again, so that its text is the same with and without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.checks import unequal
from ckpt_tool.device.descriptors import Strided, boxes_of, make_strided
from ckpt_tool.device.loading import FileSpans, fetches, stores
from ckpt_tool.device.station import ALIGNED, Box, Station
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.plan.copy import Copy, Region, clip, hull
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import BlockReader, Writer
from ckpt_tool.run.digest import LEAF
from ckpt_tool.run.walk import STRIDED_BLOCK

REMOTE = 1 << 20  # bytes of one read of what is computed or fetched
ALIGN = 256  # bytes that windows begin at
COUNTED = 64  # spans of a piece from which on their checksums are left for the end: joining them would cost more


class Window(NamedTuple):
    """Elements [start, end) of a line, of which [start, stop) are written; the rest completes a leaf."""

    move: Move
    start: int
    stop: int
    end: int
    at: int  # bytes into the lines

    @property
    def nbytes(self) -> int:
        """The bytes of elements [start, end), before a cast."""
        return (self.end - self.start) * self.move.item

    @property
    def room(self) -> int:
        """Bytes of a line that the window takes, before and after a cast."""
        return -(-(self.end - self.start) * max(self.move.item, self.move.item_out) // ALIGN) * ALIGN


def windows(move: Move, start: int, stop: int, until: int, room: int) -> Iterator[Window]:
    """Elements [start, until) in windows of at most `room` bytes that end where leaves do, on both sides of a cast.
    `at` is 0."""
    grain = LEAF // min(move.item, move.item_out)
    step = max(grain, room // max(move.item, move.item_out) // grain * grain)
    at = start
    while at < until:
        end = min((at // step + 1) * step, until)
        yield Window(move, at, min(max(at, stop), end), end, 0)
        at = end


def batches(every: Iterable[Window], room: int) -> Iterator[list[Window]]:
    """The windows, each with its place, in as many at once as `room` bytes hold."""
    batch: list[Window] = []
    used = 0
    for window in every:
        if batch and used + window.room > room:
            yield batch
            batch = []
            used = 0
        batch.append(window._replace(at=used))
        used += window.room
    if batch:
        yield batch


class Stopped(Exception):
    """Another thread failed: leave off."""


class _Image:
    """Spans on their way to a line."""

    def __init__(
        self, station: Station, reader: BlockReader, stopped: Callable[[], bool], *, count: bool = True
    ) -> None:
        self._station = station
        self._reader = reader
        self._stopped = stopped
        self._count = count
        self._used = 0
        self._boxes: list[Box] = []

    def take(self, piece: FileSpans, item: int, line: int, *, count: bool) -> None:
        """Read a piece. line: the address of its tensor's byte 0, as far as the line is concerned."""
        if self._stopped():
            raise Stopped
        station = self._station
        begin = _begin(self._used, line + piece.copy.output_offset)
        if begin + piece.nbytes > station.room + ALIGNED:
            self.flush()
            begin = _begin(0, line + piece.copy.output_offset)
        view = station.host.view
        remote = self._reader.remote(piece.file) is not None
        count = count and self._count and piece.own and piece.times < COUNTED
        for offset, at in piece.spans():
            for skip in range(0, piece.span, REMOTE if remote else piece.span):
                some = min(piece.span - skip, REMOTE) if remote else piece.span
                low = begin + at + skip
                self._reader.pread(piece.file, offset + skip, view[low : low + some], count=count)
        self._boxes += boxes_of(piece.copy, item, [station.image + begin], [line])
        self._used = begin + piece.nbytes

    def flush(self) -> None:
        if self._boxes:
            self._station.upload(self._used)
            self._station.move(self._boxes)
        self._used = 0
        self._boxes = []


def _begin(used: int, address: int) -> int:
    """Where in the image a piece begins, so that it is aligned as its address is."""
    return ceil_div(used, 16) * 16 + address % 16


def never() -> bool:
    return False


def fill(
    station: Station,
    reader: BlockReader,
    batch: Sequence[Window],
    line: int,
    *,
    stopped: Callable[[], bool] = never,
    count: bool = True,
) -> None:
    """Read a batch to the line at address `line` of the device. count: as in `BlockReader.fill`. Raises what reading
    raises, and Stopped."""
    image = _Image(station, reader, stopped, count=count)
    for window in batch:
        for region in window.move.sources:
            if not region.replica:
                _take(image, window, region, line, station.room)
    image.flush()


def _take(image: _Image, window: Window, region: Region, line: int, room: int) -> None:
    item = window.move.item
    origin = line + window.at - window.start * window.move.item
    for low, high, count in ((window.start, window.stop, True), (window.stop, window.end, False)):
        for part in clip(region, low, high):
            for piece in fetches(part, item, room):
                image.take(piece, item, origin, count=count)


def compare_replicas(
    station: Station,
    reader: BlockReader,
    batch: Sequence[Window],
    *,
    stopped: Callable[[], bool] = never,
    count: bool = True,
) -> None:
    """Hold the other replicas against what the first line has of them; the second line is overwritten.

    Raises InconsistentCheckpoint as `BlockReader.fill` does.
    """
    for layer in _layers(batch):
        image = _Image(station, reader, stopped, count=count)
        boxes: list[Strided] = []
        owners: list[Window] = []

        for window, region in layer:
            _take(image, window, region, station.second, station.room)
            item = window.move.item
            for part in clip(region, window.start, window.end):
                offset = window.at + (part.at - window.start) * item
                steps = tuple(step * item for step in part.steps)
                for box in make_strided(
                    Copy(0, offset, steps, 0, offset, steps, part.extents), item, [station.first], [station.second]
                ):
                    boxes.append(box)
                    owners.append(window)

        image.flush()
        found = unequal(station, boxes)
        if found:
            window = owners[found[0]]
            read_again(reader, window.move, window.start, window.end)
            raise StorageError(
                f"the device found replicas that differ in elements {window.start} to {window.end}, the CPU "
                "finds them equal",
                code="E1563",
                key=str(window.move.key),
                hint="ckpt kernels check tests the device; --device cpu does without it",
            )


def _layers(batch: Sequence[Window]) -> Iterator[list[tuple[Window, Region]]]:
    """Replicas of the windows, those in one layer apart from each other along their lines."""
    layers: list[list[tuple[Window, Region]]] = []
    for window in batch:
        taken: list[list[tuple[int, int]]] = []  # of each layer: hulls of this window's line
        for region in window.move.sources:
            low, high = hull(region)
            if not region.replica or low >= window.end or high <= window.start:
                continue
            free = next(
                (k for k, spans in enumerate(taken) if all(low >= b or high <= a for a, b in spans)), len(taken)
            )
            if free == len(taken):
                taken.append([])
            if free == len(layers):
                layers.append([])
            taken[free].append((low, high))
            layers[free].append((window, region))
    yield from layers


def read_again(reader: BlockReader, move: Move, start: int, stop: int) -> None:
    """Read elements [start, stop) as the CPU does: it raises what it has to say of them, such as replicas that
    differ."""
    step = STRIDED_BLOCK // move.item
    block = memoryview(bytearray(STRIDED_BLOCK))
    at = start
    while at < stop:
        end = min((at // step + 1) * step, stop)
        reader.fill(move, block[: (end - at) * move.item], at, end, count=False)
        at = end


class _Writes:
    """Runs on their way from a line to files."""

    def __init__(self, station: Station, writer: Writer) -> None:
        self._station = station
        self._writer = writer
        self._used = 0
        self._boxes: list[Box] = []
        self._runs: list[tuple[int, int, int, int]] = []  # file, offset, bytes into the image, bytes
        self._joins = False  # may the next run grow out of the last one?

    def part(self) -> None:
        """Another array begins: what belongs to it is written, and checksummed, by itself."""
        self._joins = False

    def take(self, piece: FileSpans, item: int, line: int) -> None:
        station = self._station
        copy = piece.copy
        last = self._runs[-1] if self._joins and self._runs else (-1, 0, 0, 0)
        goes_on = (piece.file, piece.offset) == (last[0], last[1] + last[3]) and last[2] + last[3] == self._used
        begin = self._used if goes_on else _begin(self._used, line + copy.output_offset)
        if begin + piece.nbytes > station.room + ALIGNED:
            self.flush()
            begin = _begin(0, line + copy.output_offset)
        there = Copy(0, copy.output_offset, copy.output_strides, 0, 0, copy.source_strides, copy.extents)
        self._boxes += boxes_of(there, item, [line], [station.image + begin])
        for offset, at in piece.spans():
            file, start, low, nbytes = self._runs[-1] if self._joins and self._runs else (-1, 0, 0, 0)
            self._joins = True
            if file == piece.file and start + nbytes == offset and low + nbytes == begin + at:
                self._runs[-1] = (file, start, low, nbytes + piece.span)
            else:
                self._runs.append((piece.file, offset, begin + at, piece.span))
        self._used = begin + piece.nbytes

    def flush(self) -> None:
        if self._boxes:
            self._station.move(self._boxes)
            self._station.download(self._used)
            for file, offset, at, nbytes in self._runs:
                self._writer.pwrite(file, offset, self._station.host.view[at : at + nbytes])
        self._used = 0
        self._boxes = []
        self._runs = []


def drain(station: Station, writer: Writer, batch: Sequence[tuple[Window, int]]) -> None:
    """Write the parts of output regions in elements [start, stop) of each window, from the line whose address is given
    with the window."""
    writes = _Writes(station, writer)
    for window, line in batch:
        item = window.move.item_out
        origin = line + window.at - window.start * item
        for region in window.move.outputs:
            writes.part()
            for part in clip(region, window.start, window.stop):
                for piece in stores(part, item, station.room):
                    writes.take(piece, item, origin)
    writes.flush()


# Storage errors of the device, its library and its compiler.
_OF_DEVICE = frozenset({"E1550", "E1551", "E1555", "E1559", "E1563", "E1567"})


def is_device_fault(fault: CkptError) -> bool:
    """Is it the device that failed, not the checkpoint?"""
    return fault.code in _OF_DEVICE
