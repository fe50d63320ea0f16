"""Expressions against Python's own evaluation of the same text, and what they refuse."""

from __future__ import annotations

import random

import pytest

from ckpt_tool.algebra.expression import expression, extent, extents
from ckpt_tool.errors import UsageError

CONFIG = {
    "a": 7,
    "b": 3,
    "zero": 0,
    "flag": True,
    "none_key": None,
    "kinds": ["full", "sliding", "full"],
    "only": [0, 2],
    "text_config": {"hidden_size": 64, "vision": {"depth": 5}},
}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a // b", 2),
        ("a % b * 2 - 1", 1),
        ("-a + b", -4),
        ("- - a", 7),
        ("2 * (a - b)", 8),
        ("a // b == 2 and not a < b", True),
        ("not a == 7", False),
        ("a in only", False),
        ("b - 1 in only", True),
        ("1 not in only", True),
        ("kinds[1] == 'sliding'", True),
        ("kinds[1][0] == 's' and 'm*e'[b - 2] == '*'", True),
        ('kinds[b - 1] != "full"', False),
        ("text_config.hidden_size // 2", 32),
        ("text_config.vision.depth", 5),
        ("missing? or a", 7),
        ("none_key or b", 3),
        ("zero and missing_is_not_asked", 0),
        ("flag or missing_is_not_asked", True),
        ("text_config.missing?", None),
        ("[1, a, b * 2]", [1, 7, 6]),
        ("[]", []),
        ("not false and true", True),
        ("1.5 * 2", 3.0),
        ("  a  ", 7),
    ],
)
def test_value(text: str, want: object) -> None:
    assert expression(text).value(CONFIG) == want


def test_random_arithmetic_equals_python() -> None:
    """The oracle is Python itself, on texts made here from numbers and operators alone."""
    rng = random.Random(1)

    def text(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randint(0, 9))
        kind = rng.choice(["+", "-", "*", "//", "%", "and", "or", "<", "==", ">=", "neg", "not", "()"])
        if kind in ("neg", "not"):
            return f"({'-' if kind == 'neg' else 'not '}{text(depth - 1)})"
        if kind == "()":
            return f"({text(depth - 1)})"
        if kind in ("<", "==", ">="):
            return f"(({text(depth - 1)}) {kind} ({text(depth - 1)}))"
        return f"{text(depth - 1)} {kind} {text(depth - 1)}"

    compared = 0
    for _ in range(2000):
        made = text(4)
        try:
            want = eval(made, {"__builtins__": {}})  # noqa: S307  (a text of digits and operators that we just made)
        except ZeroDivisionError:
            with pytest.raises(UsageError) as error:
                expression(made).value({})
            assert error.value.code == "E0224"
            continue
        assert expression(made).value({}) == want, made
        compared += 1
    assert compared > 1000


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("", "E0222", "invalid syntax"),
        ("a +", "E0222", "invalid syntax"),
        ("a b", "E0222", "invalid syntax"),
        ("(a", "E0222", "never closed"),
        ("a < b < 3", "E0222", "chain"),
        ("a ** 2", "E0222", "BinOp has no meaning here"),
        ("f(1)", "E0222", "Call has no meaning here"),
        ("a.__class__.mro()", "E0222", "Call has no meaning here"),
        ("__import__('os')", "E0222", "Call has no meaning here"),
        ("lambda: 1", "E0222", "Lambda has no meaning here"),
        ("[i for i in a]", "E0222", "ListComp has no meaning here"),
        ("a[1:2]", "E0222", "Slice has no meaning here"),
        ("a / b", "E0222", "BinOp has no meaning here"),
        ("a if b else 1", "E0222", "IfExp has no meaning here"),
        ("a is b", "E0222", "Compare has no meaning here"),
        ("[1].append", "E0222", "Attribute has no meaning here"),
        ("b'x'", "E0222", "Constant has no meaning here"),
        ("1j", "E0222", "Constant has no meaning here"),
        ("(a := 1)", "E0222", "NamedExpr has no meaning here"),
        ("a ; b", "E0222", "invalid syntax"),
        ("if", "E0222", "invalid syntax"),
        ("[1, 2", "E0222", "never closed"),
        ("a not b", "E0222", "invalid syntax"),
        ("(" * 300 + "1" + ")" * 300, "E0222", "nested"),
        ("1+" * 1000 + "1", "E0222", "characters"),
    ],
)
def test_refuses(text: str, code: str, word: str) -> None:
    with pytest.raises(UsageError) as error:
        expression(text)
    assert error.value.code == code
    assert word in error.value.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("unknown", "E0223"),
        ("a // zero", "E0224"),
        ("kinds + 1", "E0224"),
        ("kinds * 1000000", "E0224"),
        ("kinds[9]", "E0224"),
        ("a[0]", "E0224"),
        ("none_key < 3", "E0224"),
        ("a in b", "E0224"),
        ("text_config.hiden_size", "E0223"),
    ],
)
def test_has_no_value(text: str, code: str) -> None:
    with pytest.raises(UsageError) as error:
        expression(text).value(CONFIG)
    assert error.value.code == code


def test_the_deepest_text_that_parses_has_a_value() -> None:
    assert expression("+".join("1" * 400)).value({}) == 400
    assert expression("-" * 200 + "1").value({}) == 1


def test_unknown_name_tells_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        expression("num_kv_heads").value({"num_key_value_heads": 2, "hidden_size": 4})
    assert "num_key_value_heads" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a", 7),
        ("0:b", range(3)),
        ("b:a", range(3, 7)),
        ("1:a:2", range(1, 7, 2)),
        ("only", (0, 2)),
        ("[5, 3]", (5, 3)),
        ("a - b", 4),
        ("zero", 0),
        ("b:b", range(3, 3)),
        ("count of kinds", 3),
        ("count of missing? or 'M*-E'", 4),
    ],
)
def test_extent(text: str, want: object) -> None:
    assert extent(text, CONFIG) == want


@pytest.mark.parametrize(
    "text",
    [
        "b - a",
        "flag",
        "kinds",
        "none_key",
        "1.5",
        "0:a:0",
        "-1:a",
        "0:1:1:1",
        "[-1]",
        "'x'",
        "count of only",
        "count of a",
        "count of ''",
        "count of missing?",
    ],
)
def test_no_extent(text: str) -> None:
    with pytest.raises(UsageError) as error:
        extent(text, CONFIG)
    assert error.value.code == "E0231"


def test_extents_use_those_before_and_tell_all_faults() -> None:
    axes = {"v": "vocab", "p": "padded - v", "i": "0:layers"}
    assert extents(axes, {"vocab": 10, "padded": 16, "layers": 2}) == {"v": 10, "p": 6, "i": range(2)}
    with pytest.raises(UsageError) as error:
        extents({"v": "vocab", "h": "hidden", "d": "1 +"}, {"vocab": 10, "hiden": 3})
    assert error.value.code == "E0223"
    assert "hiden" in str(error.value.hint)
    assert len(error.value.faults) == 1
    assert "axis d" in error.value.faults[0]
