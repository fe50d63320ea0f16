"""Pinned host memory, set aside once and lent out: what moves between files and the device passes through here.

Pinning pages costs some 0.3 ms a MiB and a trip into the driver that waits for the device, so blocks are never pinned one by
one. Two free lists that never feed on each other: small blocks (lists of descriptors, results) come from slabs cut into one
size each, a power of two; large blocks (images of files) are cut from regions and grow together again when they come back:

    pool = Pool(device, small=4 << 20, large=256 << 20)     # pinned now; a run that stays within these pins no more
    with pool.take(96 << 20) as block:
        file.readinto(block.view)

Small ones in a list of their own, because a few of them, kept for long, would otherwise stand in the middle of what a large
one needs. What is asked for beyond the regions at hand is pinned then, up to `limit`. For many threads.
Cost: one lock and a walk over the free large blocks, of which there are few. What it does not do: give pages back before `close`.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import insort
from ctypes import byref, c_void_p
from types import TracebackType
from typing import NamedTuple, Self

from ckpt_tool.device.memory import Closed, Device
from ckpt_tool.errors import InternalError, UsageError

SMALL = 1 << 20  # bytes: blocks up to here come from slabs
LEAST = 512  # bytes of the smallest small block
SLAB = 2 << 20  # bytes that are cut into small blocks of one size
GRAIN = 64 << 10  # bytes that large blocks are rounded up to
REGION = 32 << 20  # bytes that are pinned at once where more is needed than was set aside


class Standing(NamedTuple):
    """What a pool has and lends, in bytes; calls: how often it pinned memory."""

    pinned: int
    lent: int
    most_lent: int
    calls: int


class Pinned(Closed):
    """A block of pinned memory, `nbytes` at `address`; `view` is the same as bytes. It goes back by `close`."""

    __slots__ = ("_pool", "_room", "address", "nbytes", "view")

    def __init__(self, pool: Pool, address: int, nbytes: int, room: int) -> None:
        self._pool, self.address, self.nbytes, self._room = pool, address, nbytes, room
        self.view = memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")

    def close(self) -> None:
        if self._room:
            room, self._room = self._room, 0
            self.view = memoryview(b"")
            self._pool.give_back(self.address, room)


class Pool:
    """small, large: bytes that are pinned at once for either list. limit: bytes that may be pinned in all, None for no bound.

    Raises UsageError E1561 from `take` where the bound is reached.
    """

    def __init__(self, device: Device, *, small: int = 0, large: int = 0, limit: int | None = None) -> None:
        self._device, self._limit = device, limit
        self._lock = threading.Lock()
        self._regions: dict[int, int] = {}  # address -> bytes, all that is pinned
        self._classes: dict[int, list[int]] = {}  # bytes of a small block -> the free ones
        self._slabs: list[int] = []  # slabs that are not cut yet
        self._large: list[tuple[int, int]] = []  # (address, bytes) of the free large blocks, by address
        self._pinned = self._lent = self._most = self._calls = 0
        if small > 0:
            size = up(small, SLAB)
            at = self._pin(size)
            self._slabs += range(at, at + size, SLAB)
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
                room = max(LEAST, 1 << (nbytes - 1).bit_length())
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
            left = None if self._limit is None else self._limit - self._pinned
            wanted = max(room, REGION)
            size = wanted if left is None or wanted <= left else room
            found = (self._pin(size), size)
        address, size = found
        if size > room:
            insort(self._large, (address + room, size - room))
        return address

    def _join(self, address: int, room: int) -> None:
        """Put a large block back, grown together with its free neighbours of the same region."""
        start, end = address, address + room
        for block in [block for block in self._large if block[0] + block[1] == address or block[0] == end]:
            if block[0] in self._regions and block[0] == end or address in self._regions and block[0] < address:
                continue  # two regions that happen to lie side by side stay two
            self._large.remove(block)
            start, end = min(start, block[0]), max(end, block[0] + block[1])
        insort(self._large, (start, end - start))


def up(nbytes: int, grain: int) -> int:
    """The next multiple of `grain`."""
    return -(-nbytes // grain) * grain
