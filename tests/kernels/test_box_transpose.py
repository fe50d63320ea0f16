"""box_transpose against NumPy: any item, any order of dims, any alignment; chosen by the list itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy_boxes
import pytest

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.device import kernels
from ckpt_tool.device.descriptors import EDGES, Launch, Turned, launches, pack_turned
from ckpt_tool.device.library import Device
from ckpt_tool.errors import StorageError
from ckpt_tool.plan.copy import Copy

CASES = 900
POISON = 0xA5


def laid_out(rng: np.random.Generator, extents: Sequence[int], item: int) -> tuple[list[int], int]:
    """(byte strides of dims stored in a random order with gaps, bytes): rows on 16 bytes or not."""
    grid = int(rng.choice([item, item, 16]))
    step = item
    strides = [0] * len(extents)
    for axis in rng.permutation(len(extents)):
        strides[axis] = step
        step *= extents[axis] + int(rng.integers(0, 3))
        step += -step % grid
    return strides, step


def ways(launch: Launch) -> Counter[tuple[object, ...]]:
    return Counter(
        (
            int(box["run"]),
            int(box["vlog"]) == 4,
            int(box["flags"]) == 4,
            bool(box["aux"] & 0xFFFF),
            bool(box["aux"] >> 16),
        )
        for box in launch.boxes.packed
        if launch.kernel == "box_transpose"
    )


class Turn(NamedTuple):
    """A random transpose: `target` is what `copy` makes of `source` in a target full of POISON. rng: for more of it."""

    item: int
    copy: Copy
    source: np.ndarray
    target: np.ndarray
    rng: np.random.Generator


def random_turn(seed: int) -> Turn:
    rng = np.random.default_rng((seed, 30))
    item = int(rng.choice([1, 2, 4, 8, 16]))
    extents = [int(n) for n in rng.integers(1, 5, rng.integers(2, 5))]
    for axis in rng.permutation(len(extents))[:2]:
        extents[axis] = int(rng.integers(1, 3 * EDGES[item]))
    (by_source, from_bytes), (by_target, to_bytes) = (laid_out(rng, extents, item) for _ in range(2))
    first, to = (item * int(n) for n in rng.integers(0, 16 // item + 2, 2))
    source = rng.integers(0, 256, from_bytes + 32, np.uint8)
    target = np.full(to_bytes + 32, POISON, np.uint8)
    there = np.ndarray(extents, f"V{item}", target.data, to, by_target)
    there[...] = np.ndarray(extents, f"V{item}", source.data, first, by_source)
    return Turn(item, Copy(0, first, tuple(by_source), 0, to, tuple(by_target), tuple(extents)), source, target, rng)


@pytest.mark.parametrize("part", range(6))
def test_random_transposes_equal_numpy(device: Device, part: int) -> None:
    for seed in range(part * CASES // 6, (part + 1) * CASES // 6):
        item, copy, source, want, rng = random_turn(seed)
        with device.upload(source) as src, device.upload(np.full_like(want, POISON)) as dst:
            for launch in launches([(copy, item)], [src.address], [dst.address]):
                blocks = int(rng.choice([0, 1, 3, 40]))
                threads = int(rng.choice([0, 32, 96, 256]))
                kernels.launch(device, launch, blocks=blocks, threads=threads)
            got = device.download(dst.address, len(want))
        wrong = np.flatnonzero(got != want)
        assert not len(wrong), f"case {seed}: byte {wrong[0]} of {len(want)}, {item=} {copy}"


def test_the_random_transposes_take_every_way_through_the_kernel() -> None:
    taken = Counter[tuple[object, ...]]()
    for item, copy, *_ in map(random_turn, range(CASES)):
        for launch in launches([(copy, item)], [1 << 20], [1 << 30]):
            taken.update(ways(launch))
    for item in (1, 2, 4, 8):
        for wide_source in (True, False):
            for wide_target in (True, False):
                found = sum(n for way, n in taken.items() if way[:3] == (item, wide_source, wide_target))
                assert found >= 5, (item, wide_source, wide_target, taken)
        assert sum(n for way, n in taken.items() if way[0] == item and way[3] and way[4]) >= 3, (item, taken)
    assert sum(n for way, n in taken.items() if way[0] == 16) >= 20, taken


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8"])
def test_every_first_byte_and_every_ragged_end(device: Device, dtype: str) -> None:
    """Rows on 16 bytes, the box beginning at every item of 16 bytes on both sides and ending at several: one launch."""
    item = np.dtype(dtype).itemsize
    edge = EDGES[np.dtype(dtype).itemsize]
    per = 16 // item
    pitch = 3 * edge  # items
    source = np.arange(pitch * pitch).astype(dtype)
    cases = [
        (i, j, edge + i % 3 + end, edge + j % 5 + end)
        for i in range(per)
        for j in range(per)
        for end in (0, per, per + 1)
    ][: 4000 // edge]
    want = np.full((len(cases), pitch, pitch), 0xA5, dtype)
    boxes = []
    with device.upload(source) as src, device.upload(want) as dst:
        for k, (i, j, rows, columns) in enumerate(cases):
            grid = source.reshape(pitch, pitch)
            want[k, 1 : 1 + columns, i : i + rows] = grid[2 : 2 + rows, j : j + columns].T
            first = src.address + (2 * pitch + j) * item
            to = dst.address + (k * pitch * pitch + pitch + i) * item
            boxes.append(Turned(first, to, item, (1, rows, columns), (0, pitch * item), (0, pitch * item)))
        kernels.box_transpose(device, pack_turned(boxes))
        got = device.download(dst.address, want.nbytes).view(dtype).reshape(want.shape)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("item", "edge"), [(1, 128), (2, 64), (4, 64), (8, 32), (16, 16)])
def test_sizes_about_whole_tiles(device: Device, item: int, edge: int) -> None:
    sizes = [n * edge + off for n in (1, 2) for off in (-1, 0, 1)]
    shapes = [(rows, columns) for rows in sizes for columns in sizes]
    room = (2 * edge + 1) ** 2 * item // 16 * 16 + 16
    source = np.random.default_rng(item).integers(0, 256, room, np.uint8)
    want = np.full((len(shapes), room), POISON, np.uint8)
    with device.upload(source) as src, device.upload(want) as dst:
        boxes = []
        for k, (rows, columns) in enumerate(shapes):
            given = source[: rows * columns * item].view(f"V{item}").reshape(rows, columns)
            want[k, : rows * columns * item] = np.ascontiguousarray(given.T).view(np.uint8).ravel()
            strides = (0, columns * item), (0, rows * item)
            boxes.append(Turned(src.address, dst.address + k * room, item, (1, rows, columns), *strides))
        kernels.box_transpose(device, pack_turned(boxes))
        got = device.download(dst.address, want.size).reshape(want.shape)
    np.testing.assert_array_equal(got, want)


def test_batches_and_heads(shim: Device) -> None:
    """(layer, head, position, 8 bytes) to (position, head, ...), many boxes in one launch; NumPy's stand-in agrees."""
    shape = (3, 5, 70, 4)
    swapped = (3, 70, 5, 4)
    source = np.arange(np.prod(shape), dtype=np.uint16)
    target = np.zeros_like(source)
    there = contiguous_strides(swapped)
    by_target = tuple(2 * there[axis] for axis in (0, 2, 1, 3))
    copy = Copy(0, 0, tuple(2 * n for n in contiguous_strides(shape)), 0, 0, by_target, shape)
    (launch,) = launches([(copy, 2)], [source.ctypes.data], [target.ctypes.data])
    assert launch.kernel == "box_transpose" and launch.boxes.packed["run"].tolist() == [8]
    want = source.reshape(shape).transpose(0, 2, 1, 3)
    for carry_out in (numpy_boxes.carry_out, lambda launch: kernels.launch(shim, launch)):
        target[...] = 0
        carry_out(launch)
        np.testing.assert_array_equal(target.reshape(swapped), want)


def test_work_of_nothing_launches_nothing(device: Device) -> None:
    nothing = pack_turned([])
    assert (len(nothing.packed), nothing.tiles, nothing.nbytes) == (0, 0, 0)
    kernels.box_transpose(device, nothing)
    device.library.call("box_transpose", 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(("count", "threads"), [(0, 0), (1, -32), (1, 33), (1, 512)])
def test_calls_that_make_no_sense_are_refused(device: Device, count: int, threads: int) -> None:
    with (
        device.upload(np.zeros(136, np.uint8)) as packed,
        pytest.raises(StorageError, match="cudaErrorInvalidValue"),
    ):
        device.library.call("box_transpose", packed.address, count, 1, 1, threads, 0)
