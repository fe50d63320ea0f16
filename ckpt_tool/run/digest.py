"""The digest of a logical tensor: the same for every layout, format and file.

Definition: cut the tensor's values, row-major and little-endian, into leaves of 256 KiB; hash each with XXH3-128; the
digest is XXH3-128 of `ckpt-digest-1`, the dtype, the shape and all leaf hashes (big-endian, as xxhash prints them):

    >>> digest("F32", (2,), bytes(8))   # == one leaf
    'ff1bb0bd97f5ad4b5bb0a34a4a6a2bd3'

Leaves make it computable in any order, by many threads and machines (and on a GPU), and two digests that differ can be
traced to a leaf. It is not cryptographic: it finds faults, not forgers. XXH3 runs at memory speed (xxhash 4, 58 GB/s
from L2 on the machine where the leaf size was chosen); sums of per-element mixes, the other candidate, cost 24 NumPy
passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from ckpt_tool.core.integers import ceil_div

LEAF = 256 << 10  # bytes


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes to the hash."""
        ...

    def digest(self) -> bytes:
        """The hash of all bytes so far."""
        ...


def root(dtype: str, shape: Sequence[int], leaves: bytes | bytearray) -> str:
    """The digest, 32 hex digits, from the leaf hashes laid end to end (16 bytes each)."""
    head = f"ckpt-digest-1\0{dtype}\0{','.join(map(str, shape))}\0"
    return xxhash.xxh3_128_hexdigest(head.encode() + bytes(leaves))


def digest(dtype: str, shape: Sequence[int], values: bytes | memoryview) -> str:
    """The digest of whole values in memory, row-major, little-endian."""
    view = memoryview(values).cast("B")
    leaves = b"".join(xxhash.xxh3_128_digest(view[at : at + LEAF]) for at in range(0, len(view), LEAF))
    return root(dtype, shape, leaves)


class LeafStream:
    """Hashes the leaves that begin in [start, stop) of a tensor's bytes, fed in order.

    Bytes before the first such leaf are another item's and are passed over. `end`: the byte up to which this stream
    wants to be fed, beyond `stop` when the last leaf runs on.

    exact: hash the bytes [start, stop) and no others, in pieces that end where leaves end: what the journal keeps.
    If start and stop are leaf bounds, the hashes are the same with and without `exact` (`aligned`).
    """

    def __init__(self, start: int, stop: int, total: int, *, exact: bool = False) -> None:
        self.aligned = start % LEAF == 0 and (stop % LEAF == 0 or stop == total)
        self.first = ceil_div(start, LEAF)
        last = ceil_div(stop, LEAF)  # leaves [first, last) begin in [start, stop)
        self.begin = self.first * LEAF
        self.end = min(last * LEAF, total) if last > self.first else stop
        self.leaves = bytearray()
        self._at = self.begin
        self._stop = self.end if last > self.first else self.begin
        if exact:
            self._at = start
            self._stop = stop
        self._hash: _Hash | None = None

    def feed(self, at: int, data: memoryview) -> None:
        """Bytes [at, at + len(data)) of the tensor; calls come in order without gaps."""
        size = len(data)
        if at == self._at and not (at % LEAF or size % LEAF) and at + size <= self._stop:  # nearly always
            for leaf in range(0, size, LEAF):
                self.leaves += xxhash.xxh3_128_digest(data[leaf : leaf + LEAF])
            self._at += size
            return

        # The general case: bytes before the first leaf are skipped, and a leaf may arrive in several pieces.
        skip = max(0, self._at - at)
        position = at + skip
        view = data[skip : max(skip, self._stop - at)]
        while view:
            room = LEAF - position % LEAF
            part = view[:room]
            view = view[room:]
            position += len(part)
            ends = position % LEAF == 0 or position == self._stop
            if ends and self._hash is None:
                self.leaves += xxhash.xxh3_128_digest(part)
                continue
            if self._hash is None:
                self._hash = xxhash.xxh3_128()
            self._hash.update(part)
            if ends:
                self.leaves += self._hash.digest()
                self._hash = None

        self._at = max(self._at, position)
