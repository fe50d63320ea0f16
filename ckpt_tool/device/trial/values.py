"""Trials of the kernels that know what values are: casts, dequantising, hashes and comparisons, against the CPU's own way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.device import adamw, comparisons, kernels
from ckpt_tool.device.casts import CodeBox, Scales, line, pack_casts, pack_codes
from ckpt_tool.device.descriptors import Strided
from ckpt_tool.device.digests import Line, leaf_hashes
from ckpt_tool.device.memory import Device
from ckpt_tool.device.trial.boxes import POISON, Bytes, difference
from ckpt_tool.run import compute
from ckpt_tool.run.compare import Worst, differ
from ckpt_tool.run.dequantize.codes import of_bytes
from ckpt_tool.run.digest import LEAF

FLOATS = tuple(DTYPES[name] for name in ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"))
MOST = 70_000  # elements of a trial
LENGTHS = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 5000, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF + 77)


def box_cast(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """A line of any bits from one float type to another, begun off any grid, and how many values were lost."""
    source, target = (FLOATS[int(k)] for k in rng.choice(len(FLOATS), 2, replace=False))
    numel, (before, behind) = int(rng.choice((1, 7, 300, 5000, MOST))), (int(n) for n in rng.integers(0, 3, 2))
    step, item = source.bits // 8, target.bits // 8
    values = _values(rng, source, numel + before)
    poison = np.full((numel + behind) * item + 64, POISON, np.uint8)
    with device.upload(values) as read, device.upload(poison) as written:
        boxes = line(read.address + before * step, written.address + behind * item, numel)
        lost = kernels.box_cast(device, pack_casts(boxes, source, target))[0]
        found = device.download(written.address, len(poison))
    made, beyond = compute.cast(values[before * step :].data, source, target)
    poison[behind * item : (behind + numel) * item] = made
    wrong = difference(found, poison) or (f"{lost} values lost, want {beyond}" if lost != beyond else "")
    return numel * (step + item), f"{source.name} to {target.name}: {wrong}" if wrong else ""


def _values(rng: np.random.Generator, dtype: DType, numel: int) -> Bytes:
    """Any bits, and many of the size that trained values have."""
    bits = rng.integers(0, 256, numel * dtype.bits // 8, np.uint8)
    if dtype.bits >= 32 and rng.integers(0, 2):
        usual = rng.standard_normal(numel) * 10.0 ** rng.integers(-9, 6)
        bits = usual.astype(compute.numpy_type(dtype)).view(np.uint8)
    return bits


def box_dequantise(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """A box anywhere in a matrix of E4M3 codes, or of F4 ones, with its blocks' scales."""
    codes = DTYPES["F8_E4M3" if rng.integers(0, 2) else "F4"]
    target = DTYPES[str(rng.choice(("F32", "BF16", "F16")))]
    high, wide = (128, 128) if codes.bits == 8 else (1, 32)
    rows, columns = (
        int(rng.integers(1, 300)),
        int(rng.integers(1, 10)) * 32 + (int(rng.integers(0, 32)) if codes.bits == 8 else 0),
    )
    top, left = int(rng.integers(0, rows)), int(rng.integers(0, columns // 32)) * 32
    shape, item = (1, rows - top, columns - left), target.bits // 8
    powers = rng.integers(100, 140, (-(-rows // high), -(-columns // wide)), np.uint8)
    stored = _codes(rng, codes, rows * columns)
    numel = shape[1] * shape[2]
    with device.upload(stored) as read, device.upload(powers) as scaled, device.alloc(numel * item) as written:
        device.fill(written.address, POISON, numel * item)
        first = powers.shape[1] * (top // high) + left // wide
        scales = Scales(scaled.address + first, DTYPES["F8_E8M0"], (high, wide), (0, powers.shape[1]))
        halves = 2 if codes.bits == 4 else 1
        begin = read.address * halves + top * columns + left
        box = CodeBox(
            begin, written.address, shape, (0, columns), (0, shape[2] * item), scales, top % high, left % wide
        )
        kernels.box_dequantise(device, pack_codes([box], codes, target))
        found = device.download(written.address, numel * item)
    grown = np.repeat(np.repeat(np.ldexp(np.float32(1), powers.astype(np.int32) - 127), high, 0), wide, 1)[
        :rows, :columns
    ]
    floats = (_decoded(stored, codes).reshape(rows, columns) * grown)[top:, left:].astype(np.float32)
    raw = np.ascontiguousarray(floats).reshape(-1).view(np.uint8)
    wanted = raw if target.name == "F32" else np.asarray(compute.cast(raw.data, DTYPES["F32"], target)[0])
    return len(stored) + numel * item, difference(found, wanted)


def _codes(rng: np.random.Generator, codes: DType, numel: int) -> Bytes:
    stored = rng.integers(0, 256, -(-numel * codes.bits // 8), np.uint8)
    if codes.bits == 8:
        stored[stored & 0x7F == 0x7F] = 0x38  # a NaN has many spellings
    return stored


def _decoded(stored: Bytes, codes: DType) -> npt.NDArray[np.float32]:
    if codes.bits == 8:
        return of_bytes(codes)[stored]
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    return table[np.stack([stored & 15, stored >> 4], 1).reshape(-1)]


def digest(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """The hashes of the leaves of lines that begin anywhere, by xxhash."""
    lines = [
        (int(rng.integers(0, 40)), int(rng.choice(LENGTHS)) + int(rng.integers(0, 3)))
        for _ in range(rng.integers(0, 5))
    ]
    memory = rng.integers(0, 256, sum(before + nbytes for before, nbytes in lines), np.uint8)
    at, placed, wanted = 0, [], b""
    with device.upload(memory) as read:
        for before, nbytes in lines:
            placed.append(Line(read.address + at + before, nbytes))
            held = memory[at + before : at + before + nbytes]
            wanted += b"".join(xxhash.xxh3_128_digest(held[k : k + LEAF].tobytes()) for k in range(0, nbytes, LEAF))
            at += before + nbytes
        found = leaf_hashes(device, placed)
    return len(memory), difference(np.frombuffer(found, np.uint8), np.frombuffer(wanted, np.uint8))


def compare(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Two lines of which little differs: how many, the first, the greatest distance."""
    dtype = FLOATS[int(rng.integers(0, len(FLOATS)))]
    numel, item = int(rng.choice((1, 7, 300, 5000, MOST))), dtype.bits // 8
    a = _values(rng, dtype, numel)
    b = a.copy()
    b[rng.integers(0, len(b), int(rng.choice((0, 1, 5))))] ^= np.uint8(1 << int(rng.integers(0, 8)))
    with device.upload(a) as left, device.upload(b) as right:
        box = Strided(left.address, right.address, (), (), (), numel * item)
        found = comparisons.compare(device, [box], [dtype])[0]
    worst = Worst((numel,))
    if not np.array_equal(a, b):
        with np.errstate(invalid="ignore"):
            differ(worst, 0, a, b, dtype, dtype, 0.0, 0.0)
    wanted = (worst.count, worst.first, worst.ulp, worst.gap)
    got = (found.elements, found.first, found.ulp, found.max_abs)
    return len(a) + len(b), "" if got == wanted else f"{dtype.name}: found {got}, want {wanted}"


def adamw_ema(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """One step over flat buffers that lie one behind the other, each operation of the formula by NumPy in fp32."""
    count = int(rng.choice((1, 3, 300, 5001)))
    constants = adamw.Constants.of(step=int(rng.integers(1, 2000)), rate=1e-3, scale=float(rng.choice((1.0, 0.37))))
    g, p, m, v, e = (rng.standard_normal(count, np.float32) for _ in range(5))
    v *= v
    state = np.concatenate([g, p, m, v, e])
    poison = np.full(2 * count + 64, POISON, np.uint8)
    with device.upload(state) as held, device.upload(poison) as written:
        first, step = held.address, 4 * count
        flat = adamw.Flat(
            count, first, first + step, first + 2 * step, first + 3 * step, first + 4 * step, written.address
        )
        adamw.step(device, constants, flat)
        found = device.download(held.address, state.nbytes)
        narrow = device.download(written.address, len(poison))
    k = {name: np.float32(value) for name, value in constants._asdict().items()}
    g = g * k["scale"]
    m = m * k["beta1"] + g * k["beta1_rest"]
    v = v * k["beta2"] + (g * g) * k["beta2_rest"]
    p = p * k["decay"] - (m / k["correction1"]) / (np.sqrt(v / k["correction2"]) + k["eps"]) * k["rate"]
    e = e * k["average"] + p * k["average_rest"]
    poison[: 2 * count] = compute.cast(p.view(np.uint8).data, DTYPES["F32"], DTYPES["BF16"])[0]
    wanted = np.concatenate([state[:count], p, m, v, e]).view(np.uint8)
    return state.nbytes, difference(found, wanted) or difference(narrow, poison)


def ema_swap(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Two buffers exchanged, and the parameter made of what came in."""
    count = int(rng.choice((1, 3, 300, 5001)))
    both = rng.standard_normal(2 * count, np.float32)
    poison = np.full(2 * count + 64, POISON, np.uint8)
    with device.upload(both) as held, device.upload(poison) as written:
        adamw.swap(device, count, held.address, held.address + 4 * count, parameter=written.address)
        found = device.download(held.address, both.nbytes)
        narrow = device.download(written.address, len(poison))
    wanted = np.concatenate([both[count:], both[:count]])
    poison[: 2 * count] = compute.cast(wanted[:count].view(np.uint8).data, DTYPES["F32"], DTYPES["BF16"])[0]
    return both.nbytes, difference(found, wanted.view(np.uint8)) or difference(narrow, poison)
