"""The compiled reader of a pickle's rows (`rows.c`): consecutive objects of one class, read as columns.

    reader = ready(nbytes)                       # nbytes: of the pickle; None: its machine takes row by row
    fqn = reader.intern(b"fqn")
    reader.remember(17, fqn)                     # memo entry 17 is this text
    taken = reader.take(window, at, end, memo, opcodes, program)

A program is what a row consists of, as pairs of a step and an id. The caller knows what the columns mean
(`pickles.pickle_rows`); what does not follow the program is left to it. As `library`: believed after a trial,
CKPT_COMPILED.

Cost: 0.1 us a row; 4 bytes for a text that is met, 12 for each time it is put into the memo.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_uint8, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

from ckpt_tool.compiled.library import Shelf

SYMBOL = b"\xff"  # before a name that is no text
ROWS = 1 << 14  # taken at a time


class RowStep(IntEnum):
    """What a row consists of; NAME and SIZE are followed by an id, all others by 0."""

    NAME = 0  # a name or a text that is fetched from the memo
    OPEN = 1  # an object without arguments, and its dict
    TEXT = 2  # any text of ASCII
    INT = 3  # a number from 0 to 2^63 - 1
    SKIP = 4  # a number, or None, that is not needed
    SIZE = 5  # a torch.Size; the id is that of its name
    CLOSE = 6


class RowColumns(NamedTuple):
    """Rows."""

    rows: int
    # ids, ints: of texts and numbers, row by row
    ids: array[int]
    ints: array[int]
    dims: bytes  # of the sizes, row by row
    sizes: array[int]  # the numbers of all sizes, concatenated
    at: int  # where in the window the next row would begin
    memo: int  # its length by then
    opcodes: int  # of the rows


class _Taken(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows_room", "sizes_room")),
        *((name, c_void_p) for name in ("ids", "ints", "dims", "sizes")),
        *((name, c_int64) for name in ("rows", "numbers", "at", "memo", "opcodes")),
    ]


class Calls:
    """The library's calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where a function is not there."""
        self.c = c = library
        c.ck_rows_new.restype = c_void_p
        c.ck_rows_free.argtypes = [c_void_p]
        c.ck_rows_intern.argtypes, c.ck_rows_intern.restype = [c_void_p, c_char_p, c_int64], c_int64
        c.ck_rows_texts.argtypes, c.ck_rows_texts.restype = [c_void_p], c_int64
        c.ck_rows_text.argtypes, c.ck_rows_text.restype = [c_void_p, c_int64, POINTER(c_int64)], c_void_p
        c.ck_rows_remember.argtypes, c.ck_rows_remember.restype = [c_void_p, c_int64, c_int64], c_int
        c.ck_rows_recall.argtypes, c.ck_rows_recall.restype = [c_void_p, c_int64], c_int64
        c.ck_rows_take.argtypes = [c_void_p, c_char_p, *[c_int64] * 5, c_void_p, c_int64, c_void_p]
        c.ck_rows_take.restype = None


class RowReader:
    """The texts of one pickle, which of its memo entries they are, and its rows."""

    def __init__(self, calls: Calls) -> None:
        self._c = calls.c
        self._rows = c_void_p(self._c.ck_rows_new())
        if not self._rows:
            raise MemoryError
        self._texts: list[bytes] = []
        self._ids = (c_int32 * (ROWS * 4))()
        self._ints = (c_int64 * (ROWS * 4))()
        self._dims = (c_uint8 * (ROWS * 2))()
        self._sizes = (c_int64 * (ROWS * 16))()
        self._taken = _Taken(
            ROWS, ROWS * 16, *[ctypes.addressof(block) for block in (self._ids, self._ints, self._dims, self._sizes)]
        )

    def __del__(self) -> None:
        self._c.ck_rows_free(self._rows)

    def intern(self, text: bytes) -> int:
        """The id of a text, or of SYMBOL and a name; -1: no room for it."""
        found: int = self._c.ck_rows_intern(self._rows, text, len(text))
        return found

    def text(self, number: int) -> bytes:
        """The text of an id."""
        for known in range(len(self._texts), self._c.ck_rows_texts(self._rows)):
            length = c_int64()
            start = self._c.ck_rows_text(self._rows, known, length)
            self._texts.append(ctypes.string_at(start, length.value) if length.value else b"")
        return self._texts[number]

    def remember(self, index: int, text: int) -> bool:
        """Memo entry `index`, behind all before, is this text. False: no room for it."""
        return bool(self._c.ck_rows_remember(self._rows, index, text))

    def recall(self, index: int) -> int:
        """The id of the text that memo entry `index` is, -1 where it is none."""
        found: int = self._c.ck_rows_recall(self._rows, index)
        return found

    def take(
        self, window: bytes, at: int, end: int, memo: int, opcodes: int, program: Sequence[tuple[RowStep, int]]
    ) -> RowColumns:
        """The rows that begin at window[at]. end: of the stream, counted as `at` is. memo: its length. opcodes: that
        may be taken. At most 4 texts, 4 numbers and 2 sizes a row."""
        flat = array("q", [part for step in program for part in step])
        self._c.ck_rows_take(
            *(self._rows, window, at, len(window), end, memo, opcodes),
            *(flat.buffer_info()[0], len(program), ctypes.byref(self._taken)),
        )
        kinds = [step for step, _ in program]
        done = self._taken
        rows = self._taken.rows
        return RowColumns(
            rows,
            _array("i", self._ids, rows * kinds.count(RowStep.TEXT)),
            _array("q", self._ints, rows * kinds.count(RowStep.INT)),
            bytes(memoryview(self._dims)[: rows * kinds.count(RowStep.SIZE)]),
            _array("q", self._sizes, done.numbers),
            *(done.at, done.memo, done.opcodes),
        )


def _array(code: str, block: Any, count: int) -> array[int]:
    made: array[int] = array(code)
    made.frombytes(memoryview(block).cast("B")[: count * made.itemsize])
    return made


class RowsShelf(Shelf[Calls]):
    """The functions of rows.c; who asks has enough to do (`pickles.pickle_rows.LEAST`)."""

    def load(self, library: ctypes.CDLL, path: str) -> Calls:
        """The functions of a loaded library."""
        return Calls(library)  # one for all paths

    def trial(self, functions: Calls) -> str:
        reader = RowReader(functions)
        keys = [reader.intern(text) for text in (SYMBOL + b"Row", SYMBOL + b"Size", b"where")]
        for index, key in enumerate(keys):
            reader.remember(index, key)
        row = b"h\0)\x81\x94}\x94(h\2h\1K\7M\1\2\x86\x94\x85\x94R\x94\x8c\1a\x94J\0\0\1\0ub"
        again = b"h\0)\x81}(j\2\0\0\0h\1)\x85Rh\x08\x8a\5\1\0\0\0\1ub"
        program = [(RowStep.NAME, keys[0]), (RowStep.OPEN, 0), (RowStep.NAME, keys[2]), (RowStep.SIZE, keys[1])]
        program += [(RowStep.TEXT, 0), (RowStep.INT, 0), (RowStep.CLOSE, 0)]
        window = row + again + row[:-1]
        taken = reader.take(window, 0, len(window), 3, 100, program)
        want = (2, [3, 3], [65536, (1 << 32) + 1], b"\2\0", [7, 513], len(row + again), 9, 36)
        found = (taken.rows, list(taken.ids), list(taken.ints), taken.dims, list(taken.sizes), *taken[5:])
        return "" if found == want and reader.text(3) == b"a" else "rows of pickles differ from Python's"


_shelf = RowsShelf()


def ready(nbytes: int) -> RowReader | None:
    """A reader for a pickle of `nbytes`, None while there is no library."""
    calls = _shelf.ready(nbytes)
    return None if calls is None else RowReader(calls)
