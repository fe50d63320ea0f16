"""Rows of a pickle, taken as columns: what a `.metadata` of millions of boxes has instead of millions of objects.

    rows = rows_of(size, KINDS)                  # None: a small pickle, or no compiler; then everything is an object
    machine = Machine(data, origin=0, rows=rows)

The one idea: the machine executes a row as it does everything; then the compiled reader takes all rows behind it that
have the same opcodes, and they stand on the stack as one `RowRun`. What a row consists of is read off the objects that
the
machine has just made, so the reader knows no more than the machine said. A Run is worth its rows only where lists and
dicts are filled from the stack: whatever else could meet one (a memo entry, DUP, POP) raises Irregular, as does what is
fetched from the memo out of a row and is no text. Then, and after any error, the caller reads the pickle anew without:
so an error is always that of reading by objects. `Rows.taken` says how many rows there are, for the caller to find them
all again.

Cost: 0.1 us a row, 25 us a run. What it does not do: rows with texts beyond ASCII, sizes of more than 8 dims or numbers
beyond 2^63, which the machine executes one by one.
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
# rows: a run of fewer is a poor one; how many are at most left to the machine after it
_FEW = 4
_MOST = 64
_DUP, _POPS = ord("2"), (ord("0"), ord("1"))

# Class -> its fields, each with what it holds ("text", "int", "size", "skip") and what a column of it is called.
Fields = Mapping[str, tuple[str, str]]
Kind = Sequence[tuple[frozenset[str], Fields]]  # the objects of a row: names of their classes, their fields


def rows_of(nbytes: int, kinds: Iterable[Kind]) -> Rows | None:
    """What takes the rows of a pickle of `nbytes`, None where that does not pay or can't be had."""
    if not compiled.worth_a_look(nbytes, LEAST):
        return None
    from ckpt_tool.compiled.rows import ready

    reader = ready(nbytes)
    return None if reader is None else Rows(reader, kinds)


class Rows:
    """The rows of one pickle. watched: classes behind whose objects `take` is to be called; taken: rows so far."""

    def __init__(self, reader: RowReader, kinds: Iterable[Kind]) -> None:
        from ckpt_tool.compiled.rows import SYMBOL, RowStep

        self.memo = Memo(reader)
        self.taken = 0
        self.handlers = _HANDLERS
        self._reader = reader
        self._symbol = SYMBOL
        self._kinds = {name: kind for kind in kinds for name in kind[-1][0]}
        self.watched = frozenset((*BACK_REFERENCES, *self._kinds))
        self._steps = {"text": RowStep.TEXT, "int": RowStep.INT, "size": RowStep.SIZE, "skip": RowStep.SKIP}
        self._programs: dict[
            tuple[object, ...], tuple[Sequence[tuple[RowStep, int]], Mapping[str, tuple[str, int, int]]]
        ] = {}
        self._texts: dict[int, str] = {}
        self._wait = self._left = 0

    def take(self, machine: Machine) -> int:
        """Called behind a BUILD: put the rows that follow like the last one onto the stack, as one Run for each of
        their objects. Returns how many opcodes that were."""
        stack = machine.stack
        kind = self._kinds.get(stack[-1].name)
        if kind is None or len(stack) % len(kind):
            return 0
        if self._left:
            self._left -= 1
            return 0
        found = self._program(kind, stack[-len(kind) :])
        if found is None:
            return 0
        program, columns = found
        end = machine.end - machine.origin
        left = machine.opcodes - machine.count - 1
        taken = self._reader.take(machine.data, machine.pos, end, len(self.memo), left, program)
        self._wait = 0 if taken.rows >= _FEW else min(2 * self._wait + 1, _MOST)
        self._left = self._wait
        if not taken.rows:
            return 0
        machine.pos = taken.at
        self.memo.skip(taken.memo)
        self.taken += taken.rows
        for number in {*taken.ids} - self._texts.keys():
            self._texts[number] = self._reader.text(number).decode()
        run = RowRun(taken, columns, self._texts)
        stack += [run] * len(kind)
        return taken.opcodes

    def number(self, text: str) -> int:
        """The id that stands for a text in the columns. Raises Irregular for what is none, or where there is no
        room."""
        found = self._reader.intern(text.encode("utf-8", "surrogatepass")) if type(text) is str else -1
        if found < 0:
            raise Irregular
        self._texts[found] = text
        return found

    def _program(
        self, kind: Kind, row: Sequence[Any]
    ) -> tuple[Sequence[tuple[RowStep, int]], Mapping[str, tuple[str, int, int]]] | None:
        """What rows like this one consist of, and `RowRun.columns` of them; None where it is not of the kind."""
        key: tuple[object, ...] = ()
        for made, (names, fields) in zip(row, kind, strict=True):
            if type(made) is not PickledRecord or made.name not in names or made.args or not made.state:
                return None
            if not made.state.keys() <= fields.keys():
                return None
            key += (made.name, *made.state)
        if key not in self._programs:
            from ckpt_tool.compiled.rows import RowStep

            intern = self._reader.intern
            program = list[tuple[RowStep, int]]()
            columns = list[tuple[str, str]]()
            size = intern(self._symbol + b"torch.Size")
            for made, (_, fields) in zip(row, kind, strict=True):
                program += [(RowStep.NAME, intern(self._symbol + made.name.encode())), (RowStep.OPEN, 0)]
                for field in made.state:
                    step = self._steps[fields[field][0]]
                    program += [(RowStep.NAME, intern(field.encode())), (step, size if step is RowStep.SIZE else 0)]
                    columns.append(fields[field])
                program.append((RowStep.CLOSE, 0))
            self._programs[key] = program, _placed(columns)
        return self._programs[key]


def _placed(columns: Sequence[tuple[str, str]]) -> dict[str, tuple[str, int, int]]:
    """`RowRun.columns` of columns of which each is (kind, name)."""
    kinds = [kind for kind, _ in columns]
    return {
        name: (kind, kinds[:place].count(kind), kinds.count(kind))
        for place, (kind, name) in enumerate(columns)
        if kind != "skip"
    }


class Memo:
    """The machine's memo: objects, and between them the entries that rows made, of which the texts alone are known."""

    def __init__(self, reader: RowReader) -> None:
        from ckpt_tool.compiled.rows import SYMBOL

        self._reader = reader
        self._symbol = SYMBOL
        self._tail: list[Any] = []
        # of objects
        self._starts = [0]
        self._parts = [self._tail]
        self._at = 0  # index of the tail's first

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
        """Rows made entries up to this length."""
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
