"""Module patterns against Python's own `re` and PEFT's rule."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.module_patterns import NotUnderstood, first_at_the_front, first_match, matches
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.adapters.settings import settings_of

NAMES = [
    "q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.k_proj",
    "layers.1.q_proj",
    "qq_proj",
    "model.layers.0.mlp.experts.gate_up_proj",
    "a.b",
    "a-b",
    "",
]
PATTERNS = [
    "q_proj",
    "layers.1.self_attn.q_proj",
    ".*q_proj",
    "^model.layers.1",
    "^model.*q_proj",
    r"layers\.\d+\.self_attn\.(q|k)_proj",
    r"layers\.[01]\..*",
    "layers.[^0-9].*",
    "(?:q|k)_proj",
    "(self_attn|mlp).+",
    r"\w+",
    "q{1,2}_proj",
    "q{2}_proj",
    "q*?q_proj$",
    "layers.{1,3}self_attn.q_proj",
    "",
    "a[-.]b",
    r"a[\w.]b",
    "q_proj|k_proj",
    "(a|)(.b)?",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_as_pythons_own(pattern):
    for name in NAMES:
        assert matches(pattern, name) == bool(re.match(rf"(.*\.)?({pattern})$", name)), (pattern, name)
        assert (first_at_the_front([pattern], name) == 0) == bool(re.match(pattern, name)), (pattern, name)


@given(st.text("ab.*+?|()", max_size=10), st.text("ab.", max_size=8))
def test_as_pythons_own_at_random(pattern, name):
    try:
        want = bool(re.match(rf"(.*\.)?({pattern})$", name))
        re.compile(pattern)
    except re.error:
        return
    try:
        got = matches(pattern, name)
    except NotUnderstood:
        assert re.search(r"[*+?]{2}|\(\?|^\)|\)", pattern), pattern  # possessive, flags: refused in words
        return
    assert got == want, (pattern, name)


def test_peft_takes_the_first_that_fits():
    pytest.importorskip("peft")
    from peft.utils.other import get_pattern_key

    keys = ["k_proj", "layers.1.*", "q_proj"]
    for name in NAMES:
        assert (first_match(keys, name) or name) == get_pattern_key(keys, name)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a*)*b", "((a+)+)+b", "(.*a){30}b", "(a{1,99}){1,99}b"])
def test_no_pattern_hangs(pattern):
    began = time.monotonic()
    with contextlib.suppress(NotUnderstood):
        assert matches(pattern, "a" * 400 + "!") is False
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("pattern", ["((" + "^|" * 480 + "){1000}){1000}", "((" + "|" * 480 + "){1000}){1000}"])
def test_no_step_is_free(pattern):
    began = time.monotonic()
    with pytest.raises(NotUnderstood, match="too many steps"):
        matches(pattern, "model.layers.1.self_attn.q_proj")
    assert time.monotonic() - began < 1


def test_many_patterns_share_their_steps():
    began = time.monotonic()
    with pytest.raises(NotUnderstood, match="too many steps"):
        first_match([f"(.*a){{{n}}}b" for n in range(10, 400)], "a" * 400 + "!")
    assert time.monotonic() - began < 1
    assert first_match([f"layers.{n}.q_proj" for n in range(20_000)], "model.layers.19999.q_proj")


@pytest.mark.parametrize(
    "pattern", ["(?=a)", r"(a)\1", "(?i)a", "(", "a)", "[a", "*a", "a++", "a" * 2000, "(" * 40 + ")" * 40]
)
def test_what_is_not_understood_is_refused_in_words(pattern):
    with pytest.raises(NotUnderstood, match="is not used"):
        matches(pattern, "a")
    with pytest.raises(UsageError, match="module pattern") as e:
        settings_of({"peft_type": "LORA", "r": 4, "rank_pattern": {pattern: 8}}, "adapter_config.json").rank_of("a")
    assert e.value.code == "E1426"
