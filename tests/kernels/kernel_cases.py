"""Random work for every kernel, watched: results of another road, nothing read or written outside, every byte written
once.

    python tests/kernels/kernel_cases.py LIBRARY KERNEL [CASES]      exit 1 at the first fault

runs one kernel's cases in a process of its own: a sanitizer's. `box_cases.py` has more of box_copy alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash
from box_cases import POISON, Bench, Bytes, Watched, device_of, make_case

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device import kernels
from ckpt_tool.device.adamw import Constants, Flat, step, swap
from ckpt_tool.device.casts import CastScales, CodeBox, cast_boxes, pack_casts, pack_codes
from ckpt_tool.device.comparisons import compare
from ckpt_tool.device.descriptors import Strided, launches
from ckpt_tool.device.digests import DigestLine, pack_lines
from ckpt_tool.device.library import Device
from ckpt_tool.device.quantising import FloatBox, pack_floats
from ckpt_tool.device.trial.check import quantise_by_cpu
from ckpt_tool.plan.copy import Copy
from ckpt_tool.run.compute import cast, numpy_type
from ckpt_tool.run.digest import LEAF
from ckpt_tool.weight_schemes.written_schemes import SCHEMES

BLOCKS = (0, 1, 2, 5)
THREADS = (0, 32, 96, 256)
Strides = tuple[int, ...]


def laid_out(rng: np.random.Generator, extents: list[int], item: int, order: list[int]) -> tuple[Strides, int, int]:
    """(strides in bytes of a tensor with gaps, its first byte, bytes of its buffer)."""
    grid = int(rng.choice([item, item, 16]))
    step = item
    strides = [0] * len(extents)
    for axis in reversed(order):
        strides[axis] = step
        step = (extents[axis] + int(rng.integers(0, 3))) * step
        step += -step % grid
    first = item * int(rng.integers(0, 16 // item + 2))
    return tuple(strides), first, first + step


def view(buffer: Bytes, dtype: str, extents: list[int], first: int, strides: Strides) -> npt.NDArray[Any]:
    return np.ndarray(tuple(extents), dtype, buffer.data, first, strides)


def marked(nbytes: int, item: int, extents: list[int], first: int, strides: Strides) -> Bytes:
    """1 for every byte of a box."""
    out = np.zeros(nbytes, np.uint8)
    view(out, f"V{item}", extents, first, strides)[...] = np.frombuffer(b"\1" * item, f"V{item}")[0]
    return out


def grid_of(rng: np.random.Generator) -> dict[str, int]:
    return {"blocks": int(rng.choice(BLOCKS)), "threads": int(rng.choice(THREADS))}


def first_fault(got: npt.NDArray[Any], want: npt.NDArray[Any], watched: Watched, about: object) -> str:
    wrong = np.flatnonzero(got != want)
    if len(wrong):
        return f"byte {wrong[0]} is {got[wrong[0]]}, want {want[wrong[0]]}; {about}"
    return f"{fault}; {about}" if (fault := watched.fault()) else ""


# -- the kernels -------------------------------------------------------------------------------------------------------


def box_copy(device: Device, seed: int) -> str:
    bench = Bench(device)
    case = make_case(seed)
    got, fault = bench.run_watched(case)
    bench.close()
    return fault if np.array_equal(got, case.want) else f"differs: {case.pieces}"


def box_transpose(device: Device, seed: int) -> str:
    """Dims in another order on the other side."""
    rng = np.random.default_rng((seed, 21))
    item = int(rng.choice([1, 2, 4, 8, 16]))
    extents = [int(n) for n in rng.integers(1, 4, rng.integers(2, 5))]
    for axis in rng.permutation(len(extents))[:2]:
        extents[axis] = int(rng.integers(1, 200 // item + 20))
    order = [[int(axis) for axis in rng.permutation(len(extents))] for _ in range(2)]
    sides = [laid_out(rng, extents, item, dims) for dims in order]
    (by_source, begin, room), (by_target, to, out_room) = sides
    source = rng.integers(0, 256, room, np.uint8)
    want = np.full(out_room, POISON, np.uint8)
    view(want, f"V{item}", extents, to, by_target)[...] = view(source, f"V{item}", extents, begin, by_source)
    copy = Copy(0, begin, by_source, 0, to, by_target, tuple(extents))
    with device.upload(source) as src, device.upload(np.full_like(want, POISON)) as dst:
        reads = marked(room, item, extents, begin, by_source)
        writes = marked(out_room, item, extents, to, by_target)
        with Watched(device, [(src.address, reads)], [(dst.address, writes)]) as watched:
            for launch in launches([(copy, item)], [src.address], [dst.address]):
                kernels.launch(device, launch, **grid_of(rng))
            got = device.download(dst.address, len(want))
    return first_fault(got, want, watched, copy)


def box_cast(device: Device, seed: int) -> str:
    """Two dtypes of any widths."""
    rng = np.random.default_rng((seed, 22))
    source, target = (
        DTYPES[str(name)] for name in rng.choice(["F64", "F32", "BF16", "F16", "F8_E4M3"], 2, replace=False)
    )
    size = source.bits // 8
    item = target.bits // 8
    extents = [int(n) for n in rng.integers(1, 5, rng.integers(0, 3))] + [int(rng.choice([1, 7, 16, 64, 300, 9000]))]
    plain = list(range(len(extents)))
    (by_source, begin, room), (by_target, to, out_room) = (
        laid_out(rng, extents, width, plain) for width in (size, item)
    )
    data = rng.integers(0, 256, room, np.uint8)
    box = np.ascontiguousarray(view(data, f"V{size}", extents, begin, by_source))
    values, lost = cast(box.view(np.uint8).reshape(-1).data, source, target)
    want = np.full(out_room, POISON, np.uint8)
    view(want, f"V{item}", extents, to, by_target)[...] = np.frombuffer(values, f"V{item}").reshape(extents)
    copy = Copy(0, begin, by_source, 0, to, by_target, tuple(extents))
    with device.upload(data) as src, device.upload(np.full_like(want, POISON)) as dst:
        casts = pack_casts(cast_boxes(copy, source, target, [src.address], [dst.address]), source, target)
        reads = marked(room, size, extents, begin, by_source)
        writes = marked(out_room, item, extents, to, by_target)
        with Watched(device, [(src.address, reads)], [(dst.address, writes)]) as watched:
            counted = kernels.box_cast(device, casts, **grid_of(rng))
        got = device.download(dst.address, len(want))
    about = (source.name, target.name, copy)
    return first_fault(got, want, watched, about) or (
        "" if counted == [lost] else f"lost {counted}, want {lost}; {about}"
    )


def box_dequantise(device: Device, seed: int) -> str:
    """E4M3 codes with fp32 scales of blocks to fp32, a box of a tensor."""
    rng = np.random.default_rng((seed, 23))
    rows = int(rng.integers(1, 60))
    columns = int(rng.choice([1, 9, 32, 64, 200, 512]))
    block = [(128, 128), (3, 5), (1, 16), (8, 32)][int(rng.integers(4))]
    row = int(rng.integers(rows))
    column = int(rng.choice([0, 16 * int(rng.integers(columns // 16 + 1)), int(rng.integers(columns))]))
    column = min(column, columns - 1)
    extents = [rows - row, columns - column]
    codes = rng.integers(0, 0x7F, rows * columns, np.uint8) | rng.integers(0, 2, rows * columns, np.uint8) << 7
    scales = rng.standard_normal((ceil_div(rows, block[0]), ceil_div(columns, block[1]))).astype(np.float32)
    floats, _ = cast(codes.data, DTYPES["F8_E4M3"], DTYPES["F32"])
    spread = scales[np.arange(rows)[:, None] // block[0], np.arange(columns) // block[1]]
    values = (np.frombuffer(floats, np.float32).reshape(rows, columns) * spread)[row:, column:]
    by_target, to, room = laid_out(rng, extents, 4, [0, 1])
    want = np.full(room, POISON, np.uint8)
    view(want, "f4", extents, to, by_target)[...] = values
    begin = row * columns + column
    by_source = (columns, 1)
    with device.upload(codes) as src, device.upload(np.full_like(want, POISON)) as dst, device.upload(scales) as by:
        grid = CastScales(by.address, DTYPES["F32"], block, (0, 4 * scales.shape[1]))
        box = CodeBox(
            src.address + begin, dst.address + to, (1, *extents), (0, columns), (0, by_target[0]), grid, row, column
        )
        reads = marked(len(codes), 1, extents, begin, by_source)
        writes = marked(room, 4, extents, to, by_target)
        with Watched(device, [(src.address, reads)], [(dst.address, writes)]) as watched:
            kernels.box_dequantise(device, pack_codes([box], DTYPES["F8_E4M3"], DTYPES["F32"]), **grid_of(rng))
        got = device.download(dst.address, len(want))
    return first_fault(got, want, watched, (extents, block, row, column))


def box_quantise(device: Device, seed: int) -> str:
    """Matrices in rows with gaps, anywhere, their codes and scales elsewhere, of values of any size."""
    rng = np.random.default_rng((seed, 26))
    scheme = SCHEMES[str(rng.choice([*SCHEMES]))]
    source = DTYPES[str(rng.choice(["F32", "BF16", "F16"]))]
    high, wide = scheme.block
    rows = int(rng.choice([1, 3, 129, 200])) if high > 1 else int(rng.integers(1, 12))
    columns = wide * int(rng.integers(1, 9)) if high == 1 and wide else int(rng.choice([1, 9, 64, 130, 300, 2100]))
    matrices = int(rng.integers(1, 3))
    item = source.bits // 8
    wide_values = rng.standard_normal((matrices, rows, columns), np.float32) * 10.0 ** rng.integers(-42, 39)
    with np.errstate(over="ignore"):
        values = np.where(rng.random(wide_values.shape) < 0.9, wide_values, -0.0).astype(np.float32)
    line = np.frombuffer(cast(values.reshape(-1).view(np.uint8).data, DTYPES["F32"], source)[0], numpy_type(source))
    if not np.isfinite(line.astype(np.float32)).all():
        line = np.where(np.isfinite(line.astype(np.float32)), line, line.dtype.type(1))
    want = quantise_by_cpu(line, (matrices, rows, columns), source, scheme)
    size = want.scales.itemsize
    step = columns * scheme.bits // 8
    plain = [0, 1, 2]
    by_source, begin, room = laid_out(rng, [matrices, rows, columns], item, plain)
    by_codes, to, codes_room = laid_out(rng, [matrices, rows, step], 1, plain)
    by_scales, first, scales_room = laid_out(rng, [*want.scales.shape], size, plain)
    data, codes, scales = (np.full(n, POISON, np.uint8) for n in (room, codes_room, scales_room))
    shape = [matrices, rows, columns]
    view(data, f"V{item}", shape, begin, by_source)[...] = line.view(f"V{item}").reshape(shape)
    view(codes, "u1", [matrices, rows, step], to, by_codes)[...] = want.codes.reshape(matrices, rows, step)
    raw = np.frombuffer(want.scales.tobytes(), f"V{size}").reshape(want.scales.shape)
    view(scales, f"V{size}", [*raw.shape], first, by_scales)[...] = raw
    with (
        device.upload(data) as src,
        device.upload(np.full_like(codes, POISON)) as dst,
        device.upload(np.full_like(scales, POISON)) as by,
    ):
        box = FloatBox(
            src.address + begin,
            dst.address + to,
            (matrices, rows, columns),
            (by_source[0], by_source[1]),
            (by_codes[0], by_codes[1]),
            by.address + first,
            (by_scales[0], by_scales[1]),
            want.whole,
        )
        reads = marked(room, item, shape, begin, by_source)
        # what does not fit the registers, or is not quick, is read again
        writes = [
            (dst.address, marked(codes_room, 1, [matrices, rows, step], to, by_codes)),
            (by.address, marked(scales_room, size, [*raw.shape], first, by_scales)),
        ]
        with Watched(device, [(src.address, reads)], writes) as watched:
            bad = kernels.box_quantise(device, pack_floats([box], source, scheme), **grid_of(rng))
        got = [device.download(memory.address, memory.nbytes) for memory in (dst, by)]
    about = (scheme.name, source.name, shape, box)
    return first_fault(np.concatenate(got), np.concatenate([codes, scales]), watched, about) or (
        "" if bad == [0] else f"{bad} blocks are not finite, want none; {about}"
    )


def digest(device: Device, seed: int) -> str:
    """Lines that lie apart in one buffer."""
    rng = np.random.default_rng((seed, 24))
    lengths = [
        int(rng.choice([1, 3, 8, 16, 17, 128, 129, 240, 241, int(rng.integers(1, 5000)), 0]))
        for _ in range(int(rng.integers(1, 9)))
    ]
    if seed % 8 == 0:
        lengths.append(LEAF + int(rng.integers(0, 1000)))
    starts = []
    at = 0
    for length in lengths:
        starts.append(at := at + int(rng.integers(1, 40)))
        at += length
    data = rng.integers(0, 256, at + 8, np.uint8)
    lanes = int(rng.choice([4, 8, 16, 32]))
    reads = np.zeros(len(data), np.uint8)
    want = b""
    for start, length in zip(starts, lengths, strict=True):
        reads[start : start + length] = 1
        line = data[start : start + length]
        want += b"".join(xxhash.xxh3_128_digest(line[k : k + LEAF]) for k in range(0, length, LEAF))
    out_bytes = np.frombuffer(want, np.uint8)
    with device.upload(data) as src, device.alloc(len(want) + 16) as out:
        lines = [DigestLine(src.address + start, length) for start, length in zip(starts, lengths, strict=True)]
        with Watched(device, [(src.address, reads)], [(out.address, np.ones(len(want), np.uint8))]) as watched:
            kernels.digest(device, pack_lines(lines, out.address), lanes=lanes, **grid_of(rng))
        got = device.download(out.address, len(want))
    return first_fault(got, out_bytes, watched, (lengths, lanes))


def compared(device: Device, seed: int) -> str:
    """Two sides in layouts of their own, some elements changed."""
    rng = np.random.default_rng((seed, 25))
    dtype = DTYPES[str(rng.choice(["F32", "BF16", "F16", "F8_E4M3", "I32", "U8", "F64"]))]
    item = dtype.bits // 8
    extents = [int(n) for n in rng.integers(1, 5, rng.integers(0, 3))] + [int(rng.choice([1, 5, 16, 200, 9000]))]
    plain = list(range(len(extents)))
    (by_a, first_a, room_a), (by_b, first_b, room_b) = (laid_out(rng, extents, item, plain) for _ in range(2))
    a = rng.integers(0, 256, room_a, np.uint8)
    b = rng.integers(0, 256, room_b, np.uint8)
    left = view(a, f"V{item}", extents, first_a, by_a)
    right = view(b, f"V{item}", extents, first_b, by_b)
    right[...] = left
    changed = rng.random(left.shape) < float(rng.choice([0, 0.01, 0.5]))
    inverse = np.frombuffer((~np.frombuffer(left[changed].tobytes(), np.uint8)).tobytes(), f"V{item}")
    right[changed] = inverse
    found = np.flatnonzero(changed.reshape(-1))
    with device.upload(a) as one, device.upload(b) as two:
        sides = [*zip(by_a, by_b, extents, strict=True)][:-1]
        box = Strided(
            one.address + first_a,
            two.address + first_b,
            tuple(n for *_, n in sides),
            tuple(s for s, *_ in sides),
            tuple(t for _, t, _ in sides),
            extents[-1] * item,
        )
        reads = [
            (one.address, marked(room_a, item, extents, first_a, by_a)),
            (two.address, marked(room_b, item, extents, first_b, by_b)),
        ]
        with Watched(device, reads, []) as watched:
            (got,) = compare(device, [box], [dtype])
    want = (len(found), int(found[0]) if len(found) else -1)
    fault = "" if (got.elements, got.first) == want else f"{got}, want {want}"
    return f"{dtype.name} {extents}: {fault or watched.fault()}" if fault or watched.fault() else ""


def stepped(device: Device, seed: int) -> str:
    """A step of AdamW, or the swap, over flat buffers that lie anywhere on their grid, the average and the parameter
    there or not."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([0, 1, 3, 4, 5, 63, 257, 2000, 9001]))
    has_ema = bool(rng.integers(2))
    kind = str(rng.choice(["F32", "BF16"]))
    out = str(rng.choice(["", "F32", "BF16"]))
    types = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
    arrays = {name: rng.standard_normal(count, np.float32) for name in ("master", "exp_avg", "exp_avg_sq", "ema")}
    arrays["exp_avg_sq"] **= 2
    arrays["gradient"] = rng.standard_normal(count, np.float32).astype(types[kind])
    arrays["parameter"] = np.zeros(count, types[out or "F32"])
    constants = Constants.of(step=int(rng.integers(1, 9)), rate=1e-2, scale=0.5)
    swaps = bool(rng.integers(2))
    want = _swapped(arrays) if swaps else _adamw(constants, arrays)
    read = [] if swaps else ["gradient"]
    updated = ["master", "ema"] if swaps else ["master", "exp_avg", "exp_avg_sq", *["ema"] * has_ema]
    written = ["parameter"] if out else []
    with ExitStack() as stack:
        held: dict[
            str, tuple[int, int, int]
        ] = {}  # address of the buffer, where the array begins in it, bytes of the buffer
        grid = rng.choice([16, 8, 4, 0])  # all on 16 bytes, or some on less
        for name, array in arrays.items():
            start = int(rng.choice([0, 16, max(int(grid), array.itemsize), 256 + array.itemsize if grid == 0 else 32]))
            raw = np.full(start + array.nbytes + int(rng.integers(0, 20)), POISON, np.uint8)
            raw[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            held[name] = (stack.enter_context(device.upload(raw)).address, start, raw.nbytes)
        at = {name: address + start for name, (address, start, _) in held.items()}
        legal = {name: np.zeros(nbytes, np.uint8) for name, (_, _, nbytes) in held.items()}
        for name, array in arrays.items():
            legal[name][held[name][1] : held[name][1] + array.nbytes] = 1
        maps = {name: (held[name][0], legal[name]) for name in held}
        watched = Watched(device, [maps[n] for n in read], [maps[n] for n in written], [maps[n] for n in updated])
        with watched:
            if swaps:
                swap(
                    device,
                    count,
                    at["master"],
                    at["ema"],
                    parameter=at["parameter"] if out else 0,
                    parameter_kind=out or "BF16",
                    **grid_of(rng),
                )
            else:
                flat = Flat(
                    count,
                    at["gradient"],
                    at["master"],
                    at["exp_avg"],
                    at["exp_avg_sq"],
                    at["ema"] if has_ema else 0,
                    at["parameter"] if out else 0,
                    kind,
                    out or "BF16",
                )
                step(device, constants, flat, **grid_of(rng))
            device.sync()
        about = f"{'swap' if swaps else 'step'} of {count}, {at}"
        for name in [*updated, *written]:
            got = device.download(at[name], arrays[name].nbytes)
            if fault := first_fault(got, np.frombuffer(want[name].tobytes(), np.uint8), watched, f"{name}: {about}"):
                return fault
        touched = [*read, *updated, *written]
        if device.info.host and count >= 4 and all(at[name] % (arrays[name].itemsize * 4) == 0 for name in touched):
            odd = sum(watched.loads[k] + watched.stores[k] for k in (1, 2, 4))
            if odd > (count % 4) * 2 * len(touched):
                return f"{odd} accesses of one element, though all lies on 16 bytes: {about}"
    return ""


def _swapped(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Weights and average change places; the parameter follows the weights."""
    master = arrays["ema"]
    ema = arrays["master"]
    return {"master": master, "ema": ema, "parameter": master.astype(arrays["parameter"].dtype)}


def _adamw(c: Constants, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The formula of adamw_ema.cu."""
    k = {name: np.float32(value) for name, value in c._asdict().items()}
    g = arrays["gradient"].astype(np.float32) * k["scale"]
    m = arrays["exp_avg"] * k["beta1"] + g * k["beta1_rest"]
    v = arrays["exp_avg_sq"] * k["beta2"] + (g * g) * k["beta2_rest"]
    p = arrays["master"] * k["decay"] - (m / k["correction1"]) / (np.sqrt(v / k["correction2"]) + k["eps"]) * k["rate"]
    ema = arrays["ema"] * k["average"] + p * k["average_rest"]
    return {"master": p, "exp_avg": m, "exp_avg_sq": v, "ema": ema, "parameter": p.astype(arrays["parameter"].dtype)}


KERNELS: dict[str, Callable[[Device, int], str]] = {
    "box_copy": box_copy,
    "box_transpose": box_transpose,
    "box_cast": box_cast,
    "box_dequantise": box_dequantise,
    "box_quantise": box_quantise,
    "digest": digest,
    "compare": compared,
    "adamw_ema": stepped,
}


def main(arguments: list[str]) -> int:
    device = device_of(Path(arguments[0]))
    kernel = arguments[1]
    cases = int(arguments[2]) if len(arguments) > 2 else 50
    for seed in range(cases):
        if fault := KERNELS[kernel](device, seed):
            print(f"{kernel}, case {seed}: {fault}")
            return 1
    print(f"{cases} cases equal")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
