"""Where a string of a JSON text ends, in linear time and without memory, on every Python.

    >>> raw = b'"a \\\\" b", 1'
    >>> end_of_string(raw, 3)
    8

A JSON string is plain bytes, escapes of a backslash and a byte, and a quote. One expression for all of it would need a
repeated group, which `storage.possessive` bounds; so a few hundred escapes are matched at a time. For `strict_json`,
which reads strings, and `json_faults`, which says what is wrong with one. Escapes are not checked here.
"""

from __future__ import annotations

from ckpt_tool.storage.possessive import REPEATS, possessive

_ESCAPES = possessive(rb'(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+){1,%d}+' % REPEATS)


def end_of_string(raw: bytes, at: int) -> int:
    """The index of what ends a string: its closing quote, a control byte or the end of the text. at: where the string
    has its first escape, or ends."""
    while raw[at : at + 1] == b"\\":
        escapes = _ESCAPES.match(raw, at)
        if escapes is None:
            return at
        at = escapes.end()
    return at
