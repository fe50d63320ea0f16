"""CRC-32 of pieces that arrive in any order: zip records are checked and made while their bytes pass by.

    >>> combine(crc32(b"ab"), crc32(b"cde"), 3) == crc32(b"abcde")
    True

The arithmetic is in GF(2)[x] modulo the zip polynomial, as zlib's `crc32_combine` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from typing import NamedTuple

from ckpt_tool.storage.crc import crc32

__all__ = ["ChecksummedRange", "RunPieces", "combine", "crc32", "join"]

_POLY = 0xEDB88320  # reflected


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial, bit-reflected."""
    product = 0
    mask = 1 << 31
    while mask:
        if a & mask:
            product ^= b
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1
        mask >>= 1
    return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 * nbytes) modulo the polynomial."""
    # 1 and x^8
    result = 1 << 31
    power = 0x00800000
    while nbytes:
        if nbytes & 1:
            result = _multiply(result, power)
        power = _multiply(power, power)
        nbytes >>= 1
    return result


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC of two consecutive runs, from the CRC of each; `nbytes` is the length of the second."""
    return _multiply(_shift(nbytes), first) ^ second


class ChecksummedRange(NamedTuple):
    """Bytes [start, stop) of a file, and their CRC."""

    start: int
    stop: int
    crc: int


class RunPieces:
    """Collects the CRCs of one file's runs as they pass; runs that follow each other grow into one piece."""

    def __init__(self) -> None:
        # the piece that grew last, [begin, stop)
        self._begin = -1
        self._stop = -1
        self._crc = 0
        self._others: dict[int, ChecksummedRange] = {}  # by stop: pieces that a run starting there continues

    def add(self, start: int, data: memoryview, *, breaks: Container[int]) -> None:
        """Add the run `data` at byte `start`. breaks: the bytes at which a new record begins."""
        # A piece must not span two records: its CRC could not be divided.
        if start != self._stop or start in breaks:
            self._set_aside()
            before = None if start in breaks else self._others.pop(start, None)
            self._begin, self._crc = (before.start, before.crc) if before else (start, 0)
        self._crc = crc32(data, self._crc)
        self._stop = start + len(data)

    def _set_aside(self) -> None:
        if self._begin >= 0:
            self._others[self._stop] = ChecksummedRange(self._begin, self._stop, self._crc)

    def take(self) -> list[ChecksummedRange]:
        """All pieces; none are left."""
        self._set_aside()
        pieces = list(self._others.values())
        self._begin = -1
        self._stop = -1
        self._others = {}
        return pieces


def join(start: int, stop: int, pieces: Iterable[ChecksummedRange], read: Callable[[int, int], Iterable[bytes]]) -> int:
    """The CRC of bytes [start, stop), joined from the `pieces` inside that range; bytes that no piece covers are read
    with `read(offset, nbytes)`."""
    at = start
    total = 0

    def fill(until: int) -> None:
        nonlocal at, total
        for data in read(at, until - at):
            total = crc32(data, total)
        at = until

    for piece in sorted(pieces):
        if piece.start < at or piece.stop > stop:
            continue  # a replica read twice: the bytes count once
        if piece.start > at:
            fill(piece.start)
        total = combine(total, piece.crc, piece.stop - piece.start)
        at = piece.stop
    if at < stop:
        fill(stop)
    return total
