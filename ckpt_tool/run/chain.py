"""Thin matrix products with the same bits on every processor: one chain of fused multiply-adds an element.

    c = fma(a[k], b[k], c)        fp32, k = 0, 1, ... from c = 0

torch's MKL has these bits up to some length (192 or more, measured), and so has PEFT's merge. A BLAS promises no order: of
OpenBLAS's kernels (NumPy 2.4.6, measured) the one for AVX-512 makes one chain in blocks of 4 rows; the one for AVX2 makes two
from k = 8 on, but one in blocks of 2 and of 3 rows; those without fused multiply-adds make none. So the rows of a block are
chosen by trial, once for a shape, against the chain written out; where no number of rows will do, the chain is written out
for real, hundreds of times slower. A chain is parted every 320 products, where libraries begin to part it at places of their
own, and the parts are added up one after another.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ckpt_tool.run.computed import Floats

LENGTH = 320  # of a chain at most
MOST_ROWS = 4  # of a block
_TRIED = (4, 2, 3)  # numbers of rows, the fastest first


def parts(length: int) -> list[tuple[int, int]]:
    """The chains of a product over `length`: [start, stop)."""
    return [(start, min(length, start + LENGTH)) for start in range(0, length, LENGTH)]


@lru_cache(maxsize=256)
def rows_of(length: int, wide: int) -> int:
    """In blocks of how many rows by `wide` columns this machine's BLAS makes chains of `length`; 0: in none."""
    sizes = {stop - start for start, stop in parts(length)}
    return next((rows for rows in _TRIED if all(_is_chain(rows, size, wide) for size in sizes)), 0)


def _is_chain(rows: int, length: int, wide: int) -> bool:
    rng = np.random.default_rng(length)
    left = rng.standard_normal((rows, length)).astype(np.float32)
    right = rng.standard_normal((length, wide)).astype(np.float32)
    return np.array_equal(np.matmul(left, right), written_out(left, right))


def product(left: Floats, right: Floats, out: Floats, *, blas: bool) -> None:
    """out = left @ right for stacks of blocks (..., rows, length) and (..., length, wide). blas: `rows_of` was not 0."""
    for number, (start, stop) in enumerate(parts(left.shape[-1])):
        a, b = left[..., start:stop], right[..., start:stop, :]
        if number:
            out += np.matmul(a, b) if blas else written_out(a, b)
        elif blas:
            np.matmul(a, b, out=out)
        else:
            out[...] = written_out(a, b)


def written_out(left: Floats, right: Floats) -> Floats:
    """left @ right, as one chain whatever the machine."""
    shape = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    out: Floats = np.zeros((*shape, left.shape[-2], right.shape[-1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(left.shape[-1]):
            _fused(left[..., k : k + 1], right[..., k : k + 1, :], out)
    return out


def _fused(a: Floats, b: Floats, c: Floats) -> None:
    """c = a b + c with one rounding. In fp64 the product is exact and the sum made odd, so that rounding it again is right
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008)."""
    product: Any = a.astype(np.float64) * b
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)  # exact: Knuth's two-sum
    bits = total.view(np.int64)
    inexact = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    bits += np.where(inexact, np.where((lost > 0) == (total > 0), 1, -1), 0)
    c[...] = total
