"""Pickles of protocol 4 as CPython's own pickler spells them: frames, a memo for all, globals from the stack.

The one idea: `paddle.save` is `pickle.dump(..., protocol=4)` of dicts of NumPy arrays, so a file that we compose can be
the very bytes that Paddle would have written. Readers do not care; people who compare files do, and so do our tests.

    plan = plan_framed({"w": NumpyArray("<f4", (2, 3), data=StorageSpan(0, 24))})
    plan.literals      # ((0, b"\\x80\\x04\\x95...C\\x18"), (143, b"\\x94t\\x94b..."))
    plan.offsets       # (119,): the 24 bytes of w

What CPython does (3.8 to 3.13, `Modules/_pickle.c`; PEP 3154): everything but None, booleans, numbers and `()` is put
into the memo; an object met again is fetched by number; a frame is closed at the first value that begins when the frame
has 64 KiB; a string of 64 KiB or more is written outside any frame; a dict or list of one item is written with SETITEM
or APPEND, others in batches of 1000. CPython's memo goes by identity, ours by value: texts that the real writer creates
each time (a tensor's own name), and that it therefore never shares, are given as the class `Anew`.

Cost: about 3 us a value. What it does not do: arrays of one byte in a shape of one. CPython shares single bytes by
value, and values are not known before they were moved: such a pickle is equal in meaning, but not in bytes.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import Any

from ckpt_tool.errors import InternalError
from ckpt_tool.storage.pickles.pickle_values import NumpyArray, StorageSpan
from ckpt_tool.storage.pickles.pickle_writer import BATCH, DEPTH_LIMIT, WRITERS, PicklePlan, PickleWriter

FRAME = 64 << 10  # bytes: `FRAME_SIZE_TARGET`
_LEAST = 4  # bytes: shorter frames are written without their head


class Anew(str):
    """A text that is written out each time it is met, as the real writer makes a new object of it."""

    __slots__ = ()


class FramePair(tuple[Any, ...]):
    """A tuple to be written as the call `tuple((its items))`, as Paddle reduces a tensor that has a name."""

    __slots__ = ()


class _Global(str):
    """`module.name` to be written as a global."""

    __slots__ = ()


class _NumpyDtype(str):
    """A NumPy type string to be written as a `numpy.dtype`."""

    __slots__ = ()


def plan_framed(value: Any) -> PicklePlan:
    """`value` as a pickle of protocol 4 in which each NumpyArray over a `StorageSpan` is a hole of `StorageSpan.nbytes`
    bytes (its
    offset is ignored), in the order of the value. Takes what `pickle_writer.dumps` takes. Raises UsageError E0375."""
    writer = _Framed()
    writer.save(value)
    writer.out += b"."
    writer.close_frame()
    return writer.plan()


class _Framed(PickleWriter):
    """One pickle in the making. frames: (index in out, bytes of the frame, holes included)."""

    def __init__(self) -> None:
        super().__init__(4)
        self.frames: list[tuple[int, int]] = []
        self.shift = 0  # bytes of the holes so far
        self._start = len(self.out)  # index in out where the open frame begins
        self._start_shift = 0

    # -- frames -------------------------------------------------------------------------------------------------------

    def close_frame(self) -> None:
        """End the open frame here; the next byte opens another."""
        nbytes = len(self.out) + self.shift - self._start - self._start_shift
        # CPython writes no FRAME opcode for so few bytes.
        if nbytes >= _LEAST:
            self.frames.append((self._start, nbytes))
        self._start = len(self.out)
        self._start_shift = self.shift

    def save(self, value: Any) -> None:
        """Write a value, and close the frame before it if that is full."""
        if len(self.out) + self.shift - self._start - self._start_shift >= FRAME:
            self.close_frame()
        method = _METHODS.get(type(value))
        if method is None or self.depth >= DEPTH_LIMIT:
            super().save(value)  # which says that it nests too deep
            return
        self.depth += 1
        getattr(self, method)(value)
        self.depth -= 1

    def _string(self, head: bytes, data: bytes | StorageSpan) -> None:
        """A string's opcode with its length, and its bytes, outside any frame when they are many."""
        nbytes = data.nbytes if isinstance(data, StorageSpan) else len(data)
        if nbytes >= FRAME:
            self.close_frame()
        self.out += head
        if isinstance(data, StorageSpan):
            if nbytes:
                self.holes.append((len(self.out), nbytes))
                self.shift += nbytes
        else:
            self.out += data
        if nbytes >= FRAME:
            self._start = len(self.out)
            self._start_shift = self.shift

    def plan(self) -> PicklePlan:
        """Literals and holes, with the frames' heads put in."""
        heads = {at: b"\x95" + struct.pack("<Q", nbytes) for at, nbytes in self.frames}
        holes = dict(self.holes)
        if len(holes) != len(self.holes):
            raise InternalError("two holes at one place of a pickle")
        literals: list[tuple[int, bytes]] = []
        offsets: list[int] = []
        piece = bytearray()
        start = done = size = 0
        for at in sorted({*heads, *holes, len(self.out)}):
            piece += self.out[done:at]
            done = at
            if at in holes:  # a frame never begins right behind a string's length
                literals.append((start, bytes(piece)))
                size = start + len(piece)
                offsets.append(size)
                start = size + holes[at]
                piece = bytearray()
            piece += heads.get(at, b"")
        literals.append((start, bytes(piece)))
        return PicklePlan(start + len(piece), tuple(literals), tuple(offsets))

    # -- values -------------------------------------------------------------------------------------------------------

    def text(self, value: str) -> None:
        """A str, from the memo if it was written before; an `Anew` is always written."""
        if type(value) is str and self._recalled(value):
            return
        raw = value.encode("utf-8", "surrogatepass")
        short = len(raw) < 256
        self._string(b"\x8c" + bytes([len(raw)]) if short else b"X" + struct.pack("<I", len(raw)), raw)
        self._remember(value if type(value) is str else None)

    def raw(self, value: bytes) -> None:
        """A byte string, from the memo if it was written before."""
        if self._recalled(value):
            return
        self._string(self._length(len(value)), value)
        self._remember(value)

    def _length(self, nbytes: int) -> bytes:
        before = len(self.out)
        self._counted(nbytes)
        head = bytes(self.out[before:])
        del self.out[before:]
        return head

    def tuple_of(self, value: tuple[Any, ...]) -> None:
        """A tuple. The empty one is not put into the memo."""
        if not value:
            self.out += b")"
            return
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.save(item)
        self.out += (b"", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) < 4 else b"t"
        self._remember()

    def list_of(self, value: Any) -> None:
        """A list; a single item with APPEND, others in batches with APPENDS."""
        self.out += b"]"
        self._remember()
        items = list(value)
        if len(items) == 1:
            self.save(items[0])
            self.out += b"a"
            return
        for start in range(0, len(items), BATCH):
            self.out += b"("
            for item in items[start : start + BATCH]:
                self.save(item)
            self.out += b"e"

    def _items(self, value: dict[Any, Any]) -> None:
        if len(value) == 1:
            ((key, item),) = value.items()
            self.save(key)
            self.save(item)
            self.out += b"s"
            return
        items = iter(value.items())
        full = bool(value)
        while full:  # a full batch is followed by another, even an empty one
            batch = [*islice(items, BATCH)]
            self.out += b"("
            for key, item in batch:
                self.save(key)
                self.save(item)
            self.out += b"u"
            full = len(batch) == BATCH

    # -- names and arrays ---------------------------------------------------------------------------------------------

    def named(self, full: str) -> None:
        """A global `module.name`, with STACK_GLOBAL."""
        if self._recalled((full,)):
            return
        module, _, name = full.rpartition(".")
        self.save(module)
        self.save(name)
        self.out += b"\x93"
        self._remember((full,))

    def _reduce(self, full: str, args: tuple[Any, ...], state: Any, key: object = None) -> None:
        self.save(_Global(full))
        self.save(args)
        self.out += b"R"
        self._remember(key)
        self.save(state)
        self.out += b"b"

    def array(self, value: NumpyArray) -> None:
        """A NumPy array, as `ndarray.__reduce__` gives it to pickle."""
        data = b"" if isinstance(value.data, StorageSpan) and not value.data.nbytes else value.data
        state = (1, value.shape, _NumpyDtype(value.dtype), value.fortran, data)
        self._reduce("numpy.core.multiarray._reconstruct", (_Global("numpy.ndarray"), (0,), b"b"), state)

    def pair(self, value: FramePair) -> None:
        """A `FramePair`, as a call of `builtins.tuple`."""
        self.save(_Global("builtins.tuple"))
        self.save((tuple(value),))
        self.out += b"R"
        self._remember()

    def hole(self, value: StorageSpan) -> None:
        """The bytes of an array, left as a hole that is filled when the values are moved."""
        self._string(self._length(value.nbytes), value)
        self._remember()

    def _numpy_dtype(self, code: str) -> None:
        if self._recalled(("numpy.dtype", code)):
            return
        bare = code.lstrip("<>|=")
        order = code[0] if code[0] in "<>|" else "|"
        state = (3, order, None, None, None, -1, -1, 0)
        self._reduce("numpy.dtype", (bare, False, True), state, ("numpy.dtype", code))


# The method that writes a type: those of the base, by name, so that a subclass's own are met.
_METHODS: dict[type, str] = {
    **{kind: write.__name__ for kind, write in WRITERS.items() if hasattr(PickleWriter, write.__name__)},
    Anew: "text",
    FramePair: "pair",
    StorageSpan: "hole",
    _Global: "named",
    _NumpyDtype: "_numpy_dtype",
}
