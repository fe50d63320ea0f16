"""Rows of a pickle, taken as columns: what a `.metadata` of millions of boxes has instead of millions of objects.

    rows = rows_of(size, KINDS)                  # None: a small pickle, or no compiler; then everything is an object
    machine = Machine(data, origin=0, rows=rows)

The machine executes one row as it does everything; then the compiled reader takes all following rows that have the same
opcodes, and they are on the stack as one `RowRun`. What a row consists of is read off the objects that the machine has
just made, so the reader needs no knowledge of its own about the classes.

A RowRun can replace its rows only where lists and dicts are filled from the stack. Anything else that could meet one
(a memo entry, DUP, POP) raises Irregular, and so does fetching an entry of the memo that a row made, unless it is a
text. After Irregular, or any error, the caller reads the pickle again without rows: so an error is always that of
reading by objects. `Rows.taken` says how many rows there are, for the caller to check that it found them all.

Cost: 0.1 us a row, 25 us a run. Rows with texts beyond ASCII, sizes of more than 8 dims or numbers beyond 2^63 are left
to the machine, which executes them one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool import compiled
from ckpt_tool.core.extras import Symbol
from ckpt_tool.storage.pickles.pickle_globals import BACK_REFERENCES
from ckpt_tool.storage.pickles.pickle_opcodes import HANDLERS, Handler
from ckpt_tool.storage.pickles.pickle_values import Irregular, PickledRecord, RowRun

if TYPE_CHECKING:
    from ckpt_tool.compiled.rows import RowReader, RowStep
    from ckpt_tool.storage.pickles.pickle_machine import Machine

LEAST = 1 << 20  # bytes of a pickle: below, the machine is done before a library is loaded
_FEW = 4  # rows: a run of fewer does not pay
_MOST = 64  # rows that are left to the machine, at most, after runs that did not pay
_DUP = ord("2")
_POPS = (ord("0"), ord("1"))

# Field -> (what it holds: "text", "int", "size" or "skip"; the name of its column).
Fields = Mapping[str, tuple[str, str]]
Kind = Sequence[tuple[frozenset[str], Fields]]  # the objects of a row: names of their classes, their fields
Program = Sequence[tuple["RowStep", int]]  # the opcodes of a row, as the compiled reader follows them
Columns = Mapping[str, tuple[str, int, int]]  # see `RowRun.columns`


def rows_of(nbytes: int, kinds: Iterable[Kind]) -> Rows | None:
    """A reader of the rows of a pickle of `nbytes`, None where that does not pay or there is no compiled library."""
    if not compiled.worth_a_look(nbytes, LEAST):
        return None
    from ckpt_tool.compiled.rows import ready

    reader = ready(nbytes)
    return None if reader is None else Rows(reader, kinds)


class Rows:
    """The rows of one pickle.

    watched: classes after whose objects `take` is to be called. taken: the number of rows so far.
    """

    def __init__(self, reader: RowReader, kinds: Iterable[Kind]) -> None:
        from ckpt_tool.compiled.rows import SYMBOL, RowStep

        self.memo = Memo(reader)
        self.taken = 0
        self.handlers = _HANDLERS
        self._reader = reader
        self._symbol = SYMBOL
        self._kinds = {name: kind for kind in kinds for name in kind[-1][0]}  # by the class of a row's last object
        self.watched = frozenset((*BACK_REFERENCES, *self._kinds))
        self._steps = {"text": RowStep.TEXT, "int": RowStep.INT, "size": RowStep.SIZE, "skip": RowStep.SKIP}
        self._programs: dict[tuple[object, ...], tuple[Program, Columns]] = {}  # by the classes and fields of a row
        self._texts: dict[int, str] = {}

        # After a run that did not pay, `_wait` rows are left to the machine, `_left` of them are still to come.
        self._wait = 0
        self._left = 0

    def take(self, machine: Machine) -> int:
        """Called after a BUILD: put the rows that follow like the last one onto the stack, as one RowRun for each of
        their objects. Returns how many opcodes that were."""
        stack = machine.stack
        kind = self._kinds.get(stack[-1].name)
        if kind is None or len(stack) % len(kind):
            return 0
        if self._left:
            self._left -= 1
            return 0

        program_and_columns = self._make_program(kind, stack[-len(kind) :])
        if program_and_columns is None:
            return 0
        program, columns = program_and_columns

        end = machine.end - machine.origin
        opcodes_left = machine.opcodes - machine.count - 1
        taken = self._reader.take(machine.data, machine.pos, end, len(self.memo), opcodes_left, program)
        self._wait = 0 if taken.rows >= _FEW else min(2 * self._wait + 1, _MOST)
        self._left = self._wait
        if not taken.rows:
            return 0

        # The machine goes on after the rows, with a memo and a stack as if it had executed them.
        machine.pos = taken.at
        self.memo.skip(taken.memo)
        self.taken += taken.rows
        for number in {*taken.ids} - self._texts.keys():
            self._texts[number] = self._reader.text(number).decode()
        run = RowRun(taken, columns, self._texts)
        stack += [run] * len(kind)
        return taken.opcodes

    def intern_text(self, text: str) -> int:
        """The id of a text in the columns. Raises Irregular for what is no text, or where the reader's table is
        full."""
        number = self._reader.intern(text.encode("utf-8", "surrogatepass")) if type(text) is str else -1
        if number < 0:
            raise Irregular
        self._texts[number] = text
        return number

    def _make_program(self, kind: Kind, row: Sequence[Any]) -> tuple[Program, Columns] | None:
        """Returns (the steps that read rows like this one, their `RowRun.columns`), None if the row is not of the
        kind."""
        key: tuple[object, ...] = ()
        for record, (names, fields) in zip(row, kind, strict=True):
            if type(record) is not PickledRecord or record.name not in names or record.args or not record.state:
                return None
            if not record.state.keys() <= fields.keys():
                return None
            key += (record.name, *record.state)

        if key not in self._programs:
            from ckpt_tool.compiled.rows import RowStep

            # An object is its class, then a dict of its fields in the order in which this row has them.
            intern = self._reader.intern
            program: list[tuple[RowStep, int]] = []
            columns: list[tuple[str, str]] = []
            size = intern(self._symbol + b"torch.Size")
            for record, (_, fields) in zip(row, kind, strict=True):
                program += [(RowStep.NAME, intern(self._symbol + record.name.encode())), (RowStep.OPEN, 0)]
                for field in record.state:
                    step = self._steps[fields[field][0]]
                    program += [(RowStep.NAME, intern(field.encode())), (step, size if step is RowStep.SIZE else 0)]
                    columns.append(fields[field])
                program.append((RowStep.CLOSE, 0))
            self._programs[key] = program, _index_columns(columns)
        return self._programs[key]


def _index_columns(columns: Sequence[tuple[str, str]]) -> Columns:
    """`RowRun.columns` of columns, each given as (kind, name)."""
    kinds = [kind for kind, _ in columns]
    return {
        name: (kind, kinds[:place].count(kind), kinds.count(kind))
        for place, (kind, name) in enumerate(columns)
        if kind != "skip"
    }


class Memo:
    """The machine's memo: objects, and between them the entries that rows made, of which only texts are known."""

    def __init__(self, reader: RowReader) -> None:
        from ckpt_tool.compiled.rows import SYMBOL

        self._reader = reader
        self._symbol = SYMBOL
        self._tail: list[Any] = []

        # The objects, in parts: each begins at the entry of the same place in `_starts`.
        self._starts = [0]
        self._parts = [self._tail]
        self._at = 0  # index of the tail's first entry

    def __len__(self) -> int:
        return self._at + len(self._tail)

    def append(self, value: Any) -> None:
        """Remember the value as the next entry of the memo."""
        kind = type(value)
        if kind is str:
            self._remember(value.encode("utf-8", "surrogatepass"))
        elif kind is Symbol and not value.args:
            self._remember(self._symbol + value.name.encode("utf-8", "surrogatepass"))
        elif kind is RowRun:
            raise Irregular
        self._tail.append(value)

    def _remember(self, text: bytes) -> None:
        number = self._reader.intern(text)
        if number < 0 or not self._reader.remember(len(self), number):
            raise Irregular

    def __iadd__(self, values: Iterable[Any]) -> Memo:
        for value in values:
            self.append(value)
        return self

    def skip(self, length: int) -> None:
        """Rows made entries up to this length of the memo."""
        if length > len(self):
            self._tail = []
            self._at = length
            self._starts.append(length)
            self._parts.append(self._tail)

    def __getitem__(self, index: int) -> Any:
        part = bisect_right(self._starts, index) - 1
        place = index - self._starts[part]
        if place < len(self._parts[part]):
            return self._parts[part][place]
        if index >= len(self):
            raise IndexError
        text = self._reader.recall(index)
        if text < 0:
            raise Irregular
        return self._reader.text(text).decode()

    def __setitem__(self, index: int, value: Any) -> None:
        raise Irregular  # an entry that is written again


def _irregular(machine: Machine, pos: int) -> int:
    raise Irregular


_HANDLERS: tuple[Handler, ...] = tuple(
    _irregular if code in (_DUP, *_POPS) else handler for code, handler in enumerate(HANDLERS)
)
