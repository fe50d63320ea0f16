"""Extras through JSON text and back: exact, and hostile bodies are refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.extras import Opaque, Symbol, display, from_json, to_json
from ckpt_tool.errors import CorruptFile

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
KEYS = st.text(max_size=4) | st.integers(-5, 5).map(lambda n: n + 10) | st.sampled_from(["$tuple", "$dict", "$"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Symbol, st.text(max_size=5), st.lists(inner, max_size=2).map(tuple))
        | st.builds(Opaque, st.text(max_size=5), st.lists(inner, max_size=2).map(tuple), inner)
    ),
    max_leaves=12,
)


def types(value: Any) -> Any:
    """The value with the type of every part: `==` does not tell 1 from True or 1.0."""
    if isinstance(value, dict):
        return {(type(key), key): types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    if isinstance(value, Symbol):
        return Symbol, value.name, types(value.args)
    if isinstance(value, Opaque):
        return Opaque, value.name, types(value.args), types(value.state)
    return type(value), repr(value)


@given(VALUES)
def test_there_and_back_through_text(value: Any) -> None:
    assert types(from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))) == types(value)


@given(VALUES)
def test_display_is_json(value: Any) -> None:
    json.dumps(display(value), allow_nan=False)


def test_values_that_plain_json_loses() -> None:
    value = {
        "betas": (0.9, 0.999),
        "big": 1 << 60,
        "less": -(1 << 53),
        "inf": math.inf,
        "minus": -math.inf,
        "raw": b"\x00\xff",
        "dtype": Symbol("torch.float32"),
        3: "int key",
        "set": frozenset({1, 2}),
        "zero": -0.0,
        "args": Opaque("argparse.Namespace", (), {"lr": 0.1}),
    }
    again = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert again == value
    assert math.copysign(1, again["zero"]) == -1
    assert math.isnan(from_json(to_json(math.nan)))


def test_ints_that_python_prints_no_decimals_of() -> None:
    for value in (10**5000, -(10**5000), 1 << 4095, (1 << 4096) - 1):
        assert from_json(json.loads(json.dumps(to_json(value)))) == value


def test_plain_values_stay_plain() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert to_json(value) == value


@pytest.mark.parametrize(
    "value",
    [
        {"$nonsense": 1},
        {"$": 1},
        {"$int": 3},
        {"$int": "x"},
        {"$int": None},
        {"$float": 1},
        {"$float": "one"},
        {"$bytes": "!"},
        {"$bytes": 3},
        {"$tuple": "abc"},
        {"$tuple": {"a": 1}},
        {"$set": [[1]]},
        {"$symbol": []},
        {"$symbol": "torch.float32"},
        {"$opaque": ["a"]},
        {"$opaque": ["a", 3, None]},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$dict": {"a": 1}},
        {"a": [{"$tuple": 1}]},
    ],
)
def test_refuses(value: Any) -> None:
    with pytest.raises(CorruptFile) as error:
        from_json(value)
    assert error.value.code == "E0314"


def test_bottomless_nesting_is_our_error() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CorruptFile):
        from_json(value)


def test_what_is_no_plain_value_is_a_bug_of_ours() -> None:
    with pytest.raises(TypeError):
        to_json(object())


def test_display_reads_well() -> None:
    value = {
        "a": (1, b"xyz"),
        2: math.nan,
        "d": Symbol("torch.device", ("cpu",)),
        "n": Opaque("x.Y"),
        "t": Symbol("t.f"),
    }
    assert display(value) == {"a": [1, "<3 bytes>"], "2": "nan", "d": "torch.device('cpu')", "n": "<x.Y>", "t": "t.f"}
