"""The norms of a comparison: those of whole tensors, however few of their blocks differ, as NumPy has them in fp64."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool as ckpt

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int32]


def difference(tmp_path: Path, one: np.ndarray, other: np.ndarray) -> dict:
    for name, values in (("one", one), ("other", other)):
        save_file({"w": values}, tmp_path / f"{name}.safetensors")
    found = ckpt.diff(tmp_path / "one.safetensors", tmp_path / "other.safetensors")
    (row,) = found["differences"]
    (group,) = found["summary"]
    assert (group["rel_l2"], group["cosine"]) == (row["rel_l2"], row["cosine"])
    assert "norms" not in row
    return row


def expected(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    a = one.astype(np.float64).ravel()
    b = other.astype(np.float64).ravel()
    return np.linalg.norm(a - b) / np.linalg.norm(a), a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("kind", DTYPES, ids=lambda kind: np.dtype(kind).name)
def test_norms_are_those_of_numpy(kind: type, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    one = (random.standard_normal((64, 48)) * 9).astype(kind)
    other = (one.astype(np.float64) + random.integers(-2, 3, one.shape)).astype(kind)
    row = difference(tmp_path, one, other)
    np.testing.assert_allclose((row["rel_l2"], row["cosine"]), expected(one, other), rtol=1e-12)


@pytest.mark.parametrize("at", [0, 400_000, -1], ids=["first", "in the middle", "last"])
def test_blocks_that_are_equal_count_in_the_norms(at: int, tmp_path: Path) -> None:
    """A tensor of four blocks of 1 MiB, of which one element differs: the norm is that of all of them."""
    one = np.random.default_rng(5).standard_normal(1 << 20).astype(np.float32)
    other = one.copy()
    other[at] += 3
    row = difference(tmp_path, one, other)
    np.testing.assert_allclose((row["rel_l2"], row["cosine"]), expected(one, other), rtol=1e-12)


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    one = np.arange(1, 9, dtype=np.float32)
    other = one.copy()
    one[0] = np.nan
    other[1] = np.inf
    other[2] = 5
    save_file({"w": one}, tmp_path / "one.safetensors")
    save_file({"w": other}, tmp_path / "other.safetensors")
    (group,) = ckpt.diff(tmp_path / "one.safetensors", tmp_path / "other.safetensors")["summary"]
    assert group["nonfinite"] == 2
    np.testing.assert_allclose(group["rel_l2"], expected(one[2:], other[2:])[0])


def test_a_tensor_of_zeros_has_no_relative_norm(tmp_path: Path) -> None:
    row = difference(tmp_path, np.zeros(4, np.float32), np.ones(4, np.float32))
    assert (row["rel_l2"], row["cosine"], row["max_abs"]) == (None, None, 1.0)
