"""Folding recipes on plain arrays: the same bits in any range, equal to the products written out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.adapters.arithmetic import Biased, Folded, MatrixRows, ProductTerm, RunCache
from ckpt_tool.core.tensor import TensorKey

KEY = TensorKey("w")


def recipe(kind, arrays, shape, *rest):
    """A recipe over arrays, and the way to read them."""
    inputs = tuple(SimpleNamespace(tensor=SimpleNamespace(shape=each.shape)) for each in arrays)
    made = kind(KEY, shape, inputs, "", *rest)
    return made, lambda k, a, b: arrays[k].reshape(-1)[a:b].copy()


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def written_out(w, a, b, scaling, *, turned, magnitude=None):
    """Element by element in PEFT's order: one chain of fused multiply-adds, times s, added."""
    delta = np.zeros((b.shape[0], a.shape[1]), np.float32)
    for k in range(a.shape[0]):
        product = b[:, k : k + 1].astype("f8") * a[k : k + 1].astype("f8")
        delta = (delta.astype("f8") + product).astype("f4")
    delta *= np.float32(scaling)
    out = w + (delta.T if turned else delta)
    if magnitude is not None:
        factor = magnitude / norms(out.T if turned else out, lanes=1 if turned else 8)
        out = out * (factor if turned else factor[:, None])
    return out


def norms(rows, *, lanes):
    """Row by row, one number after another in each lane: torch's order."""
    out = []
    for row in rows:
        sums = [np.float32(0)] * lanes
        whole = len(row) // lanes * lanes
        for k, value in enumerate(row[:whole]):
            sums[k % lanes] += value * value
        for lane in range(1, lanes):
            sums[0] += sums[lane]
        for value in row[whole:]:
            sums[0] += value * value
        out.append(np.sqrt(sums[0]))
    return np.array(out, "f4")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 600),
    st.sampled_from([1, 2, 5, 16, 64, 130]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from([0.7, 2.0, -0.5, 1.0]),
)
def test_any_range_has_the_same_bits(rows, columns, rank, turned, dora, seed, scaling):
    outputs, inner = (columns, rows) if turned else (rows, columns)
    w = drawn(seed, rows, columns)
    a = drawn(seed + 1, rank, inner)
    b = drawn(seed + 2, outputs, rank)
    m = np.abs(drawn(seed + 3, outputs)) + 1
    term = ProductTerm(1, 2, rank, scaling, turned, 3 if dora else None)
    made, read = recipe(Folded, [w, a, b, m], w.shape, (term,), 1, RunCache())
    whole = made.values(read, 0, w.size)
    want = written_out(w, a, b, scaling, turned=turned, magnitude=m if dora else None).reshape(-1)
    np.testing.assert_array_equal(whole, want)
    rng = np.random.default_rng(seed)
    cuts = sorted({0, w.size, *rng.integers(0, w.size + 1, 12)})
    parts = [made.values(read, low, high) for low, high in zip(cuts, cuts[1:], strict=False)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    for _ in range(5):  # strips within a row, column by column, as panels ask for them
        left, right = sorted(rng.integers(0, columns + 1, 2))
        for row in range(rows):
            low = row * columns + left
            high = row * columns + right
            if low < high:
                np.testing.assert_array_equal(made.values(read, low, high), whole[low:high])


@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts(turned):
    experts = 5
    rank = 3
    inner = 20
    outputs = 36
    shape = (experts, inner, outputs) if turned else (experts, outputs, inner)
    w = drawn(1, *shape)
    a = drawn(2, experts * rank, inner)
    b = drawn(3, outputs, rank * experts)
    made, read = recipe(Folded, [w, a, b], shape, (ProductTerm(1, 2, rank, 1.5, turned),), experts, RunCache())
    by_expert = b.reshape(outputs, rank, experts)
    want = [
        written_out(w[e], a[e * rank : (e + 1) * rank], by_expert[:, :, e], 1.5, turned=turned) for e in range(experts)
    ]
    np.testing.assert_array_equal(made.values(read, 0, w.size), np.stack(want).reshape(-1))
    for low, high in ((0, 1), (700, 1500), (719, 721), (100, 3600), (3599, 3600)):
        np.testing.assert_array_equal(made.values(read, low, high), np.stack(want).reshape(-1)[low:high])


def test_terms_come_one_after_another():
    w = drawn(1, 40, 50)
    factors = [drawn(s, *shape) for s, shape in ((2, (4, 50)), (3, (40, 4)), (4, (7, 50)), (5, (40, 7)))]
    made, read = recipe(
        Folded,
        [w, *factors],
        w.shape,
        (ProductTerm(1, 2, 4, 0.5, False), ProductTerm(3, 4, 7, -2.0, False)),
        1,
        RunCache(),
    )
    want = written_out(written_out(w, *factors[:2], 0.5, turned=False), *factors[2:], -2.0, turned=False)
    np.testing.assert_array_equal(made.values(read, 0, w.size), want.reshape(-1))


def test_biases_and_rows():
    bias = drawn(1, 30)
    one = drawn(2, 30)
    two = drawn(3, 30)
    made, read = recipe(Biased, [bias, one, two], (30,), (0.5, 3.0))
    want = bias + one * np.float32(0.5) + two * np.float32(3)
    np.testing.assert_array_equal(made.values(read, 3, 29), want[3:29])
    table = np.arange(60, dtype="f4").reshape(10, 6)
    rows = -np.arange(12, dtype="f4").reshape(2, 6) - 1
    made, read = recipe(MatrixRows, [table, rows], table.shape, ((2, 1), (9, 0)))
    table[2], table[9] = rows[1], rows[0]
    for low, high in ((0, 60), (13, 14), (10, 17), (55, 60), (0, 12)):
        np.testing.assert_array_equal(made.values(read, low, high), table.reshape(-1)[low:high])


def test_factors_are_let_go(monkeypatch):
    monkeypatch.setattr(RunCache, "ROOM", 4000)
    kept = RunCache()
    for key in range(9):
        kept.factors(key, lambda: (np.zeros(400, "f4"),))
    assert len(kept._held) == 2
