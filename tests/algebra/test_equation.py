"""Equations against NumPy's reshapes and concatenations, on whole tensors and on misaligned chunks of both sides."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from conversions import CONVERSIONS, Arrays, random_boxes, random_sizes, tagged

from ckpt_tool.algebra.element_map import ElementMap
from ckpt_tool.algebra.equation import Alias, Equation, equation, rules
from ckpt_tool.algebra.piece import PAD, Piece, Side
from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.errors import UsageError

CASES = [(name, seed) for name in CONVERSIONS for seed in range(50)]


@pytest.mark.share(6)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_equals_numpy_both_ways(name: str, seed: int) -> None:
    case = CONVERSIONS[name]
    sizes = random_sizes(case.axes, random.Random(seed))
    rule = equation(case.text)
    right = tagged(case.right(sizes))
    left = case.left(right, sizes)
    shapes = rule.shapes(sizes)
    assert shapes == ({k: v.shape for k, v in left.items()}, {k: v.shape for k, v in right.items()})
    assert_same(rule.apply(left, sizes), right, f"{name} {sizes}")
    assert_same(rule.swap().apply(right, sizes), left, f"{name} {sizes}, back")


@pytest.mark.share(6)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_moves_every_element_once_between_misaligned_chunks(name: str, seed: int) -> None:
    """Both sides cut in random boxes, each stored by itself; what moves between two boxes moves once and is right."""
    case = CONVERSIONS[name]
    rng = random.Random(10_000 + seed)
    sizes = random_sizes(case.axes, rng)
    rule = equation(case.text)
    right = tagged(case.right(sizes))
    left = case.left(right, sizes)
    for there, source, wanted in ((rule, left, right), (rule.swap(), right, left)):
        assert_chunks_move(there.pieces(sizes), source, wanted, rng, f"{name} {sizes}")


def assert_chunks_move(pieces: list[Piece], source: Arrays, wanted: Arrays, rng: random.Random, told: str) -> None:
    cuts = {name: random_boxes(array.shape, rng, 4) for name, array in (*source.items(), *wanted.items())}
    stored = {name: [cell(array, box).reshape(-1).copy() for box in cuts[name]] for name, array in source.items()}
    out = {name: [np.zeros(box.numel, int) for box in cuts[name]] for name in wanted}
    times = {name: [np.zeros(box.numel, int) for box in cuts[name]] for name in wanted}
    taken = {name: [np.zeros(box.numel, int) for box in cuts[name]] for name in source}
    for whole in pieces:
        for a, part, here in chunked(whole, "src", source, cuts):
            for b, piece, there in chunked(part, "dst", wanted, cuts):
                moved = piece
                if a is not None:
                    moved = moved.into("src", source[whole.src.name].shape, here, 0, contiguous_strides(here.shape))
                if b is not None:
                    moved = moved.into("dst", wanted[whole.dst.name].shape, there, 0, contiguous_strides(there.shape))
                src = elements(moved, moved.src)
                dst = elements(moved, moved.dst)
                if a is not None:
                    taken[whole.src.name][a][src] += 1
                if b is not None:
                    times[whole.dst.name][b][dst] += 1
                if a is not None and b is not None:
                    out[whole.dst.name][b][dst] = stored[whole.src.name][a][src]
    for name, array in wanted.items():
        for got, count, box in zip(out[name], times[name], cuts[name], strict=True):
            np.testing.assert_array_equal(got, cell(array, box).reshape(-1), err_msg=f"{told} {name} {box}")
            assert (count == 1).all(), f"{told} {name} {box}: {count}"
    assert all((count == 1).all() for chunks in taken.values() for count in chunks), told


def cell(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


def chunked(piece: Piece, side: str, arrays: Arrays, cuts: dict[str, list[Box]]):
    name = getattr(piece, side).name
    if name == PAD:
        yield None, piece, None
        return
    for number, box in enumerate(cuts[name]):
        for part in piece.cut(side, arrays[name].shape, box):
            yield number, part, box


def elements(piece: Piece, side: Side) -> np.ndarray:
    index = np.full(piece.ext, side.offset)
    for axis, (n, stride) in enumerate(zip(piece.ext, side.strides, strict=True)):
        index = index + (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(len(piece.ext))])
    return index.reshape(-1)


def assert_same(got: Arrays, want: Arrays, told: str) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=f"{told} {name}")


@pytest.mark.parametrize("name", CONVERSIONS)
def test_swap_is_its_own_inverse(name: str) -> None:
    case = CONVERSIONS[name]
    rule = equation(case.text)
    assert rule.swap().swap() == rule
    sizes = random_sizes(case.axes, random.Random(3))
    there = sorted((p.src, p.dst, p.ext) for p in (q.merged() for q in rule.pieces(sizes)))
    back = sorted((p.src, p.dst, p.ext) for p in (q.swap().merged() for q in rule.swap().pieces(sizes)))
    assert there == back


def test_numpy_sizes_and_empty_tensors() -> None:
    rule = equation("fc1 : ((1 + 1) f) h = <gate|up> : f h")
    f, h = np.array([2, 3])
    assert rule.shapes({"f": f, "h": h})[0] == {"fc1": (4, 3)}
    assert rule.pieces({"f": 0, "h": 3}) == []
    assert rule.shapes({"f": 0, "h": 3})[0] == {"fc1": (0, 3)}
    pad = equation("emb : (v + p) h = embed : v h ; _ : p h")
    assert [p.dst.name for p in pad.pieces({"v": 3, "p": 0, "h": 2})] == ["embed"]
    (_, made) = pad.swap().pieces({"v": 3, "p": 2, "h": 2})
    assert (made.src.name, made.dst, made.numel) == (PAD, Side("emb", 6, (2, 1)), 4)


def test_padding_borrows_the_index_of_its_partner() -> None:
    rule = equation("layers.{i}.e : (v + p) h = l.{i}.e : v h ; _ : p h")
    pads = [p for p in rule.swap().pieces({"i": range(3, 5), "v": 2, "p": 1, "h": 2}) if p.src.name == PAD]
    assert [p.dst.name for p in pads] == ["layers.3.e", "layers.4.e"]


def test_element_maps_relate_values() -> None:
    """A = B + 1 reads: the left tensor is the right one plus one."""
    rule = equation("final.weight : h = norm.weight : h * add(1)")
    norm = np.arange(5.0)
    np.testing.assert_array_equal(rule.swap().apply({"norm.weight": norm}, {"h": 5})["final.weight"], norm + 1)
    np.testing.assert_array_equal(rule.apply({"final.weight": norm + 1}, {"h": 5})["norm.weight"], norm)
    assert rule.pieces({"h": 5})[0].maps == (ElementMap("add", -1),)
    same = equation("a : h * add(1) = b : h * add(1)")
    assert same.pieces({"h": 5})[0].maps == ()


LAYERS = """
    # a table as a family writes it
    embed : v h                    = model.embed : v h
    dense.{i}.fc1 : ((1 + 1) f) h  = model.{i}.<gate|up> : f h      if i < first_dense
    moe.{i}.router : e h           = model.{i}.router : e h
                                     if i >= first_dense and i not in plain
    mtp.{k}.w : h = model.{k + layers}.w : h
    head : v h = lm_head : v h     if not tied
    out ~ embed                    if tied
    extra.{i}.head ~ dense.{i}.fc1 if i < first_dense
"""


def test_a_table_of_rules() -> None:
    table = rules(LAYERS)
    assert [type(rule) for rule in table] == [Equation] * 5 + [Alias] * 2
    sizes = {"v": 6, "h": 2, "f": 3, "e": 4, "i": 4, "k": 2}
    config = {"first_dense": 1, "plain": [2], "tied": True, "layers": 4}
    names = [
        (set(left), set(right))
        for rule in table
        if isinstance(rule, Equation)
        for left, right in [rule.shapes(sizes, config)]
    ]
    assert names == [
        ({"embed"}, {"model.embed"}),
        ({"dense.0.fc1"}, {"model.0.gate", "model.0.up"}),
        ({"moe.1.router", "moe.3.router"}, {"model.1.router", "model.3.router"}),
        ({"mtp.0.w", "mtp.1.w"}, {"model.4.w", "model.5.w"}),
        (set(), set()),
    ]
    for rule, (left, right) in zip((r for r in table if isinstance(r, Equation)), names, strict=True):
        pieces = rule.pieces(sizes, config)
        assert ({p.src.name for p in pieces}, {p.dst.name for p in pieces}) == (left, right)
    aliases = [rule for rule in table if isinstance(rule, Alias)]
    assert [alias.pairs(sizes, config) for alias in aliases] == [{"out": "embed"}, {"extra.0.head": "dense.0.fc1"}]
    assert aliases[0].pairs({}, {"tied": False}) == {}


def test_a_rule_that_does_not_hold_asks_for_no_size() -> None:
    rule = equation("experts.{e}.w : f h = x.{e}.w : f h if moe? == true")
    assert not rule.holds({}, {})
    assert rule.pieces({}) == []
    assert rule.shapes({}) == ({}, {})
    with pytest.raises(UsageError) as error:
        rule.pieces({}, {"moe": True})
    assert error.value.code == "E0230"
    assert len(error.value.faults) == 2  # e, f and h: all at once


def test_a_condition_may_ask_for_extents() -> None:
    rule = equation("emb : (v + p) h = embed : v h ; _ : p h if p > 0")
    assert rule.pieces({"v": 2, "p": 0, "h": 1}) == []
    assert len(rule.pieces({"v": 2, "p": 1, "h": 1})) == 2


def test_ranges_and_lists_number_tensors_by_value_and_stacks_by_position() -> None:
    rule = equation("w : i h = layers.{i}.w : h")
    for indices in (range(3, 9, 2), (3, 5, 7)):
        pieces = rule.pieces({"i": indices, "h": 4})
        assert [(p.dst.name, p.src.offset) for p in pieces] == [("layers.3.w", 0), ("layers.5.w", 4), ("layers.7.w", 8)]
        assert rule.shapes({"i": indices, "h": 4})[0] == {"w": (3, 4)}


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("a : h", "E0221", "one `=`"),
        ("a : h = b : h = c : h", "E0221", "one `=`"),
        ("a h = b : h", "E0221", "NAME : pattern"),
        (": h = b : h", "E0221", "NAME : pattern"),
        ("a b : h = c : h", "E0221", "no tensor name"),
        ("a.{i : h = b : h", "E0221", "no tensor name"),
        ("<a|b>.<c|d> : h = b : h", "E0221", "2 choices"),
        ("a : h = b : h if x if y", "E0221", "one `if`"),
        ("a : h = b : h if", "E0222", "invalid syntax"),
        ("a.{i +} : i h = b : h", "E0222", "invalid syntax"),
        ("a : (h = b : h", "E0220", "not closed"),
        ("a : (f + f) h = <b|c|d> : f h, f h", "E0228", "3 names for 2 patterns"),
        ("a : (f + f) h = b : f h", "E0226", "2 parts on the left, 1 on the right"),
        ("a : f h = b : f g", "E0225", "h only on the left; g only on the right"),
        ("a : f h = b.{e} : f h", "E0225", "e only on the right"),
        ("a : (f f) = b : f f", "E0227", "twice"),
        ("a.{e} : e h = b.{e} : h", "E0227", "name and in the pattern"),
        ("a : h * sub(1) = b : h", "E0229", "no element map"),
        ("_ : h = _ : h", "E0234", "both sides"),
        ("a : (v + p) * add(1) = b : v ; _ : p", "E0234", "can't be mapped"),
        ("w : i h = l.{i} : h if i > 2", "E0235", "index 'i'"),
        ("a.{i} ~ b.{j}", "E0225", "other indices"),
    ],
)
def test_refuses(text: str, code: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        rules(text)
    assert error.value.code == code
    assert words in error.value.message
    assert "in the rule" in str(error.value.place)


def test_all_faults_of_a_rule_and_of_a_table_at_once() -> None:
    with pytest.raises(UsageError) as error:
        equation("a : (f + g) h = b : f k ; c : g m")
    assert len(error.value.faults) == 1
    with pytest.raises(UsageError) as error:
        rules("a : f = b : g\nc : (d = e : d\nf : x = g : x\nh x = y : x")
    assert error.value.code == "E0225"
    assert len(error.value.faults) == 2
    with pytest.raises(UsageError):
        equation("a ~ b")


def test_a_pattern_fault_tells_its_column() -> None:
    with pytest.raises(UsageError) as error:
        equation("a : v + p h = b : v h")
    assert str(error.value.place).startswith("column 3 in the rule")


def test_missing_sizes_tell_near_misses() -> None:
    with pytest.raises(UsageError) as error:
        equation("a : heads h = b : heads h").pieces({"head": 2, "h": 3})
    assert error.value.code == "E0230"
    assert "head" in str(error.value.hint)


def test_one_name_twice() -> None:
    for text in ("<a|a> : h = <b|c> : h", "a : h ; a : g = b : h ; c : g", "a{i}{j} : h = b.{i}.{j} : h"):
        with pytest.raises(UsageError) as error:
            equation(text).shapes({"h": 1, "g": 1, "i": 12, "j": 12})
        assert error.value.code == "E0232"


def test_a_term_that_stands_twice_in_one_tensor_is_in_both_places() -> None:
    rule = equation("qkv : (g (1 + 1 + 1) d) = <q|k|k> : (g d)")
    sizes = {"g": 2, "d": 2}
    assert rule.shapes(sizes) == ({"qkv": (12,)}, {"q": (4,), "k": (4,)})
    whole = rule.swap().apply({"q": np.arange(4), "k": np.arange(4, 8)}, sizes)["qkv"]
    np.testing.assert_array_equal(whole, [0, 1, 4, 5, 4, 5, 2, 3, 6, 7, 6, 7])
    with pytest.raises(UsageError) as error:  # of two tensors it would be two that need not be alike
        equation("<a|b> : h = <c|c> : h").shapes({"h": 1})
    assert error.value.code == "E0232"


def test_sixty_layers_of_256_experts_in_under_a_second() -> None:
    table = rules("""
        d.{i}.experts.{e}.fc1 : ((1 + 1) f) h = m.{i}.experts.{e}.<gate|up>.weight : f h   if i >= first
        d.{i}.experts.{e}.fc2 : h f = m.{i}.experts.{e}.down.weight : h f                   if i >= first
        s.{i}.w1 : e h f = m.{i}.stacked.{e}.weight : f h                                   if i >= first
    """)
    sizes = {"i": 61, "e": 256, "f": 2048, "h": 7168}
    start = time.process_time()
    pieces = [piece for rule in table for piece in rule.pieces(sizes, {"first": 3})]  # type: ignore[union-attr]
    seconds = time.process_time() - start
    assert len(pieces) == 58 * 256 * 4
    assert seconds < 2.0, f"{seconds:.2f} s"  # some 0.4 s alone; the bound leaves room for a busy machine
