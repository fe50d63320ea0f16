"""Hints: what is stored comes back, what somebody edited reads as absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from ckpt_tool.core.hints import Degrees, Dialect, FileRanks, Globals, Hint, Hints


@dataclass(frozen=True, slots=True)
class Made(Hint):
    KEY: ClassVar[str] = "made"
    flag: bool
    word: str | None
    counts: tuple[int, ...]
    table: Mapping[str, str]
    anything: Mapping[str, Any] | None = None
    size: int | None = None


FULL = Made(True, "w", (1, 2), {"a": "b"}, {"x": [1]}, 0)


def test_what_is_stored_comes_back() -> None:
    hints = Hints.of(FULL, Dialect("paddle"), Degrees(tp=2), Globals.each("ab", "bc"), FileRanks({"f": {"tp": 1}}))
    assert hints.plain == {
        "made": {"flag": True, "word": "w", "counts": [1, 2], "table": {"a": "b"}, "anything": {"x": [1]}, "size": 0},
        "dialect": "paddle",
        "degrees": {"tp": 2},
        "globals": ["a", "b", "c"],
        "ranks": {"f": {"tp": 1}},
    }
    again = Hints(hints.plain)
    assert again.get(Made) == FULL and again.dialect == "paddle" and again.get(Globals) == Globals(("a", "b", "c"))
    assert again.get(FileRanks) == FileRanks({"f": {"tp": 1}})
    assert again.get(Degrees) == Degrees(tp=2) and Degrees(tp=2).at("tp") == 2 and Degrees(tp=2).at("dp") == 1
    assert Degrees().alone and Degrees(dp=1).alone and not Degrees(dp=2).alone


def test_a_field_without_a_default_always_stands_there() -> None:
    assert Made(False, None, (), {}).plain() == {"flag": False, "word": None, "counts": [], "table": {}}
    assert Made.read({}) == Made(False, None, (), {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flag", 1),
        ("word", 5),
        ("counts", [1, "2"]),
        ("counts", "12"),
        ("counts", [True]),
        ("table", {"a": 1}),
        ("table", {1: "a"}),
        ("table", [["a", "b"]]),
        ("anything", {1: 2}),
        ("size", "7"),
        ("size", True),
    ],
)
def test_an_edited_value_reads_as_absent(field: str, value: Any) -> None:
    whole = {**FULL.plain(), field: value}
    assert Made.read(whole) == Made.read({key: item for key, item in FULL.plain().items() if key != field})


@pytest.mark.parametrize("value", [None, 5, "x", [1], True])
def test_a_hint_of_another_kind_is_none(value: Any) -> None:
    hints = Hints({"made": value, "degrees": value, "ranks": value})
    assert hints.get(Made) is None and hints.get(Degrees) is None and hints.get(FileRanks) is None
    assert Hints({"dialect": 3}).dialect is None and Hints({"globals": 3}).get(Globals) is None


def test_more_hints_replace_those_of_their_kind() -> None:
    hints = Hints.of(Dialect("hf"), Degrees(tp=2))
    assert hints.having(Dialect("meta")).plain == {"dialect": "meta", "degrees": {"tp": 2}}
    assert hints.without(Degrees).plain == {"dialect": "hf"} and hints.plain["degrees"] == {"tp": 2}
