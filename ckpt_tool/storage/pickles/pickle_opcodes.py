"""The less frequent opcodes: one small function each, `HANDLERS[opcode byte](machine, pos) -> pos`.

`pos` is the index in `machine.data` just behind the opcode byte. A handler reads its argument before it touches the
stack, so that it can be run again when the window had to move on. Text forms (protocol 0) are read as CPython reads
them: decimal numbers, quoted strings, raw-unicode-escape.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.extras import Opaque
from ckpt_tool.storage.pickles.pickle_builders import storage
from ckpt_tool.storage.pickles.pickle_calls import call, dict_of, list_of, set_of
from ckpt_tool.storage.pickles.pickle_values import Misuse, MoreWanted, Placed, StorageRef, StorageSpan, safe_key

if TYPE_CHECKING:
    from ckpt_tool.storage.pickles.pickle_machine import Machine

Handler = Callable[["Machine", int], int]
LINE_LIMIT = 4096  # bytes of a text argument
INT_LIMIT = 255  # bytes of an integer: Python prints more than 4300 digits only on request
_FLOAT = struct.Struct(">d").unpack_from
_U32 = struct.Struct("<I").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U64 = struct.Struct("<Q").unpack_from


def _unknown(m: Machine, pos: int) -> int:
    raise Misuse(f"unknown opcode {m.data[pos - 1]:#04x}", "E0361")


def _constant(value: Any) -> Handler:
    def push(m: Machine, pos: int) -> int:
        m.stack.append(value)
        return pos

    return push


# -- arguments --------------------------------------------------------------------------------------------------------


def _line(m: Machine, pos: int, limit: int = LINE_LIMIT) -> tuple[bytes, int]:
    """The text up to a line feed, and the index behind it."""
    end = m.data.find(b"\n", pos, pos + limit)
    if end < 0:
        if pos + limit < len(m.data):
            raise Misuse(f"a text argument of more than {limit} bytes", "E0369")
        if m.origin + len(m.data) >= m.end:
            raise Misuse("the pickle ends inside a text argument", "E0360")
        raise MoreWanted(min(pos - m.at + limit + 1, m.end - m.origin - m.at))
    m.longest = max(m.longest, end - pos)
    return m.data[pos:end], end + 1


def _counted(m: Machine, pos: int, width: int) -> tuple[int, int]:
    """Start and end of an argument whose length precedes it in `width` bytes. Raises unless it is in the window."""
    size: int = m.data[pos] if width == 1 else (_U32 if width == 4 else _U64)(m.data, pos)[0]
    start = pos + width
    m.fits(start + size - m.at, m.at)
    return start, start + size


def _take(m: Machine, pos: int, width: int) -> tuple[bytes | StorageSpan, int]:
    """Bytes with their length before them; a Span, unread, when they are long and spans are wanted."""
    size = m.data[pos] if width == 1 else (_U32 if width == 4 else _U64)(m.data, pos)[0]
    start = pos + width
    if m.span_from and size >= m.span_from:
        if m.origin + start + size > m.end:
            raise Misuse(f"a string of {size} bytes, but {m.end - m.origin - start} are left", "E0368")
        return StorageSpan(m.origin + start, size), start + size
    m.fits(start + size - m.at, m.at)
    data = m.data[start : start + size]
    if m.places:
        data = Placed(data)
        data.offset = m.origin + start
    return data, start + size


# -- numbers and strings ----------------------------------------------------------------------------------------------


def _int(m: Machine, pos: int) -> int:
    line, pos = _line(m, pos, INT_LIMIT)
    m.stack.append(line == b"01" if line in (b"00", b"01") else int(line, 0))
    return pos


def _long(m: Machine, pos: int) -> int:
    line, pos = _line(m, pos, INT_LIMIT)
    m.stack.append(int(line.removesuffix(b"L"), 0))
    return pos


def _long1(m: Machine, pos: int) -> int:
    start, end = _counted(m, pos, 1)
    m.stack.append(int.from_bytes(m.data[start:end], "little", signed=True))
    return end


def _long4(m: Machine, pos: int) -> int:
    size: int = _I32(m.data, pos)[0]
    if size < 0:
        raise Misuse(f"an integer of {size} bytes", "E0368")
    m.fits(size + pos + 4 - m.at, m.at, INT_LIMIT + 5)
    m.stack.append(int.from_bytes(m.data[pos + 4 : pos + 4 + size], "little", signed=True))
    return pos + 4 + size


def _float(m: Machine, pos: int) -> int:
    line, pos = _line(m, pos, INT_LIMIT)
    m.stack.append(float(line))
    return pos


def _binfloat(m: Machine, pos: int) -> int:
    m.stack.append(_FLOAT(m.data, pos)[0])
    return pos + 8


def _string(m: Machine, pos: int) -> int:
    """STRING: a Python 2 `repr`, quoted and escaped."""
    line, pos = _line(m, pos, 1 << 20)
    line = line.strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise Misuse("a STRING without quotes", "E0363")
    m.stack.append(_text(codecs.escape_decode(line[1:-1])[0]))
    return pos


def _text(raw: bytes) -> str | bytes:
    """Python 2's `str`: text where it is UTF-8, else bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _binstring(width: int) -> Handler:
    def push(m: Machine, pos: int) -> int:
        if width == 4 and _I32(m.data, pos)[0] < 0:
            raise Misuse("a string of negative length", "E0368")
        start, end = _counted(m, pos, width)
        m.stack.append(_text(m.data[start:end]))
        return end

    return push


def _unicode(m: Machine, pos: int) -> int:
    line, pos = _line(m, pos, 1 << 20)
    m.stack.append(str(line, "raw-unicode-escape"))
    return pos


def _binunicode8(m: Machine, pos: int) -> int:
    start, end = _counted(m, pos, 8)
    m.stack.append(str(m.data[start:end], "utf-8", "surrogatepass"))
    return end


def _bytes(width: int) -> Handler:
    def push(m: Machine, pos: int) -> int:
        value, pos = _take(m, pos, width)
        m.stack.append(value)
        return pos

    return push


# -- containers -------------------------------------------------------------------------------------------------------


def _pop_mark(m: Machine) -> list[Any]:
    items = m.stack
    m.stack = m.meta.pop()
    return items


def _make(build: Callable[[list[Any]], Any]) -> Handler:
    def push(m: Machine, pos: int) -> int:
        items = _pop_mark(m)
        m.stack.append(build(items))
        return pos

    return push


def _dict(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise Misuse("DICT with a key and no value", "E0363")
    return {safe_key(items[i]): items[i + 1] for i in range(0, len(items), 2)}


def _tuple3(m: Machine, pos: int) -> int:
    stack = m.stack
    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
    return pos


def _empty_set(m: Machine, pos: int) -> int:
    m.stack.append(set())
    return pos


def _appends(m: Machine, pos: int) -> int:
    items = _pop_mark(m)
    list_of(m, m.stack[-1]).extend(items)
    return pos


def _setitem(m: Machine, pos: int) -> int:
    value = m.stack.pop()
    key = m.stack.pop()
    dict_of(m, m.stack[-1])[safe_key(key)] = value
    return pos


def _additems(m: Machine, pos: int) -> int:
    items = _pop_mark(m)
    set_of(m, m.stack[-1]).update(safe_key(item) for item in items)
    return pos


# -- stack and memo ---------------------------------------------------------------------------------------------------


def _pop(m: Machine, pos: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        _pop_mark(m)
    return pos


def _drop_mark(m: Machine, pos: int) -> int:
    _pop_mark(m)
    return pos


def _dup(m: Machine, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _get(m: Machine, pos: int) -> int:
    line, pos = _line(m, pos, INT_LIMIT)
    index = int(line)
    if index < 0:
        raise Misuse(f"memo index {index}", "E0367")
    m.stack.append(m.memo[index])
    return pos


def _put(m: Machine, pos: int) -> int:
    line, pos = _line(m, pos, INT_LIMIT)
    m.put(int(line), m.stack[-1])
    return pos


# -- names, calls, persistent ids -------------------------------------------------------------------------------------


def _two_lines(m: Machine, pos: int) -> tuple[str, str, int]:
    module, pos = _line(m, pos)
    name, pos = _line(m, pos)
    return str(module, "utf-8"), str(name, "utf-8"), pos


def _global(m: Machine, pos: int) -> int:
    module, name, pos = _two_lines(m, pos)
    m.stack.append(m.name(module, name))
    return pos


def _stack_global(m: Machine, pos: int) -> int:
    name = m.stack.pop()
    m.stack[-1] = m.name(m.stack[-1], name)
    return pos


def _inst(m: Machine, pos: int) -> int:
    module, name, pos = _two_lines(m, pos)
    made = m.name(module, name)
    args = _pop_mark(m)
    m.stack.append(call(m, made, tuple(args)))
    return pos


def _obj(m: Machine, pos: int) -> int:
    args = _pop_mark(m)
    m.stack.append(call(m, args[0], tuple(args[1:])))
    return pos


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs = m.stack.pop()
    args = m.stack.pop()
    if not isinstance(kwargs, dict) or type(args) is not tuple:
        raise Misuse("NEWOBJ_EX wants a tuple and a dict", "E0363")
    m.stack[-1] = call(m, m.stack[-1], (*args, kwargs) if kwargs else args)
    return pos


def _extension(width: int) -> Handler:
    """EXT1, EXT2, EXT4: a number in a registry of the process that wrote: it could be any name, so it is unsafe."""

    def push(m: Machine, pos: int) -> int:
        if pos + width > len(m.data):
            raise MoreWanted(width + 1)
        code = int.from_bytes(m.data[pos : pos + width], "little")
        m.stack.append(m.name("copyreg", f"extension.{code}"))
        return pos + width

    return push


def _persid(m: Machine, pos: int) -> int:
    raise Misuse("persistent id is text, want a torch storage's tuple", "E0366")


def _binpersid(m: Machine, pos: int) -> int:
    """A torch storage. Torch takes the first mention of a key, so two that differ would be read differently."""
    ref = storage(m.stack[-1])
    if type(ref) is StorageRef:
        known = m.storages.setdefault(ref.key, ref)
        if known[:4] != ref[:4]:
            raise Misuse(
                f"storage {ref.key} is {known.numel} in a {known.kind}, then {ref.numel} in a {ref.kind}", "E0366"
            )
        ref = known
    m.stack[-1] = ref
    return pos


def _next_buffer(m: Machine, pos: int) -> int:
    m.stack.append(Opaque("pickle.PickleBuffer"))
    return pos


# -- the stream -------------------------------------------------------------------------------------------------------


def _proto(m: Machine, pos: int) -> int:
    version = m.data[pos]
    if version > 5:
        raise Misuse(f"pickle protocol {version}, want 0 to 5", "E0362")
    m.protocol = version
    return pos + 1


def _frame(m: Machine, pos: int) -> int:
    size = _U64(m.data, pos)[0]
    left = m.end - m.origin - pos - 8
    if size > left:
        raise Misuse(f"a frame of {size} bytes, but {left} are left", "E0368")
    return pos + 8


def _stop(m: Machine, pos: int) -> int:
    m.stopped = True
    return pos


def _handlers() -> tuple[Handler, ...]:
    table: dict[bytes, Handler] = {
        b".": _stop,
        b"0": _pop,
        b"1": _drop_mark,
        b"2": _dup,
        b"F": _float,
        b"G": _binfloat,
        b"I": _int,
        b"L": _long,
        b"\x8a": _long1,
        b"\x8b": _long4,
        b"N": _constant(None),
        b"\x88": _constant(True),
        b"\x89": _constant(False),
        b"S": _string,
        b"T": _binstring(4),
        b"U": _binstring(1),
        b"V": _unicode,
        b"\x8d": _binunicode8,
        b"B": _bytes(4),
        b"C": _bytes(1),
        b"\x8e": _bytes(8),
        b"\x96": _bytes(8),
        b"l": _make(list),
        b"d": _make(_dict),
        b"\x87": _tuple3,
        b"\x8f": _empty_set,
        b"e": _appends,
        b"s": _setitem,
        b"\x90": _additems,
        b"\x91": _make(lambda items: frozenset(safe_key(item) for item in items)),
        b"g": _get,
        b"p": _put,
        b"c": _global,
        b"\x93": _stack_global,
        b"i": _inst,
        b"o": _obj,
        b"\x92": _newobj_ex,
        b"\x82": _extension(1),
        b"\x83": _extension(2),
        b"\x84": _extension(4),
        b"P": _persid,
        b"Q": _binpersid,
        b"\x97": _next_buffer,
        b"\x98": lambda m, pos: pos,
        b"\x80": _proto,
        b"\x95": _frame,
    }
    return tuple(table.get(bytes([byte]), _unknown) for byte in range(256))


HANDLERS = _handlers()
