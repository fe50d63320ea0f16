"""box_copy against NumPy: random lists of boxes, and the ones that chance does not find."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from box_cases import POOL, Bench, Case, Watched, make_case

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.descriptors import SPANS, TILE, Strided, pack
from ckpt_tool.device.kernels import box_copy
from ckpt_tool.device.library import Device
from ckpt_tool.errors import StorageError

CASES = int(os.environ.get("CKPT_KERNEL_CASES", "10000"))  # fewer for mutants, which most die at once


def differs(case: Case, got: np.ndarray) -> str:
    at = int(np.flatnonzero(got != case.want)[0])
    return f"case {case.seed}: byte {at} of the target is {got[at]}, want {case.want[at]}; {case.pieces}"


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_boxes_equal_numpy(device: Device, count: int) -> None:
    """And every way through the kernel is taken, and often."""
    bench = Bench(device)
    count = min(count, CASES)
    seen: Counter[str] = Counter()
    dims: Counter[int] = Counter()
    for seed in range(count):
        case = make_case(seed)
        if seed % 4:
            got = bench.run(case, seen)
        else:
            got, fault = bench.run_watched(case)
            assert not fault, f"case {seed}: {fault}; {case.pieces}"
        assert np.array_equal(got, case.want), differs(case, got)
        dims.update(len(piece.extents) if 0 not in piece.extents else -1 for piece in case.pieces)
    ways = [f"elements of {1 << log} bytes, {levels}" for log in range(5) for levels in ("one level", "levels")]
    ways += [f"{rows}, {skew} alignment" for rows in ("spans", "pieces") for skew in ("equal", "shifted")]
    assert min(seen[way] for way in ways) >= count * 3 // 100, seen
    assert min(dims[n] for n in range(-1, 7)) >= count * 3 // 100, dims


def test_a_column_slice_of_rows(device: Device) -> None:
    source = np.arange(4 * 32, dtype=np.uint8)
    with device.upload(source) as src, device.alloc(48) as dst:
        box_copy(device, pack([Strided(src.address + 4, dst.address, (4,), (32,), (12,), 12)]))
        got = device.download(dst.address, 48)
    np.testing.assert_array_equal(got.reshape(4, 12), source.reshape(4, 32)[:, 4:16])


@pytest.mark.parametrize("runs", [range(1, 40), range(510, 550)], ids=["short", "warp"])
def test_every_alignment_of_both_sides_and_every_end(device: Device, runs: range) -> None:
    """256 pairs of alignments, each with every length of the last bytes: heads, shifts and tails of copy_span."""
    pitch = 48 + runs[-1]
    pitch += -pitch % 16
    count = len(runs) * 256
    source = np.resize(POOL, count * pitch)
    want = np.full(count * pitch, 0xA5, np.uint8)
    boxes = []
    with device.upload(source) as src, device.upload(want) as dst:
        for number in range(count):
            run = runs[number // 256]
            from_ = 16 + number % 16
            to = 16 + number // 16 % 16
            start = number * pitch
            want[start + to : start + to + run] = source[start + from_ : start + from_ + run]
            boxes.append(Strided(src.address + start + from_, dst.address + start + to, (), (), (), run))
        box_copy(device, pack(boxes))
        got = device.download(dst.address, len(want))
    wrong = np.flatnonzero(got != want)
    assert not len(wrong), f"box {wrong[0] // pitch}, byte {wrong[0] % pitch}"


def test_work_of_nothing_launches_nothing(device: Device) -> None:
    assert pack([]).tiles == 0
    box_copy(device, pack([]))
    device.library.call("box_copy", 0, 0, 0, 0, 0, 0)  # null pointers are legal with nothing to do


@pytest.mark.parametrize(("count", "threads"), [(0, 0), (1, -32), (1, 33), (1, 1024)])
def test_calls_that_make_no_sense_are_refused(device: Device, count: int, threads: int) -> None:
    with (
        device.upload(np.zeros(136, np.uint8)) as packed,
        pytest.raises(StorageError, match="cudaErrorInvalidValue") as e,
    ):
        device.library.call("box_copy", packed.address, count, 1, 1, threads, 0)
    assert e.value.code == "E1551"


def vectors_of(source: int, target: int, nbytes: int, before: int, after: int) -> int:
    """How many 16-byte stores a span allows: blocks of the target's grid inside it, whose bytes two aligned loads (one,
    where both sides lie alike) have without going further than `before` and `after` bytes beyond it."""
    found = 0
    for block in range(ceil_div(target, 16) * 16, target + nbytes - 15, 16):
        begin = source + block - target
        low = begin // 16 * 16
        high = ceil_div(begin + 16, 16) * 16
        found += low >= source - before and high <= source + nbytes + after
    return found


@pytest.mark.parametrize("run", [512, 515, 1000])
def test_spans_move_all_they_can_by_16_bytes(shim: Device, run: int) -> None:
    """Values can't show it: bytes one by one are as right, and slow."""
    with shim.alloc(2048) as src, shim.alloc(2048) as dst:
        for number in range(256):
            source = src.address + number % 16
            target = dst.address + number // 16
            boxes = pack([Strided(source, target, (), (), (), run)])
            if boxes.packed["op"][0] != SPANS:
                continue
            with Watched(shim, [], [(target, np.ones(run, np.uint8))]) as watched:
                box_copy(shim, boxes)
            wide = vectors_of(source, target, run, 0, 0)
            narrow = (run - 16 * wide) // (2 if source % 2 == target % 2 == run % 2 == 0 else 1)
            assert (watched.stores[16], sum(watched.stores.values())) == (wide, wide + narrow), (
                source % 16,
                target % 16,
            )


def test_pieces_look_beyond_their_ends_rather_than_go_by_bytes(shim: Device) -> None:
    """A row of several tiles is odd at its own ends only."""
    run = 3 * TILE + 100
    with shim.alloc(run + 64) as src, shim.alloc(run + 64) as dst:
        for from_, to in ((0, 0), (3, 3), (0, 5), (7, 2), (15, 1), (1, 15), (8, 4)):
            source = src.address + from_
            target = dst.address + to
            with Watched(shim, [], [(target, np.ones(run, np.uint8))]) as watched:
                box_copy(shim, pack([Strided(source, target, (), (), (), run)]))
            assert not watched.fault()
            assert watched.stores[16] == vectors_of(source, target, run, 0, 0), (from_, to)
