"""Which kernel a copy goes to, what NumPy's stand-in makes of a list, and boxes that meet."""

from __future__ import annotations

import itertools

import numpy as np
import numpy_boxes
import pytest

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device import descriptors, kernels
from ckpt_tool.device.descriptors import (
    ELEMENTS,
    PIECES,
    SPANS,
    TILE,
    Strided,
    launches,
    magic,
    magics,
    make_transposes,
    merge_dims,
    pack,
    pack_turned,
    split_levels,
)
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import Copy


def whole(shape: tuple[int, ...], item: int, order: tuple[int, ...] | None = None, number: int = 0) -> Copy:
    """A copy of all of a row-major array to a row-major array of its dims in `order`; file `number` on both sides."""
    order = order or tuple(range(len(shape)))
    there = contiguous_strides([shape[axis] for axis in order])
    to = tuple(item * there[order.index(axis)] for axis in range(len(shape)))
    return Copy(number, 0, tuple(item * n for n in contiguous_strides(shape)), number, 0, to, shape)


@pytest.mark.parametrize(
    ("shape", "item", "order", "kernel"),
    [
        ((64, 96), 2, (0, 1), "box_copy"),
        ((64, 96), 2, (1, 0), "box_transpose"),
        ((16, 16), 2, (1, 0), "box_transpose"),  # a sector on both sides
        ((15, 96), 2, (1, 0), "box_copy"),
        ((31, 40), 1, (1, 0), "box_copy"),
        ((32, 40), 1, (1, 0), "box_transpose"),
        ((8, 4, 64, 32), 4, (0, 2, 1, 3), "box_copy"),  # rows of 128 bytes
        ((8, 16, 64, 4), 4, (0, 2, 1, 3), "box_transpose"),  # of items of 16 bytes
        ((8, 16, 64, 3), 2, (0, 2, 1, 3), "box_copy"),  # items of 6 bytes are none
        ((9, 40, 33), 1, (2, 1, 0), "box_copy"),  # 9 bytes on one side
        ((9, 40, 33), 1, (0, 2, 1), "box_transpose"),
    ],
)
def test_a_list_chooses_its_kernel(shape: tuple[int, ...], item: int, order: tuple[int, ...], kernel: str) -> None:
    (launch,) = launches([(whole(shape, item, order), item)], [0], [1 << 30])
    assert launch.kernel == kernel
    assert launch.boxes.nbytes == item * np.prod(shape)


@pytest.mark.parametrize(
    ("source", "target", "by_source", "by_target"),
    [
        (1, 0, (8192, 128, 2), (8192, 2, 128)),
        (0, 1, (8192, 128, 2), (8192, 2, 128)),
        (0, 0, (8192, 129, 2), (8192, 2, 128)),
        (0, 0, (8192, 128, 2), (9000, 2, 129)),
        (0, 0, (9001, 128, 2), (8192, 2, 128)),
        (0, 0, (8192, 128, 2), (9001, 2, 128)),
    ],
)
def test_items_off_their_own_size_are_no_transpose(
    source: int, target: int, by_source: tuple[int, ...], by_target: tuple[int, ...]
) -> None:
    even = Copy(0, 0, (8192, 128, 2), 0, 0, (8192, 2, 128), (3, 64, 64))
    odd = Copy(0, source, by_source, 0, target, by_target, (3, 64, 64))
    assert [launch.kernel for launch in launches([(even, 2)], [0], [1 << 30])] == ["box_transpose"]
    assert [launch.kernel for launch in launches([(odd, 2)], [0], [1 << 30])] == ["box_copy"]


def test_one_launch_a_kernel_and_the_same_bytes_from_numpy(shim: Device) -> None:
    shapes = [((70, 80), (1, 0)), ((70, 80), (0, 1)), ((5, 64, 66), (0, 2, 1)), ((0, 4), (1, 0)), ((), ())]
    copies = [(whole(shape, 2, order, number), 2) for number, (shape, order) in enumerate(shapes)]
    sources = [np.arange(np.prod(shape), dtype=np.uint16) + 7 * n for n, (shape, _) in enumerate(shapes)]
    by_kernel, by_numpy = ([np.zeros_like(source) for source in sources] for _ in range(2))
    for targets, device in ((by_kernel, shim), (by_numpy, None)):
        found = launches(copies, *([array.ctypes.data for array in arrays] for arrays in (sources, targets)))
        assert [(launch.kernel, len(launch.boxes.packed)) for launch in found] == [
            ("box_copy", 2),
            ("box_transpose", 2),
        ]
        for launch in found:
            kernels.launch(device, launch) if device else numpy_boxes.carry_out(launch)
    for source, (shape, order), one, other in zip(sources, shapes, by_kernel, by_numpy, strict=True):
        np.testing.assert_array_equal(one, source.reshape(shape).transpose(order).ravel())
        np.testing.assert_array_equal(other, one)


def test_numpy_carries_out_backward_strides_and_repeated_rows() -> None:
    source = np.arange(12, dtype=np.uint8)
    target = np.zeros(24, np.uint8)
    at = source.ctypes.data
    to = target.ctypes.data
    numpy_boxes.copy_boxes(pack([Strided(at + 8, to, (3,), (-4,), (4,), 4), Strided(at, to + 12, (3,), (0,), (4,), 4)]))
    assert target.tolist() == [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3, *[0, 1, 2, 3] * 3]


def test_a_kernel_without_a_stand_in_is_told() -> None:
    (launch,) = launches([(whole((4,), 1), 1)], [0], [100])
    with pytest.raises(InternalError, match="digest has no stand-in"):
        numpy_boxes.carry_out(launch._replace(kernel="digest"))


# -- packing -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("run", "at", "op", "flags"),
    [
        (62, 3, ELEMENTS, 0),
        (64, 3, SPANS, 2),
        (254, 2, ELEMENTS, 0),
        (256, 2, SPANS, 4),
        (252, 4, ELEMENTS, 0),
        (260, 4, SPANS, 5),
        (504, 8, ELEMENTS, 0),
        (512, 8, SPANS, 5),
        (512, 16, ELEMENTS, 0),
        (TILE, 16, ELEMENTS, 0),
        (TILE + 16, 16, PIECES, 0),
        (TILE + 1, 3, PIECES, 0),
    ],
)
def test_the_way_of_a_box(run: int, at: int, op: int, flags: int) -> None:
    (box,) = pack([Strided(at, 1 << 20, (3,), (1 << 16,), (1 << 16,), run)]).packed
    assert (int(box["op"]), int(box["flags"])) == (op, flags)


def test_tiles_follow_one_another_and_hold_about_as_much() -> None:
    rng = np.random.default_rng(5)
    runs = [int(n) for n in np.exp(rng.uniform(0, 14, 300))]
    for tile in (16384, 32768, 131072):
        made = pack(
            [Strided(0, 1 << 40, (n % 50 + 1, 3), (1 << 30, 1 << 22), (1 << 30, 1 << 22), n) for n in runs], tile=tile
        )
        at = 0
        for box in made.packed:
            assert int(box["tile0"]) == at
            run = int(box["run"])
            rows = int(box["rows"])
            if box["op"] == PIECES:
                per = int(box["tiles_per_row"])
                each = int(box["aux"])
                assert each % 128 == 0 and each <= tile and (per - 1) * each < run <= per * each
                assert 2 * each > tile - 256, "pieces are at least half a tile"
                at += rows * per
            else:
                held = int(box["rows_per_tile"])
                assert held == rows or held * run <= tile < (held + 1) * run
                at += ceil_div(rows, held)
        assert made.tiles == at


def test_magic_divides_every_number() -> None:
    top = (1 << 32) - 1
    divisors = [1, 2, 3, 5, 7, 10, 641, 65535, 65536, 65537, 1 << 31, top - 1, top]
    assert magics(np.array(divisors, np.uint64)).tolist() == [magic(d) for d in divisors]
    for divisor in divisors[1:]:
        near = {k * divisor + e for k in (0, 1, 2, top // divisor) for e in (-1, 0, 1)} | {top}
        for number in (n for n in near if 0 <= n <= top):
            assert magic(divisor) * number >> 64 == number // divisor


def test_dims_come_in_the_order_of_the_target_and_join() -> None:
    # (4, 6) with its columns outermost on both sides is one run of 24
    assert merge_dims(Copy(0, 0, (1, 4), 0, 0, (1, 4), (4, 6)), 1) == ([], 24)
    dims, run = merge_dims(Copy(0, 0, (2, 100, 50), 0, 0, (2, 16, 8), (4, 3, 2)), 2)
    assert (dims, run) == ([(6, 50, 8)], 8)


# -- numbers beyond 32 bits --------------------------------------------------------------------------------------------
def covered(boxes: list[Strided]) -> int:
    return sum(box.run * int(np.prod(box.extents, dtype=object)) for box in boxes)


@pytest.mark.parametrize(
    "dims", [[1 << 33], [3, 1 << 31, 4], [1 << 32], [(1 << 32) - 1], [2, 1 << 20, 1 << 20, 3], [5, 7, 2, 3, 4]]
)
def test_boxes_of_too_many_rows_or_levels_are_parted(dims: list[int]) -> None:
    strides = [int(np.prod(dims[k + 1 :], dtype=object)) * 2 for k in range(len(dims))]
    boxes = list(split_levels(1000, 0, [(n, 3 * s, s) for n, s in zip(dims, strides, strict=True)], 1))
    assert covered(boxes) == int(np.prod(dims, dtype=object))
    made = pack(boxes)
    assert made.nbytes == covered(boxes) and made.packed["rows"].max() < 1 << 32 and (made.packed["rows"] > 0).all()
    spans = sorted(descriptors.BoxSide(b.target, b.extents, b.target_strides, b.run).hull for b in boxes)
    assert spans[0][0] == 0 and spans[-1][1] == 2 * int(np.prod(dims, dtype=object)) - 1
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    sources = sorted((box.target, box.source) for box in boxes)
    assert all(source == 1000 + 3 * target for target, source in sources)


@pytest.mark.parametrize(
    ("batch", "rows", "columns"), [(1, 1 << 33, 64), (1, 64, 1 << 32), (1 << 34, 32, 32), (1, 1 << 28, 1 << 22)]
)
def test_transposes_of_too_many_tiles_are_parted(batch: int, rows: int, columns: int) -> None:
    by_source = (rows * columns, columns, 1)
    by_target = (3 * rows * columns, 1, 2 * rows)
    dims = list(zip((batch, rows, columns), by_source, by_target, strict=True))
    boxes = list(make_transposes(0, 0, dims, 1))
    assert len(boxes) > 1 and max(max(box.extents[1:]) for box in boxes) <= 1 << 31
    starts = []
    for box in boxes:
        assert (box.source_strides, box.target_strides) == (by_source[:2], (by_target[0], by_target[2]))
        number, left = divmod(box.source, by_source[0])
        starts.append((number, *divmod(left, by_source[1])))
        assert box.target == sum(n * stride for n, stride in zip(starts[-1], by_target, strict=True))
    assert sum(b * r * c for b, r, c in (box.extents for box in boxes)) == batch * rows * columns
    assert all(
        at + n <= of
        for start, box in zip(starts, boxes, strict=True)
        for at, n, of in zip(start, box.extents, (batch, rows, columns), strict=True)
    )
    for (start, one), (begin, other) in itertools.combinations(zip(starts, boxes, strict=True), 2):
        apart = zip(start, one.extents, begin, other.extents, strict=True)
        assert any(x + n <= y or y + m <= x for x, n, y, m in apart)


def test_tiles_that_hang_over_on_both_sides_are_counted() -> None:
    """63 x 63 from item 7 of 16 bytes on: two tiles each way, 2^32 and some in all, though 63 items are less than a
    tile."""
    boxes = list(make_transposes(14, 14, [((1 << 30) + 1, 1 << 14, 1 << 14), (63, 128, 2), (63, 2, 128)], 2))
    assert [box.extents[0] for box in boxes] == [1 << 29, (1 << 29) + 1]
    assert pack_turned(boxes).tiles == 4 * ((1 << 30) + 1)


def test_a_box_of_more_tiles_than_the_kernel_counts_is_refused() -> None:
    with pytest.raises(InternalError, match="want fewer than") as e:
        pack([Strided(0, 0, (), (), (), 1 << 48)])
    assert e.value.code == "E1570"


# -- overlap -----------------------------------------------------------------------------------------------------------
def places(side: descriptors.BoxSide) -> list[int]:
    index = itertools.product(*(range(n) for n in side.extents))
    starts = [side.start + sum(i * s for i, s in zip(at, side.strides, strict=True)) for at in index]
    return [start + x for start in starts for x in range(side.run)]


def random_side(rng: np.random.Generator) -> descriptors.BoxSide:
    levels = int(rng.integers(0, 4))
    extents, strides = (tuple(int(n) for n in rng.integers(low, high, levels)) for low, high in ((1, 5), (-12, 40)))
    return descriptors.BoxSide(int(rng.integers(100, 200)), extents, strides, int(rng.integers(1, 6)))


def test_meeting_equals_sets_of_bytes() -> None:
    rng = np.random.default_rng(11)
    found = {True: 0, False: 0}
    for _ in range(4000):
        one = random_side(rng)
        other = random_side(rng)
        mine = places(one)
        assert one.hull == (min(mine), max(mine) + 1)
        want = not set(mine).isdisjoint(places(other))
        assert descriptors.meet(one, other) == want, (one, other)
        assert descriptors.meets_itself(one) == (len(set(mine)) < len(mine)), one
        found[want] += 1
    assert min(found.values()) > 500, found


def column(target: int, first: int, width: int, rows: int = 1000) -> Strided:
    return Strided((1 << 40) + first, target + first, (rows,), (4096,), (4096,), width)


def test_column_slices_of_one_tensor_do_not_meet_and_one_too_wide_does() -> None:
    slices = [column(0, 64 * k, 64) for k in range(64)]
    descriptors.refuse_overlap(slices)
    with pytest.raises(InternalError, match="two boxes of one list meet") as e:
        descriptors.refuse_overlap([*slices[:30], column(0, 64 * 30, 65), *slices[31:]])
    assert e.value.code == "E1571"


@pytest.mark.parametrize(
    "boxes",
    [
        [Strided(0, 10, (), (), (), 11)],  # read and written
        [Strided(1000, 0, (), (), (), 10), Strided(2000, 9, (), (), (), 1)],
        [Strided(1000, 0, (4,), (8,), (0,), 8)],  # writes one place four times
        [Strided(1000, 0, (4,), (8,), (7,), 8)],
        [Strided(1000, 0, (3, 2), (16, 8), (10, 20), 4)],  # 0 10 20 and 20 30 40
        [Strided(0, 5000, (), (), (), 10), Strided(6000, 9, (), (), (), 1)],  # one reads what the other writes
    ],
)
def test_a_byte_written_twice_or_written_and_read_is_refused(boxes: list[Strided]) -> None:
    with pytest.raises(InternalError) as e:
        descriptors.refuse_overlap(boxes)
    assert e.value.code == "E1571"


def test_launches_look_for_overlap_unless_told() -> None:
    copies = [(whole((64, 64), 2, (1, 0)), 2), (whole((64, 64), 2), 2)]
    with pytest.raises(InternalError, match="meet"):
        launches(copies, [0], [1 << 20])
    assert len(launches(copies, [0], [1 << 20], apart=True)) == 2


def test_reading_the_same_bytes_often_is_legal() -> None:
    descriptors.refuse_overlap([Strided(0, 100 + 10 * k, (), (), (), 10) for k in range(9)])


def test_a_knot_that_is_not_undone_is_refused_rather_than_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "MOST_TRIES", 50)
    one = descriptors.BoxSide(0, (997, 991, 983), (30030, 2 * 3 * 5 * 7, 2 * 3 * 11), 1)
    with pytest.raises(InternalError, match="can't find out") as e:
        descriptors.meet(one, one._replace(start=1, strides=(30030, 2 * 3 * 5 * 14, 2 * 3 * 22)))
    assert e.value.code == "E1572"
