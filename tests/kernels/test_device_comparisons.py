"""The compare kernel against what `run/compare.py` and `run/stats.py` count on the CPU."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from box_cases import Watched

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.device import kernels
from ckpt_tool.device.comparisons import (
    TILE,
    DeviceDifference,
    comparable,
    compare,
    count_bad,
    pack_pairs,
    unequal,
)
from ckpt_tool.device.descriptors import Strided, magic
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InternalError, StorageError
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.compare import Worst, differ
from ckpt_tool.run.compute import numpy_type
from ckpt_tool.run.stats import bad_values

KINDS = sorted(name for name, dtype in DTYPES.items() if comparable(dtype))
WIDE = [name for name in KINDS if DTYPES[name].bits >= 8]
PATTERNS = {  # directed bit patterns: zeros, least and largest, infinities, NaNs, neighbours
    2: [
        0,
        1,
        0x8000,
        0x8001,
        0x3FF,
        0x400,
        0x7BFF,
        0x7C00,
        0x7C01,
        0xFC00,
        0x7F7F,
        0x7F80,
        0x7F81,
        0xFF80,
        0x7FFF,
        0xFFFF,
        0x3F80,
    ],
    4: [
        0,
        1,
        1 << 31,
        0x80000001,
        0x7FFFFF,
        0x800000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0xFF800000,
        0x7FC00000,
        0xFFFFFFFF,
        0x3F800000,
    ],
    8: [
        0,
        1,
        1 << 63,
        (1 << 63) + 1,
        (1 << 52) - 1,
        1 << 52,
        (0x7FF << 52) - 1,
        0x7FF << 52,
        (0x7FF << 52) + 1,
        0xFFF << 52,
        (1 << 64) - 1,
        0x3FF << 52,
        (1 << 53) + 1,
        (1 << 63) - 1,
    ],
}


def of_cpu(a: np.ndarray, b: np.ndarray, kind: DType) -> tuple[int, int, int, float]:
    worst = Worst((len(a) * 8 // max(8, kind.bits),))
    if not np.array_equal(a, b):
        with np.errstate(all="ignore"):
            differ(worst, 0, a, b, kind, kind, 0.0, 0.0)
    return worst.count, worst.first, worst.ulp, worst.gap


def bad(a: np.ndarray, kind: DType) -> int:
    item = max(1, kind.bits // 8)
    return bad_values(Move(TensorKey("x"), (len(a) // item,), kind, kind, len(a) // item, item, item, (), ()), a)


def check(found: DeviceDifference, a: np.ndarray, b: np.ndarray, kind: DType, note: str = "") -> None:
    assert (found.elements, found.first, found.ulp, found.max_abs) == of_cpu(a, b, kind), note
    assert (found.bad_left, found.bad_right) == (bad(a, kind), bad(b, kind)), note


def test_every_pair_of_bytes_of_every_type_of_8_bits(device: Device) -> None:
    a, b = (side.astype(np.uint8).ravel() for side in np.meshgrid(np.arange(256), np.arange(256), indexing="ij"))
    names = [name for name in KINDS if DTYPES[name].bits <= 8]
    assert len(names) == 11
    with device.upload(a) as left, device.upload(b) as right:
        for name in names:
            kind = DTYPES[name]
            rows = [Strided(left.address + at, right.address + at, (), (), (), 2048) for at in range(0, len(a), 2048)]
            for k, found in enumerate(compare(device, rows, [kind] * len(rows))):
                check(found, a[k * 2048 : k * 2048 + 2048], b[k * 2048 : k * 2048 + 2048], kind, f"{name} {k}")
            ones = np.random.default_rng(1).integers(0, 65536, 60)
            boxes = [Strided(left.address + k, right.address + k, (), (), (), 1) for k in ones.tolist()]
            for k, found in zip(ones, compare(device, boxes, [kind] * len(boxes)), strict=True):
                check(found, a[k : k + 1], b[k : k + 1], kind, f"{name} {a[k]} {b[k]}")


@pytest.mark.parametrize("name", [name for name in WIDE if DTYPES[name].bits > 8])
def test_directed_patterns_one_by_one(device: Device, name: str) -> None:
    kind = DTYPES[name]
    size = kind.bits // 8
    bits = np.array(PATTERNS[size], f"u{size}")
    a, b = (np.ascontiguousarray(side).ravel().view(np.uint8) for side in np.meshgrid(bits, bits, indexing="ij"))
    with device.upload(a) as left, device.upload(b) as right:
        boxes = [Strided(left.address + k, right.address + k, (), (), (), size) for k in range(0, len(a), size)]
        for k, found in enumerate(compare(device, boxes, [kind] * len(boxes))):
            x = a[k * size : k * size + size]
            y = b[k * size : k * size + size]
            check(found, x, y, kind, f"{name} {x.view(bits.dtype)} {y.view(bits.dtype)}")
            with np.errstate(all="ignore"):
                u, v = (side.view(numpy_type(kind)).astype(np.float64)[0] for side in (x, y))
            assert found.nans == (math.isnan(u) and math.isnan(v) and not np.array_equal(x, y))


class Pair(NamedTuple):
    """Two random sides of which little differs, and their box."""

    kind: DType
    a: np.ndarray
    b: np.ndarray
    spread: tuple[int, int, int, int]  # rows, run in bytes, gap after a row on either side
    shift: tuple[int, int]


def random_pair(rng: np.random.Generator, name: str) -> Pair:
    kind = DTYPES[name]
    item = max(1, kind.bits // 8)
    rows = int(rng.choice([1, 1, 2, 7, 300]))
    run = int(rng.choice([1, 3, 4, 16, 33, 100, 1000 if rows < 9 else 20, 20_000 if rows < 3 else 2])) * item
    a = rng.integers(0, 256, rows * run, dtype=np.uint8)
    if kind.name == "BOOL":
        a &= 1
    b = a.copy()
    for at in rng.integers(0, len(b), int(rng.integers(0, 6))):
        b[at] ^= 1 << int(rng.integers(8))
    gaps = [int(gap) for gap in rng.choice([0, 0, 16, 5, 32, 8], 2)]
    shift = [int(shift) for shift in rng.choice([0, 0, 0, 1, 4, 8, 13], 2)]
    return Pair(kind, a, b, (rows, run, *gaps), (shift[0], shift[1]))


def spread_out(line: np.ndarray, rows: int, run: int, gap: int, shift: int, noise: int) -> np.ndarray:
    out = np.full(shift + rows * (run + gap), noise, np.uint8)
    out[shift:].reshape(rows, run + gap)[:, :run] = line.reshape(rows, run)
    return out


@pytest.mark.parametrize("seed", range(6))
def test_random_boxes_of_all_types_in_one_list(device: Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [random_pair(rng, str(rng.choice(KINDS))) for _ in range(60)]
    memories = []
    boxes = []
    for pair in pairs:
        rows, run, left, right = pair.spread
        sides = [
            device.upload(spread_out(line, rows, run, gap, shift, noise))
            for line, gap, shift, noise in zip((pair.a, pair.b), (left, right), pair.shift, (0x7F, 0xFF), strict=True)
        ]
        memories += sides
        boxes.append(
            Strided(
                sides[0].address + pair.shift[0],
                sides[1].address + pair.shift[1],
                (rows,),
                (run + left,),
                (run + right,),
                run,
            )
        )
    kinds = [pair.kind for pair in pairs]
    found = compare(device, boxes, kinds)
    counts = count_bad(device, boxes, kinds)
    differ_at = unequal(device, boxes)
    for memory in memories:
        memory.close()
    for n, pair in enumerate(pairs):
        check(found[n], pair.a, pair.b, pair.kind, f"{seed=} {n} {pair.kind.name} {pair.spread} {pair.shift}")
        assert counts[n] == bad(pair.a, pair.kind)
    assert differ_at == [n for n, pair in enumerate(pairs) if not np.array_equal(pair.a, pair.b)]
    assert len(differ_at) > 20


@pytest.mark.parametrize("name", ["F32", "BF16", "F8_E4M3", "I64", "BOOL"])
@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("threads", [32, 256])
def test_long_runs_are_cut_into_tiles(device: Device, name: str, shift: int, threads: int) -> None:
    kind = DTYPES[name]
    item = max(1, DTYPES[name].bits // 8)
    rng = np.random.default_rng(3)
    for nbytes in (TILE - item, TILE, TILE + item, 3 * TILE + 40):
        a = rng.integers(0, 256, 2 * nbytes, dtype=np.uint8)
        b = a.copy()
        b[rng.integers(0, len(b), 5)] ^= 3
        b[-1] ^= 128
        with device.upload(np.concatenate([np.zeros(shift, np.uint8), a])) as left, device.upload(b) as right:
            box = Strided(left.address + shift, right.address, (2,), (nbytes,), (nbytes,), nbytes)
            packed = pack_pairs([box], [kind])
            assert packed.tiles == 2 * ceil_div(nbytes, TILE)
            check(compare(device, [box], [kind])[0], a, b, kind, f"{nbytes=}")
            one = pack_pairs([box], [kind], one_side=True)
            start = np.zeros(8, np.uint64)
            with device.upload(start) as record:
                kernels.compare(device, one, record.address, blocks=3, threads=threads)
                assert device.download(record.address, 64).view(np.uint64)[6] == bad(a, kind)


def test_what_lies_beside_the_runs_is_not_looked_at(device: Device) -> None:
    for size in (1, 2, 4, 6, 12, 16, 18, 30, 64):
        for shift in range(17):
            inside = np.arange(size, dtype=np.uint8) + 1
            sides = [np.full(100, noise, np.uint8) for noise in (0x7F, 0xFF)]
            for side in sides:
                side[shift : shift + size] = inside
            with device.upload(sides[0]) as a, device.upload(sides[1]) as b:
                box = Strided(a.address + shift, b.address + shift, (), (), (), size)
                found = compare(device, [box], [DTYPES["F8_E4M3"]])[0]
            assert found == DeviceDifference(0, -1, 0, 0.0, 0, 0, 0, 0), (size, shift)


def test_the_first_is_the_first_whoever_finds_it(device: Device) -> None:
    a = np.zeros(4 * TILE, np.uint32)
    b = a.copy()
    b[777:] = 1
    with device.upload(a) as left, device.upload(b) as right:
        found = compare(device, [Strided(left.address, right.address, (), (), (), a.nbytes)], [DTYPES["U32"]])[0]
    assert found == DeviceDifference(len(a) - 777, 777, 1, 1.0, len(a) - 777, 0, 0, 0)


@pytest.mark.parametrize("cut", [True, False])
def test_places_far_beyond_32_bits(device: Device, cut: bool) -> None:
    """Only the last tiles of the box are looked at: the list says that the others were before it."""
    kind = DTYPES["U16"]
    most = (1 << 32) - 1
    rows, run = (1, 2 * TILE) if cut else (16, TILE // 16)
    before = most - 4 if cut else (1 << 28) - 3  # tiles
    a = np.random.default_rng(0).integers(0, 256, rows * run, dtype=np.uint8)
    b = a.copy()
    b[TILE // 2 + 6] ^= 1
    skipped = before * TILE  # bytes of each side
    with device.upload(a) as left, device.upload(b) as right:
        packed = pack_pairs([Strided(0, 0, (rows,), (run,), (run,), run)], [kind])
        assert packed.tiles == len(a) // TILE
        row = packed.packed
        row["src"], row["dst"] = ((memory.address - skipped) % (1 << 64) for memory in (left, right))
        row["tile0"] = (1 << 64) - before
        if cut:
            row["run"], row["tiles_per_row"], row["divr"] = skipped + run, most, magic(most)
        else:
            row["ext"], row["rows"], row["div2"] = (1, 1, most), most, magic(most)
        start = np.array([0, (1 << 64) - 1, 0, 0, 0, 0, 0, 0], np.uint64)
        with device.upload(start) as record:
            kernels.compare(device, packed, record.address)
            found = device.download(record.address, 64).view(np.uint64)
    assert found[:3].tolist() == [1, (skipped + TILE // 2 + 6) // 2, 1]


@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_is_read_outside_the_runs(shim: Device, rows: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    with shim.upload(data) as left, shim.upload(data) as right:
        for shifts in ((0, 0), (0, 16), (3, 3), (0, 5), (15, 1), (8, 12)):
            for run in (1, 2, 15, 16, 17, 31, 32, 33, 47, 100, 160):
                boxes = []
                maps = []
                for memory, shift in ((left, shifts[0]), (right, shifts[1])):
                    legal = np.zeros(4096, np.uint8)
                    for row in range(rows):
                        legal[shift + row * 176 : shift + row * 176 + run] = 1
                    maps.append((memory.address, legal))
                    boxes.append(memory.address + shift)
                box = Strided(boxes[0], boxes[1], (rows,), (176,), (176,), run)
                with Watched(shim, maps, []) as watched:
                    compare(shim, [box], [DTYPES["U8"]])
                assert watched.fault() == "", f"{run=} {shifts=}"


def test_nothing_launches_nothing_and_wrong_calls_are_refused(device: Device) -> None:
    assert compare(device, [], []) == [] and unequal(device, []) == [] and count_bad(device, [], []) == []
    none = DeviceDifference(0, -1, 0, 0.0, 0, 0, 0, 0)
    empty = [Strided(0, 0, (), (), (), 0), Strided(0, 0, (0,), (8,), (8,), 8)]
    assert compare(device, empty, [DTYPES["F32"]] * 2) == [none, none]
    with pytest.raises(InternalError) as error:
        pack_pairs([Strided(0, 0, (), (), (), 6)], [DTYPES["F32"]])
    assert error.value.code == "E1578"
    assert not comparable(DTYPES["C64"])
    with device.alloc(64) as memory:
        pairs = pack_pairs([Strided(memory.address, memory.address, (), (), (), 32)], [DTYPES["F32"]])
        for threads in (33, 512, -32):
            with pytest.raises(StorageError):
                kernels.compare(device, pairs, memory.address, threads=threads)
