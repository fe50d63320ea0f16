"""The pickle machine: executes opcodes on inert values. One interpreter parses and builds, so there is no scanner
that could see another program than the loader.

The idea: the stack holds plain data; a GLOBAL pushes a `Symbol`, a name without power; REDUCE looks the name up in the
table of builders (`pickle_builders`) or makes an Opaque record. The loop below runs the frequent opcodes inline,
`pickle_opcodes.HANDLERS` the rest.

    >>> machine = Machine(b"\\x80\\x02c__builtin__\\neval\\nU\\x011\\x85R.", origin=0)
    >>> machine.run(), machine.uses[0].tier            # a record of the call that did not happen
    (Opaque(name='builtins.eval', args=('1',), state=None), 3)

Cost: about 0.1 us an opcode; DCP writes about 80 opcodes a chunk, so 100,000 chunks read in about a second.
Limits: opcodes in all, 1000 open marks, 10,000 distinct names, 256 MB a string, 255 bytes an integer; a length is
checked against the file before anything is read or made, and what builders copy is bounded by the stream's own length,
so that naming one long list again and again gains nothing.
Source of the opcodes: CPython 3.13 `pickle.py`, `pickletools.py`, PEP 3154, PEP 574.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.storage.pickles.pickle_builders import BUILDERS
from ckpt_tool.storage.pickles.pickle_calls import build_state, call, dict_of, list_of
from ckpt_tool.storage.pickles.pickle_globals import BACK_REFERENCES, GETATTR, RECORDS, canonical, full_name, tier
from ckpt_tool.storage.pickles.pickle_opcodes import HANDLERS
from ckpt_tool.storage.pickles.pickle_values import GlobalUse, Misuse, MoreWanted, PickledRecord, StorageRef, safe_key

if TYPE_CHECKING:
    from collections.abc import Set

    from ckpt_tool.storage.pickles.pickle_rows import Rows

MARK_LIMIT = 1000
NAME_LIMIT = 10_000  # distinct globals of one pickle
BYTES_LIMIT = 256 << 20  # bytes of one string
LONG_TEXT = 1024  # bytes; a string longer than this, shared often, could make a value huge written out
_BININT = struct.Struct("<i").unpack_from
_LONG_INDEX = struct.Struct("<I").unpack_from


class Machine:
    """One pickle's execution.

    data: the stream, or a window of it that `refill(offset, nbytes)` replaces. origin: offset (bytes, in the file) of
    data[0]. end: offset (bytes, in the file) where the stream may end at most. span_from: byte strings at least this
    long become Spans; 0: none do. places: shorter ones become Placed. rows: what takes rows as columns (`pickle_rows`).
    """

    __slots__ = (
        "at",
        "condemned",
        "copies",
        "count",
        "data",
        "end",
        "good_getattr",
        "handlers",
        "items",
        "longest",
        "memo",
        "meta",
        "odd",
        "opcodes",
        "origin",
        "places",
        "pos",
        "protocol",
        "refill",
        "rows",
        "size",
        "span_from",
        "stack",
        "start",
        "stopped",
        "storages",
        "subscripts",
        "symbols",
        "tiers",
        "uses",
    )

    def __init__(
        self,
        data: bytes,
        *,
        origin: int,
        end: int | None = None,
        opcodes: int = 10_000_000,
        span_from: int = 0,
        refill: Callable[[int, int], bytes] | None = None,
        places: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self.data = data
        self.places = places
        self.origin = origin
        self.end = origin + len(data) if end is None else end
        self.opcodes = opcodes
        self.span_from = span_from
        self.refill = refill
        self.start = origin
        self.longest = 0  # bytes of the longest string so far
        self.protocol = 0
        self.count = 0  # number of the opcode being executed, from 0
        self.at = 0  # its index in data
        self.pos = 0
        self.stopped = False
        self.stack: list[Any] = []
        self.meta: list[list[Any]] = []
        self.rows = rows
        self.memo: Any = [] if rows is None else rows.memo
        self.handlers = HANDLERS if rows is None else rows.handlers
        self.odd: Set[str] = (
            BACK_REFERENCES.keys() if rows is None else rows.watched
        )  # classes whose BUILD is no plain one
        self.symbols: dict[tuple[str, str], Symbol] = {}
        self.storages: dict[str, StorageRef] = {}  # by key
        self.size: Symbol | None = None  # the symbol of torch.Size
        self.uses: list[GlobalUse] = []
        self.tiers: dict[str, int] = {}  # by full name, of the names used
        self.condemned: set[str] = set()  # full names whose use turned out to be unsafe
        # Bounds the memory: a short pickle must not ask for large copies.
        self.copies = (1 << 20) + self.end - origin  # elements or bytes that builders may still copy
        self.items: dict[int, tuple[Opaque, Any]] = {}  # id of an Opaque -> (it, its list, dict or set items)
        self.good_getattr: bool | None = None  # None: never called; False: called on something else than an enum
        self.subscripts: dict[str, bool] = {}  # a name of `operator.getitem` -> were annotations all that it took?

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Execute to STOP and return the value. Raises Misuse; `at` and `count` then give the position."""
        while not self.stopped:
            try:
                self._loop()
            except (IndexError, struct.error, MoreWanted) as e:
                self._more_or_fail(e)
            except (UnicodeDecodeError, ValueError) as e:
                raise Misuse(f"malformed argument: {e}", "E0363") from e
        if not self.stack:
            raise Misuse("STOP with an empty stack", "E0363")
        return self.stack.pop()

    def _more_or_fail(self, error: Exception) -> None:
        """Read on from the current opcode, if the window ended inside it. Else the stream is broken: raises Misuse."""
        start = self.origin + self.at
        wanted = error.nbytes if isinstance(error, MoreWanted) else 16
        have = len(self.data) - self.at
        if self.refill is not None and have < wanted and have < self.end - start:
            self.data = self.refill(start, min(wanted, self.end - start))
            self.origin = start
            self.pos = 0
            self.at = 0
            return
        if isinstance(error, MoreWanted):
            raise Misuse(
                f"an argument wants {error.nbytes} bytes, but {max(self.end - start, 0)} are left", "E0368"
            ) from error
        if self.at >= len(self.data) or isinstance(error, struct.error):
            raise Misuse("the pickle ends without STOP", "E0360") from error
        raise Misuse("an opcode finds too few objects, or no such memo entry", "E0363") from error

    def _loop(self) -> None:
        """Execute until STOP or an exception. One long function by intent: a call for each opcode would double the
        time, and the opcodes inlined here are nine of ten in any file."""
        data = self.data
        pos = self.pos
        meta = self.meta
        memo = self.memo
        stack = self.stack
        push = stack.append
        remember = memo.append
        builders = BUILDERS
        records = RECORDS
        torch_size = BUILDERS["torch.Size"]
        count = self.count
        at = self.at
        extra = 0  # opcodes beyond one a turn, where a common run of them is taken in one step
        starts = data.startswith
        rows = self.rows
        handlers = self.handlers
        odd = self.odd

        try:
            for count in range(self.count, self.opcodes):
                at = pos
                op = data[pos]
                pos += 1
                if op >= 0x80:
                    if op == 0x94:  # MEMOIZE
                        remember(stack[-1])
                        continue
                    if op == 0x85 or op == 0x86:  # TUPLE1, TUPLE2
                        last = stack.pop()
                        inner = (last,) if op == 0x85 else (stack.pop(), last)
                        # torch.Size((a, b)), as protocol 4 spells it: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE
                        if starts(b"\x94\x85\x94R\x94", pos) and stack and stack[-1] is self.size:
                            args = (inner,)
                            stack[-1] = made = torch_size(args)
                            memo += (inner, args, made)
                            pos += 5
                            extra += 5
                        else:
                            push(inner)
                        continue
                    if op == 0x8C:  # SHORT_BINUNICODE
                        end = pos + 1 + data[pos]
                        if end > len(data):
                            raise MoreWanted(end - at)
                        push(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
                        pos = end
                        continue
                    if op == 0x81:  # NEWOBJ
                        args = stack.pop()
                        made = stack[-1]
                        if args == () and type(made) is Symbol and made.name in records and not made.args:
                            stack[-1] = PickledRecord(made.name)
                        else:
                            stack[-1] = call(self, made, args)
                        continue
                    if op == 0x89:  # NEWFALSE
                        push(False)
                        continue
                elif op == 0x6A:  # LONG_BINGET
                    push(memo[_LONG_INDEX(data, pos)[0]])
                    pos += 4
                    continue
                elif op == 0x68:  # BINGET
                    push(memo[data[pos]])
                    pos += 1
                    continue
                elif op == 0x4B:  # BININT1
                    push(data[pos])
                    pos += 1
                    continue
                elif op == 0x28:  # MARK
                    if len(meta) >= MARK_LIMIT:
                        raise Misuse(f"more than {MARK_LIMIT} nested marks", "E0369")
                    meta.append(stack)
                    stack = []
                    push = stack.append
                    continue
                elif op == 0x29:  # EMPTY_TUPLE
                    # Class() with a state: NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
                    if starts(b"\x81\x94}\x94(", pos) and stack and len(meta) < MARK_LIMIT:
                        made = stack[-1]
                        if type(made) is Symbol and made.name in records and not made.args:
                            stack[-1] = made = PickledRecord(made.name)
                            fields: dict[Any, Any] = {}
                            push(fields)
                            memo += (made, fields)
                            meta.append(stack)
                            stack = []
                            push = stack.append
                            pos += 5
                            extra += 5
                            continue
                    push(())
                    continue
                elif op == 0x7D:  # EMPTY_DICT
                    push({})
                    continue
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    made = stack[-1]
                    plain = type(made) is PickledRecord and made.state is None and type(state) is dict
                    if plain and made.name not in odd:
                        made.state = state
                        continue
                    build_state(self, made, state)
                    if rows is not None and type(made) is PickledRecord:
                        self.stack = stack
                        self.pos = pos
                        self.count = count + extra
                        extra = extra + rows.take(self)
                        pos = self.pos
                    continue
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    if len(items) % 2:
                        raise Misuse("SETITEMS with a key and no value", "E0363")
                    target = stack[-1]
                    if type(target) is not dict:
                        target = dict_of(self, target)
                    for i in range(0, len(items), 2):
                        key = items[i]
                        target[key if type(key) is str and len(key) < 4096 else safe_key(key)] = items[i + 1]
                    continue
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    made = stack[-1]
                    build = builders.get(made.name) if type(made) is Symbol else None
                    if build is None or made.args or type(args) is not tuple:
                        stack[-1] = call(self, made, args)
                    else:
                        stack[-1] = build(args)
                    continue
                elif op == 0x61:  # APPEND
                    last = stack.pop()
                    target = stack[-1]
                    (target if type(target) is list else list_of(self, target)).append(last)
                    continue
                elif op == 0x5D:  # EMPTY_LIST
                    push([])
                    continue
                elif op == 0x4D:  # BININT2
                    push(data[pos] | data[pos + 1] << 8)
                    pos += 2
                    continue
                elif op == 0x74:  # TUPLE
                    made = tuple(stack)
                    stack = meta.pop()
                    push = stack.append
                    push(made)
                    continue
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + _LONG_INDEX(data, pos)[0]
                    if end - pos > LONG_TEXT or end > len(data):
                        self.fits(end - at, at)
                    push(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
                    pos = end
                    continue
                elif op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
                    index = data[pos] if op == 0x71 else _LONG_INDEX(data, pos)[0]
                    pos += 1 if op == 0x71 else 4
                    if index == len(memo):
                        remember(stack[-1])
                    else:
                        self.put(index, stack[-1])
                    continue
                elif op == 0x4A:  # BININT
                    push(_BININT(data, pos)[0])
                    pos += 4
                    continue
                self.stack = stack
                self.at = at
                self.count = count + extra
                pos = handlers[op](self, pos)
                if self.stopped:
                    return
                stack = self.stack
                push = stack.append
            raise Misuse(f"more than {self.opcodes} opcodes", "E0369")
        finally:
            self.stack = stack
            self.at = at
            self.pos = pos
            self.count = count + extra

    # -- what opcodes do ----------------------------------------------------------------------------------------------

    def fits(self, nbytes: int, at: int, limit: int = BYTES_LIMIT + 16) -> None:
        """Raise unless the opcode at data[at], `nbytes` long with its argument, is inside the window. Raises Misuse if
        it never can be: it ends beyond the stream, or is too long."""
        if nbytes > self.end - self.origin - at:
            raise Misuse(f"an argument wants {nbytes} bytes, but {self.end - self.origin - at} are left", "E0368")
        if nbytes > limit:
            raise Misuse(f"an argument of {nbytes} bytes, want at most {limit}", "E0369")
        if at + nbytes > len(self.data):
            raise MoreWanted(nbytes)
        self.longest = max(self.longest, nbytes)

    def put(self, index: int, value: Any) -> None:
        """Set memo entry `index`. Picklers number from 0 (Python 2's C pickler from 1), so a gap is a fault: extending
        the list up to any index would let a number in the file determine an allocation."""
        memo = self.memo
        if index > len(memo) + 1 or index < 0:
            raise Misuse(f"memo index {index} after {len(memo)} entries", "E0367")
        if index > len(memo):
            memo.append(None)
        if index == len(memo):
            memo.append(value)
        else:
            memo[index] = value

    def name(self, module: Any, name: Any) -> Symbol:
        """The symbol of a global; its first use is recorded with its tier."""
        if type(module) is not str or type(name) is not str:
            raise Misuse("a global's name is no text", "E0363")
        symbol = self.symbols.get((module, name))
        if symbol is None:
            if len(self.symbols) >= NAME_LIMIT:
                raise Misuse(f"more than {NAME_LIMIT} names", "E0369")
            # Python 2 names of modules are mapped to those of Python 3.
            known = canonical(module, name, self.protocol)
            symbol = self.symbols[module, name] = Symbol(full_name(*known))
            if known == ("torch", "Size"):
                self.size = symbol
            self.tiers[symbol.name] = tier(*known)
            self.uses.append(GlobalUse(module, name, self.count, self.origin + self.at, self.tiers[symbol.name]))
        return symbol

    def verdicts(self) -> tuple[GlobalUse, ...]:
        """The uses of names, with tiers corrected by how they were called: a condemned name is unsafe, `getattr` is
        harmless if it was only called on enum members."""
        found = []
        for use in self.uses:
            full = self.symbols[use.module, use.name].name
            if full in self.condemned:
                use = use._replace(tier=3)
            elif (full == GETATTR and self.good_getattr) or self.subscripts.get(full):
                use = use._replace(tier=1)
            found.append(use)
        return tuple(found)

    def charge(self, nitems: int) -> None:
        """Account for a copy of `nitems` elements or bytes: honest pickles copy what the stream spelt out, once."""
        self.copies -= nitems
        if self.copies < 0:
            raise Misuse("values are copied again and again", "E0370")
