"""What all codecs share: packed integers in both directions, and which scale each element takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.quantised.codecs.code_bits import (
    AWQ_ORDER,
    list_integers,
    pack_integers,
    pack_nibbles,
    unpack_awq,
    unpack_columns,
    unpack_rows,
)
from ckpt_tool.quantised.codecs.rectangles import Rectangle
from ckpt_tool.quantised.codecs.scale_grid import RowBlocks, ScaleGrid, ZeroGrid, apply_rows


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_come_back_along_rows_and_columns(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (5, 64))
    words = np.stack([pack_integers(row, bits) for row in codes])
    assert (list_integers(words, bits).reshape(codes.shape) == codes).all()
    for first, count in ((0, 64), (3, 1), (31, 9), (63, 1)):
        part = codes[:, first : first + count] - 2
        assert (unpack_rows(words.view(np.uint8), bits, first * bits, count, lowest=-2) == part).all()
        low = first * bits // 32
        high = -(-(first + count) * bits // 32)
        column_words = np.ascontiguousarray(words.T)[low:high]
        assert (unpack_columns(column_words, bits, first * bits - 32 * low, count, lowest=-2) == part.T).all()


def test_words_of_awq() -> None:
    codes = np.arange(8, dtype=np.uint32).reshape(1, 8)
    words = np.zeros(1, np.uint32)
    for place, column in enumerate(AWQ_ORDER):
        words |= codes[:, column] << np.uint32(4 * place)
    assert (unpack_awq(words[None]) == codes).all()
    assert (pack_nibbles(codes.reshape(8, 1)) == np.uint32(0x76543210)).all()


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.data())
def test_every_row_takes_its_own_scales(rows: int, blocks: int, width: int, data: st.DataObject) -> None:
    """In any order, with one number a row, a column or a block."""
    groups = data.draw(st.integers(1, rows))
    taken = np.array(data.draw(st.lists(st.integers(0, groups - 1), min_size=rows, max_size=rows)))
    if data.draw(st.booleans()):
        taken.sort()
    rng = np.random.default_rng(rows)
    grid: npt.NDArray[np.float32] = rng.standard_normal((groups, blocks)).astype(np.float32)
    values = rng.standard_normal((rows, blocks * width)).astype(np.float32)
    want = values * np.repeat(grid, width, axis=1)[taken]

    spread = values.copy()
    apply_rows(np.multiply, spread, np.repeat(grid, width, axis=1), taken)
    by_block = values.copy()
    apply_rows(np.multiply, by_block, grid[:, :, None], taken)
    assert (spread == want).all() and (by_block == want).all()


@pytest.mark.parametrize(("left", "right"), [(0, 12), (4, 8), (3, 9), (5, 6)])
def test_a_rectangle_takes_the_scales_of_its_columns(left: int, right: int) -> None:
    scales = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    rectangle = Rectangle(0, 2, left, right)
    grid = ScaleGrid(1, DTYPES["F32"], 3, 4, "w_scale")
    grid_rows = grid.read_rows(lambda _, a, b: scales.reshape(-1)[a:b], 0, 2, rectangle)
    values = np.ones((2, right - left), np.float32)
    apply_rows(np.multiply, values, grid_rows, RowBlocks(2, 2).find_rows(lambda *_: values, rectangle))
    assert (values == np.repeat(scales, 4, axis=1)[:, left:right]).all()


@pytest.mark.parametrize("dtype", ["U8", "I8", "I32", "F32", "F16"])
def test_zero_points_are_integers_in_every_dtype(dtype: str) -> None:
    """Bytes are powers of two only where they are scales."""
    kinds = {"U8": np.uint8, "I8": np.int8, "I32": np.int32, "F32": np.float32, "F16": np.float16}
    stored = np.array([[3, 120]], kinds[dtype])
    assert ZeroGrid(1, DTYPES[dtype], 2, 1, "w_zero_point").widen(stored).tolist() == [[3.0, 120.0]]


def test_zero_points_that_are_no_integers_are_an_error() -> None:
    with pytest.raises(InconsistentCheckpoint, match="no integers"):
        ZeroGrid(1, DTYPES["F32"], 1, 1, "w_zero_point").widen(np.array([[0.5]], np.float32))
