"""The executor against NumPy: random boxes on both sides, casts, checksums, replicas, resume, parts, faults."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import Patch, Target, TargetArray, TargetFile, Wanted, WantedTensor
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint, InputError, OutputExists, SourceChanged, StorageError
from ckpt_tool.plan.moves import Stored
from ckpt_tool.plan.plan import Plan, SourceFile
from ckpt_tool.plan.saved import read_plan
from ckpt_tool.plan.schedule import build_moves, units
from ckpt_tool.run import executor, finish, transposed
from ckpt_tool.run.digest import digest
from ckpt_tool.run.executor import Executor, RunOptions
from ckpt_tool.storage.output.destination import staging_path
from ckpt_tool.storage.source import Tree


def cut(rng, shape):
    """A random grid of boxes that tile `shape`."""
    edges = []
    for n in shape:
        inner = sorted(set(rng.integers(1, max(2, n), size=rng.integers(0, 4)).tolist())) if n > 1 else []
        edges.append([0, *[e for e in inner if 0 < e < n], n])
    spans = [list(zip(e[:-1], e[1:], strict=True)) for e in edges]
    return [Box(tuple(a for a, _ in index), tuple(b - a for a, b in index)) for index in itertools.product(*spans)]


def slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


class Case:
    """A source folder of raw arrays, the tensors in it, and a plan to another random layout."""

    def __init__(
        self,
        root: Path,
        rng,
        *,
        shapes,
        kind="u2",
        dtype="BF16",
        out=None,
        replicas=1,
        crc=False,
        view=False,
        turned=False,
        turned_out=False,
        digested=True,
    ):
        self.root = root
        self.out = root / "out"
        source = root / "source"
        source.mkdir()
        self.values = {}
        stored = []
        wanted = []
        files = [bytearray(b"head" * int(rng.integers(0, 3))) for _ in range(3)]
        for i, shape in enumerate(shapes):
            whole = (np.arange(np.prod(shape, dtype=int)) + 7 * i).astype(kind).reshape(shape)
            self.values[f"t{i}"] = whole
            chunks = []
            for box in cut(rng, shape):
                for replica in range(replicas):
                    number = int(rng.integers(0, 3))
                    array = whole[slices(box)]
                    within = Box((0,) * len(shape), box.shape)
                    strides = None
                    raw = np.ascontiguousarray(array)
                    if len(shape) == 2 and (turned or (view and rng.integers(0, 2))):
                        raw = np.ascontiguousarray(array.T)
                        strides = (1, box.shape[0])
                    data = raw.tobytes()
                    at = len(files[number])
                    check = (at, len(data), crc32(data)) if crc else None
                    item = StoredArray(f"f{number}.bin", at, DTYPES[dtype], box.shape, strides, check)
                    files[number] += data
                    chunks.append(Chunk(box, item, within, replica))
            key = TensorKey(f"t{i}")
            stored.append(Stored(0, LogicalTensor(key, tuple(shape), DTYPES[dtype], tuple(chunks))))
            wanted.append(WantedTensor(key, tuple(shape), DTYPES[out or dtype]))
        for number, data in enumerate(files):
            (source / f"f{number}.bin").write_bytes(data)
        self.tree = Tree(source)
        self.places = []
        arrays = [[], []]
        sizes = [16, 16]
        patches = [[], []]
        literals = [[(0, b"A" * 16)], [(0, b"B" * 16)]]
        for i, shape in enumerate(shapes):
            for box in cut(rng, shape):
                for number in (0, 1) if rng.integers(0, 5) == 0 else (int(rng.integers(0, 2)),):
                    nbytes = DTYPES[out or dtype].nbytes(box.numel)
                    if crc:
                        patches[number].append(Patch(sizes[number], "crc32", len(arrays[number])))
                        sizes[number] += 4
                    across = turned_out and len(shape) == 2 and bool(not digested or rng.integers(0, 4))
                    strides = (1, box.shape[0]) if across else None
                    arrays[number].append(TargetArray(i, box, sizes[number], strides=strides))
                    self.places.append((number, sizes[number], nbytes, f"t{i}", box, across))
                    sizes[number] += nbytes
        files_out = [
            TargetFile(f"o{n}.bin", sizes[n], tuple(literals[n]), tuple(arrays[n]), tuple(patches[n])) for n in (0, 1)
        ]
        index = json.dumps({f"t{i}": "0" * 32 for i in range(len(shapes))}).encode()
        holes = tuple(Patch(at, "digest", i) for i, at in enumerate(_holes(index)) if digested)
        files_out.append(TargetFile("index.json", len(index), ((0, index),), (), holes))
        target = Target("raw", tuple(files_out))
        want = Wanted(tuple(wanted))
        numbers = {f"f{n}.bin": n for n in range(3)}
        moves, records, extents = build_moves(stored, want, target, lambda _, path: numbers[path])
        self.plan = Plan(
            tuple(SourceFile(self.tree.shown, f"f{n}.bin", tuple(self.tree.identity(f"f{n}.bin"))) for n in range(3)),
            records,
            tuple(f._replace(arrays=()) for f in files_out),
            extents,
            moves,
            "raw",
            None,
            str(self.out),
            {},
            {},
        )

    def run(self, **options):
        how = {name: options.pop(name) for name in RunOptions.__slots__ if name in options}
        return Executor(self.plan, {self.tree.shown: self.tree}, RunOptions(**how), **options).run()

    def check(self, convert=lambda array: array):
        data = [(self.out / f"o{n}.bin").read_bytes() for n in (0, 1)]
        assert data[0][:16] == b"A" * 16
        for number, at, nbytes, name, box, across in self.places:
            want = convert(self.values[name])[slices(box)]
            want = np.ascontiguousarray(want.T if across else want).tobytes()
            assert data[number][at : at + nbytes] == want, (name, box)
        return data


def _holes(index):
    at = -1
    while (at := index.find(b"0" * 32, at + 1)) >= 0:
        yield at


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_move_every_element(tmp_path, seed):
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(1, 40, size=rng.integers(0, 4)).tolist()) for _ in range(5)] + [
        (300, 700),
        (0, 3),
        (3000, 40),
    ]
    case = Case(tmp_path, rng, shapes=shapes, view=seed % 2 == 1)
    result = case.run(threads=1 + seed % 3)
    case.check()
    for name, whole in case.values.items():
        want = digest("BF16", whole.shape, whole.tobytes())
        assert result.digests[TensorKey(name)] == want
        assert json.loads((case.out / "index.json").read_text())[name] == want
    assert not staging_path(case.out).exists()


@pytest.mark.parametrize("seed", range(12))
def test_transposed_sources_in_small_shares(tmp_path, monkeypatch, seed):
    """Shares end inside rows and inside leaves; panels are smaller than shares; digests know nothing of it."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(executor, "units", partial(units, size=int(rng.integers(50_000, 600_000))))
    out, kind = ("F32", "f4") if seed % 3 == 0 else (None, None)
    case = Case(
        tmp_path,
        rng,
        shapes=[(700, 900), (2000, 300), (90, 11), (300, 2100)],
        out=out,
        replicas=1 + seed % 4 // 3,
        crc=seed % 2 == 1,
        turned=True,
    )
    parts = [(1, 2), (2, 2)] if seed % 2 else [None]
    memory = int(rng.integers(1, 8)) << 20
    results = [case.run(threads=1 + seed % 2, part=part, memory=memory) for part in parts]
    case.check(lambda array: array.view(ml_dtypes.bfloat16).astype(kind) if kind else array)
    for name, whole in case.values.items():
        assert results[-1].digests[TensorKey(name)] == digest("BF16", whole.shape, whole.tobytes())


@pytest.mark.parametrize("seed", range(16))
def test_transposed_outputs_in_small_shares(tmp_path, monkeypatch, seed):
    """The same for outputs, plain ones among them, with sources of either kind: parts, casts, checksums, replicas."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(finish, "ALONE", (0, 16 << 20)[seed // 2 % 2])
    monkeypatch.setattr(executor, "units", partial(units, size=int(rng.integers(50_000, 600_000))))
    out, kind = ("F32", "f4") if seed % 3 == 0 else (None, None)
    case = Case(
        tmp_path,
        rng,
        shapes=[(700, 900), (2000, 300), (90, 11), (300, 2100), (77,), ()],
        out=out,
        replicas=1 + seed % 4 // 3,
        crc=seed % 2 == 1,
        turned=seed % 5 > 1,
        turned_out=True,
    )
    parts = [(1, 2), (2, 2)] if seed % 2 else [None]
    options = {"memory": int(rng.integers(1, 8)) << 20, "verify": "off" if seed == 15 else "quick"}
    results = [case.run(threads=1 + seed % 2, part=part, **options) for part in parts]
    data = case.check(lambda array: array.view(ml_dtypes.bfloat16).astype(kind) if kind else array)
    for name, whole in case.values.items() if seed != 15 else ():
        assert results[-1].digests[TensorKey(name)] == digest("BF16", whole.shape, whole.tobytes())
    for number, at, nbytes, *_ in case.places if seed % 2 else ():
        assert data[number][at - 4 : at] == crc32(data[number][at : at + nbytes]).to_bytes(4, "little")


@pytest.mark.parametrize("seed", range(6))
def test_transpositions_on_both_sides_cancel(tmp_path, monkeypatch, seed):
    """Where nobody wants digests: runs on both sides, hashed as they lie, and the same bytes as ever."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(executor, "units", partial(units, size=int(rng.integers(50_000, 600_000))))
    monkeypatch.setattr(transposed, "Transposed", None)
    shapes = [(700, 900), (90, 11), (77,), (), (1, 40), (40, 1)]
    out = ("F32", "BF16")[seed % 2]
    case = Case(tmp_path, rng, shapes=shapes, out=out, crc=seed > 2, turned=True, turned_out=True, digested=False)
    orders = {move.key.name: move.order for move in case.plan.moves}
    assert orders == {f"t{i}": (1, 0) if i < 2 else () for i in range(len(shapes))}
    result = case.run(threads=1 + seed % 2)
    case.check(lambda array: array.view(ml_dtypes.bfloat16).astype("f4") if out == "F32" else array)
    for name, whole in case.values.items():
        line = whole.T if orders[name] else whole
        assert result.digests[TensorKey(name)] == digest("BF16", line.shape, line.tobytes())


def test_what_is_compared_or_digested_keeps_its_own_order(tmp_path):
    for i, options in enumerate(({"digested": True}, {"digested": False, "replicas": 2})):
        (tmp_path / str(i)).mkdir()
        case = Case(
            tmp_path / str(i), np.random.default_rng(0), shapes=[(9, 7)], turned=True, turned_out=True, **options
        )
        assert [move.order for move in case.plan.moves] == [()]


def test_off_moves_the_same_bytes(tmp_path):
    case = Case(tmp_path, np.random.default_rng(3), shapes=[(300, 700), (9,), (64, 1000)])
    assert case.run(verify="off").digests == {}
    case.check()


def test_a_digest_is_layout_free_and_sees_swaps():
    values = np.arange(300_000, dtype="f4")
    one = digest("F32", values.shape, values.tobytes())
    values[[5, 200_000]] = values[[200_000, 5]]
    assert digest("F32", values.shape, values.tobytes()) != one
    assert digest("F32", (300, 1000), np.arange(300_000, dtype="f4").tobytes()) != one


def test_casts_equal_ml_dtypes_and_overflows_are_refused(tmp_path):
    rng = np.random.default_rng(5)
    case = Case(tmp_path, rng, shapes=[(37, 900), (70_000,)], kind="f4", dtype="F32", out="BF16")
    case.run()
    case.check(lambda array: array.astype(ml_dtypes.bfloat16))
    other = tmp_path / "big"
    other.mkdir()
    case = Case(other, rng, shapes=[(70_000,)], kind="f4", dtype="F32", out="F16")
    with pytest.raises(InputError, match="overflow") as caught:
        case.run()
    assert caught.value.exit_code == 3 and not case.out.exists() and not staging_path(case.out).exists()
    result = case.run(allow_lossy=True)
    with np.errstate(over="ignore"):
        lost = int(np.isinf(case.values["t0"].astype("f2")).sum())
    assert sum(result.overflows.values()) == lost > 0


@pytest.mark.parametrize("seed", range(8))
def test_checksums_are_checked_and_made(tmp_path, seed):
    case = Case(tmp_path, np.random.default_rng(seed), shapes=[(30, 41), (500, 900), (7,)], crc=True, view=True)
    case.run(threads=3)
    data = case.check()
    for number, at, nbytes, *_ in case.places:
        assert data[number][at - 4 : at] == crc32(data[number][at : at + nbytes]).to_bytes(4, "little")


@pytest.mark.parametrize("turned", [False, True])
def test_what_nobody_hashed_is_checked_by_several_threads(tmp_path, monkeypatch, turned):
    monkeypatch.setattr(finish, "ALONE", 0)
    case = Case(tmp_path, np.random.default_rng(5), shapes=[(300, 500), (40, 7)] * 4, crc=True, turned=turned)
    case.run()
    case.check()
    record = case.plan.records[-1]
    records = (*case.plan.records[:-1], record._replace(crc=record.crc ^ 1))
    case.plan = replace(case.plan, records=records, destination=str(tmp_path / "again"))
    with pytest.raises(CorruptFile) as e:
        case.run()
    assert e.value.code == "E0351" and e.value.offset == record.offset


def test_a_flipped_bit_in_a_checksummed_record_is_found(tmp_path):
    case = Case(tmp_path, np.random.default_rng(1), shapes=[(500, 900)], crc=True)
    path = case.root / "source" / "f1.bin"
    data = bytearray(path.read_bytes())
    at = next(record.offset for record in case.plan.records if record.file == 1)
    data[at + 100] ^= 4
    path.write_bytes(data)
    again = [SourceFile(f.root, f.path, tuple(case.tree.identity_by_name(f.path))) for f in case.plan.sources]
    case.plan = replace(case.plan, sources=tuple(again))
    with pytest.raises(CorruptFile, match="CRC-32") as caught:
        case.run()
    assert caught.value.offset == at and not case.out.exists() and not staging_path(case.out).exists()


def test_replicas_are_compared(tmp_path):
    case = Case(tmp_path, np.random.default_rng(2), shapes=[(60, 41)], replicas=2)
    case.run()
    case.check()
    other = tmp_path / "differ"
    other.mkdir()
    case = Case(other, np.random.default_rng(2), shapes=[(60, 41)], replicas=2)
    region = next(region for region in case.plan.moves[0].sources if region.replica == 1)
    path = case.root / "source" / f"f{region.file}.bin"
    data = bytearray(path.read_bytes())
    data[region.offset] ^= 1
    path.write_bytes(data)
    again = [SourceFile(f.root, f.path, tuple(case.tree.identity_by_name(f.path))) for f in case.plan.sources]
    case.plan = replace(case.plan, sources=tuple(again))
    with pytest.raises(InconsistentCheckpoint, match="replicas differ"):
        case.run()
    assert not case.out.exists() and not staging_path(case.out).exists()


def test_parts_commit_once_and_equal_the_whole(tmp_path):
    shapes = [(300, 700), (9, 9), (64, 1000), (2000, 300)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    whole = Case(tmp_path / "a", np.random.default_rng(4), shapes=shapes)
    whole.run()
    parts = Case(tmp_path / "b", np.random.default_rng(4), shapes=shapes)
    committed = [parts.run(part=(i, 3)).committed for i in (2, 3, 1)]
    assert committed == [False, False, True]
    for file in whole.out.iterdir():
        assert file.read_bytes() == (parts.out / file.name).read_bytes()
    assert not staging_path(parts.out).exists()


class Stop(Exception):
    pass


@pytest.mark.parametrize("turned", [False, True])
def test_a_failed_run_goes_on_where_it_stopped(tmp_path, monkeypatch, turned):
    import ckpt_tool.run.executor as executor
    from ckpt_tool.plan import schedule

    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 14))
    shapes = [(300, 700), (64, 1000), (2000, 300)]
    case = Case(tmp_path, np.random.default_rng(6), shapes=shapes, turned=turned, turned_out=turned)
    real = executor.Executor._move_unit
    seen = []

    def breaks(self, taken, job, state):
        seen.append(taken[0])
        if len(seen) == 20:
            raise StorageError("the plug was pulled")
        return real(self, taken, job, state)

    monkeypatch.setattr(executor.Executor, "_move_unit", breaks)
    with pytest.raises(StorageError, match="plug"):
        case.run(threads=1)
    assert staging_path(case.out).exists() and not case.out.exists()
    first = list(seen)
    seen.clear()
    seen.extend([-1] * 20)
    case.run(threads=1)
    assert not set(first[:19]) & set(seen), "finished units are not moved again"
    case.check()
    assert not staging_path(case.out).exists()


@pytest.mark.parametrize("turned", [False, True])
def test_a_staged_file_that_was_changed_is_written_again(tmp_path, monkeypatch, turned):
    import ckpt_tool.run.executor as executor

    case = Case(tmp_path, np.random.default_rng(7), shapes=[(300, 700), (64, 1000)], turned_out=turned)
    monkeypatch.setattr(
        executor.Executor, "_finish", lambda self, staging, state: (_ for _ in ()).throw(StorageError("x"))
    )
    with pytest.raises(StorageError):
        case.run()
    monkeypatch.undo()
    staged = staging_path(case.out) / "o0.bin"
    data = bytearray(staged.read_bytes())
    for at in range(20, len(data), 1000):
        data[at] ^= 0xFF
    staged.write_bytes(data)
    case.run()
    case.check()


def test_a_source_that_changes_is_refused(tmp_path):
    case = Case(tmp_path, np.random.default_rng(8), shapes=[(300, 700)])
    os.utime(case.root / "source" / "f1.bin", ns=(1, 1))
    with pytest.raises(SourceChanged):
        case.run()
    assert not case.out.exists() and not staging_path(case.out).exists()


def test_an_output_that_appears_meanwhile_is_left_alone(tmp_path):
    case = Case(tmp_path, np.random.default_rng(9), shapes=[(30, 70)])
    case.out.mkdir()
    (case.out / "mine").write_text("precious")
    with pytest.raises(OutputExists):
        case.run()
    assert (case.out / "mine").read_text() == "precious"


def test_a_second_run_is_told_who_writes(tmp_path):
    from ckpt_tool.storage.output.staging import Staging

    case = Case(tmp_path, np.random.default_rng(9), shapes=[(30, 70)])
    with Staging(case.out, "another", []), pytest.raises(OutputExists, match=f"process {os.getpid()}"):
        case.run()


def test_what_file_it_was_may_be_any_64_bits(tmp_path):
    """Hashes of a store's ETags, inodes of networks' file systems, times before 1970."""
    plan = Case(tmp_path, np.random.default_rng(10), shapes=[(5,)]).plan
    seen = ((1 << 64) - 1, 1 << 63, (1 << 62) - 1, -1, 0)
    plan = replace(plan, sources=tuple(source._replace(identity=seen) for source in plan.sources))
    again = read_plan(json.loads(json.dumps(plan.to_json())), "plan.json")
    assert again.sources == plan.sources and again.identifier() == plan.identifier()


def test_a_plan_survives_json(tmp_path):
    case = Case(tmp_path, np.random.default_rng(10), shapes=[(30, 70), (5,)], crc=True)
    document = json.loads(json.dumps(case.plan.to_json()))
    again = read_plan(document, "plan.json")
    assert again.identifier() == case.plan.identifier()
    document["moves"][0][7][0][1] = 1 << 40
    with pytest.raises(SourceChanged, match="leaves its file"):
        read_plan(document, "plan.json")
