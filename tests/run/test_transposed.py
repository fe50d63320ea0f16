"""Panels against NumPy: sources stored in any order of dims, cut anywhere, read in any blocks; each strip read once."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, StorageError
from ckpt_tool.plan.copy import Region, source_region
from ckpt_tool.plan.plan import Move
from ckpt_tool.run import transposed
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.transposed import Dim, cut_group, cut_strip, is_transposed, strip_of
from ckpt_tool.storage.source import Tree

KINDS = {"u1": "U8", "u2": "BF16", "f4": "F32", "f8": "F64", "c16": "C128"}


class Files:
    """Numbered files of one folder, with or without descriptors."""

    def __init__(self, folder, far=False):
        self.folder = folder
        self.far = far
        self.asked = []

    def open(self, number):
        return os.open(self.path(number), os.O_RDONLY)

    def path(self, number):
        return str(self.folder / f"{number}.bin")

    shown = path

    def make_changed_error(self, number):
        return StorageError("shorter than planned", code="E0708", path=self.path(number))

    def remote(self, number):
        return self if self.far else None

    def view(self, path, offset, nbytes):
        self.asked.append(nbytes)
        with open(path, "rb") as f:
            f.seek(offset)
            return f.read(nbytes)

    fill = Tree.fill


class Case:
    """A tensor cut into a grid of boxes, each stored in an order of dims of its own, some inside larger arrays."""

    def __init__(self, folder, rng, shape, kind, *, order=None, replicas=1, far=False):
        self.whole = np.arange(np.prod(shape)).astype(kind).reshape(shape)
        chunks = []
        number = 0
        for box in grid(rng, shape):
            for replica in range(replicas):
                axes = rng.permutation(len(shape)) if order is None else order
                values = self.whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
                margin = rng.integers(0, 3, (len(shape), 2)) if rng.integers(0, 2) else np.zeros((len(shape), 2), int)
                larger = np.pad(values, margin, constant_values=77)
                stored = np.ascontiguousarray(larger.transpose(axes))
                strides = [0] * len(shape)
                for d, axis in enumerate(axes):
                    strides[axis] = stored.strides[d] // stored.itemsize
                head = b"h" * int(rng.integers(0, 40))
                (folder / f"{number}.bin").write_bytes(head + stored.tobytes())
                array = StoredArray(f"{number}.bin", len(head), DTYPES[KINDS[kind]], larger.shape, tuple(strides))
                chunks.append(Chunk(box, array, Box(tuple(int(m[0]) for m in margin), box.shape), replica))
                number += 1
        tensor = LogicalTensor(TensorKey("w"), tuple(shape), DTYPES[KINDS[kind]], tuple(chunks))
        sources = tuple(source_region(chunk, tensor.shape, i) for i, chunk in enumerate(chunks))
        item = self.whole.itemsize
        self.move = Move(tensor.key, tensor.shape, tensor.dtype, tensor.dtype, tensor.numel, item, item, sources, ())
        self.files = Files(folder, far)

    @property
    def turned(self):
        return any(map(is_transposed, self.move.sources))


def grid(rng, shape):
    edges = [sorted({0, n, *rng.integers(0, n + 1, rng.integers(0, 3)).tolist()}) for n in shape]
    spans = [list(itertools.pairwise(e)) for e in edges]
    return [Box(tuple(a for a, _ in index), tuple(b - a for a, b in index)) for index in itertools.product(*spans)]


@pytest.fixture(params=["as it is", "small"])
def sizes(request, monkeypatch):
    """The module's sizes, or such that arrays of a few KiB meet every bound."""
    if request.param == "small":
        for name, value in (
            ("STRIP", 16),
            ("SHORT", 8),
            ("NEAR", 6),
            ("GROUP", 300),
            ("COLUMNS", 4),
            ("BRIDGE", 24),
            ("_VECTORS", 6),
            ("FAR_BRIDGE", 40),
            ("FAR_READ", 200),
        ):
            monkeypatch.setattr(transposed, name, value)


def read_in_blocks(reader, case, rng, start, stop, until):
    """Elements [start, stop), some through `view` where the panel has them in one piece."""
    item = case.whole.itemsize
    at = start
    got = b""
    while at < stop:
        end = min(stop, at + int(rng.integers(1, max(2, case.whole.size // 3))))
        turned = reader.find_panels(case.move) if rng.integers(0, 2) else None
        seen = turned.view(at, end, until) if turned else None
        if seen is None:
            seen = memoryview(bytearray((end - at) * item))
            reader.fill(case.move, seen, at, end, until=until if rng.integers(0, 2) else None)
        got += bytes(seen)
        at = end
    return got


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("kind", list(KINDS))
def test_any_part_of_the_line_is_what_numpy_has(tmp_path, sizes, seed, kind):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, (0, 0, 60, 14, 7)[n := int(rng.integers(2, 5))], n).tolist())
    case = Case(tmp_path, rng, shape, kind, replicas=1 + seed % 3 // 2, far=seed % 5 == 4)
    line = case.whole.tobytes()
    item = case.whole.itemsize
    reader = BlockReader(case.files, 2, {}, panel=int(rng.integers(1, 2 * len(line) + 2)))
    assert (reader.find_panels(case.move) is not None) == case.turned
    for _ in range(3):
        start, stop = sorted(int(i) for i in rng.integers(0, case.whole.size + 1, 2))
        until = int(rng.integers(stop, case.whole.size + 1))
        assert read_in_blocks(reader, case, rng, start, stop, until) == line[start * item : stop * item]
    assert read_in_blocks(reader, case, rng, 0, case.whole.size, case.whole.size) == line
    reader.close()


@pytest.mark.parametrize("shape", [(300, 500), (70, 9000), (9000, 70), (1000, 1)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_matrices_of_real_proportions(tmp_path, shape, kind):
    case = Case(tmp_path, np.random.default_rng(3), shape, kind, order=(1, 0))
    reader = BlockReader(case.files, 2, {}, panel=200_000)
    block = memoryview(bytearray(case.whole.nbytes))
    reader.fill(case.move, block, 0, case.whole.size)
    assert bytes(block) == case.whole.tobytes()
    reader.close()


def stored_whole(tmp_path, shape, kind="u2"):
    """One transposed array without margins: (case, bytes)."""
    rng = np.random.default_rng(0)
    whole = np.arange(np.prod(shape)).astype(kind).reshape(shape)
    (tmp_path / "0.bin").write_bytes(np.ascontiguousarray(whole.T).tobytes())
    item = whole.itemsize
    case = Case.__new__(Case)
    source = Region(0, 0, 0, shape, (item, shape[0] * item), (shape[1], 1))
    case.whole = whole
    case.files = Files(tmp_path)
    case.move = Move(
        TensorKey("w"), shape, DTYPES[KINDS[kind]], DTYPES[KINDS[kind]], whole.size, item, item, (source,), ()
    )
    return case, rng


@pytest.mark.parametrize("panel", [1 << 20, 100_000, 30_000])
def test_every_strip_is_read_once_and_none_beyond_the_share(tmp_path, monkeypatch, panel):
    """A share of rows reads its rows' strips, all of them once; the gaps of 14 KB between strips of 10 KB stay
    unread."""
    case, _ = stored_whole(tmp_path, (12_000, 40))
    read = []
    true = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(true(fd, views, at)) or read[-1])
    reader = BlockReader(case.files, 2, {}, panel=panel)
    block = memoryview(bytearray(2000))
    start = 1000 * 40
    stop = 6000 * 40
    for at in range(start, stop, 1000):
        reader.fill(case.move, block, at, at + 1000, until=stop)
        assert bytes(block) == case.whole.reshape(-1)[at : at + 1000].tobytes()
    reader.close()
    assert sum(read) == (stop - start) * 2


def test_gaps_that_are_bridged_cost_few_calls(tmp_path, monkeypatch):
    """Strips of 3.6 KB, 400 bytes apart: some 140 to a call."""
    case, rng = stored_whole(tmp_path, (2000, 600))
    calls = []
    true = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: calls.append(len(views)) or true(fd, views, at))
    reader = BlockReader(case.files, 2, {}, panel=(2000 - 200) * 600 * 2)
    got = read_in_blocks(reader, case, rng, 0, 1800 * 600, 1800 * 600)
    assert got == case.whole[:1800].tobytes()
    reader.close()
    assert len(calls) < 20 and max(calls) > 200


def test_memory_stays_within_the_bound(tmp_path):
    case, rng = stored_whole(tmp_path, (3000, 700))
    reader = BlockReader(case.files, 2, {}, panel=1 << 20)
    assert read_in_blocks(reader, case, rng, 0, case.whole.size, case.whole.size) == case.whole.tobytes()
    strips = reader.strips
    assert len(strips._panels) == 1 << 20
    assert len(strips._strips) <= transposed.GROUP + 2 * transposed.STRIP


def test_a_replica_that_differs_is_named(tmp_path):
    case = Case(tmp_path, np.random.default_rng(1), (50, 60), "c16", order=(1, 0), replicas=2)
    block = memoryview(bytearray(case.whole.nbytes))
    BlockReader(case.files, 2, {}).fill(case.move, block, 0, case.whole.size)
    number = next(region.file for region in case.move.sources if region.replica)
    region = case.move.sources[number]
    data = bytearray((tmp_path / f"{number}.bin").read_bytes())
    data[region.offset + region.strides[0]] ^= 1
    (tmp_path / f"{number}.bin").write_bytes(data)
    reader = BlockReader(case.files, 2, {})
    for _ in range(2):  # nothing of the bad panel is kept
        with pytest.raises(InconsistentCheckpoint, match="replicas differ") as e:
            reader.fill(case.move, block, 0, case.whole.size)
        assert e.value.path and e.value.path.endswith(f"{number}.bin")


def test_a_panel_that_failed_is_not_taken_for_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(transposed, "GROUP", 2000)
    case, _ = stored_whole(tmp_path, (400, 300))
    reader = BlockReader(case.files, 2, {}, panel=30_000)
    block = memoryview(bytearray(600))
    reader.fill(case.move, block, 0, 300)
    os.truncate(tmp_path / "0.bin", case.whole.nbytes - 300)
    with pytest.raises(StorageError):
        reader.fill(case.move, block, case.whole.size - 300, case.whole.size)
    reader.fill(case.move, block, 0, 300)
    assert bytes(block) == case.whole[0].tobytes()


def test_a_file_that_is_shorter_is_an_error_and_no_silence(tmp_path):
    case, _ = stored_whole(tmp_path, (200, 300))
    os.truncate(tmp_path / "0.bin", case.whole.nbytes - 1)
    block = memoryview(bytearray(case.whole.nbytes))
    with pytest.raises(StorageError, match="shorter"):
        BlockReader(case.files, 2, {}).fill(case.move, block, 0, case.whole.size)


def test_a_remote_source_is_asked_seldom(tmp_path):
    case, rng = stored_whole(tmp_path, (3000, 700))
    case.files.far = True
    reader = BlockReader(case.files, 2, {})
    assert read_in_blocks(reader, case, rng, 0, case.whole.size, case.whole.size) == case.whole.tobytes()
    assert len(case.files.asked) < 30 and max(case.files.asked) <= transposed.FAR_READ


@pytest.mark.parametrize("seed", range(40))
def test_cuts_tile_the_dims(seed):
    rng = np.random.default_rng(seed)
    extents = rng.integers(1, 30, rng.integers(1, 4)).tolist()
    shape = tuple(extents)
    axes = rng.permutation(len(extents))
    where = np.arange(np.prod(shape)).reshape(shape)
    stored = np.ascontiguousarray(where.transpose(axes)).transpose(np.argsort(axes))
    dims = [Dim(n, s // 8 * 2, t // 8 * 2) for n, s, t in zip(shape, stored.strides, where.strides, strict=True)]
    inner, outer = strip_of(dims, 2)
    seen = []
    for a, b, few in cut_strip(inner, int(rng.integers(1, 100))):
        for c, d, many in cut_group(outer, most := int(rng.integers(1, 200))):
            assert np.prod([dim.extent for dim in many]) <= most
            for index in itertools.product(*(range(dim.extent) for dim in (*many, *few))):
                steps = list(zip(index, (*many, *few), strict=True))
                seen.append(
                    (a + c + sum(i * dim.stride for i, dim in steps), b + d + sum(i * dim.step for i, dim in steps))
                )
    flat = stored.transpose(axes).ravel()  # the line's number of each stored element
    assert sorted(seen) == [(2 * i, 2 * int(n)) for i, n in enumerate(flat)]


def test_what_is_transposed():
    assert is_transposed(Region(0, 0, 0, (4, 4), (2, 8), (4, 1)))
    assert is_transposed(Region(0, 0, 0, (2, 4, 4), (32, 2, 8), (16, 4, 1)))
    for plain in (
        ((4, 4), (8, 2), (4, 1)),
        ((2, 3, 4), (8, 32, 2), (12, 4, 1)),
        ((9,), (4,), (1,)),
        ((), (), ()),
        ((4, 4), (0, 2), (4, 1)),
        ((4, 4), (0, 8), (4, 1)),
    ):
        assert not is_transposed(Region(0, 0, 0, *plain)), plain
