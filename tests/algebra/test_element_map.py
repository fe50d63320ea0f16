"""Element maps: parsing, inverses, joining."""

from __future__ import annotations

import pytest

from ckpt_tool.algebra.element_map import ElementMap, element_map, inverse, joined
from ckpt_tool.errors import UsageError


@pytest.mark.parametrize(("text", "by"), [("add(1)", 1), (" add( -2 ) ", -2), ("add(0.5)", 0.5), ("add(0)", 0)])
def test_parse(text: str, by: float) -> None:
    assert element_map(text) == ElementMap("add", by)
    assert element_map(text)(10) == 10 + by


@pytest.mark.parametrize("text", ["ad(1)", "add", "add()", "add(x y)", "add(1e9)", "add(1) add(2)", "", "_i(1)"])
def test_refuses(text: str) -> None:
    with pytest.raises(UsageError) as error:
        element_map(text)
    assert error.value.code == "E0229"


def test_near_miss() -> None:
    with pytest.raises(UsageError) as error:
        element_map("ad(1)")
    assert "add" in str(error.value.hint)


def test_inverse_undoes_and_joined_forgets_what_cancels() -> None:
    maps = (element_map("add(1)"), element_map("add(2)"))
    value = 5
    for step in (*maps, *inverse(maps)):
        value = step(value)
    assert value == 5
    assert joined(maps) == (ElementMap("add", 3),)
    assert joined(maps, inverse(maps)) == ()
    assert joined() == ()
