"""Regular expressions that never try again with fewer, on every Python that the tool runs on.

    >>> possessive(rb'"[^"]*+"').fullmatch(b'"a name"')[0]
    b'"a name"'

A text that a stranger wrote is matched by possessive quantifiers (`*+`, `++`, `{1,9}+`), which keep no places to return
to: their time is linear and their memory none. Python has them from 3.11 on. Python 3.10 takes the same pattern with
greedy quantifiers. The match is the same where nothing that may follow a quantifier begins with what it repeats: every
pattern given here is written so. Of one byte class, a greedy quantifier needs no memory either. Of a group it needs
some 150 bytes for each repetition, so there a group repeats at most `REPEATS` times: the caller goes on with another
match, or by another way, where a text has more.
"""

from __future__ import annotations

import re
import sys

REPEATS = 200  # of one group, in Python 3.10 alone

_QUANTIFIER = re.compile(rb"(\\.)|(\[\^?\]?(?:\\.|[^\]\\])*\])|(\)?)([*+]|\{[0-9,]+\})\+", re.DOTALL)


def possessive(pattern: bytes, flags: int = 0) -> re.Pattern[bytes]:
    """`re.compile(pattern, flags)`; in Python 3.10 of the greedy pattern that has the same matches."""
    if sys.version_info >= (3, 11):
        return re.compile(pattern, flags)

    return re.compile(greedy(pattern), flags)


def greedy(pattern: bytes) -> bytes:
    r"""The pattern with greedy quantifiers in place of possessive ones.

    >>> greedy(rb'[a*+]*+(?:\\.b++)*+c')
    b'[a*+]*(?:\\\\.b+){0,200}c'
    """
    return _QUANTIFIER.sub(_spell_greedy, pattern)


def _spell_greedy(found: re.Match[bytes]) -> bytes:
    escape_or_class = found[1] or found[2]
    if escape_or_class:
        return escape_or_class

    closes_group = found[3]
    quantifier = found[4]
    if not closes_group or quantifier not in b"*+":
        return closes_group + quantifier

    least = 0 if quantifier == b"*" else 1
    return b"){%d,%d}" % (least, REPEATS)
