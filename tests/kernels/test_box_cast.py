"""box_cast against run/compute.py: every pair of dtypes, every value of 8 and 16 bits, what rounds, ties, overflows and
is NaN.

compute.cast goes by tables, NumPy and ml_dtypes, and has been held against torch (tests/run/test_compute.py); the
kernels by integers. Torch is asked here once more for what both make.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from box_cases import Watched

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.casts import CAST_TILE, KINDS, cast_boxes, kind, line, pack_casts
from ckpt_tool.device.descriptors import Strided, magic
from ckpt_tool.device.kernels import box_cast
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InternalError, StorageError
from ckpt_tool.plan.copy import Copy
from ckpt_tool.run.compute import cast, numpy_type

FLOATS = [DTYPES[name] for name in KINDS if DTYPES[name].is_float and DTYPES[name].bits >= 8]
PAIRS = list(permutations(FLOATS, 2))
COMMON = [DTYPES[name] for name in ("F32", "BF16", "F16", "F8_E4M3")]
Bits = npt.NDArray[np.unsignedinteger[Any]]
POISON = 0xA5


def unsigned(dtype: DType) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.bits // 8}")


def cast_line(
    device: Device,
    values: Bits,
    source: DType,
    target: DType,
    *,
    shifts: tuple[int, int] = (0, 0),
    threads: int = 0,
    blocks: int = 0,
) -> tuple[Bits, int]:
    """The line as `target`, and what was lost; both buffers begin `shifts` bytes off, with guards on both sides of the
    output."""
    raw = values.astype(unsigned(source)).view(np.uint8)
    nbytes = len(values) * target.bits // 8
    padded = np.concatenate([np.zeros(shifts[0], np.uint8), raw])
    with device.upload(padded) as begin, device.alloc(nbytes + 64) as end:
        device.fill(end.address, POISON, nbytes + 64)
        first = end.address + 16 + shifts[1]
        casts = pack_casts(line(begin.address + shifts[0], first, len(values)), source, target)
        lost = box_cast(device, casts, threads=threads, blocks=blocks)
        out = device.download(end.address, nbytes + 64)
    assert (out[: 16 + shifts[1]] == POISON).all() and (out[16 + shifts[1] + nbytes :] == POISON).all()
    return out[16 + shifts[1] : 16 + shifts[1] + nbytes].copy().view(unsigned(target)), lost[0]


def wanted(values: Bits, source: DType, target: DType) -> tuple[Bits, int]:
    out, lost = cast(values.astype(unsigned(source)).view(np.uint8).data, source, target)
    return np.frombuffer(out, unsigned(target)), lost


def directed(dtype: DType, rng: np.random.Generator) -> Bits:
    """Bits of F32 or F64 about which a rounding can be wrong: both sides of every value, tie and limit of the narrower
    types, the least and the largest, infinities, NaNs of several payloads, and whatever."""
    wide = np.dtype("f8") if dtype.name == "F64" else np.dtype("f4")
    values = []
    for name in ("BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        narrow = DTYPES[name]
        every = np.arange(1 << narrow.bits) if narrow.bits == 8 else rng.integers(0, 1 << 16, 3000)
        edges = [0, 1, 2, 0x3FF, 0x400, 0x401, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7F, 0x80, 0x7E]
        bits = np.concatenate([every, edges] if narrow.bits == 16 else [every]).astype(unsigned(narrow))
        with np.errstate(invalid="ignore"):  # NaNs that are not quiet
            exact = np.frombuffer(cast(bits.view(np.uint8).data, narrow, DTYPES["F32"])[0], np.float32).astype(
                np.float64
            )
        exact = np.unique(exact[np.isfinite(exact)])
        ties = (
            (exact[1:] + exact[:-1]) / 2 if narrow.bits == 8 else exact + np.spacing(exact.astype(np.float32)) * 2.0**12
        )
        values += [exact, ties, ties * 1.5]
    values += [
        np.array(
            [
                464.0,
                448.0,
                456.0,
                65504.0,
                65519.99,
                65520.0,
                61440.0,
                248.0,
                3.3961775292304e38,
                3.4028236692e38,
                3.5e38,
                2.0**-149,
                2.0**-150,
                1.5 * 2.0**-149,
                2.0**-126,
                2.0**-24,
                2.0**-25,
                1.5 * 2.0**-25,
                2.0**-133,
                1.5 * 2.0**-127,
                1.7e308,
                2.0**128,
                0.0,
            ]
        )
    ]
    with np.errstate(all="ignore"):
        flat = np.concatenate(values).astype(wide)
    bits = np.concatenate([flat, -flat]).view(f"u{wide.itemsize}")
    top = dtype.bits - 1
    inf = 0x7F800000 if wide.itemsize == 4 else 0x7FF0000000000000
    nans = np.array([inf, inf + 1, inf + (1 << 12), inf + (1 << 29), inf | (inf >> 1), (1 << top) - 1], bits.dtype)
    near = np.concatenate(
        [bits, bits + bits.dtype.type(1), bits - bits.dtype.type(1), nans, nans | bits.dtype.type(1 << top)]
    )
    low, high = rng.integers(0, 1 << 32, (2, 4000), np.uint64)
    whatever = (high << np.uint64(32) | low) if wide.itemsize == 8 else low
    return np.concatenate([near, whatever.astype(bits.dtype)])


def values_of(dtype: DType) -> Bits:
    if dtype.bits > 16:
        return directed(dtype, np.random.default_rng(6))
    every: Bits = np.arange(1 << dtype.bits).astype(unsigned(dtype))
    return every


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_every_pair_gives_the_bits_of_compute(device: Device, source: DType, target: DType) -> None:
    values = values_of(source)
    got, lost = cast_line(device, values, source, target)
    want, known = wanted(values, source, target)
    wrong = np.flatnonzero(got != want)
    assert not wrong.size, [(hex(values[k]), hex(got[k]), hex(want[k])) for k in wrong[:8]]
    assert lost == known


@pytest.mark.parametrize(("source", "target"), list(permutations(COMMON, 2)), ids=lambda dtype: dtype.name)
def test_groups_and_elements_give_the_same(device: Device, source: DType, target: DType) -> None:
    """Values that are nothing special by groups, mixed ones by groups with something special in them, off the grid by
    elements."""
    every = values_of(source)
    floats = np.frombuffer(
        cast(every.view(np.uint8).data, source, DTYPES["F32"])[0] if source.name != "F32" else every, np.float32
    )
    with np.errstate(invalid="ignore"):
        plain = every[np.abs(floats) < 400]
    rng = np.random.default_rng(3)
    for count in (0, 1, 3, 17, 255, 256, 257, 5000, CAST_TILE, CAST_TILE + 1):
        for values in (rng.choice(plain, count), rng.choice(every, count)):
            want, known = wanted(values, source, target)
            for shifts in ((0, 0), (source.bits // 8, target.bits // 8), (1, 0), (0, 1), (source.bits // 8 * 3, 0)):
                got, lost = cast_line(
                    device,
                    values,
                    source,
                    target,
                    shifts=shifts,
                    threads=int(rng.choice([0, 32, 96])),
                    blocks=int(rng.choice([0, 1, 3])),
                )
                assert (got == want).all() and lost == known, (count, shifts)


def test_torch_makes_the_same(device: Device) -> None:
    torch = pytest.importorskip("torch")
    for source, target in permutations(COMMON[:3], 2):
        values = values_of(source)
        signed = torch.from_numpy(values.view(f"i{values.itemsize}").copy())
        want = (
            signed.view(getattr(torch, source.torch or ""))
            .to(getattr(torch, target.torch or ""))
            .view({2: torch.int16, 4: torch.int32}[target.bits // 8])
            .numpy()
            .view(unsigned(target))
        )
        got, _ = cast_line(device, values, source, target)
        exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}[target.name]
        nan = (want & ((1 << (target.bits - 1)) - 1)) > exponent
        assert (((got & ((1 << (target.bits - 1)) - 1)) > exponent) == nan).all()
        assert (got[~nan] == want[~nan]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [DTYPES[name] for name in ("BF16", "F16", "F8_E4M3", "F64")], ids=lambda dtype: dtype.name
)
def test_all_fp32_there_are(device: Device, target: DType) -> None:
    """2^32 of them, by groups; a minute a target on the shim."""
    f32 = DTYPES["F32"]
    size = 1 << 22
    for first in range(0, 1 << 32, size):
        values: Bits = np.arange(first, first + size, dtype=np.uint32)
        got, lost = cast_line(device, values, f32, target)
        want, known = wanted(values, f32, target)
        assert (got == want).all() and lost == known, hex(first)


def test_strided_boxes(device: Device) -> None:
    """Random boxes of up to five dims, both sides with strides of their own, against NumPy's fancy-free assignment."""
    for seed in range(150):
        rng = np.random.default_rng((seed, 5))
        few = COMMON if seed % 3 else FLOATS
        source, target = (few[int(k)] for k in rng.choice(len(few), 2, replace=False))
        items = (source.bits // 8, target.bits // 8)
        case = [_strided_case(rng, items) for _ in range(int(rng.integers(1, 4)))]
        _check_strided(device, rng, source, target, case)


def _strided_case(
    rng: np.random.Generator, items: tuple[int, int]
) -> tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]:
    """(extents, (offset, strides) in elements of either side)."""
    ndim = int(rng.integers(0, 6))
    extents = [int(n) for n in rng.integers(1, 5, ndim)]
    if ndim:
        extents[-1] = int(
            rng.choice([1, 3, 8, 16, 40, 256, 300, 1024, 0], p=[0.1, 0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.08, 0.02])
        )
    sides = []
    for _ in items:
        strides = [0] * ndim
        step = 1
        order = list(range(ndim)) if rng.random() < 0.8 else [int(k) for k in rng.permutation(ndim)]
        for axis in reversed(order):
            strides[axis] = step
            step *= extents[axis] + (0 if rng.random() < 0.5 else int(rng.choice([1, 8, 16])))
        sides.append((int(rng.choice([0, 8, 16, 3])), tuple(strides)))
    return tuple(extents), sides


def _check_strided(device: Device, rng: np.random.Generator, source: DType, target: DType, case: list[Any]) -> None:
    at = [0, 0]
    views = []
    copies = []
    for extents, sides in case:
        spots = []
        for side, (offset, strides) in enumerate(sides):
            first = at[side] + offset
            last = first + sum((n - 1) * s for n, s in zip(extents, strides, strict=True)) + 1
            at[side] = max(first, last) + int(rng.choice([0, 1, 16]))
            spots.append((first, strides))
        views.append((extents, spots))
        by = [
            tuple(s * dtype.bits // 8 for s in strides)
            for (_, strides), dtype in zip(spots, (source, target), strict=True)
        ]
        copies.append(Copy(0, spots[0][0] * source.bits // 8, by[0], 0, spots[1][0] * target.bits // 8, by[1], extents))
    data = rng.integers(0, 256, at[0] * source.bits // 8, np.uint8)
    want = np.full(at[1] * target.bits // 8, POISON, np.uint8)
    bits = data.view(unsigned(source))
    out = want.view(unsigned(target))
    known = []
    for extents, ((first, strides), (begin, steps)) in views:
        if 0 in extents:
            known.append(0)
            continue
        taken = np.ndarray(
            extents, bits.dtype, bits.data, first * bits.itemsize, tuple(s * bits.itemsize for s in strides)
        )
        values, lost = wanted(np.ascontiguousarray(taken).reshape(-1), source, target)
        there = np.ndarray(extents, out.dtype, out.data, begin * out.itemsize, tuple(s * out.itemsize for s in steps))
        there[...] = values.reshape(extents)
        known.append(lost)
    shift = int(rng.choice([0, 0, 1, 2, 8]))
    with (
        device.upload(np.concatenate([np.zeros(shift, np.uint8), data])) as mine,
        device.alloc(len(want) + 1) as theirs,
    ):
        device.fill(theirs.address, POISON, len(want) + 1)
        boxes = []
        records = []
        for number, copy in enumerate(copies):
            for box in cast_boxes(copy, source, target, [mine.address + shift], [theirs.address]):
                boxes.append(box)
                records.append(number)
        casts = pack_casts(boxes, source, target, records)
        lost_there = box_cast(
            device, casts, blocks=int(rng.choice([0, 1, 2, 7])), threads=int(rng.choice([0, 64, 256]))
        )
        got = device.download(theirs.address, len(want) + 1)
    assert got[-1] == POISON and (got[:-1] == want).all()
    assert lost_there + [0] * (len(known) - len(lost_there)) == known


@pytest.mark.parametrize("run", [16, 300, CAST_TILE + 9])
def test_rows_may_lie_backwards(device: Device, run: int) -> None:
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    rows = 5
    values: Bits = np.arange(rows * run, dtype=np.float32).view(np.uint32)
    want = wanted(values, f32, bf16)[0].reshape(rows, run)
    for mine, theirs in ((1, -1), (-1, 1), (-1, -1)):
        with device.upload(values) as begin, device.alloc(rows * run * 2) as end:
            first = (
                begin.address + (0 if mine > 0 else (rows - 1) * run * 4),
                end.address + (0 if theirs > 0 else (rows - 1) * run * 2),
            )
            box_cast(
                device, pack_casts([Strided(*first, (rows,), (mine * run * 4,), (theirs * run * 2,), run)], f32, bf16)
            )
            got = device.download(end.address, rows * run * 2).view(np.uint16).reshape(rows, run)
        assert (got == (want if mine == theirs else want[::-1])).all()


def test_the_end_of_a_line_of_more_than_2_32_elements(device: Device) -> None:
    """A list whose first tile number is -F begins with tile F of its box: only these elements are there."""
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    skipped = (1 << 32) // CAST_TILE - 1
    first = skipped * CAST_TILE
    numel = (1 << 32) + CAST_TILE + 777
    values: Bits = np.arange(numel - first, dtype=np.float32).view(np.uint32)
    with device.upload(values) as begin, device.alloc(len(values) * 2) as end:
        casts = pack_casts(line(begin.address - first * 4, end.address - first * 2, numel), f32, bf16)
        casts.boxes.packed["tile0"] = (1 << 64) - skipped
        box_cast(device, casts._replace(boxes=casts.boxes._replace(tiles=casts.boxes.tiles - skipped)))
        got = device.download(end.address, len(values) * 2).view(np.uint16)
    assert (got == wanted(values, f32, bf16)[0]).all()


def test_nothing_launches_nothing(device: Device) -> None:
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    assert box_cast(device, pack_casts([], f32, bf16)) == [0]
    assert box_cast(device, pack_casts(line(0, 0, 0), f32, bf16)) == [0]
    assert not list(cast_boxes(Copy(0, 0, (4,), 0, 0, (2,), (0,)), f32, bf16, [0], [0]))


def test_what_no_kernel_casts_is_refused(device: Device) -> None:
    with pytest.raises(InternalError, match="no C64"):
        kind(DTYPES["C64"])
    boxes = line(256, 512, 1)
    for pair in (("F32", "F32"), ("I8", "F32"), ("F32", "I8"), ("F4", "BF16")):
        with pytest.raises(StorageError, match="cudaErrorInvalidValue"):
            box_cast(
                device,
                pack_casts(boxes, DTYPES[pair[0]], DTYPES[pair[1]])
                if pair[0] != "F4"
                else pack_casts(boxes, DTYPES["I8"], DTYPES["BF16"])._replace(source=KINDS.index("F4")),
            )
    for threads in (33, 512, -32):
        with pytest.raises(StorageError, match="cudaErrorInvalidValue"):
            box_cast(device, pack_casts(boxes, DTYPES["F32"], DTYPES["BF16"]), threads=threads)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_groups_where_all_lies_on_their_grid(source: DType, target: DType) -> None:
    """Addresses, strides and runs in whole groups give groups; any one of them half a group off gives elements."""
    s = source.bits // 8
    t = target.bits // 8
    group = 16 // max(s, t)
    box = Strided(
        1 << 20,
        1 << 21,
        (2, 3, 50),
        tuple(group * s * n for n in (99, 33, 7)),
        tuple(group * t * n for n in (8, 4, -9)),
        6 * group,
    )
    (packed, tiles, nbytes), *_ = pack_casts([box], source, target)
    assert packed["vlog"][0] == group.bit_length() - 1 and packed["divr"][0] == magic(6)
    assert (packed["rows"][0], packed["run"][0], packed["tiles_per_row"][0]) == (300, 6 * group, 1)
    each = min(300, CAST_TILE // (6 * group))
    assert packed["rows_per_tile"][0] == each and tiles == ceil_div(300, each) and nbytes == 300 * 6 * group * t
    half = group // 2
    three = range(3)
    for off in (
        box._replace(source=box.source + half * s),
        box._replace(target=box.target + half * t),
        *(
            box._replace(source_strides=tuple(n + half * s * (k == j) for j, n in enumerate(box.source_strides)))
            for k in three
        ),
        *(
            box._replace(target_strides=tuple(n + half * t * (k == j) for j, n in enumerate(box.target_strides)))
            for k in three
        ),
        box._replace(run=box.run + half),
    ):
        packed = pack_casts([off], source, target).boxes.packed
        assert packed["vlog"][0] == 0 and packed["divr"][0] == magic(off.run), off


@pytest.mark.parametrize(("source", "target"), list(permutations(COMMON, 2)), ids=lambda dtype: dtype.name)
def test_groups_go_by_their_width(shim: Device, source: DType, target: DType) -> None:
    """The wider side by 16 bytes at a time, wherever both are on their grid together; else by element, or byte."""
    s = source.bits // 8
    t = target.bits // 8
    group = 16 // max(s, t)
    count = 2 * CAST_TILE + 1003
    values = np.ones(count, numpy_type(source)).view(np.uint8)
    tiles = (CAST_TILE, CAST_TILE, 1003)
    for shifts, groups, by in (
        ((0, 0), count // group, t),
        ((s, t), sum((n - group + 1) // group for n in tiles), t),
        ((s, 0), 0, t),
        ((1, t), sum((n - group + 1) // group for n in tiles) if s == 1 else 0, t),
        ((0, 1), 0, 1),
    ):
        with (
            shim.upload(np.concatenate([np.zeros(shifts[0], np.uint8), values])) as begin,
            shim.alloc(count * t + shifts[1]) as end,
        ):
            mine = begin.address + shifts[0]
            theirs = end.address + shifts[1]
            with Watched(shim, [(mine, np.ones(count * s))], [(theirs, np.ones(count * t))]) as watched:
                box_cast(shim, pack_casts(line(mine, theirs, count), source, target))
        if (shifts, t) == ((0, 1), 1):  # one byte is an element
            groups = 0
        assert not watched.fault()
        wide = {width: n for width, n in watched.stores.items() if n}
        rest = (count - groups * group) * t // by
        assert wide == {k: n for k, n in ((group * t, groups), (by, rest)) if n}, shifts
        assert watched.loads[group * s] >= groups and (groups > 0) == (watched.loads[group * s] > 0), shifts


def test_short_rows_go_in_groups(shim: Device) -> None:
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    for run, rows in ((8, 700), (252, 70), (256, 64), (260, 3)):
        with shim.upload(np.ones(run * rows, np.float32)) as begin, shim.alloc(run * rows * 4) as end:
            boxes = [Strided(begin.address, end.address, (rows,), (4 * run,), (4 * run,), run)]
            written = np.arange(run * rows * 4) % (4 * run) < 2 * run
            with Watched(shim, [(begin.address, np.ones(4 * run * rows))], [(end.address, written)]) as watched:
                box_cast(shim, pack_casts(boxes, f32, bf16))
        assert not watched.fault() and {k: n for k, n in watched.stores.items() if n} == {8: run * rows // 4}
        assert {k for k, n in watched.loads.items() if n} == {16}


@pytest.mark.parametrize("off", [0, 1])
def test_warps_share_long_rows_on_the_grid_of_groups(shim: Device, off: int) -> None:
    """Every element once, in groups but for the ends of a row, also where rows begin off the grid. off: elements."""
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    run = 2500
    rows = 3
    pitch = 2504
    values = np.arange(rows * pitch, dtype=np.float32)
    with shim.upload(values) as begin, shim.alloc(rows * pitch * 2) as end:
        boxes = [Strided(begin.address + 4 * off, end.address + 2 * off, (rows,), (4 * pitch,), (2 * pitch,), run)]
        within = (np.arange(rows * pitch) - off) % pitch < run
        maps = [(begin.address, np.repeat(within, 4))], [(end.address, np.repeat(within, 2))]
        with Watched(shim, *maps) as watched:
            box_cast(shim, pack_casts(boxes, f32, bf16))
        got = shim.download(end.address, rows * pitch * 2).view(np.uint16)
    groups = (run - off * 3) // 4 * rows
    single = run * rows - 4 * groups
    assert not watched.fault() and {k: n for k, n in watched.stores.items() if n} == {8: groups} | (
        {2: single} if single else {}
    )
    assert (got[within] == wanted(values.view(np.uint32), f32, bf16)[0][within]).all()


def test_rows_are_cut_at_tiles() -> None:
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    runs = (CAST_TILE - 1, CAST_TILE, CAST_TILE + 1, 3 * CAST_TILE, 1)
    boxes = [Strided(0, 0, (3,), (1 << 20,), (1 << 20,), run) for run in runs]
    (packed, tiles, nbytes), *_, records = pack_casts(boxes, f32, bf16, [4, 0, 2, 1, 3])
    assert packed["tiles_per_row"].tolist() == [1, 1, 2, 3, 1] and packed["rows_per_tile"].tolist() == [1, 1, 1, 1, 3]
    assert packed["tile0"].tolist() == [0, 3, 6, 12, 21] and tiles == 22 and nbytes == 6 * sum(runs)
    assert packed["divr"].tolist() == [magic(n) for n in (CAST_TILE - 1, CAST_TILE // 4, 2, 3, 1)]
    assert packed["aux"].tolist() == [4, 0, 2, 1, 3] and records == 5


def test_runs_are_joined_where_both_sides_run_on() -> None:
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    copy = Copy(0, 40, (96, 24, 4), 1, 50, (48, 12, 2), (5, 4, 6))
    assert list(cast_boxes(copy, f32, bf16, [1000], [0, 2000])) == [Strided(1040, 2050, (), (), (), 120)]
    double = copy._replace(source_strides=(192, 48, 8))
    assert list(cast_boxes(double, DTYPES["F64"], bf16, [0], [0, 0])) == [Strided(40, 50, (), (), (), 120)]
    wider = copy._replace(output_strides=(192, 48, 8))
    assert list(cast_boxes(wider, f32, DTYPES["F64"], [0], [0, 0])) == [Strided(40, 50, (), (), (), 120)]
    gap = copy._replace(source_strides=(100, 24, 4))
    assert list(cast_boxes(gap, f32, bf16, [1000], [0, 2000])) == [Strided(1040, 2050, (5,), (100,), (48,), 24)]
    assert next(cast_boxes(copy._replace(output_strides=(48, 12, 4)), f32, bf16, [0], [0, 0])).run == 1


def test_lists_of_huge_boxes_count_right() -> None:
    """Over 2^32 elements, rows and strides: the list alone, no memory is touched."""
    f32 = DTYPES["F32"]
    bf16 = DTYPES["BF16"]
    one = pack_casts(line(1 << 40, 1 << 50, 3 << 32), f32, bf16)
    assert one.boxes.tiles == (3 << 32) // CAST_TILE and one.boxes.nbytes == 3 << 33
    rows = Copy(0, 0, (12,), 0, 0, (6,), (1 << 33,))
    boxes = list(cast_boxes(rows, f32, bf16, [0], [0]))
    assert sum(int(np.prod(box.extents, dtype=object)) for box in boxes) == 1 << 33 and len(boxes) > 1
    packed = pack_casts(boxes, f32, bf16).boxes
    assert packed.tiles * CAST_TILE == 1 << 33 and (packed.packed["rows"] < 1 << 32).all()
