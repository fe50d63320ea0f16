"""What is wrong with a JSON text at the byte where it stopped reading, in words that say how to mend it.

    {"a": "two          "control character (newline) inside a string at line 1 column 11; JSON writes it as \\n"
    lines"}
    {'a': 1}            "a text in single quotes at line 1 column 2; JSON has double quotes"
    {"a": 1,}           "a comma before the closing '}' at line 1 column 8; JSON has no trailing comma"

The parsers (`texts.strict_json`, Python's own, editors with extensions) disagree on what is JSON; most texts that
fail were written by hand or by a program for one of those dialects. Lines and columns count from 1, columns in
characters. Cost: none but on failure, then a look at the text before the fault.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

from ckpt_tool.storage.json_strings import end_of_string
from ckpt_tool.storage.possessive import possessive

EDITED = "the file is damaged or was edited"
CUT = "the file is cut short: compare its size with the source"
_PLAIN = possessive(rb'[^"\\\x00-\x1f]*+')
_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4}).?', re.DOTALL)
_WORD = re.compile(rb"[+-]?[A-Za-z_][A-Za-z_0-9]*")
_NAMED = {0: "NUL", 8: "backspace", 9: "tab", 10: "newline", 12: "form feed", 13: "carriage return", 27: "escape"}
_SHORT = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_WORDS = {b"none": "null", b"undefined": "null", b"nil": "null", b"true": "true", b"false": "false", b"null": "null"}
_NUMBERS = (b"nan", b"inf", b"infinity")


class JsonFault(NamedTuple):
    """Why a text is not JSON."""

    message: str
    at: int  # the byte of the text that is at fault
    hint: str = EDITED
    rule: str = ""  # what JSON has instead
    number: bool = False  # a value that JSON has no number for (NaN)?


def line_and_column(raw: bytes, at: int) -> str:
    """`at line 2 column 7`: of byte `at` of the text."""
    start = raw.rfind(b"\n", 0, at) + 1
    return f"at line {raw.count(bytes([10]), 0, at) + 1} column {len(raw[start:at].decode('utf-8', 'replace')) + 1}"


def glimpse(raw: bytes, at: int) -> str:
    """The text at `raw[at]`, short enough for a message."""
    return "the end" if at >= len(raw) else repr(raw[at : at + 12])[1:]


def fault_of(raw: bytes, at: int, wanted: str) -> JsonFault:
    """The fault at `raw[at]`, where `wanted` was expected ("a value", "',' or ']'")."""
    found = (
        _nothing(raw, at)
        or _encoding(raw, at)
        or _string(raw, at)
        or _foreign(raw, at)
        or _comma(raw, at)
        or _number(raw, at)
        or JsonFault(f"want {wanted}, found {glimpse(raw, at)}", at)
    )
    if not raw.strip():
        return found
    rule = f"; {found.rule}" if found.rule else ""
    return found._replace(message=f"{found.message} {line_and_column(raw, found.at)}{rule}")


def _nothing(raw: bytes, at: int) -> JsonFault | None:
    if not raw.strip():
        return JsonFault("the text is empty, want a value", at, CUT)
    if not raw[at:].strip(b"\x00"):
        if at < len(raw):
            return JsonFault(
                f"want JSON, found {len(raw) - at} NUL bytes up to the end", at, "the file was never written to its end"
            )
        return JsonFault("the text ends before its last bracket is closed", at, CUT)
    return None


def _encoding(raw: bytes, at: int) -> JsonFault | None:
    if raw[:2] in (b"{\x00", b"[\x00", b"\x00{", b"\x00["):
        return JsonFault("the text is UTF-16, want plain UTF-8", at, "save the file as UTF-8 without a byte order mark")
    if raw.startswith(codecs.BOM_UTF8, at):
        return JsonFault(
            "the text begins with a byte order mark, want plain UTF-8", at, "save the file as UTF-8 without one"
        )
    return None


def _string(raw: bytes, at: int) -> JsonFault | None:
    """A string in double quotes that does not read, or one in others."""
    quote = raw[at : at + 1]
    if quote in (b"'", b"`") or raw.startswith((b"\xe2\x80\x9c", b"\xe2\x80\x9d", b"\xe2\x80\x98"), at):
        kind = {b"'": "single quotes", b"`": "backquotes"}.get(quote, "typographic quotes")
        return JsonFault(f"a text in {kind}", at, "write it in double quotes", "JSON has double quotes")
    if quote != b'"':
        return None
    plain = _PLAIN.match(raw, at + 1)
    end = end_of_string(raw, plain.end() if plain else at + 1)
    if raw[end : end + 1] == b'"':  # the string itself reads: what is wrong comes after it
        return None
    if end < len(raw) and raw[end : end + 1] == b"\\":
        end += 1
    if end >= len(raw):
        return JsonFault(f"a string is not closed, it begins {glimpse(raw, at)}", at, CUT)
    code = raw[end]
    spelled = _SHORT.get(code, f"\\u{code:04x}")
    name = _NAMED.get(code, f"0x{code:02x}")
    return JsonFault(f"control character ({name}) inside a string", end, EDITED, f"JSON writes it as {spelled}")


def _foreign(raw: bytes, at: int) -> JsonFault | None:
    """Comments, and words of other languages."""
    if raw.startswith((b"//", b"/*", b"#"), at):
        return JsonFault("a comment", at, "take the comment out", "JSON has none")
    word = _WORD.match(raw, at)
    if word is None:
        return None
    text = word[0].lower().lstrip(b"+-")
    if text in _NUMBERS:
        return JsonFault(f"{word[0].decode()} is not JSON", at, "write a number or null", number=True)
    if text in _WORDS and word[0].decode() != _WORDS[text]:
        return JsonFault(f"{word[0].decode()} is not JSON", at, f"write {_WORDS[text]}")
    return None


def _comma(raw: bytes, at: int) -> JsonFault | None:
    mark = raw[at : at + 1]
    before = raw[:at].rstrip(b" \t\r\n")
    if before.endswith(b",") and mark in (b"}", b"]", b","):
        if mark == b",":
            return JsonFault("two commas with nothing between them", at)
        message = f"a comma before the closing {mark.decode()!r}"
        return JsonFault(message, len(before) - 1, "take the comma out", "JSON has no trailing comma")
    return None


def _number(raw: bytes, at: int) -> JsonFault | None:
    """Numbers as other languages write them; `at` is where JSON's own number ends, or where it should begin."""
    begin = at
    while begin and raw[begin - 1 : begin] in (b"-", b"0") and raw[at : at + 1].isalnum():
        begin -= 1
    before = raw[begin:at]
    mark = raw[at : at + 1]
    spelled = re.match(rb"[+-]?[0-9A-Za-z_.]*", raw[begin : begin + 40])
    shown = spelled[0].decode() if spelled else ""
    if before.endswith(b"0") and mark.isdigit():
        return JsonFault(f"the number {shown} begins with a zero", begin, EDITED, "JSON has no leading zeros")
    if before.endswith(b"0") and mark in b"xXoObB" and mark:
        return JsonFault(f"the number {shown}", begin, EDITED, "JSON has decimal numbers alone")
    if (mark in (b"+", b".") and raw[at + 1 : at + 2].isdigit()) or (mark == b"." and raw[at - 1 : at].isdigit()):
        message = "a number with a plus sign" if mark == b"+" else "a number without digits on both sides of its point"
        return JsonFault(message, at, EDITED, "JSON has none")
    return None


def bad_escape(token: bytes, at: int, raw: bytes) -> JsonFault:
    """The escape in the string `token` (quotes included, at `raw[at]`) that JSON does not know."""
    position = 1
    place = at
    while position < len(token) - 1:
        if token[position : position + 1] == b"\\":
            wrong = _ESCAPE.match(token, position)
            if wrong is not None:
                place = at + position
                shown = wrong[0].decode("utf-8", "replace")
                return JsonFault(
                    f"a string holds {shown}, an escape that JSON does not know, {line_and_column(raw, place)}", place
                )
            position += 1
        position += 1
    return JsonFault("a string holds an escape that JSON does not know", place)
