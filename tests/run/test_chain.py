"""Products of thin matrices: one chain of fused multiply-adds on every processor that can be had here."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.adapters import chain

DIGEST = """
import hashlib, sys
import numpy as np
from ckpt_tool.adapters import chain
said, sums = [], hashlib.sha256()
for length in (1, 7, 8, 16, 64, 320, 321, 700):
    rng = np.random.default_rng(length)
    rows = chain.rows_of(length, 32)
    left, right = (rng.standard_normal(shape).astype("f4") for shape in ((12, length), (2, length, 32)))
    out = np.empty((2, 12 // rows, rows, 32), "f4")
    chain.product(left.reshape(-1, rows, length), right[:, None], out)
    sums.update(out.tobytes())
    said.append(rows if chain.blas_makes_chains(rows, length, 32) else 0)
print(sums.hexdigest(), *said)
"""


def fused(a, b, c):
    """One rounding of a b + c, by exact arithmetic: of the two neighbours in fp32 the nearer, of a tie the even one."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))  # perhaps rounded twice: one of the neighbours
    tried = (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf)))
    return min(tried, key=lambda x: (abs(Fraction(float(x)) - exact), int(np.float32(x).view("u4")) & 1))


SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 1e18)


@settings(max_examples=400)
@given(SINGLE, SINGLE, SINGLE)
def test_written_out_rounds_once(a, b, c):
    left = np.array([[1, a]], "f4")
    right = np.array([[c], [b]], "f4")
    assert chain.written_out(left, right)[0, 0] == fused(a, b, c)


def test_ties_that_rounding_twice_gets_wrong():
    """a b lies just beside the middle between two values of fp32, too near for fp64 to tell from it."""
    for a, b, c in (
        (2.0**-30, 2.0**-30, 1 + 2.0**-24),
        (2.0**-30, -(2.0**-30), 1 + 2.0**-24),
        (3 * 2.0**-41, 2.0**-40, 2.0**-24),
    ):
        left = np.array([[1, 1, a]], "f4")
        right = np.array([[1], [np.float32(c - 1 if c > 1 else c)], [b]], "f4")
        so_far = fused(1.0, right[1, 0], np.float32(1))
        assert chain.written_out(left, right)[0, 0] == fused(np.float32(a), np.float32(b), so_far)
    left = np.array([[1 + 2.0**-12, 1]], "f4")
    right = np.array([[1 + 2.0**-12], [2.0**-54]], "f4")
    assert chain.written_out(left[:, ::-1], right[::-1])[0, 0] == fused(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-54)
    assert chain.written_out(left[:, ::-1], -right[::-1])[0, 0] == -fused(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-54)


def test_infinities_and_nan_stay_what_they_are():
    got = chain.written_out(
        np.array([[1, 1]], "f4"), np.array([[np.inf, np.inf, np.nan, 3e38], [1, -np.inf, 1, 3e38]], "f4")
    )
    np.testing.assert_array_equal(got, [[np.inf, np.nan, np.nan, np.inf]])


@pytest.mark.parametrize("length", [1, 5, 16, 320, 321, 650])
def test_the_slow_road_has_the_same_bits(length, monkeypatch):
    rng = np.random.default_rng(0)
    rows = chain.rows_of(length, 48)
    left, right = (rng.standard_normal(shape).astype("f4") for shape in ((3, 1, rows, length), (3, 2, length, 48)))
    fast, slow = np.empty((2, 3, 2, rows, 48), "f4")
    chain.product(left, right, fast)
    monkeypatch.setattr(chain, "blas_makes_chains", lambda *_: False)
    chain.product(left, right, slow)
    np.testing.assert_array_equal(fast, slow)
    for i, j in np.ndindex(3, 2):
        want = sum(chain.written_out(left[i, 0, :, a:b], right[i, j, a:b]) for a, b in chain.parts(length))
        np.testing.assert_array_equal(slow[i, j], want)


def test_every_kernel_of_openblas_gives_the_same_bits():
    """As on another processor: OpenBLAS takes the kernel that it is told to. Nehalem has no fused multiply-add."""
    said = {}
    for core in ("", "Nehalem", "Sandybridge", "Haswell"):
        env = {**os.environ, "OPENBLAS_CORETYPE": core} if core else dict(os.environ)
        done = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True)
        if done.returncode < 0 and core:
            continue  # this processor can't run that kernel
        assert done.returncode == 0, done.stderr
        digest, *rows = done.stdout.split()
        said[core] = digest, rows
    assert len({digest for digest, _ in said.values()}) == 1, said
    assert len(said) > 1, "OpenBLAS ran on none of the kernels that were asked for"
