"""Measure the kernels next to a plain copy from device to device.

    rows = measured(device, payload=1 << 30, repeats=30)       # some 20 s on a GPU

A row says how long a work (`workloads.py`) took and its share of the plain copy: its bytes read and written a second
over those of `cudaMemcpyAsync` between the same buffers, measured in the same call. A time is the median of `repeats`
launches, each between two events of the device, on slots in turn; the list is on the device already, as in a program
that uses it often. All works are measured twice, one pass after another: `spread` is how far the two medians are apart.

On the host shim it runs too, to test the bench: its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_void_p
from statistics import median
from typing import NamedTuple

from ckpt_tool.device.library import Device
from ckpt_tool.device.trial.workloads import WORKS, Arena, Knobs, Workload, values

PASSES = 2
SEED_BYTES = 32 << 20  # random values are made once and laid out again and again


class BenchRow(NamedTuple):
    """One work, or one peer of it."""

    kernel: str
    work: str
    who: str
    boxes: int
    moved: int
    milliseconds: float  # the median
    gbs: float  # bytes read and written a nanosecond
    share: float  # of the plain copy
    spread: float  # the difference of the two passes over their mean


class Timer:
    """Times of queued work by the device's own events."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.events: list[tuple[c_void_p, c_void_p]] = []

    def _event(self) -> c_void_p:
        handle = c_void_p()
        self.device.library.call("event_create", byref(handle))
        return handle

    def milliseconds(self, call: Callable[[int], None], repeats: int) -> float:
        """The median time of `call`, given 0, 1, 2, ... for the slot."""
        while len(self.events) < repeats:
            self.events.append((self._event(), self._event()))
        for slot in range(min(3, repeats)):  # the first ones find cold code
            call(slot)
        for slot, (begin, end) in enumerate(self.events[:repeats]):
            self.device.library.call("event_record", begin, 0)
            call(slot)
            self.device.library.call("event_record", end, 0)
        self.device.sync()
        return median(self.device.milliseconds(begin, end) for begin, end in self.events[:repeats])

    def close(self) -> None:
        for pair in self.events:
            for event in pair:
                self.device.library.call("event_destroy", event)
        self.events.clear()


class Measured:
    """Times of many contestants over passes, each against the plain copy of its own pass."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str, str], list[float]] = {}
        self.copies: dict[tuple[str, str, str], list[float]] = {}
        self.sizes: dict[tuple[str, str, str], tuple[int, int]] = {}

    def add(self, kernel: str, work: str, who: str, sizes: tuple[int, int], milliseconds: float, plain: float) -> None:
        """sizes: (boxes, bytes moved). plain: bytes a nanosecond of the plain copy."""
        key = kernel, work, who
        self.sizes[key] = sizes
        self.times.setdefault(key, []).append(milliseconds)
        self.copies.setdefault(key, []).append(plain)

    def rows(self) -> list[BenchRow]:
        rows = []
        for key, times in self.times.items():
            boxes, payload = self.sizes[key]
            speeds = [payload / time / 1e6 for time in times]
            share = sum(speed / plain for speed, plain in zip(speeds, self.copies[key], strict=True)) / len(speeds)
            mean = sum(times) / len(times)
            spread = (max(times) - min(times)) / mean
            rows.append(BenchRow(*key, boxes, payload, mean, sum(speeds) / len(speeds), share, spread))
        return rows


@contextmanager
def arena_on(device: Device, payload: int, slots: int) -> Iterator[Arena]:
    """Source and target of that size on the device."""
    need = Arena(0, 0, payload, slots).nbytes
    with device.alloc(need) as source, device.alloc(need) as target:
        yield Arena(source.address, target.address, payload, slots)


def lay_out(device: Device, arena: Arena, kind: str) -> None:
    """Fill the source with values of a kind, the target with 0xA5."""
    seed = values(kind, min(SEED_BYTES, arena.nbytes) // 16 * 16)
    device.write(arena.source, seed)
    for offset in range(seed.nbytes, arena.nbytes, seed.nbytes):
        device.library.call("move", arena.source + offset, arena.source, min(seed.nbytes, arena.nbytes - offset), 0)
    device.fill(arena.target, 0xA5, arena.nbytes)
    device.sync()


def plain_copy(device: Device, arena: Arena, timer: Timer, repeats: int) -> float:
    """Bytes read and written a nanosecond by the plain copy of a payload."""

    def move(slot: int) -> None:
        source, target = arena.at(slot)
        device.library.call("move", target, source, arena.payload, 0)

    return 2 * arena.payload / timer.milliseconds(move, repeats) / 1e6


def measure_kernels(
    device: Device,
    *,
    payload: int,
    repeats: int = 30,
    slots: int = 2,
    knobs: Knobs | None = None,
    only: Collection[str] = (),
    watch: Callable[[Workload], None] | None = None,
) -> list[BenchRow]:
    """Every work on this device, after a row for the plain copy. payload: bytes of each side. only: kernels, all where
    empty.
    watch: is given each work before it begins."""
    works = [work for work in WORKS.values() if not only or work.kernel in only]
    timer = Timer(device)
    measured = Measured()
    with arena_on(device, payload, slots) as arena:
        for _ in range(PASSES):
            run_pass(device, arena, timer, measured, works, repeats, knobs or Knobs(), watch)
    timer.close()
    return measured.rows()


def run_pass(
    device: Device,
    arena: Arena,
    timer: Timer,
    found: Measured,
    works: Sequence[Workload],
    repeats: int,
    knobs: Knobs,
    watch: Callable[[Workload], None] | None = None,
) -> None:
    """All works once, ordered by the values that they need."""
    lay_out(device, arena, "bytes")
    plain = plain_copy(device, arena, timer, repeats)
    found.add(
        "plain copy", "one run", "cudaMemcpyAsync", (1, 2 * arena.payload), 2 * arena.payload / plain / 1e6, plain
    )
    laid = "bytes"
    for work in sorted(works, key=lambda work: work.values != "bytes"):
        if watch is not None:
            watch(work)
        if work.values != laid:
            lay_out(device, arena, work.values)
            laid = work.values
        call = work.prepare(device, arena, knobs)
        try:
            time = timer.milliseconds(call.call, repeats)
        finally:
            device.sync()
            call.close()
        found.add(work.kernel, work.name, "ckpt", (call.boxes, call.moved), time, plain)
