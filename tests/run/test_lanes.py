"""Lanes against NumPy: whatever a lane moves, block by block, is what the array's own slices hold; odd sides get
none."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.core.box import Box
from ckpt_tool.plan.copy import Region, box_region
from ckpt_tool.run.blocks import LONG
from ckpt_tool.run.lanes import Bands, Runs, bands_of, runs_of


def regions_of(shape, boxes, item):
    """Each box as a file of its own, stored densely behind a head of 16 bytes."""
    return [box_region(shape, box, item, number, 16) for number, box in enumerate(boxes)]


def files_of(whole, boxes):
    return [
        b"h" * 16 + whole[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True))].tobytes()
        for b in boxes
    ]


def grid(rng, shape):
    rows = np.unique([0, shape[0], *rng.integers(0, shape[0] + 1, 2)])
    columns = np.unique([0, shape[1], *rng.integers(0, shape[1] + 1, 2)])
    return [
        Box((int(a), int(c)), (int(b - a), int(d - c)))
        for a, b in zip(rows, rows[1:], strict=False)
        for c, d in zip(columns, columns[1:], strict=False)
    ]


def arrays(shape, kind):
    return np.arange(np.prod(shape)).astype(kind).reshape(shape)


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", ["u1", "u2", "f4", "f8", "c16"])
def test_bands_read_and_write_what_slices_hold(seed, kind):
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(2, 40)), int(rng.integers(2, 30)))
    whole = arrays(shape, kind)
    boxes = grid(rng, shape)
    item = whole.itemsize
    regions = regions_of(shape, boxes, item)
    files = files_of(whole, boxes)
    found = bands_of(regions, item)
    if found is None:  # full rows everywhere, or a single column: plain runs
        assert runs_of(regions, item, 0, whole.size) is not None
        return
    row, bands = found
    assert row == shape[1]
    block = memoryview(bytearray(whole.nbytes))
    scratch = memoryview(bytearray(whole.nbytes))

    def read(file, offset, view):
        view[:] = files[file][offset : offset + len(view)]

    made = [bytearray(len(data)) for data in files]

    def write(file, offset, view):
        made[file][offset : offset + len(view)] = view

    reads = Bands(bands, row, item, block, scratch, read, reads=True)
    writes = Bands(bands, row, item, block, scratch, write, reads=False)
    step = int(rng.integers(1, shape[0] + 1))
    for top in range(0, shape[0], step):
        end = min(top + step, shape[0])
        part = block[: (end - top) * row * item]
        assert reads.whole(top * row, end * row)
        reads.pass_by(part, top * row, end * row)
        assert bytes(part) == whole[top:end].tobytes()
        writes.pass_by(part, top * row, end * row)
    assert [data[16:] for data in made] == [data[16:] for data in files]
    assert not reads.whole(0, row - 1) and not reads.whole(1, row)


@pytest.mark.parametrize("seed", range(30))
def test_runs_move_any_part_of_the_line(seed):
    rng = np.random.default_rng(seed)
    width = LONG // 2  # of u2: rows are runs
    shape = (int(rng.integers(1, 6)), 2 * width)
    whole = arrays(shape, "u2")
    boxes = [Box((0, 0), (shape[0], width)), Box((0, width), (shape[0], width))]
    if seed % 2:
        boxes = [Box((i, 0), (1, 2 * width)) for i in range(shape[0])]
    boxes = [boxes[i] for i in rng.permutation(len(boxes))]
    files, line = files_of(whole, boxes), whole.tobytes()
    start, stop = sorted(int(i) for i in rng.integers(0, whole.size + 1, 2))
    runs = runs_of(regions_of(shape, boxes, 2), 2, start, stop)
    assert runs is not None and sum(run.stop - run.start for run in runs) == (stop - start) * 2

    def read(file, offset, view):
        view[:] = files[file][offset : offset + len(view)]

    lane = Runs(runs, read)
    at = start * 2
    while at < stop * 2:
        end = min(at + int(rng.integers(1, 3 * LONG)), stop * 2)
        part = memoryview(bytearray(end - at))
        lane.pass_by(part, at, end)
        assert bytes(part) == line[at:end]
        at = end


def test_copies_of_a_run_are_all_written():
    two = [Region(0, 0, 0, (100,), (1,), (1,)), Region(1, 50, 0, (100,), (1,), (1,))]
    seen = []
    runs = runs_of(two, 1, 0, 100)
    assert runs is not None
    lane = Runs(runs, lambda file, offset, view: seen.append((file, offset, len(view))))
    for at in (0, 60):
        lane.pass_by(memoryview(bytearray(60))[: 100 - at], at, min(at + 60, 100))
    assert seen == [(0, 0, 60), (1, 50, 60), (0, 60, 40), (1, 110, 40)]


def test_sides_that_are_neither_get_no_lane():
    column_major = Region(0, 0, 0, (4, 4), (2, 8), (4, 1))
    three_dims = Region(0, 0, 0, (2, 2, 2), (8, 4, 2), (16, 4, 1))
    gaps = Region(0, 0, 0, (4, 2), (100, 2), (4, 1))
    for region in (column_major, three_dims, gaps):
        assert runs_of([region], 2, 0, 16) is None and bands_of([region], 2) is None, region
