"""JSON that comes from a stranger: strict, bounded, and every fault has a place.

The one idea: two parsers of one language. The interpreter's own C scanner reads almost everything; whatever it
refuses, and whatever it would let through that we do not want, goes to a slow exact parser that walks the bytes
token by token and either accepts by the same rules or says which rule was broken, at which byte, under which JSON
pointer. Acceptance is decided by the rules below, never by which parser ran.

Rules (RFC 8259, tightened): UTF-8 without a byte order mark; no duplicate keys in an object; no NaN, Infinity or
number that overflows a double; no lone surrogates; at most 64 containers deep and 2,000,000 values; integers of at
most 4,300 digits; `-0` is a float.

    >>> parse(b'{"a": [1, 2]}', path="x.json")
    {'a': [1, 2]}
    >>> parse(b'{"a": 1, "a": 1}', path="x.json")
    Traceback (most recent call last):
    ckpt_tool.errors.CorruptFile: duplicate key: 'a' appears twice in one object, at bytes 1 and 9

Cost: the C scanner's (10 ns a byte) for valid input; about 1 us a token in the exact parser, which allocates no more
than the values it has accepted so far. Does not read files and knows no schema.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from ckpt_tool.errors import CorruptFile
from ckpt_tool.storage.json_strings import end_of_string
from ckpt_tool.storage.magic import advice, is_lfs_pointer, what_is
from ckpt_tool.storage.possessive import possessive

DEPTH_LIMIT = 64  # containers
VALUE_LIMIT = 2_000_000  # values of one document
DIGIT_LIMIT = 4_300  # CPython's own bound on int() of a string

NOT_UTF8 = "E0319"
SYNTAX = "E0320"
DUPLICATE = "E0321"
NOT_A_NUMBER = "E0322"
LIMIT = "E0323"
SURROGATE = "E0324"

_BLOCK = 1 << 20  # bytes decoded at a time
_SPACE = possessive(rb"[ \t\n\r]*+")
# Of a string the part before its first escape: `end_of_string` finds the rest.
_TOKEN = possessive(
    rb"[ \t\n\r]*+(?:([\[\]{},:])"
    rb'|("[^"\\\x00-\x1f]*+)'
    rb"|(-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)"
    rb"|(true|false|null))"
)
_KEY = possessive(rb'[ \t\n\r]*+("[^"\\\x00-\x1f]*+")[ \t\n\r]*+:[ \t\n\r]*+')  # without escapes
_QUOTE = possessive(rb'[ \t\n\r]*+"[^"\\\x00-\x1f]*+')
_COLON = possessive(rb"[ \t\n\r]*+:[ \t\n\r]*+")
# An object without objects inside, as header entries are: its end is found without parsing it.
_FLAT = possessive(rb'\{[^{}"\\]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^{}"\\]*+)*+\}', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")
_MINUS_ZERO = re.compile(rb"-0(?![^ \t\n\r,\]}])(?<![^ \t\n\r,:\[]-0)")  # as a whole number token
_WORDS = {b"true": True, b"false": False, b"null": None}


class JsonMember(NamedTuple):
    """One member of an object, with the bytes from the start of the file to its key and to its value."""

    key: str
    value: Any
    key_offset: int
    value_offset: int


def pointer(*parts: str | int) -> str:
    """A JSON pointer (RFC 6901); long names are cut for display.  pointer("a/b", 0) -> '/a~1b/0'"""
    return "".join("/" + str(part)[:200].replace("~", "~0").replace("/", "~1") for part in parts)


def parse(raw: bytes, *, path: str, offset: int = 0, place: str = "", limit: int = VALUE_LIMIT) -> Any:
    """The value of the JSON document `raw`.

    Args:
        raw: the whole document.
        path: the file, for messages. offset: bytes from its start to `raw[0]`.
        place: the JSON pointer of the document itself if it is part of another one.
        limit: values of the document.

    Raises CorruptFile (E0319 not UTF-8, E0320 syntax, E0321 duplicate key, E0322 NaN or Infinity, E0323 a limit,
    E0324 lone surrogate) with byte offset and JSON pointer.
    """
    found = _quick(raw, limit)
    if found is not None:
        return found[0]
    if is_lfs_pointer(raw):
        raise CorruptFile(f"this is {what_is(raw)}, want JSON", code=SYNTAX, path=path, offset=offset, hint=advice(raw))
    exact = _Exact(raw, path, offset, place, limit)
    value, end = exact.value(0)
    exact.expect_end(end)
    return value


def members(raw: bytes, *, path: str, offset: int = 0, limit: int = VALUE_LIMIT) -> Iterator[JsonMember]:
    """The members of the one object that `raw` is, in order, each parsed when it is asked for.

    limit: values inside one member. Memory is that of one value (and of the keys, to find duplicates). Raises as
    `parse` does.
    """
    check_utf8(raw, path=path, offset=offset)
    exact = _Exact(raw, path, offset, "", limit)
    at = exact.skip(0)
    if raw[at : at + 1] != b"{":
        exact.want("an object", at)

    seen: dict[str, int] = {}
    at = exact.skip(at + 1)
    if raw[at : at + 1] == b"}":
        exact.expect_end(at + 1)
        return

    while True:
        key, key_at, value_at = exact.key(at)
        if seen.setdefault(key, key_at) != key_at:
            exact.duplicate(key, seen[key], key_at)
        exact.prefix = pointer(key)
        value, end = exact.member_value(value_at)
        exact.prefix = ""
        yield JsonMember(key, value, offset + key_at, offset + value_at)
        at = exact.skip(end)
        mark = raw[at : at + 1]
        if mark == b"}":
            exact.expect_end(at + 1)
            return
        if mark != b",":
            exact.want("',' or '}'", at)
        at += 1


def value_at(raw: bytes, at: int, *, path: str, offset: int = 0, place: str = "") -> tuple[Any, int]:
    """The value that starts at `raw[at]`, and the index after it. What follows is not looked at."""
    return _Exact(raw, path, offset, place).value(at)


def check_utf8(raw: bytes, *, path: str, offset: int = 0) -> None:
    """Raise CorruptFile (E0319) at the first byte that is not UTF-8. Memory: one block."""
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(raw), _BLOCK):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(raw[at : at + _BLOCK], final=at + _BLOCK >= len(raw))
        except UnicodeDecodeError as e:
            bad = at - pending + e.start
            wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            raise CorruptFile(
                "the text is UTF-16, want UTF-8"
                if wide
                else f"not UTF-8: byte 0x{raw[bad]:02x} at {offset + bad} ({e.reason})",
                code=NOT_UTF8,
                path=path,
                offset=offset + bad,
                hint="JSON is UTF-8: the file is damaged or is something else",
            ) from e


def _quick(raw: bytes, limit: int = VALUE_LIMIT) -> tuple[Any] | None:
    """The value by the C scanner, in a 1-tuple, where nothing is in doubt. limit: of its values."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") >= limit:
        return None
    if _SURROGATE.search(raw) or _MINUS_ZERO.search(raw):
        return None
    try:
        value = _SCANNER.decode(raw.decode("utf-8"))
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None
    return (value,) if _shallow(value, DEPTH_LIMIT) else None


def _shallow(value: Any, limit: int) -> bool:
    """Is `value` at most `limit` containers deep?"""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not level:
            return True
        level = [
            inner
            for box in level
            for inner in (box.values() if type(box) is dict else box)
            if type(inner) is dict or type(inner) is list
        ]
    return not level


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")  # never shown: the exact parser says which
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)  # never shown


def _finite(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise ValueError("overflow")  # never shown
    return number


_SCANNER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


class _Open:
    """A container that is still being filled."""

    __slots__ = ("box", "key", "keys")

    def __init__(self, box: dict[str, Any] | list[Any]) -> None:
        self.box = box
        self.key: str | None = None
        self.keys: dict[str, int] = {}

    def add(self, value: Any) -> None:
        """Add a value to the container: to a list, or under the last key."""
        if isinstance(self.box, list):
            self.box.append(value)
        elif self.key is not None:
            self.box[self.key] = value

    def parts(self) -> tuple[str | int, ...]:
        """The index or key of the value that is being read, as a tuple; () before the first key."""
        if isinstance(self.box, list):
            return (len(self.box),)
        return () if self.key is None else (self.key,)


class _Exact:
    """The slow parser: iterative, counted, and able to say where it is. Indexes are into `raw`."""

    def __init__(self, raw: bytes, path: str, offset: int, place: str, limit: int = VALUE_LIMIT) -> None:
        self.limit = limit
        self.raw = raw
        self.path = path
        self.offset = offset
        self.prefix = place
        self.open: list[_Open] = []
        self.count = 0

    # -- faults -------------------------------------------------------------------------------------------------

    def fail(self, message: str, code: str, at: int, hint: str = "") -> NoReturn:
        """Raise CorruptFile with the position and the JSON pointer of byte `at`."""
        from ckpt_tool.storage.texts.json_faults import EDITED

        raise CorruptFile(
            message,
            code=code,
            path=self.path,
            offset=self.offset + at,
            place=self.prefix + pointer(*(part for each in self.open for part in each.parts())) or None,
            hint=hint or EDITED,
        )

    def want(self, wanted: str, at: int) -> NoReturn:
        """Raise the error for byte `at`, where `wanted` was expected: a syntax error, or a more specific one."""
        from ckpt_tool.storage.texts.json_faults import fault_of

        if not self.raw[at:].isascii():
            check_utf8(self.raw, path=self.path, offset=self.offset)
        fault = fault_of(self.raw, at, wanted)
        self.fail(fault.message, NOT_A_NUMBER if fault.number else SYNTAX, fault.at, fault.hint)

    def duplicate(self, key: str, first: int, second: int) -> NoReturn:
        """Raise the error for a key that appears at two bytes of one object."""
        places = f"bytes {self.offset + first} and {self.offset + second}"
        self.fail(
            f"duplicate key: {key[:200]!r} appears twice in one object, at {places}",
            DUPLICATE,
            second,
            hint="readers disagree on which of the two counts: the file can't be trusted",
        )

    # -- pieces -------------------------------------------------------------------------------------------------

    def skip(self, at: int) -> int:
        """The index of the next byte that is no white space."""
        space = _SPACE.match(self.raw, at)
        return space.end() if space else at

    def expect_end(self, at: int) -> None:
        """Raise unless nothing but white space follows from byte `at` on."""
        at = self.skip(at)
        if at != len(self.raw):
            from ckpt_tool.storage.texts.json_faults import glimpse

            self.fail(f"the JSON text ends, but {glimpse(self.raw, at)} follows", SYNTAX, at)

    def string(self, token: bytes, at: int) -> str:
        """The text of a string token, quotes included."""
        try:
            text = token[1:-1].decode("utf-8")
        except UnicodeDecodeError as e:
            self.fail(f"not UTF-8: byte 0x{token[1 + e.start]:02x} ({e.reason})", NOT_UTF8, at + 1 + e.start)
        if "\\" not in text:
            return text
        try:
            text = str(json.loads(f'"{text}"'))
        except ValueError:
            from ckpt_tool.storage.texts.json_faults import bad_escape

            fault = bad_escape(token, at, self.raw)
            self.fail(fault.message, SYNTAX, fault.at)
        if _LONE.search(text):
            self.fail("a string holds a lone surrogate, which no encoding can write", SURROGATE, at)
        return text

    def number(self, token: bytes, at: int) -> int | float:
        """The value of a number token. Raises for an overflow and for too many digits."""
        digits = len(token)
        if b"." in token or b"e" in token or b"E" in token or token == b"-0":
            number = float(token)
            if number - number != 0:
                self.fail(f"the number {token[:40].decode()} overflows a double", NOT_A_NUMBER, at)
            return number
        # Python's conversion takes time quadratic in the digits.
        if digits > DIGIT_LIMIT:
            self.fail(f"a number of {digits} digits, want at most {DIGIT_LIMIT}", LIMIT, at)
        return int(token)

    def key(self, at: int) -> tuple[str, int, int]:
        """(text, where it starts, where its value starts)."""
        found = _KEY.match(self.raw, at)
        if found is not None:
            return self.string(found[1], found.start(1)), found.start(1), found.end()

        start = self.skip(at)
        opening = _QUOTE.match(self.raw, start)
        end = start if opening is None else end_of_string(self.raw, opening.end()) + 1
        colon = _COLON.match(self.raw, end)
        if opening is None or self.raw[end - 1 : end] != b'"' or colon is None:
            self.want("a key in quotes and ':'", start)
        return self.string(self.raw[start:end], start), start, colon.end()

    def member_value(self, at: int) -> tuple[Any, int]:
        """The value at `at`, by the C scanner if it is an object without objects inside. Restarts the count of values,
        so that the limit applies to each member."""
        self.count = 0
        flat = _FLAT.match(self.raw, at)
        if flat is not None:
            quick = _quick(flat[0], self.limit)
            if quick is not None:
                return quick[0], flat.end()
        return self.value(at)

    # -- the walk -----------------------------------------------------------------------------------------------

    def value(self, at: int) -> tuple[Any, int]:
        """The value that starts at `at`, and the index after it."""
        while True:
            value, at = self._start(at)
            if value is _OPENED:
                continue
            while self.open:
                inner = self.open[-1]
                inner.add(value)
                kind = type(inner.box)
                at = self.skip(at)
                mark = self.raw[at : at + 1]
                if mark == b",":
                    at = self._next_key(at + 1) if kind is dict else at + 1
                    break
                if mark != (b"}" if kind is dict else b"]"):
                    self.want(f"',' or the closing {'}' if kind is dict else ']'!r}", at)
                value = self.open.pop().box
                at = at + 1
            else:
                return value, at

    def _start(self, at: int) -> tuple[Any, int]:
        """A scalar or an empty container whole; `_OPENED` where a container was opened."""
        token = _TOKEN.match(self.raw, at)
        if token is None:
            self.want("a value", self.skip(at))
        self.count += 1
        if self.count > self.limit:
            self.fail(f"more than {self.limit} values", LIMIT, token.start(), hint="no real checkpoint has as many")

        end = token.end()
        if token[2] is not None:
            start = token.start(2)
            end = end_of_string(self.raw, end)
            if self.raw[end : end + 1] != b'"':
                self.want("a value", start)
            return self.string(self.raw[start : end + 1], start), end + 1

        if token[3] is not None:
            return self.number(token[3], token.start(3)), end
        if token[4] is not None:
            return _WORDS[token[4]], end

        mark = token[1]
        start = token.start(1)
        if mark not in b"{[":
            self.want("a value", start)
        if len(self.open) == DEPTH_LIMIT:
            self.fail(f"nested more than {DEPTH_LIMIT} deep", LIMIT, start, hint="no real checkpoint nests this deep")

        box: dict[str, Any] | list[Any] = {} if mark == b"{" else []
        inside = self.skip(end)
        if self.raw[inside : inside + 1] == (b"}" if mark == b"{" else b"]"):
            return box, inside + 1

        self.open.append(_Open(box))
        return _OPENED, self._next_key(inside) if mark == b"{" else inside

    def _next_key(self, at: int) -> int:
        """Read a key into the open object; the index where its value starts."""
        inner = self.open[-1]
        key, key_at, value_at = self.key(at)
        if inner.keys.setdefault(key, key_at) != key_at:
            inner.key = key
            self.duplicate(key, inner.keys[key], key_at)
        inner.key = key
        return value_at


_OPENED = object()
