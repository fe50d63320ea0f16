"""A station: what one thread needs to work on a device. A stream, an image in pinned memory with its twin on the device,
and two lines there.

    file --pread--> image (pinned) --upload--> image (device) --box_copy--> line
    file <-pwrite-- image (pinned) <-download- image (device) <-box_copy--- line, or the other line after a cast

The two lines hold the values of one batch of windows: `first` what was read, `second` the copy that is compared with it or the
cast that is written. A station works on one thing at a time; what overlaps are stations, one a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from ctypes import byref, c_void_p
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Self

from ckpt_tool.device.descriptors import DESC, Descriptors, Strided, pack
from ckpt_tool.device.memory import Bytes, Closed, Device
from ckpt_tool.device.pool import GRAIN, Pool, up
from ckpt_tool.device.transposes import Turned, pack_turned
from ckpt_tool.errors import UsageError

Box = Strided | Turned
LEAST = 4 << 20  # bytes of the smallest line: holds a leaf of what a cast makes four times as long, with room to spare
MOST = 32 << 20  # bytes of the largest: beyond it nothing is gained, a copy of this size takes the bus 0.6 ms
SLACK = 256 << 10  # bytes of an image beyond its line, for what alignment costs
LISTS = 256 << 10  # bytes of a list of descriptors that is uploaded at once
ALIGNED = 32  # bytes of an image that the alignment of one piece may cost
SHARE = 0.9  # of the device's free memory


class Sizes(NamedTuple):
    """threads: how many stations. line, image: bytes of each line and of each image."""

    threads: int
    line: int

    @property
    def image(self) -> int:
        return self.line + SLACK

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory of all stations."""
        return self.threads * (self.image + LISTS)

    @property
    def on_device(self) -> int:
        """Bytes of device memory of all stations."""
        return self.threads * _of_device(self.line)


def _of_device(line: int) -> int:
    return 2 * line + line + SLACK + LISTS


def sizes_for(device: Device, *, threads: int, memory: int, work: int) -> Sizes:
    """How many stations of which size fit `memory` bytes of the host and the free memory of the device.

    work: bytes of values that there are in all. At least one, of the smallest size, on the host; UsageError E1560 where the device has no room for that one.
    """
    free = int(device.library.info(device.number).free_bytes * SHARE)
    if free < _of_device(LEAST):
        raise UsageError(
            f"the device has {free} bytes to spare, one thread needs {_of_device(LEAST)}", code="E1560",
            path=device.info.name, hint="free memory of the device, or leave --device out: the CPU does the same",
        )  # fmt: skip
    count = max(1, min(threads, memory // (LEAST + SLACK + LISTS), free // _of_device(LEAST), -(-work // LEAST)))
    by_host = memory // count - SLACK - LISTS
    by_device = (free // count - SLACK - LISTS) // 3
    line = max(LEAST, min(MOST, by_host, by_device, -(-2 * work // count)))
    return Sizes(count, line >> 20 << 20)


class Station(Closed):
    """One thread's share of a device. Made and used on that thread. room: bytes of the largest piece that the image holds."""

    def __init__(self, device: Device, pool: Pool, sizes: Sizes) -> None:
        self.device, self.room = device, sizes.image - ALIGNED
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
        out = c_void_p()
        self.device.library.call("stream_create", byref(out))
        stream = out.value or 0
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
        self.device.sync(self.stream)

    def bytes_at(self, address: int, nbytes: int) -> Bytes:
        """Bytes of the device as an array of its own."""
        return self.device.download(address, nbytes, self.stream)

    def move(self, boxes: Iterable[Box]) -> None:
        """Move boxes on the device, in lists as long as there is room for: those that swap dims by `box_transpose`, the others by
        `box_copy`. They do not meet where one is written. Returns when it is done."""
        rest = iter(boxes)
        while some := list(islice(rest, LISTS // DESC.itemsize)):
            self._launch("box_copy", pack([box for box in some if isinstance(box, Strided)]))
            self._launch("box_transpose", pack_turned([box for box in some if isinstance(box, Turned)]))

    def _launch(self, kernel: str, packed: Descriptors) -> None:
        if not packed.tiles:
            return
        library, nbytes = self.device.library, packed.packed.nbytes
        self._list_host.view[:nbytes] = packed.packed.tobytes()
        library.call("upload", self._list, self._list_host.address, nbytes, self.stream)
        library.call(kernel, self._list, len(packed.packed), packed.tiles, 0, 0, self.stream)
        self.sync()  # the list may change again

    def close(self) -> None:
        self._held.close()


class Stations:
    """The stations of a run, as many as fit, and the pool that they share. For many threads.

    threads, memory: what the run may use of the host. work: bytes of values that it moves. pinned: bytes of large and of small blocks that are set aside at once, (0, 0)
    for what the stations need.
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
