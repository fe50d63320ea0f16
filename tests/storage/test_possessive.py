"""The greedy patterns that Python 3.10 has in place of possessive ones match what those match, and no more.

The rest of the suite runs them too, where Python 3.10 runs it."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.formats.hub_folder import index
from ckpt_tool.sources.config import parsed
from ckpt_tool.storage import json_strings
from ckpt_tool.storage.possessive import greedy
from ckpt_tool.storage.safetensors_files import safetensors_entries
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.storage.texts.strict_json import members, parse

newer = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 has no possessive quantifiers to compare with"
)

PATTERNS = [
    *(value for value in vars(strict_json).values() if isinstance(value, re.Pattern)),
    *(value for value in vars(json_strings).values() if isinstance(value, re.Pattern)),
    *(value for value in vars(index).values() if isinstance(value, re.Pattern)),
    safetensors_entries._COMPACT.entry,
    safetensors_entries._COMPACT.kind,
]
BYTES_PATTERNS = [pattern for pattern in PATTERNS if isinstance(pattern.pattern, bytes)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (rb"[ \t]*+x", rb"[ \t]*x"),
        (rb"a++b?", rb"a+b?"),
        (rb"[0-9]{0,17}+", rb"[0-9]{0,17}"),
        (rb"(?:ab*+)*+", rb"(?:ab*){0,200}"),
        (rb"(?:ab)++", rb"(?:ab){1,200}"),
        (rb"[*+]+\*\++[]*+]", rb"[*+]+\*\++[]*+]"),  # in a class, or escaped, it is no quantifier
    ],
)
def test_a_possessive_quantifier_becomes_a_greedy_one(pattern, expected):
    assert greedy(pattern) == expected


@newer
@pytest.mark.parametrize("pattern", BYTES_PATTERNS, ids=lambda pattern: repr(pattern.pattern)[:40])
@given(
    text=st.lists(st.sampled_from([b'"', b"\\", b"{", b"}", b":", b",", b" ", b"1", b"0", b"-", b"a", b"\n"])).map(
        b"".join
    )
)
def test_the_greedy_pattern_matches_the_same(pattern, text):
    possessive_match = pattern.match(text)
    greedy_match = re.compile(greedy(pattern.pattern), pattern.flags).match(text)

    assert (greedy_match and greedy_match.regs) == (possessive_match and possessive_match.regs)


@pytest.mark.parametrize("escapes", [1, 199, 200, 201, 100_000])
def test_a_string_may_have_any_number_of_escapes(escapes):
    """A member that is there twice leads to the exact parser, which reads keys and values by these patterns."""
    string = b'"' + rb"\n\"x" * escapes + b'"'
    text = '\n"x' * escapes

    assert parse(b"[-0, " + string + b"]", path="x") == [-0.0, text]
    assert parse(b'{"a": -0, ' + string + b" : 1}", path="x") == {"a": -0.0, text: 1}
    assert [member.value for member in members(b'{"a": {"b": ' + string + b"}}", path="x")] == [{"b": text}]


def test_words_of_floats_are_read_outside_strings_alone():
    raw = rb'{"a": "NaN \" NaN", "b": [NaN, -Infinity], "c\\": Infinity}'
    floats = {"b": [{"__float__": "NaN"}, {"__float__": "-Infinity"}], "c\\": {"__float__": "Infinity"}}

    assert parsed(raw, "config.json") == {"a": 'NaN " NaN', **floats}
