"""Pinned host memory, set aside once and lent out: what moves between files and the device passes through ite.

Pinning pages costs some 0.3 ms a MiB and a trip into the driver that waits for the device, so blocks are never pinned
one by one. Two free lists that never feed on each other: small blocks (lists of descriptors, results) come from slabs
cut into one size each, a power of two; large blocks (images of files) are cut from regions and grow together again when
they come back:

    pool = Pool(device, small=4 << 20, large=256 << 20)     # pinned now; a run that stays within these pins no more
    with pool.take(96 << 20) as block:
        file.readinto(block.view)

Small blocks have a list of their own, because a few of them, kept for long, would otherwise split the space that a
large block needs. If a request exceeds the regions at hand, more is pinned, up to `limit`. Many threads may use a pool.
Cost: one lock and a walk over the free large blocks, of which there are few. Pages are only given back by `close`.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import insort
from collections.abc import Iterable
from contextlib import ExitStack
from ctypes import byref, c_void_p
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.descriptors import DESC, PackedDescriptors, Strided, Turned, pack, pack_turned
from ckpt_tool.device.library import Bytes, Closed, Device
from ckpt_tool.errors import InternalError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

SMALL = 1 << 20  # bytes: blocks up to here come from slabs
SMALLEST = 512  # bytes of the smallest small block
SLAB = 2 << 20  # bytes that are cut into small blocks of one size
GRAIN = 64 << 10  # bytes that large blocks are rounded up to
REGION = 32 << 20  # bytes that are pinned at once where more is needed than was set aside


class Standing(NamedTuple):
    """What a pool has and lends, in bytes;"""

    pinned: int
    lent: int
    most_lent: int
    calls: int  # how often it pinned memory


class Pinned(Closed):
    """A block of pinned memory, `nbytes` at `address`; `view` is the same as bytes. It goes back by `close`."""

    __slots__ = ("_pool", "_room", "address", "nbytes", "view")

    def __init__(self, pool: Pool, address: int, nbytes: int, room: int) -> None:
        self._pool = pool
        self.address = address
        self.nbytes = nbytes
        self._room = room
        self.view = memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")

    def close(self) -> None:
        if self._room:
            room = self._room
            self._room = 0
            self.view = memoryview(b"")
            self._pool.give_back(self.address, room)


class Pool:
    """small, large: bytes that are pinned at once for either list. limit: bytes that may be pinned in all, None for no
    bound.

    Raises UsageError E1561 from `take` where the bound is reached.
    """

    def __init__(self, device: Device, *, small: int = 0, large: int = 0, limit: int | None = None) -> None:
        self._device = device
        self._limit = limit
        self._lock = threading.Lock()
        self._regions: dict[int, int] = {}  # address -> bytes, all that is pinned
        self._classes: dict[int, list[int]] = {}  # bytes of a small block -> the free ones
        self._slabs: list[int] = []  # slabs that are not cut yet
        self._large: list[tuple[int, int]] = []  # (address, bytes) of the free large blocks, by address
        self._pinned = self._lent = self._most = self._calls = 0
        if small > 0:
            size = up(small, SLAB)
            address = self._pin(size)
            self._slabs += range(address, address + size, SLAB)
        if large > 0:
            size = up(large, GRAIN)
            self._large.append((self._pin(size), size))

    def take(self, nbytes: int) -> Pinned:
        """A block of `nbytes`, aligned to 256 bytes; with 0 an empty one."""
        if nbytes < 0:
            raise InternalError(f"a block of {nbytes} bytes")
        if nbytes == 0:
            return Pinned(self, 0, 0, 0)
        with self._lock:
            if nbytes <= SMALL:
                room = max(SMALLEST, 1 << (nbytes - 1).bit_length())
                address = self._small(room)
            else:
                room = up(nbytes, GRAIN)
                address = self._cut(room)
            self._lent += room
            self._most = max(self._most, self._lent)
        return Pinned(self, address, nbytes, room)

    def give_back(self, address: int, room: int) -> None:
        """Take back a block: `Pinned.close` calls it."""
        with self._lock:
            self._lent -= room
            if room <= SMALL:
                self._classes[room].append(address)
            else:
                self._join(address, room)

    @property
    def standing(self) -> Standing:
        """The state of the pool at this moment, for tests and diagnostics."""
        with self._lock:
            return Standing(self._pinned, self._lent, self._most, self._calls)

    def close(self, *, force: bool = False) -> None:
        """Give all pages back. InternalError where a block is still lent, unless `force`."""
        with self._lock:
            if self._lent and not force:
                raise InternalError(f"{self._lent} bytes of pinned memory are still lent", code="E1562")
            for address in self._regions:
                self._device.library.call("host_free", address)
            self._regions.clear()
            self._classes.clear()
            self._slabs.clear()
            self._large.clear()
            self._pinned = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(force=kind is not None)

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _pin(self, nbytes: int) -> int:
        if self._limit is not None and self._pinned + nbytes > self._limit:
            raise UsageError(
                f"{nbytes} bytes more of pinned memory would make {self._pinned + nbytes}, the bound is {self._limit}",
                code="E1561",
                hint="raise --memory or lower --threads",
            )
        out = c_void_p()
        self._device.library.call("host_alloc", byref(out), nbytes)
        address = out.value or 0
        self._regions[address] = nbytes
        self._pinned += nbytes
        self._calls += 1
        return address

    def _small(self, room: int) -> int:
        free = self._classes.setdefault(room, [])
        if not free:
            slab = self._slabs.pop() if self._slabs else self._pin(SLAB)
            free += range(slab + SLAB - room, slab - 1, -room)
        return free.pop()

    def _cut(self, room: int) -> int:
        """The front of the smallest free block that holds `room`."""
        fitting = [block for block in self._large if block[1] >= room]
        if fitting:
            found = min(fitting, key=lambda block: block[1])
            self._large.remove(found)
        else:
            remaining = None if self._limit is None else self._limit - self._pinned
            region = max(room, REGION)
            size = region if remaining is None or region <= remaining else room
            found = (self._pin(size), size)
        address, size = found
        if size > room:
            insort(self._large, (address + room, size - room))
        return address

    def _join(self, address: int, room: int) -> None:
        """Put a large block back, grown together with its free neighbours of the same region."""
        start = address
        end = address + room
        for block in [block for block in self._large if block[0] + block[1] == address or block[0] == end]:
            if (block[0] in self._regions and block[0] == end) or (address in self._regions and block[0] < address):
                continue  # two regions that happen to be side by side stay two
            self._large.remove(block)
            start = min(start, block[0])
            end = max(end, block[0] + block[1])
        insort(self._large, (start, end - start))


def up(nbytes: int, grain: int) -> int:
    """The next multiple of `grain`."""
    return ceil_div(nbytes, grain) * grain


# ----------------------------------------------------------------------------------------------------
# A station: what one thread needs to work on a device. A stream, an image in pinned memory with its twin on the
# device, and two lines there.
#
#     file --pread--> image (pinned) --upload--> image (device) --box_copy--> line
#     file <-pwrite-- image (pinned) <-download- image (device) <-box_copy--- line, or the other line after a cast
#
# The two lines hold the values of one batch of windows: `first` what was read, `second` the copy that is compared
# with it or the cast that is written. A station works on one thing at a time; what overlaps are stations, one a
# thread.


Box = Strided | Turned
LEAST = 4 << 20  # bytes of the smallest line: holds a leaf of what a cast makes four times as long, with room to spare
MOST = 32 << 20  # bytes of the largest: beyond it nothing is gained, a copy of this size takes the bus 0.6 ms
SLACK = 256 << 10  # bytes of an image beyond its line, for what alignment costs
LISTS = 256 << 10  # bytes of a list of descriptors that is uploaded at once
ALIGNED = 32  # bytes of an image that the alignment of one piece may cost
SHARE = 0.9  # of the device's free memory


class StationSizes(NamedTuple):
    """threads: how many stations. line, image: bytes of each line and of each image."""

    threads: int
    line: int

    @property
    def image(self) -> int:
        """Bytes of an image: a line, and the slack that alignment may cost."""
        return self.line + SLACK

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory of all stations."""
        return self.threads * (self.image + LISTS)

    @property
    def on_device(self) -> int:
        """Bytes of device memory of all stations."""
        return self.threads * _count_device_bytes(self.line)


def _count_device_bytes(line: int) -> int:
    return 2 * line + line + SLACK + LISTS


def sizes_for(device: Device, *, threads: int, memory: int, work: int) -> StationSizes:
    """How many stations of which size fit `memory` bytes of the host and the free memory of the device.

    work: bytes of values that there are in all. At least one, of the smallest size, on the host; UsageError E1560 where
        the device has no room for that one.
    """
    free = int(device.library.info(device.number).free_bytes * SHARE)
    if free < _count_device_bytes(LEAST):
        raise UsageError(
            f"the device has {free} bytes to spare, one thread needs {_count_device_bytes(LEAST)}",
            code="E1560",
            path=device.info.name,
            hint="free memory of the device, or leave --device out: the CPU does the same",
        )
    count = max(
        1, min(threads, memory // (LEAST + SLACK + LISTS), free // _count_device_bytes(LEAST), ceil_div(work, LEAST))
    )
    by_host = memory // count - SLACK - LISTS
    by_device = (free // count - SLACK - LISTS) // 3
    line = max(LEAST, min(MOST, by_host, by_device, -(-2 * work // count)))
    return StationSizes(count, line >> 20 << 20)


class Station(Closed):
    """One thread's share of a device. Made and used on that thread. room: bytes of the largest piece that the image
    holds."""

    def __init__(self, device: Device, pool: Pool, sizes: StationSizes) -> None:
        self.device = device
        self.room = sizes.image - ALIGNED
        device.use()
        self._held = ExitStack()
        try:
            self.stream = self._stream()
            self.host = self._held.enter_context(pool.take(sizes.image))
            self._list_host = self._held.enter_context(pool.take(LISTS))
            self.image = self._held.enter_context(device.alloc(sizes.image)).address
            self.first = self._held.enter_context(device.alloc(sizes.line)).address
            self.second = self._held.enter_context(device.alloc(sizes.line)).address
            self._list = self._held.enter_context(device.alloc(LISTS)).address
        except BaseException:
            self._held.close()
            raise
        self.line = sizes.line

    def _stream(self) -> int:
        handle = c_void_p()
        self.device.library.call("stream_create", byref(handle))
        stream = handle.value or 0
        self._held.callback(self.device.library.call, "stream_destroy", stream)
        return stream

    def upload(self, nbytes: int) -> None:
        """The first bytes of the image, to the device."""
        self.device.library.call("upload", self.image, self.host.address, nbytes, self.stream)

    def download(self, nbytes: int) -> None:
        """The first bytes of the image, from the device; waits for them."""
        self.device.library.call("download", self.host.address, self.image, nbytes, self.stream)
        self.sync()

    def sync(self) -> None:
        """Wait for the work of this station."""
        self.device.sync(self.stream)

    def bytes_at(self, address: int, nbytes: int) -> Bytes:
        """Bytes of the device as an array of its own."""
        return self.device.download(address, nbytes, self.stream)

    def move(self, boxes: Iterable[Box]) -> None:
        """Move boxes on the device, in lists as long as there is room for: those that swap dims by `box_transpose`, the
        others by `box_copy`. They do not meet where one is written. Returns when it is done."""
        remaining = iter(boxes)
        while handful := list(islice(remaining, LISTS // DESC.itemsize)):
            self._launch("box_copy", pack([box for box in handful if isinstance(box, Strided)]))
            self._launch("box_transpose", pack_turned([box for box in handful if isinstance(box, Turned)]))

    def _launch(self, kernel: str, packed: PackedDescriptors) -> None:
        if not packed.tiles:
            return
        library = self.device.library
        nbytes = packed.packed.nbytes
        self._list_host.view[:nbytes] = packed.packed.tobytes()
        library.call("upload", self._list, self._list_host.address, nbytes, self.stream)
        library.call(kernel, self._list, len(packed.packed), packed.tiles, 0, 0, self.stream)
        self.sync()  # the list may change again

    def close(self) -> None:
        self._held.close()


class Stations:
    """The stations of a run, as many as fit, and the pool that they share. For many threads.

    threads, memory: what the run may use of the host. work: bytes of values that it moves. pinned: bytes of large and
    of small blocks that are set aside at once, (0, 0) for what the stations need.
    """

    def __init__(
        self, device: Device, *, threads: int, memory: int, work: int, pinned: tuple[int, int] = (0, 0)
    ) -> None:
        self.device = device
        self.sizes = sizes_for(device, threads=threads, memory=memory, work=work)
        large, small = pinned
        if not large:
            large = self.sizes.threads * up(self.sizes.image, GRAIN)
        self._pool = Pool(device, small=small or self.sizes.threads * LISTS, large=large)
        self._guard = threading.Lock()

    def station(self) -> Station:
        """A station for the calling thread."""
        with self._guard:
            return Station(self.device, self._pool, self.sizes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, value, trace)
