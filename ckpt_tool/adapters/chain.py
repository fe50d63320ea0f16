"""Thin matrix products with the same bits on every processor: one chain of fused multiply-adds an element.

    c = fma(a[k], b[k], c)        fp32, k = 0, 1, ... from c = 0

torch's MKL has these bits up to some length (192 or more, measured), and so has PEFT's merge. A BLAS promises no order:
of OpenBLAS's kernels (NumPy 2.4.6, measured) the one for AVX-512 makes one chain in blocks of 4 rows; the one for AVX2
makes two from k = 8 on, but one in blocks of 2 and of 3 rows; those without fused multiply-adds make none. So the rows
of a block are chosen by trial, once for a shape, against the chain written out; where no number of rows will do, the
chain is written out for real, hundreds of times slower. A chain is split every 320 products, where libraries begin to
split it at places of their own, and the parts are added up one after another.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np

from ckpt_tool.run.computed import Floats

LENGTH = 320  # of a chain at most
ROWS = (4, 2, 3)  # of a block: the numbers that are tried, the fastest first
MOST_ROWS = max(ROWS)
EVEN_ROWS = lcm(*ROWS)  # whole blocks, whatever number was chosen


def parts(length: int) -> list[tuple[int, int]]:
    """The chains of a product over `length`: [start, stop)."""
    return [(start, min(length, start + LENGTH)) for start in range(0, length, LENGTH)]


def rows_of(length: int, wide: int) -> int:
    """How many rows blocks with `wide` columns should have; MOST_ROWS where this machine's BLAS makes chains with
    none."""
    return next((rows for rows in ROWS if blas_makes_chains(rows, length, wide)), MOST_ROWS)


@lru_cache(maxsize=256)
def blas_makes_chains(rows: int, length: int, wide: int) -> bool:
    """By trial: (rows, length) @ (length, wide), part by part."""
    for size in {stop - start for start, stop in parts(length)}:
        rng = np.random.default_rng(size)
        left = rng.standard_normal((rows, size)).astype(np.float32)
        right = rng.standard_normal((size, wide)).astype(np.float32)
        if not np.array_equal(np.matmul(left, right), written_out(left, right)):
            return False
    return True


def product(left: Floats, right: Floats, total: Floats) -> None:
    """out = left @ right for stacks of blocks (..., rows, length) and (..., length, wide); fast where rows are
    `rows_of`'s."""
    length = left.shape[-1]
    multiply: Any = np.matmul if blas_makes_chains(left.shape[-2], length, right.shape[-1]) else _block_by_block
    for start, stop in parts(length):
        part = np.empty(total.shape, np.float32) if start else total
        multiply(left[..., start:stop], right[..., start:stop, :], out=part)
        if start:
            total += part


def _block_by_block(left: Floats, right: Floats, *, out: Floats) -> None:
    """A block at a time: what a chain needs in fp64 is many times its block."""
    stack = out.shape[:-2]
    lefts, rights = (np.broadcast_to(matrices, stack + matrices.shape[-2:]) for matrices in (left, right))
    for index in np.ndindex(stack):
        out[index] = written_out(lefts[index], rights[index])


def written_out(left: Floats, right: Floats) -> Floats:
    """left @ right, two matrices, as one chain whatever the machine."""
    total: Floats = np.zeros((left.shape[0], right.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(left.shape[1]):
            _fuse_multiply_add(left[:, k : k + 1], right[k : k + 1], total)
    return total


def _fuse_multiply_add(a: Floats, b: Floats, c: Floats) -> None:
    """c = a b + c with one rounding. In fp64 the product is exact and the sum made odd, so that rounding it again is
    right (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008)."""
    product: Any = a.astype(np.float64) * b
    total = product + c
    back = total - product
    rounding_error = (product - (total - back)) + (c - back)  # exact: Knuth's two-sum
    bits = total.view(np.int64)
    inexact = (rounding_error != 0) & np.isfinite(total) & (bits & 1 == 0)
    bits += np.where(inexact, np.where((rounding_error > 0) == (total > 0), 1, -1), 0)
    c[...] = total
