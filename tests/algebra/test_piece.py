"""Pieces against a brute-force list of (source element, destination element) pairs."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from ckpt_tool.algebra.element_map import element_map
from ckpt_tool.algebra.piece import PAD, Piece, Side, aligned, apply
from ckpt_tool.core.box import Box, contiguous_strides, whole
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import InternalError

Pairs = list[tuple[int, int]]


def pairs(pieces: list[Piece]) -> Pairs:
    """Every (source element, destination element), sorted: what a piece means, one by one."""
    out = []
    for piece in pieces:
        assert len(piece.ext) == len(piece.src.strides) == len(piece.dst.strides)
        for k in product(*(range(n) for n in piece.ext)):
            out.append(
                (
                    piece.src.offset + sum(a * b for a, b in zip(k, piece.src.strides, strict=True)),
                    piece.dst.offset + sum(a * b for a, b in zip(k, piece.dst.strides, strict=True)),
                )
            )
    return sorted(out)


def random_piece(rng: random.Random) -> tuple[Piece, tuple[int, ...], tuple[int, ...]]:
    """A piece between two tensors that nest the same axes in other orders, with margins, and the tensors' shapes."""
    ext = [rng.choice([1, 2, 2, 3, 3, 4, 5]) for _ in range(rng.randint(0, 4))]

    def side(name: str) -> tuple[Side, tuple[int, ...]]:
        order = rng.sample(range(len(ext)), len(ext))
        dims: list[list[int]] = []
        for axis in order:
            if dims and rng.random() < 0.5:
                dims[-1].append(axis)
            else:
                dims.append([axis])
        # each axis lies in a wider grid: `before` and `after` are other parts beside it
        before = [rng.choice([0, 0, 1, 2]) for _ in ext]
        room = [n + b + rng.choice([0, 0, 1, 3]) for n, b in zip(ext, before, strict=True)]
        shape = tuple(int(np.prod([room[a] for a in dim])) for dim in dims)
        strides = [0] * len(ext)
        step = 1
        for axis in reversed(order):
            strides[axis] = step
            step *= room[axis]
        offset = sum(b * s for b, s in zip(before, strides, strict=True))
        return Side(name, offset, tuple(strides)), shape

    (src, src_shape), (dst, dst_shape) = side("a"), side("b")
    return Piece(tuple(ext), src, dst), src_shape, dst_shape


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    offset = tuple(rng.randint(0, n) for n in shape)
    return Box(offset, tuple(rng.randint(0, n - o) for n, o in zip(shape, offset, strict=True)))


def in_box(element: int, shape: tuple[int, ...], box: Box) -> bool:
    at = np.unravel_index(element, shape) if shape else ()
    return all(o <= i < o + n for i, o, n in zip(at, box.offset, box.shape, strict=True))


SEEDS = range(400)


@pytest.mark.share(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_cut_by_a_box_keeps_what_lies_in_it(seed: int) -> None:
    rng = random.Random(seed)
    piece, src_shape, dst_shape = random_piece(rng)
    every = pairs([piece])
    for side, shape, which in (("src", src_shape, 0), ("dst", dst_shape, 1)):
        box = random_box(rng, shape)
        got = pairs(piece.cut(side, shape, box))  # type: ignore[arg-type]
        assert got == [row for row in every if in_box(row[which], shape, box)], (seed, side, box)


@pytest.mark.share(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_cut_by_a_range_keeps_what_lies_in_it(seed: int) -> None:
    rng = random.Random(seed)
    piece, src_shape, _ = random_piece(rng)
    every = pairs([piece])
    size = int(np.prod(src_shape))
    for side, which in (("src", 0), ("dst", 1)):
        start = rng.randint(0, size)
        stop = rng.randint(start, size + 3)
        parts = piece.cut_range(side, start, stop)  # type: ignore[arg-type]
        assert pairs(parts) == [row for row in every if start <= row[which] < stop]
        assert len(parts) <= 2 * len(piece.ext) + 1


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(200))
def test_cuts_follow_one_another_and_swap(seed: int) -> None:
    """Cut by source box, then by destination box, then merged, swapped, cut again: still the same pairs."""
    rng = random.Random(seed)
    piece, src_shape, dst_shape = random_piece(rng)
    a = random_box(rng, src_shape)
    b = random_box(rng, dst_shape)
    once = [q for p in piece.cut("src", src_shape, a) for q in p.cut("dst", dst_shape, b)]
    other = [q for p in piece.merged().cut("dst", dst_shape, b) for q in p.merged().cut("src", src_shape, a)]
    back = [q.swap() for p in piece.swap().cut("src", dst_shape, b) for q in p.cut("dst", src_shape, a)]
    want = [row for row in pairs([piece]) if in_box(row[0], src_shape, a) and in_box(row[1], dst_shape, b)]
    assert pairs(once) == pairs(other) == pairs(back) == want


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(200))
def test_cut_of_cut_pieces_by_misaligned_shapes(seed: int) -> None:
    """Boxes of a tensor that the piece was not made for: other dims over the same elements. Exact all the same."""
    rng = random.Random(seed)
    piece, src_shape, _ = random_piece(rng)
    size = int(np.prod(src_shape))
    width = rng.randint(1, 7)
    shape = (ceil_div(size, width), width)
    box = random_box(rng, shape)
    assert pairs(piece.cut("src", shape, box)) == [row for row in pairs([piece]) if in_box(row[0], shape, box)]


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(200))
def test_aligned_pieces_split_their_index(seed: int) -> None:
    rng = random.Random(seed)
    piece, _, _ = random_piece(rng)
    step = rng.randint(1, 20)
    parts = list(aligned(piece, step))
    assert pairs(parts) == pairs([piece])
    for part in parts:
        low = [(n - 1) * s for n, s in zip(part.ext, part.src.strides, strict=True) if s % step]
        assert part.src.offset % step + sum(low) < step
        assert list(aligned(part, step)) == [part], "what is aligned stays whole"


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(200))
def test_into_finds_the_same_elements_in_a_stored_array(seed: int) -> None:
    """A chunk stores a box of the tensor with strides of its own; NumPy's own slicing says what lies there."""
    rng = random.Random(seed)
    piece, src_shape, _ = random_piece(rng)
    size = int(np.prod(src_shape))
    tensor = np.arange(size).reshape(src_shape)
    box = random_box(rng, src_shape)
    chunk = tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
    order = rng.sample(range(chunk.ndim), chunk.ndim)  # the array is stored transposed, after 5 other elements
    stored = np.concatenate([np.full(5, -1), chunk.transpose(order).reshape(-1)])
    strides = [0] * chunk.ndim
    for axis, step in zip(order, contiguous_strides([chunk.shape[a] for a in order]), strict=True):
        strides[axis] = step
    for part in piece.cut("src", src_shape, box):
        told = part.into("src", src_shape, box, 5, strides)
        for (element, _), (place, _) in zip(sorted_by_dst([part]), sorted_by_dst([told]), strict=True):
            assert stored[place] == element


def sorted_by_dst(pieces: list[Piece]) -> Pairs:
    return sorted(pairs(pieces), key=lambda row: row[1])


def test_into_refuses_a_piece_that_crosses_dims() -> None:
    merged = Piece((12,), Side("a", 0, (1,)), Side("b", 0, (1,)))
    with pytest.raises(InternalError):
        merged.into("src", (3, 4), whole((3, 4)), 0, (4, 1))
    diagonal = Piece((2,), Side("a", 0, (6,)), Side("b", 0, (1,)))
    with pytest.raises(InternalError):
        diagonal.into("src", (3, 4), whole((3, 4)), 0, (4, 1))
    (part,) = merged.cut("src", (3, 4), Box((0, 1), (3, 2)))
    assert part.into("src", (3, 4), Box((0, 1), (3, 2)), 0, (2, 1)).src.strides == (2, 1)


def test_an_unaligned_edge_is_head_body_tail() -> None:
    """A flat run of elements 3..16 of a (4, 5) tensor: the end of row 0, rows 1 and 2, the start of row 3."""
    run = Piece((14,), Side("a", 3, (1,)), Side("b", 0, (1,)))
    parts = run.cut("src", (4, 5), Box((0, 0), (4, 4)))
    assert pairs(parts) == [(e, e - 3) for e in range(3, 17) if e % 5 != 4]
    assert [part.ext for part in parts] == [(), (2, 4), (2,)]


@pytest.mark.parametrize("seed", range(100))
def test_swap_is_its_own_inverse_and_merged_changes_nothing(seed: int) -> None:
    piece, _, _ = random_piece(random.Random(seed))
    assert piece.swap().swap() == piece
    assert pairs([piece.swap()]) == sorted((b, a) for a, b in pairs([piece]))
    assert pairs([piece.merged()]) == pairs([piece])
    assert len(piece.merged().ext) <= len(piece.ext)
    assert piece.merged().merged() == piece.merged()
    assert 1 not in piece.merged().ext


def test_merged_joins_what_is_contiguous_on_both_sides() -> None:
    piece = Piece((3, 1, 4, 5), Side("a", 7, (20, 99, 5, 1)), Side("b", 0, (40, 98, 5, 1)))
    assert piece.merged() == Piece((3, 20), Side("a", 7, (20, 1)), Side("b", 0, (40, 1)))
    assert Piece((4, 5), Side("a", 0, (1, 4)), Side("b", 0, (5, 1))).merged().ext == (4, 5)


def test_span_and_numel() -> None:
    piece = Piece((2, 4), Side("a", 10, (20, 1)), Side("b", 3, (1, 2)))
    assert piece.numel == 8
    assert piece.span("src") == (10, 34)
    assert piece.span("dst") == (3, 11)
    assert Piece((), Side("a", 6, ()), Side("b", 2, ())).span("src") == (6, 7)


def test_apply_moves_maps_and_pads() -> None:
    add = (element_map("add(1)"),)
    pieces = [
        Piece((2, 3), Side("a", 0, (3, 1)), Side("b", 0, (1, 2)), add),
        Piece((2,), Side(PAD, 0, (1,)), Side("b", 6, (1,))),
        Piece((), Side("s", 0, ()), Side("t", 0, ())),
    ]
    got = apply(pieces, {"a": np.arange(6).reshape(2, 3), "s": np.array(7)}, {"b": (4, 2), "t": (), "none": (0, 3)})
    np.testing.assert_array_equal(got["b"], [[1, 4], [2, 5], [3, 6], [0, 0]])
    assert got["t"] == 7
    assert got["t"].shape == ()
    assert got["none"].shape == (0, 3)
    undone = apply([pieces[0].swap()], {"b": got["b"]}, {"a": (2, 3)})
    np.testing.assert_array_equal(undone["a"], np.arange(6).reshape(2, 3))
