"""Composed pieces against applying twice, and the proof that pieces tile."""

from __future__ import annotations

import random
import time
from itertools import product

import numpy as np
import pytest
from conversions import CONVERSIONS, random_sizes, tagged
from tiling import check_tiling

from ckpt_tool.algebra.compose import _Rows, compose, meet
from ckpt_tool.algebra.element_map import ElementMap, element_map
from ckpt_tool.algebra.equation import equation
from ckpt_tool.algebra.piece import PAD, Piece, Side, apply
from ckpt_tool.errors import InconsistentCheckpoint, UnmappedTensor

# Two dialects of one hub: the axes of each, and how the second's sizes follow from the first's.
ROUTES = {
    "megatron -> paddle qkv": ("megatron qkv", "paddle qkv", lambda s, rng: s),
    "megatron -> qkv by rank": (
        "megatron qkv",
        "qkv by rank",
        lambda s, rng: {"t": s["g"], "m": s["r"], "n": 1, "d": s["d"], "h": s["h"]},
    ),
    "fc1 of one split to another": ("striped fc1", "striped fc1", "restripe"),
    "fc1 -> striped": ("swiglu fc1", "striped fc1", "stripe"),
    "stacked -> in the middle": ("stacked experts, transposed", "experts in the middle", lambda s, rng: s),
    "padded -> padded otherwise": (
        "padded vocabulary",
        "padded vocabulary",
        lambda s, rng: {**s, "p": rng.randint(0, 5)},
    ),
    "rotary -> rotary": ("rotary pairs", "rotary pairs", lambda s, rng: s),
}


def both_sizes(route: str, rng: random.Random) -> tuple[dict[str, int], dict[str, int]]:
    first, _, follow = ROUTES[route]
    sizes = random_sizes(CONVERSIONS[first].axes, rng)
    if follow == "restripe":  # any two stripings of one f, often such that neither's stripes divide the other's
        f = rng.choice([4, 6, 8, 12, 12, 24])
        a, b = (rng.choice([t for t in range(1, f + 1) if f % t == 0]) for _ in range(2))
        return {"t": a, "u": f // a, "h": sizes["h"]}, {"t": b, "u": f // b, "h": sizes["h"]}
    if follow == "stripe":
        t = rng.randint(1, 4)
        u = rng.randint(1, 4)
        return {"f": t * u, "h": sizes["h"]}, {"t": t, "u": u, "h": sizes["h"]}
    return sizes, follow(sizes, rng)


@pytest.mark.share(4)
@pytest.mark.parametrize(("route", "seed"), [(route, seed) for route in ROUTES for seed in range(30)])
def test_composed_equals_applied_twice_and_numpy(route: str, seed: int) -> None:
    first, second = (CONVERSIONS[name] for name in ROUTES[route][:2])
    here, there = both_sizes(route, random.Random(seed))
    to_hub = equation(first.text)
    from_hub = equation(second.text).swap()
    hub = tagged(first.right(here))
    source = first.left(hub, here)
    want = second.left(hub, there)
    pieces = compose(to_hub.pieces(here), from_hub.pieces(there))
    shapes = {name: array.shape for name, array in want.items()}
    got = apply(pieces, source, shapes)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=f"{route} {here} {there}")
    check_tiling(pieces, shapes, "dst")
    check_tiling(pieces, {name: array.shape for name, array in source.items()}, "src")
    again = apply(from_hub.pieces(there), apply(to_hub.pieces(here), source, to_hub.shapes(here)[1]), shapes)
    for name in want:
        np.testing.assert_array_equal(got[name], again[name])


@pytest.mark.share(6)
@pytest.mark.parametrize("seed", range(300))
def test_meet_of_any_two_pieces(seed: int) -> None:
    """Two pieces made for other grids over one space, so that strides need not divide one another."""
    rng = random.Random(seed)

    def side(name: str, ext: list[int]) -> Side:
        order = rng.sample(range(len(ext)), len(ext))
        step = 1
        strides = [0] * len(ext)
        for axis in order:
            strides[axis] = step
            step = step * ext[axis] + rng.choice([0, 0, 1, 2])
        return Side(name, rng.randint(0, 6), tuple(strides))

    def piece(src: str, dst: str) -> Piece:
        ext = [rng.choice([1, 2, 3, 4, 5]) for _ in range(rng.randint(0, 3))]
        return Piece(tuple(ext), side(src, ext), side(dst, ext))

    a = piece("a", "hub")
    b = piece("hub", "c")
    there = {dst: src for src, dst in listed(a)}
    want = sorted((there[src], dst) for src, dst in listed(b) if src in there)
    met = list(meet(a, b))
    assert sorted(row for piece in met for row in listed(piece)) == want
    assert all(1 not in piece.ext for piece in met)


def listed(piece: Piece) -> list[tuple[int, int]]:
    rows = []
    for k in product(*(range(n) for n in piece.ext)):
        src, dst = (
            side.offset + sum(i * s for i, s in zip(k, side.strides, strict=True)) for side in (piece.src, piece.dst)
        )
        rows.append((src, dst))
    assert len({s for s, _ in rows}) == len({d for _, d in rows}) == len(rows)
    return rows


def test_qkv_between_dialects_is_one_piece_a_part() -> None:
    sizes = {"g": 8, "r": 4, "d": 128, "h": 4096}
    megatron, paddle = (equation(CONVERSIONS[name].text) for name in ("megatron qkv", "paddle qkv"))
    pieces = compose(megatron.pieces(sizes), paddle.swap().pieces(sizes))
    assert [piece.merged().ext for piece in pieces] == [(4096, 8, 512), (4096, 8, 128), (4096, 8, 128)]
    assert {(piece.src.name, piece.dst.name) for piece in pieces} == {("qkv", "w")}


def test_maps_follow_one_another() -> None:
    a = equation("zero_centred : h = norm : h * add(-1)").pieces({"h": 4})
    b = equation("plain : h = norm : h").swap().pieces({"h": 4})
    c = equation("other : h = norm : h * add(-1)").swap().pieces({"h": 4})
    assert compose(a, b)[0].maps == (ElementMap("add", 1),)
    assert compose(a, c)[0].maps == ()
    assert compose(a, b)[0].swap().maps == (element_map("add(-1)"),)


def test_padding_of_one_dialect_never_becomes_padding_of_the_other() -> None:
    rule = equation(CONVERSIONS["padded vocabulary"].text)
    pieces = compose(rule.pieces({"v": 5, "p": 3, "h": 2}), rule.swap().pieces({"v": 5, "p": 1, "h": 2}))
    assert [(p.src.name, p.dst.name, p.numel) for p in pieces] == [("emb", PAD, 6), ("emb", "emb", 10), (PAD, "emb", 2)]


def test_what_is_made_and_then_taken_is_padding() -> None:
    zeros = [Piece((4,), Side(PAD, 0, (1,)), Side("hub", 0, (1,)))]
    taken = [
        Piece((3,), Side("hub", 0, (1,)), Side("out", 2, (1,))),
        Piece((1,), Side("hub", 3, (1,)), Side(PAD, 0, (1,))),
    ]
    assert compose(zeros, taken) == [Piece((3,), Side(PAD, 0, (1,)), Side("out", 2, (1,)))]


def test_nothing_is_lost_between_two_dialects() -> None:
    a = equation("x.{i} : h = hub.{i} : h")
    b = equation("hub.{i} : h = y.{i} : h")
    with pytest.raises(UnmappedTensor) as error:
        compose(a.pieces({"i": 3, "h": 2}), b.pieces({"i": range(1, 4), "h": 2}))
    assert error.value.code == "E0304"
    told = (error.value.message, *error.value.faults)
    assert any("hub.0: made, but nothing takes it" in line for line in told)
    assert any("hub.3: taken, but nothing makes it" in line for line in told)
    with pytest.raises(InconsistentCheckpoint) as clash:
        compose(a.pieces({"i": 1, "h": 2}), b.pieces({"i": 1, "h": 3}))
    assert clash.value.code == "E0358"
    assert "2 elements are made, 3 are taken" in clash.value.message


def whole_piece(name: str, offset: int, n: int, stride: int = 1) -> Piece:
    return Piece((n,), Side("x", 0, (1,)), Side(name, offset, (stride,)))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([whole_piece("a", 0, 5)], "5 of 6 elements"),
        ([whole_piece("a", 0, 3), whole_piece("a", 2, 3)], "overlap"),
        ([whole_piece("a", 0, 3, 2), whole_piece("a", 4, 2), whole_piece("a", 1, 1)], "overlap"),
        ([whole_piece("a", 1, 6)], "elements 1 to 6 of 6"),
        ([whole_piece("a", -1, 6)], "elements -1 to 4 of 6"),
        ([whole_piece("a", 0, 5), whole_piece("a", 5, 2)], "elements 0 to 6 of 6"),
        ([Piece((2, 3), Side("x", 0, (3, 1)), Side("a", 0, (1, 1)))], "steps over itself"),
    ],
)
def test_pieces_that_do_not_tile(pieces: list[Piece], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_tiling(pieces, {"a": (2, 3)}, "dst")
    with pytest.raises(AssertionError):
        check_tiling([piece.swap() for piece in pieces], {"a": (2, 3)}, "src")


def test_pieces_that_interleave_do_tile() -> None:
    check_tiling([whole_piece("a", 0, 3, 2), whole_piece("a", 1, 3, 2)], {"a": (6,), "empty": (0, 4)}, "dst")
    check_tiling([Piece((2, 1, 3), Side("x", 0, (3, 1, 1)), Side("a", 0, (1, 1, 2)))], {"a": (6,)}, "dst")


def test_tensors_without_a_partner() -> None:
    with pytest.raises(AssertionError, match="q_proj: no rule for it.*q_prj: no such tensor"):
        check_tiling([whole_piece("a", 0, 6), whole_piece("q_prj", 0, 4)], {"a": (6,), "q_proj": (4,)}, "dst")


def test_sixty_layers_of_256_experts_compose_in_seconds() -> None:
    sizes = {"i": 58, "e": 256, "f": 2048, "h": 7168}
    text = "{i}.{e}.fc1 : ((1 + 1) f) h = m.{i}.{e}.<gate|up> : f h"
    first = equation(f"d.{text}").pieces(sizes)
    second = equation(f"p.{text}").swap().pieces(sizes)
    start = time.process_time()
    assert len(compose(first, second)) == 58 * 256 * 2
    stack = equation("h : e h (f (1 + 1)) = w.{e} : ((1 + 1) f) h")
    stacked = compose(stack.swap().pieces(sizes), stack.pieces(sizes))
    assert len(stacked) == 512
    seconds = time.process_time() - start
    assert seconds < 4.0, f"{seconds:.2f} s"


# Which columns of which tensor Paddle's own conversion engine (paddlepaddle 3.3.1, flex_checkpoint AOA) puts where:
# (first column of the target, source, first row or column of the source), all bands equally wide. 4 heads of 2, 2
# groups, 8 hidden, 6 intermediate; recorded from its slice maps for the macros named.
FUSED_QKV = [(0, "q", 0), (2, "q", 2), (4, "k", 0), (6, "v", 0), (8, "q", 4), (10, "q", 6), (12, "k", 2), (14, "v", 2)]
FUSED_FFN_TP2 = [(0, "gate", 0), (3, "up", 0), (6, "gate", 3), (9, "up", 3)]
FFN_TP2_TO_TP1 = [(0, "w", 0), (3, "w", 6), (6, "w", 3), (9, "w", 9)]
OLD_QKV_TP2_TO_TP1 = [(0, 0), (2, 2), (4, 8), (6, 10), (8, 4), (10, 12), (12, 6), (14, 14)]


def test_paddles_own_engine_fuses_hugging_face_tensors_the_same() -> None:
    qkv = equation("w : h (g (r + 1 + 1) d) = <q|k|v> : (g r d) h, (g d) h, (g d) h").swap()
    hub = tagged({"q": (8, 8), "k": (4, 8), "v": (4, 8)})
    got = qkv.apply(hub, {"g": 2, "r": 2, "d": 2, "h": 8})["w"]
    want = np.concatenate([hub[name][row : row + 2].T for _, name, row in FUSED_QKV], axis=1)
    np.testing.assert_array_equal(got, want)
    ffn = equation("w : h (t (1 + 1) u) = <gate|up> : (t u) h").swap()
    hub = tagged({"gate": (6, 8), "up": (6, 8)})
    got = ffn.apply(hub, {"t": 2, "u": 3, "h": 8})["w"]
    want = np.concatenate([hub[name][row : row + 3].T for _, name, row in FUSED_FFN_TP2], axis=1)
    np.testing.assert_array_equal(got, want)


def test_paddles_own_engine_changes_the_tp_size_of_fused_tensors_the_same() -> None:
    ffn = equation("w : h (t (1 + 1) u) = <gate|up> : (t u) h")
    stored = tagged({"w": (8, 12)})
    pieces = compose(ffn.pieces({"t": 2, "u": 3, "h": 8}), ffn.swap().pieces({"t": 1, "u": 6, "h": 8}))
    want = np.concatenate([stored["w"][:, column : column + 3] for _, _, column in FFN_TP2_TO_TP1], axis=1)
    np.testing.assert_array_equal(apply(pieces, stored, {"w": (8, 12)})["w"], want)
    old = equation("w : h (t (m + n + n) d) = <q|k|v> : (t m d) h, (t n d) h, (t n d) h")
    stored = tagged({"w": (8, 16)})
    pieces = compose(
        old.pieces({"t": 2, "m": 2, "n": 1, "d": 2, "h": 8}),
        old.swap().pieces({"t": 1, "m": 4, "n": 2, "d": 2, "h": 8}),
    )
    want = np.concatenate([stored["w"][:, column : column + 2] for _, column in OLD_QKV_TP2_TO_TP1], axis=1)
    np.testing.assert_array_equal(apply(pieces, stored, {"w": (8, 16)})["w"], want)


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_a_tensor_meet_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of one tensor, however it is stored and however each is taken: by rows, the pieces are those of each
    taker alone; and what can't be taken by rows (copies of halves across two experts) is not."""
    rng = random.Random(seed)
    sizes = {"e": rng.randint(2, 5), "f": rng.randint(1, 4), "h": rng.randint(1, 3)}
    made = rng.choice(
        ["w : e h (f + f) = hub : e (f + f) h", "w : e (f + f) h = hub : e (f + f) h", "w : e f h = hub : e f h"]
    )
    halves = "f + f" in made
    taken = ["hub : e (f + f) h = x.{e}.<gate|up> : f h, f h", "hub : e (f + f) h = x.{e} : h (f + f)"]
    taken = taken if halves else ["hub : e f h = x.{e} : h f", "hub : e f h = x.{e} : f h"]
    first = equation(made).pieces(sizes)
    second = equation(rng.choice(taken)).pieces(sizes)
    rng.shuffle(second)
    by_rows = []
    of = _Rows.of
    monkeypatch.setattr(_Rows, "of", lambda *given: by_rows.append(of(*given)) or by_rows[-1])
    together = compose(first, second)
    monkeypatch.setattr(_Rows, "of", lambda *given: None)
    assert together == compose(first, second)
    assert any(by_rows) or len(second) < 2 * len(first)
    across = [
        Piece((2, 1), Side("hub", 0, (2, 1)), Side("y", 0, (1, 1))),
        Piece((2, 1), Side("hub", 1, (2, 1)), Side("z", 0, (1, 1))),
    ]
    maker = Piece((2, 2), Side("w", 0, (1, 2)), Side("hub", 0, (2, 1)))
    monkeypatch.setattr(_Rows, "of", of)
    assert {(piece.src, piece.dst.name) for piece in compose([maker], across)} == {
        (Side("w", 0, (1,)), "y"),
        (Side("w", 2, (1,)), "z"),
    }
