"""Thousands of patterns against tens of thousands of names: the same names as one test after the other, in linear
time."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.patterns import Names, matcher
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.option_kinds.values import BadValue, patterns
from ckpt_tool.sources.select import split_keys

LETTERS = "ab.\n[]*?!-é\U0010ffff"
MANY = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    for layer in range(25)
    for expert in range(267)
    for part in ("up", "gate", "down")
][:20_000]
KINDS = {
    "names": lambda name: name,
    "prefixes": lambda name: name[:-6] + "*",
    "suffixes": lambda name: "*" + name[6:],
    "parts": lambda name: "*" + name[6:-7] + "*",
    "classes": lambda name: name[:-7] + "[.]weight",
    "misses": lambda name: name + "x",
    "missing parts": lambda name: "*" + name[6:-7] + "x*",
}


@given(st.lists(st.text(LETTERS, max_size=6), max_size=12), st.lists(st.text(LETTERS, max_size=6), max_size=6))
def test_names_match_as_one_by_one(names: list[str], globs: list[str]) -> None:
    globs = [glob for glob in globs if not glob.startswith("re:")]
    found, misses = Names(names).matched(globs)
    assert found == {name for name in names if any(fnmatchcase(name, glob) for glob in globs)}
    assert misses == [glob for glob in dict.fromkeys(globs) if not any(fnmatchcase(name, glob) for name in names)]


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_patterns_on_twenty_thousand_names_take_linear_time(kind: str) -> None:
    """Trying each on each took 13 s and more."""
    keys = [TensorKey(name) for name in MANY]
    wanted = [KINDS[kind](name) for name in MANY[:2000]]
    began = time.process_time()
    try:
        _, gone = split_keys(keys, remove=wanted, keep=())
    except UsageError as error:
        assert "miss" in kind and error.code == "E0255" and len(error.faults) == 1999
    else:
        assert {key.name for key in gone} >= set(MANY[:2000])
    assert time.process_time() - began < 6


@pytest.mark.parametrize(
    ("pattern", "told"),
    {
        "re:" + "(" * 5000 + ")" * 5000: "nested too deeply",
        "re:a{1,99999999999999}": "too large",
        "re:(((((": "unterminated",
        "[" * 50_000: "50000 characters",
        "re:" + "x" * 50_000: "50003 characters",
    }.items(),
    ids=lambda text: text[:12],
)
def test_a_pattern_that_can_not_be_one_is_told_so(pattern: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        matcher(pattern)
    assert caught.value.code == "E0254" and caught.value.hint
    with pytest.raises(BadValue, match=told):
        patterns([pattern])
