"""Items of a file compared with the first of their kind in one call (`twins.c`); `formats.containers.dcp_items` says
what a twin is and has the road without.

    compare = ready(items)                               # items: how many there are; None: one by one
    crcs, nbytes = compare(fd, [1577, 3794], [0, 0], [Kind(...)])     # of each item, -1 where it is no twin

As `library`: compiled on first use, believed after a trial, CKPT_COMPILED. Cost: a microsecond an item, most of it the
pread.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from ctypes import Structure, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckpt_tool.compiled.library import Array, Shelf

WORTH = 50_000  # items: half a second of the road without
Compare = Callable[[int, "Array | Sequence[int]", "Array | Sequence[int]", Sequence["Kind"]], tuple["Array", int]]


class Kind(NamedTuple):
    """What items have in common. head: their first bytes. end_at: where their end begins, from their start. fixed: 255
    for each byte of the end that is to be equal, else 0. crc, id_crc: where in the end a CRC-32 stands twice; the first
    is the tensor's."""

    head: bytes
    end_at: int
    end: bytes
    fixed: bytes
    crc: tuple[int, int]
    id_crc: tuple[int, int]


class _Kind(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("head_size", "end_at", "end_size")),
        *((name, c_int64 * 2) for name in ("crc", "id_crc")),
        *((name, c_char_p) for name in ("head", "end", "fixed")),
    ]


def compare_of(path: Path) -> Compare:
    """The call. Raises OSError where the loader refuses."""
    call = ctypes.CDLL(str(path)).ck_twins
    call.argtypes = [c_int, c_void_p, c_int64, *[c_void_p] * 5]
    call.restype = c_int64

    def compare(
        fd: int, at: Array | Sequence[int], kinds_of: Array | Sequence[int], kinds: Sequence[Kind]
    ) -> tuple[Array, int]:
        """(CRC-32 of each item's tensor, -1 where it is no twin; bytes that were read). at: first bytes. kinds_of: by
        number in `kinds`."""
        table = (_Kind * len(kinds))(
            *(
                _Kind(len(k.head), k.end_at, len(k.end), tuple(k.crc), tuple(k.id_crc), k.head, k.end, k.fixed)
                for k in kinds
            )
        )
        heads, ends = max(len(k.head) for k in kinds), max(len(k.end) for k in kinds)
        starts, numbers = np.ascontiguousarray(at, np.int64), np.ascontiguousarray(kinds_of, np.int32)
        crcs = np.full(len(starts), -1, np.int64)
        head, tail = ctypes.create_string_buffer(heads), ctypes.create_string_buffer(heads + ends)
        lists = (starts.ctypes.data, numbers.ctypes.data, head, tail, crcs.ctypes.data)
        nbytes: int = call(fd, ctypes.addressof(table), len(starts), *lists)
        return crcs, nbytes

    return compare


class _Shelf(Shelf[Compare]):
    source, worth = Path(__file__).with_name("twins.c"), WORTH

    def load(self, path: Path) -> Compare:
        return compare_of(path)

    def trial(self, library: Compare) -> str:
        kind = Kind(b"head", 10, b"end.1234.1234.56.56..", b"\xff" * 4 + bytes(17), (4, 9), (13, 13))
        good, bad = b"head......end.abcd.abcd.56.56..", b"head......end.abcd.abce.56.56.."
        with tempfile.TemporaryFile() as file:
            file.write(good + bad + b"." + good + good[:-1])
            file.flush()
            found, nbytes = library(file.fileno(), [0, 31, 63, 94], [0] * 4, [kind])
        right = [int.from_bytes(b"abcd", "little"), -1]
        return "" if found.tolist() == right * 2 and nbytes == 4 * (4 + 21) - 1 else "twins differ from Python's"


_shelf = _Shelf()


def ready(items: int) -> Compare | None:
    """The call for so many items, None while there is no library."""
    return _shelf.ready(items, wait=True)
