"""Tables as text: what is left unsaid in them, and what they may not say."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.algebra.piece import apply
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.families.base import Family
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.families.table import form_of, instances, table_of


def sides(text: str) -> list[tuple[list[str], list[str]]]:
    return [([str(term) for term in rule.left], [str(term) for term in rule.right]) for rule in table_of(text).rules]


def test_both_sides_alike() -> None:
    assert sides("model.norm.weight : h") == [(["model.norm.weight : h"],) * 2]
    assert table_of("w : h if tied == 1").rules[0].condition is not None


def test_the_same_name() -> None:
    assert sides("a.{i}.<x|y>.w : h f, f h = : f h, h f") == [
        (["a.{i}.x.w : h f", "a.{i}.y.w : f h"], ["a.{i}.x.w : f h", "a.{i}.y.w : h f"])
    ]


def test_a_name_beside() -> None:
    assert sides("a.{i}.xy.w : ((1 + 1) f)\n    = ..<x|y>.w : f") == [
        (["a.{i}.xy.w : ((1 + 1) f)"], ["a.{i}.x.w : f", "a.{i}.y.w : f"])
    ]


def test_a_rule_for_each_word() -> None:
    assert sides("[a|b.{n}].w : h = [a|b.{n}].[v|w] : h") == [
        ([f"{word}.w : h"], [f"{word}.{leaf} : h"]) for word in ("a", "b.{n}") for leaf in ("v", "w")
    ]


def test_forms() -> None:
    assert form_of("model.layers.12.experts.0.w1.weight") == ("model.layers.%d.experts.%d.w1.weight", (12, 0))
    assert form_of("a.1.b.shard_0.weight") == ("a.%d.b.shard_%d.weight", (1, 0))
    assert form_of("a.shard_00.w") == ("a.shard_00.w", ()) and form_of("norm_2.weight") == ("norm_2.weight", ())
    assert form_of("a.007.b") == ("a.007.b", ()) and form_of("a%.1") == ("a%%.%d", (1,))
    named, unknown = instances(table_of("l.{i}.w : h").left, ["l.3.w", "x", "l.11.w", "l.01.w"])
    assert [(group.form, group.values) for group in named] == [("l.%d.w", [(3,), (11,)])] and unknown == ["x", "l.01.w"]


def test_spellings_of_what_is_fused() -> None:
    table = table_of("m.gu.w : h ((1 + 1) f) = ..<g|u>.w : f h\nm.o.w : h f = : f h").with_unfused_spelling()
    assert table.left.keys() == {"m.gu.w", "m.o.w", "m.g.w", "m.u.w"}
    assert [str(term) for term in table.rules[-1].left] == ["m.g.w : h f", "m.u.w : h f"]


def test_a_dialect_under_another_root_and_over_another() -> None:
    table = table_of("[model.e|head].w : v h").with_root("llama.")
    assert table.left.keys() == {"llama.e.w", "head.w"} and table.right.keys() == {"model.e.w", "head.w"}
    over = table_of("head.w : h v = : v h").override(table)
    assert over.left["head.w"][0].rule == 0 and len(over.rules) == 2


def test_words_of_conditions_are_spelt_out() -> None:
    kinds = {"windowed": "i in windows", "full": "i not in windows"}
    plain = table_of("l.{i}.w : a if not windowed").rules[0]
    assert plain.condition is not None and plain.condition.text == "not windowed"
    rule = table_of("l.{i}.windowed : a\n    = l.{i}.full : a\n    if not windowed  # a windowed one", kinds).rules[0]
    assert rule.condition is not None and rule.condition.text == "not (i in windows)"
    assert [str(term) for term in (*rule.left, *rule.right)] == ["l.{i}.windowed : a", "l.{i}.full : a"]


def test_a_number_that_a_name_always_has() -> None:
    table = table_of("m.{0}.l.{j}.<v|w> : h = l.{j}.<v|w> : h\nm.{j - b + 1}.n : h = l.{j}.n : h if j == b - 1")
    assert table.left.keys() == {"m.%d.l.%d.v", "m.%d.l.%d.w", "m.%d.n"}
    (spot,) = table.left["m.%d.l.%d.w"]
    assert spot.axes == ("j",) and spot.values([(0, 2), (0, 5)], {}) == [(2,), (5,)]
    (last,) = table.left["m.%d.n"]
    assert last.values([(0,)], {"b": 3}) == [(2,)]
    assert spot.values([(0, 2), (1, 2)], {}) == [(2,)]  # 1 is no number of the rule's
    assert table.rules[0].shapes({"h": 4, "j": range(1, 3)})[0] == {
        f"m.0.l.{j}.{word}": (4,) for j in (1, 2) for word in "vw"
    }


def test_a_number_counted_on_from_a_size() -> None:
    """Experts of two kinds under one count on one side, each from 0 on the other; neither side need be the one that
    counts on."""
    for text in (
        "b.{e - x}.w : h = m.{e}.w : h if e >= x\na.{e}.w : h = m.{e}.w : h if e < x",
        "b.{o}.w : h = m.{o + x}.w : h\na.{o}.w : h = m.{o}.w : h",
    ):
        table = table_of(text)
        sizes = {"x": 3}
        axis = "e" if "{e}" in text else "o"
        shift = 3 if axis == "e" else 0
        (left,) = table.left["b.%d.w"]
        assert left.axes == (axis,) and left.values([(0,), (2,)], sizes) == [(shift,), (2 + shift,)]
        on, _ = table.right["m.%d.w"]
        assert on.values([(2,), (3,), (5,)], sizes) == ([(2,), (3,), (5,)] if axis == "e" else [(0,), (2,)])


def test_numbers_of_several_axes() -> None:
    """Two modules a layer, each numbered on its own; blocks of layers under one count, as of Nemotron-H's MTP."""
    table = table_of("d.{2 * i}.a : h = l.{i}.a : h\nd.{2 * i + 1}.b : h = l.{i}.b : h")
    (even,), (odd,) = table.left["d.%d.a"], table.left["d.%d.b"]
    assert even.values([(0,), (3,), (4,)], {}) == [(0,), (2,)] and odd.values([(0,), (1,), (5,)], {}) == [(0,), (2,)]
    blocks = table_of(FLAT)
    (flat,), (last,) = blocks.right["l.%d.w"], blocks.right["l.%d.n"]
    assert flat.axes == ("j", "o") and flat.values([(0,), (2,), (7,)], {"b": 3}) == [(0, 0), (2, 0), (1, 2)]
    assert last.values([(0,), (2,), (5,)], {"b": 3}) == [(0,), (1,)]
    family = Family("blocks", (), {"b": "size"}, "l.{k}.[w|n] : h", {"kept": FLAT})
    shapes = {f"l.{k}.w": (4,) for k in range(6)} | {"l.2.n": (4,), "l.5.n": (4,)}
    there = {each.name: each.shape for each in mapping(family, "hf", "kept", shapes, {"size": 3}).made}
    assert there.keys() == {f"m.{o}.l.{j}.w" for o in range(2) for j in range(3)} | {"m.0.n", "m.1.n"}
    assert {each.name: each.shape for each in mapping(family, "kept", "hf", there, {"size": 3}).made} == shapes


FLAT = "m.{o}.l.{j}.w : h = l.{o * b + j}.w : h if j < b\nm.{o}.n : h = l.{o * b + b - 1}.n : h"


def test_experts_of_two_kinds_come_from_one_count_and_back() -> None:
    """As of ERNIE 4.5 VL, in names on both sides and along an axis on one."""
    apart = "b.{e - x}.w : h = m.{e}.w : h if e >= x\na.{e}.w : h = m.{e}.w : h if e < x"
    stacked = "b.w : o h = m.{o + x}.w : h\na.w : o h = m.{o}.w : h"
    axes = {"x": "count", "e": "2 * x", "o": "x"}
    family = Family("two", (), axes, "m.{e}.w : h", {"apart": apart, "stacked": stacked})
    arrays = {f"m.{e}.w": np.arange(4) + 10 * e for e in range(6)}
    shapes = {name: array.shape for name, array in arrays.items()}
    want = {
        "apart": {f"{'ab'[e // 3]}.{e % 3}.w": array for e, array in enumerate(arrays.values())},
        "stacked": {"a.w": np.stack(list(arrays.values())[:3]), "b.w": np.stack(list(arrays.values())[3:])},
    }
    for dialect, expected in want.items():
        there = mapping(family, "hf", dialect, shapes, {"count": 3})
        got = apply([p for each in there.made for p in each.pieces], arrays, {e.name: e.shape for e in there.made})
        assert {name: array.tolist() for name, array in got.items()} == {n: a.tolist() for n, a in expected.items()}
        made = {name: array.shape for name, array in got.items()}
        back = mapping(family, dialect, "hf", made, {"count": 3})
        found = apply([p for each in back.made for p in each.pieces], got, {e.name: e.shape for e in back.made})
        assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in arrays.items()}
    with pytest.raises(InconsistentCheckpoint) as caught:  # a fourth of the first kind is the second's
        mapping(family, "apart", "hf", {"a.3.w": (4,)}, {"count": 3})
    assert caught.value.code == "E1370"


def test_a_number_of_no_rule_is_an_error_that_names_the_tensor() -> None:
    family = Family("few", (), {"h": "4"}, "m.{j}.w : h", {"kept": "k.{0}.{j}.w : h = m.{j}.w : h"})
    with pytest.raises(InconsistentCheckpoint, match="k.1.2.w: the family has no tensor of that number") as caught:
        mapping(family, "kept", "hf", {"k.0.2.w": (4,), "k.1.2.w": (4,)}, {})
    assert caught.value.code == "E1374" and caught.value.key == "k.1.2.w"


FAULTS = {
    "an index by an expression": (
        lambda: table_of("l.{i * i}.w : h ; k.{i}.w : h = j.{i}.<a|b> : h"),
        "axes or numbers",
    ),
    "a number between dots": (lambda: table_of("l.0.w : h"), "axes or numbers"),
    "other indices on one side": (lambda: table_of("a.{i} : h ; b : i h = c.{i} : h ; d.{i} : h"), "other indices"),
    "replaced in part": (lambda: table_of("a.w : h").override(table_of("<a|b>.w : h")), "replaced in part: b.w"),
    "no pattern": (lambda: table_of("a.w = b.w"), "NAME : pattern"),
    "other axes": (lambda: table_of("a.w : h = b.w : f"), "other axes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_table_may_not_say(fault: str) -> None:
    call, told = FAULTS[fault]
    with pytest.raises(UsageError, match=told):
        call()
