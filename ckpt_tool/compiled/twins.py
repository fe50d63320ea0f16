"""Items of a file compared with the first of their kind in one call (`twins.c`); `formats.dcp_container.dcp_items` says
what a twin is and has the fallback in Python.

    compare = ready(items)                               # items: how many there are; None: one by one
    crcs, nbytes = compare(fd, [1577, 3794], [0, 0], [TwinKind(...)])     # of each item, -1 where it is no twin

As `library`: believed after a trial, CKPT_COMPILED. Cost: a microsecond an item, most of it the pread.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from ctypes import Structure, c_char_p, c_int, c_int64, c_void_p
from typing import NamedTuple

import numpy as np

from ckpt_tool.compiled.library import Array, Shelf

Compare = Callable[[int, "Array | Sequence[int]", "Array | Sequence[int]", Sequence["TwinKind"]], tuple["Array", int]]


class TwinKind(NamedTuple):
    """What items have in common."""

    head: bytes  # their first bytes
    end_at: int  # where their end begins, from their start
    end: bytes
    fixed: bytes  # 255 for each byte of the end that is to be equal, else 0
    # crc, id_crc: where in the end a CRC-32 is stored, twice each; the first is the tensor's
    crc: tuple[int, int]
    id_crc: tuple[int, int]


class _CTwinKind(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("head_size", "end_at", "end_size")),
        *((name, c_int64 * 2) for name in ("crc", "id_crc")),
        *((name, c_char_p) for name in ("head", "end", "fixed")),
    ]


def compare_of(library: ctypes.CDLL) -> Compare:
    """The call. Raises AttributeError where it is not there."""
    call = library.ck_twins
    call.argtypes = [c_int, c_void_p, c_int64, *[c_void_p] * 5]
    call.restype = c_int64

    def compare(
        fd: int, at: Array | Sequence[int], kinds_of: Array | Sequence[int], kinds: Sequence[TwinKind]
    ) -> tuple[Array, int]:
        """(CRC-32 of each item's tensor, -1 where it is no twin; bytes that were read). at: first bytes. kinds_of: by
        number in `kinds`."""
        table = (_CTwinKind * len(kinds))(
            *(
                _CTwinKind(len(k.head), k.end_at, len(k.end), tuple(k.crc), tuple(k.id_crc), k.head, k.end, k.fixed)
                for k in kinds
            )
        )
        heads = max(len(k.head) for k in kinds)
        ends = max(len(k.end) for k in kinds)
        starts = np.ascontiguousarray(at, np.int64)
        numbers = np.ascontiguousarray(kinds_of, np.int32)
        crcs = np.full(len(starts), -1, np.int64)
        head = ctypes.create_string_buffer(heads)
        tail = ctypes.create_string_buffer(heads + ends)
        lists = (starts.ctypes.data, numbers.ctypes.data, head, tail, crcs.ctypes.data)
        nbytes: int = call(fd, ctypes.addressof(table), len(starts), *lists)
        return crcs, nbytes

    return compare


class TwinsShelf(Shelf[Compare]):
    """The function of twins.c; who asks has enough to do (`formats.dcp_container.dcp_items.MANY`)."""

    def load(self, library: ctypes.CDLL, path: str) -> Compare:
        """The function of a loaded library."""
        return compare_of(library)  # one for all paths

    def trial(self, functions: Compare) -> str:
        kind = TwinKind(b"head", 10, b"end.1234.1234.56.56..", b"\xff" * 4 + bytes(17), (4, 9), (13, 13))
        good = b"head......end.abcd.abcd.56.56.."
        bad = b"head......end.abcd.abce.56.56.."
        with tempfile.TemporaryFile() as file:
            file.write(good + bad + b"." + good + good[:-1])
            file.flush()
            found, nbytes = functions(file.fileno(), [0, 31, 63, 94], [0] * 4, [kind])
        right = [int.from_bytes(b"abcd", "little"), -1]
        return "" if found.tolist() == right * 2 and nbytes == 4 * (4 + 21) - 1 else "twins differ from Python's"


_shelf = TwinsShelf()


def ready(items: int) -> Compare | None:
    """The call for so many items, None while there is no library."""
    return _shelf.ready(items)
