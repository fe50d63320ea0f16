"""Transposed outputs against NumPy: any order of dims, any share, any blocks; not one byte beside the share is
touched."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import xxhash

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import StorageError
from ckpt_tool.plan import schedule
from ckpt_tool.plan.copy import Region, box_region, is_transposed
from ckpt_tool.plan.plan import Move
from ckpt_tool.run import transposed, transposed_outputs, walk
from ckpt_tool.run.blocks import BlockReader, Writer
from ckpt_tool.run.digest import LEAF, digest, root
from ckpt_tool.run.transposed_outputs import TransposedOutputs
from ckpt_tool.run.walk import ROOM, STRIDED_BLOCK, Walk, WalkBuffers, read_back

KINDS = {"u1": "U8", "u2": "BF16", "f4": "F32", "f8": "F64", "c16": "C128"}
FILL = 0x77


class Folder:
    """Numbered files, to read and to write."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder
        self.path = lambda number: str(folder / f"{number}.bin")
        self.shown = self.path

    def open(self, number):
        return os.open(number if isinstance(number, str) else self.path(number), os.O_RDWR)

    def make_changed_error(self, number):
        return StorageError("shorter than planned", code="E0708", path=self.path(number))

    def staged(self):
        """The folder as a writer has it, with a path of its own."""
        return SimpleNamespace(open=self.open, path=self.folder)

    def remote(self, number):
        return None

    def bytes(self, number):
        return (self.folder / f"{number}.bin").read_bytes()


def grid(rng, shape):
    edges = [sorted({0, n, *rng.integers(0, n + 1, rng.integers(0, 3)).tolist()}) for n in shape]
    spans = [list(itertools.pairwise(e)) for e in edges]
    return [tuple(slice(a, b) for a, b in index) for index in itertools.product(*spans)]


class Side:
    """A tensor cut into a grid of boxes, each a file of its own and stored in some order of dims, here and there with
    room around it (tight: one box, no room). `where[i]` has, for each byte of file i that is an element's, the line's
    byte, else -1."""

    def __init__(self, rng, shape, item, *, order=None, copies=1, tight=False):
        line = np.arange(np.prod(shape) * item).reshape(*shape, item)
        self.regions = []
        self.where = []
        for box in [tuple(slice(0, n) for n in shape)] if tight else grid(rng, shape):
            extents = tuple(s.stop - s.start for s in box)
            axes = order or rng.permutation(len(shape)).tolist()
            margin = rng.integers(0, 3, (len(shape), 2)) * (not tight and int(rng.integers(0, 2)))
            for copy in range(1 + int(rng.integers(0, copies))):
                larger = np.pad(line[box], [*margin.tolist(), (0, 0)], constant_values=-1)
                stored = np.ascontiguousarray(larger.transpose(*axes, len(shape)))
                strides = [0] * len(shape)
                for d, axis in enumerate(axes):
                    strides[axis] = stored.strides[d] // line.itemsize // item
                head = int(rng.integers(0, 40))
                start = head + sum(int(m[0]) * s for m, s in zip(margin, strides, strict=True)) * item
                at = walk_box(box, extents)
                region = box_region(shape, at, item, len(self.where), start, strides=strides)
                self.regions.append(region._replace(replica=copy))
                self.where.append(np.concatenate([np.full(head, -1), stored.ravel()]))

    def files(self, line, start, stop):
        """What every file holds once bytes [start, stop) of the line are written over FILL."""
        for where in self.where:
            data = np.full(where.size, FILL, np.uint8)
            mine = (where >= start) & (where < stop)
            data[mine] = line[where[mine]]
            yield data.tobytes()


def walk_box(box, extents):
    from ckpt_tool.core.box import Box

    return Box(tuple(s.start for s in box), extents)


@pytest.fixture(params=["as it is", "small"])
def sizes(request, monkeypatch):
    """The modules' sizes, or such that arrays of a few KiB meet every bound."""
    if request.param == "small":
        for name, value in (("STRIP", 16), ("SHORT", 8), ("NEAR", 6), ("GROUP", 300), ("COLUMNS", 4)):
            monkeypatch.setattr(transposed, name, value)
            if hasattr(transposed_outputs, name):
                monkeypatch.setattr(transposed_outputs, name, value)
        monkeypatch.setattr(walk, "STRIDED_BLOCK", 2048)
        monkeypatch.setattr(walk, "BLOCK", 1024)


def job_of(tmp_path, source, out, line, panel):
    """(a job between two folders, the output's folder)"""
    here = Folder(tmp_path / "source")
    there = Folder(tmp_path / "out")
    for i, data in enumerate(source.files(line, 0, line.size)):
        (here.folder / f"{i}.bin").write_bytes(data)
    for i, where in enumerate(out.where):
        (there.folder / f"{i}.bin").write_bytes(bytes([FILL]) * where.size)
    writer = Writer(there.staged(), [there.path(i) for i in range(len(out.where))], 2, {})
    reader = BlockReader(here, 2, {}, panel=panel)
    block = memoryview(bytearray(ROOM))
    scratch = memoryview(bytearray(STRIDED_BLOCK))
    return WalkBuffers(reader, writer, block, scratch, True, lambda: False, lambda n: None), there


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", list(KINDS))
def test_any_share_between_any_layouts(tmp_path, sizes, seed, kind):
    """Every share writes its own elements and no other byte; digest, journal hash and read-back agree with NumPy."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, (0, 0, 60, 14, 7)[n := int(rng.integers(2, 5))], n).tolist())
    whole = np.arange(np.prod(shape)).astype(kind).reshape(shape)
    item = whole.itemsize
    line = np.frombuffer(whole.tobytes(), np.uint8)
    plain = tuple(range(n))
    source = Side(rng, shape, item, order=plain if seed % 3 == 0 else None, copies=1 + seed % 2)
    out = Side(rng, shape, item, order=(1, 0, *plain[2:]) if seed % 5 == 0 else None, copies=3)
    job, there = job_of(tmp_path, source, out, line, int(rng.integers(1, 2 * line.size + 300)))
    dtype = DTYPES[KINDS[kind]]
    outputs = tuple(region._replace(replica=0) for region in out.regions)
    move = Move(TensorKey("w"), shape, dtype, dtype, whole.size, item, item, tuple(source.regions), outputs)
    again = BlockReader(there, 2, {}, panel=int(rng.integers(1, 2 * line.size + 300)))
    cuts = sorted({0, whole.size, *rng.integers(0, whole.size + 1, 2).tolist()})
    shares = list(itertools.pairwise(cuts))
    leaves = b""
    done = np.zeros(line.size, bool)
    for start, stop in [shares[i] for i in rng.permutation(len(shares))]:
        step = Walk(job, move, start, stop)
        step.run()
        leaves = leaves or bytes(step.source_leaves.leaves)  # one leaf: the first share's, whichever that is
        done[start * item : stop * item] = True
        for i, where in enumerate(out.where):
            want = np.full(where.size, FILL, np.uint8)
            mine = (where >= 0) & done[where]
            want[mine] = line[where[mine]]
            assert there.bytes(i) == want.tobytes(), (i, start, stop)
        bytes_of = line[start * item : stop * item].tobytes()
        want = xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(bytes_of))
        assert step.hash_written() == read_back(again, move, start, stop) == want
    assert root(dtype.name, shape, leaves) == digest(dtype.name, shape, whole.tobytes())


SHAPES = [(300, 500), (70, 9000), (9000, 70), (1000, 1), (700, 1100)]


@pytest.mark.share(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sides", ["both", "output", "cast", "cast both"])
def test_matrices_of_real_proportions(tmp_path, shape, sides):
    """Shares that end inside rows and leaves; digests of both sides."""
    rng = np.random.default_rng(7)
    whole = np.arange(np.prod(shape)).astype("f4").reshape(shape)
    after = whole.astype(ml_dtypes.bfloat16) if "cast" in sides else whole
    line = np.frombuffer(whole.tobytes(), np.uint8)
    source = Side(rng, shape, 4, order=(1, 0) if "both" in sides else (0, 1))
    out = Side(rng, shape, after.itemsize, order=(1, 0), copies=2)
    job, there = job_of(tmp_path, source, out, line, 300_000)
    kinds = DTYPES["F32"], DTYPES["BF16" if "cast" in sides else "F32"]
    move = Move(TensorKey("w"), shape, *kinds, whole.size, 4, after.itemsize, tuple(source.regions), tuple(out.regions))
    cuts = sorted({0, whole.size, *rng.integers(0, whole.size + 1, 3).tolist()})
    leaves = {}
    leaves_out = {}
    for start, stop in itertools.pairwise(cuts):
        step = Walk(job, move, start, stop)
        step.run()
        for stream, into in ((step.source_leaves, leaves), (step.out_leaves, leaves_out)):
            if stream.leaves:
                into[stream.first] = bytes(stream.leaves)
        assert step.hash_written() == read_back(BlockReader(there, 2, {}, panel=100_000), move, start, stop)
    for i, want in enumerate(out.files(np.frombuffer(after.tobytes(), np.uint8), 0, after.nbytes)):
        assert there.bytes(i) == want
    for values, found, kind in ((whole, leaves, kinds[0]), (after, leaves_out, kinds[1])):
        got = root(kind.name, shape, b"".join(found[first] for first in sorted(found)))
        assert got == digest(kind.name, shape, values.tobytes())
    assert len(job.reader.strips._panels) <= 300_000
    assert len(job.reader.strips._strips) <= 2 * transposed.GROUP + 128


def test_read_back_sees_a_byte_of_either_copy(tmp_path):
    rng = np.random.default_rng(1)
    whole = np.arange(5000, dtype="u2").reshape(50, 100)
    line = np.frombuffer(whole.tobytes(), np.uint8)
    source = Side(rng, (50, 100), 2, order=(0, 1))
    out = Side(rng, (50, 100), 2, order=(1, 0), tight=True)
    out.regions = [*out.regions, *(r._replace(file=r.file + len(out.where)) for r in out.regions)]
    out.where = out.where * 2
    job, there = job_of(tmp_path, source, out, line, 1 << 20)
    dtype = DTYPES["BF16"]
    move = Move(TensorKey("w"), (50, 100), dtype, dtype, 5000, 2, 2, tuple(source.regions), tuple(out.regions))
    step = Walk(job, move, 0, 5000)
    step.run()
    for i in (0, len(out.where) - 1):
        data = bytearray(there.bytes(i))
        data[-1] ^= 1
        (there.folder / f"{i}.bin").write_bytes(data)
        assert read_back(BlockReader(there, 2, {}), move, 0, 5000) != step.hash_written()
        data[-1] ^= 1
        (there.folder / f"{i}.bin").write_bytes(data)
    assert read_back(BlockReader(there, 2, {}), move, 0, 5000) == step.hash_written()


@pytest.mark.parametrize("both", [False, True])
def test_strips_are_as_long_as_the_panel_is_high(tmp_path, monkeypatch, both):
    """A matrix of 3000 x 1400 in three panels: three strips a stored row, each byte written once."""
    rng = np.random.default_rng(0)
    shape = (3000, 1400)
    written = []
    whole = np.arange(np.prod(shape)).astype("u2").reshape(shape)
    line = np.frombuffer(whole.tobytes(), np.uint8)
    source = Side(rng, shape, 2, order=(1, 0) if both else (0, 1), tight=True)
    out = Side(rng, shape, 2, order=(1, 0), tight=True)
    job, there = job_of(tmp_path, source, out, line, 3 << 20)
    true = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(true(fd, data, at)) or written[-1])
    dtype = DTYPES["BF16"]
    move = Move(TensorKey("w"), shape, dtype, dtype, whole.size, 2, 2, tuple(source.regions), tuple(out.regions))
    Walk(job, move, 0, whole.size).run()
    assert sum(written) == whole.nbytes and len(written) == 3 * 1400 and min(written) == 2000
    assert there.bytes(0)[out.regions[0].offset :] == whole.T.tobytes()


def test_a_panel_that_another_move_has_overwritten_is_made_again(tmp_path):
    """One thread: half of a move with transposed sources, one with transposed outputs, then the other half."""
    whole = np.arange(2400, dtype="u2").reshape(40, 60)
    dtype = DTYPES["BF16"]
    across = Region(0, 0, 0, (40, 60), (2, 80), (60, 1))
    along = Region(1, 0, 0, (2400,), (2,), (1,))
    here = Folder(tmp_path / "source")
    there = Folder(tmp_path / "out")
    for i, data in enumerate((whole.T.tobytes(), bytes(4800))):
        (here.folder / f"{i}.bin").write_bytes(data)
        (there.folder / f"{i}.bin").write_bytes(bytes(4800))
    key = TensorKey("w")
    one = Move(key, (40, 60), dtype, dtype, 2400, 2, 2, (across,), (along,))
    other = Move(key, (40, 60), dtype, dtype, 2400, 2, 2, (along,), (across,))
    writer = Writer(there.staged(), [there.path(0), there.path(1)], 2, {})
    block = memoryview(bytearray(ROOM))
    scratch = memoryview(bytearray(STRIDED_BLOCK))
    job = WalkBuffers(BlockReader(here, 2, {}), writer, block, scratch, False, lambda: False, lambda n: None)
    for move, start, stop in ((one, 0, 1230), (other, 0, 2400), (one, 1230, 2400)):
        Walk(job, move, start, stop).run()
    assert there.bytes(1) == whole.tobytes()


class Sink:
    """Takes `most` bytes a call through the descriptor; `pwrite` keeps what it is given."""

    def __init__(self, path):
        self.fds = {0: os.open(path, os.O_RDWR)}
        self.path = path
        self.kept = []

    def pwrite(self, file, offset, view, *, count=True):
        assert not count
        self.kept.append((file, offset, bytes(view)))


@pytest.mark.parametrize("fault", ["short", "error"])
def test_what_the_device_does_not_take_goes_strip_by_strip(tmp_path, monkeypatch, fault):
    (tmp_path / "f").write_bytes(bytes(100))
    sink = Sink(tmp_path / "f")

    def pwrite(fd, data, at):
        if fault == "error":
            raise OSError(28, "no space")
        return len(data) - (at == 20)

    monkeypatch.setattr(os, "pwrite", pwrite)
    transposed_outputs.write(sink, 0, range(0, 40, 20), [memoryview(b"abcd"), memoryview(b"efgh")])
    assert sink.kept == [(0, 0, b"abcd"), (0, 20, b"efgh")]


def test_copies_of_a_box_are_turned_once(tmp_path, monkeypatch):
    move = Move(
        TensorKey("w"),
        (4, 6),
        DTYPES["U8"],
        DTYPES["U8"],
        24,
        1,
        1,
        (),
        tuple(Region(i, 5 * i, 0, (4, 6), (1, 4), (6, 1)) for i in range(3)),
    )
    assert all(map(is_transposed, move.outputs))
    turned = []
    seen = []
    true = TransposedOutputs._turn
    monkeypatch.setattr(TransposedOutputs, "_turn", lambda *a: turned.append(1) or true(*a))
    monkeypatch.setattr(
        transposed_outputs,
        "write",
        lambda sink, file, offsets, slots: seen.extend(
            (file, at, bytes(slot)) for at, slot in zip(offsets, slots, strict=True)
        ),
    )
    outputs = TransposedOutputs(
        move, (0, 24, 24), transposed.Strips(1000), Sink(tmp_path.joinpath("x").open("w").name), None
    )
    whole = np.arange(24, dtype="u1").reshape(4, 6)
    for at in range(0, 24, 5):
        end = outputs.begin(at, min(at + 5, 24))
        outputs.take(memoryview(whole.reshape(-1)[at:end].copy()), at, end)
    assert len(turned) == 1 and seen == [(i, 5 * i, whole.T.tobytes()) for i in range(3)]


@pytest.mark.parametrize(
    ("columns", "most", "share"),
    [
        (300, 100_000, 99_900),  # whole rows; whole leaves too would be 9,830,400 elements
        (4096, 300_000, 262_144),  # whole leaves, each of 32 rows
        (300, 200, 200),  # rows that don't fit are cut
    ],
)
@pytest.mark.parametrize("side", ["source", "output"])
def test_shares_end_where_rows_do(columns, most, share, side):
    assert schedule.LEAF == LEAF
    rows = 500
    across = Region(0, 0, 0, (rows, columns), (2, 2 * rows), (columns, 1))
    along = Region(0, 0, 0, (rows * columns,), (2,), (1,))
    regions = ((across,), (along,)) if side == "source" else ((along,), (across,))
    move = Move(TensorKey("w"), (rows, columns), DTYPES["BF16"], DTYPES["BF16"], rows * columns, 2, 2, *regions)
    parts = [(start, stop) for start, stop, _ in schedule.cut_segments(move, 2 * most)]
    assert [start for start, _ in parts] == list(range(0, rows * columns, share))
    assert [stop for _, stop in parts] == [*(start for start, _ in parts[1:]), rows * columns]
