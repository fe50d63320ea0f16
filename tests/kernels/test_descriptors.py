"""Lists of boxes, at the numbers where they change."""

from __future__ import annotations

import pytest

from ckpt_tool.device.descriptors import MOST_ROWS, TILE, Dims, Strided, merge_dims, pack, split_levels
from ckpt_tool.plan.copy import Copy


def copy(extents: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> Copy:
    return Copy(0, 0, source, 0, 0, target, extents)


@pytest.mark.parametrize(
    ("what", "item", "dims", "run"),
    [
        (copy((1, 5, 1, 7), (999, 14, 77, 2), (888, 14, 66, 2)), 2, [], 70),  # dims of 1 lie anywhere
        (copy((3, 4, 5), (20, 5, 1), (20, 5, 1)), 1, [], 60),
        (copy((3, 4, 5), (40, 5, 1), (20, 5, 1)), 1, [(3, 40, 20)], 20),  # joined in the target alone
        (copy((3, 4, 5), (20, 5, 1), (40, 5, 1)), 1, [(3, 20, 40)], 20),  # joined in the source alone
        (copy((2, 3, 4), (48, 8, 2), (30, 10, 2)), 1, [(2, 48, 30), (3, 8, 10), (4, 2, 2)], 1),
        (copy((6, 2, 3), (6, 3, 1), (60, 3, 1)), 1, [(6, 6, 60)], 6),
        (copy((2, 3, 4), (12, 4, 1), (1, 2, 6)), 1, [(4, 1, 6), (3, 4, 2), (2, 12, 1)], 1),  # the target's order
        (copy((4, 6), (6, 1), (1, 4)), 1, [(6, 1, 4), (4, 6, 1)], 1),
        (copy((), (), ()), 8, [], 8),
    ],
)
def test_dims_that_run_on_are_one(what: Copy, item: int, dims: Dims, run: int) -> None:
    assert merge_dims(what, item) == (dims, run)


def test_casts_join_dims_that_run_on_at_both_widths() -> None:
    assert merge_dims(copy((3, 4), (16, 4), (8, 2)), 4, 2) == ([], 48)
    assert merge_dims(copy((3, 4), (16, 4), (16, 4)), 4, 2) == ([(12, 4, 4)], 4)


@pytest.mark.parametrize(
    ("dims", "extents"),
    [
        ([(MOST_ROWS, 2, 3)], [(MOST_ROWS,)]),
        ([(MOST_ROWS + 1, 2, 3)], [(1 << 31,), (1 << 31,)]),
        ([(3, 1 << 40, 1 << 41), (1 << 31, 1, 2)], [(1 << 31,), (1 << 31,), (1 << 31,)]),
        ([(2, 90, 80), (5, 9, 8), (6, 7, 6), (7, 5, 4)], [(5, 6, 7), (5, 6, 7)]),
        ([(5, 9, 8), (6, 7, 6), (7, 5, 4)], [(5, 6, 7)]),
        ([], [()]),
    ],
)
def test_boxes_are_parted_only_where_they_must(dims: Dims, extents: list[tuple[int, ...]]) -> None:
    assert [box.extents for box in split_levels(0, 0, dims, 1)] == extents


@pytest.mark.parametrize(
    ("run", "pieces"), [(TILE, 1), (TILE + 1, 2), (2 * TILE, 2), (2 * TILE + 1, 3), (10 * TILE, 10)]
)
def test_rows_longer_than_a_tile_are_cut(run: int, pieces: int) -> None:
    (box,) = pack([Strided(0, 0, (), (), (), run)]).packed
    assert box["tiles_per_row"] == pieces


def test_lists_of_as_many_tiles_as_the_kernel_counts() -> None:
    most = (1 << 32) - 1
    one = pack([Strided(0, 0, (), (), (), most * TILE)])
    assert (one.tiles, int(one.packed["tiles_per_row"][0]), int(one.packed["aux"][0])) == (most, most, TILE)
    three = pack([Strided(0, 0, (most // 3,), (3 * TILE,), (3 * TILE,), 3 * TILE)])
    assert (three.tiles, int(three.packed["tiles_per_row"][0])) == (most, 3)


def test_a_list_of_nothing() -> None:
    assert pack([])[1:] == (0, 0)
    assert len(pack([]).packed) == 0
