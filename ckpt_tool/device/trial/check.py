"""`ckpt kernels check`: do the kernels compute the right results on this device? Random work, compared with NumPy.

Each trial makes random bytes and a random list (any alignment, any run, also empty boxes), fills the output and the
memory around it with a pattern, runs the kernel, and compares the entire output, gaps included, with the result of the
CPU for the same list: strided assignments, xxhash, `run.compute.cast`, `run.compare`. The seed determines all of it, so
a finding can be reproduced.

    trials(device, cases=200, seed=0)
    [Outcome(kernel="box_copy", cases=200, nbytes=31457280, seconds=1.9, findings=()), ...]

Cost: a second or two a kernel. It does not look for races among blocks: compute-sanitizer does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device import adamw, comparisons, kernels
from ckpt_tool.device.casts import CastScales, CodeBox, line, pack_casts, pack_codes
from ckpt_tool.device.descriptors import Strided, Turned, as_strided, pack, pack_turned
from ckpt_tool.device.digests import DigestLine, leaf_hashes
from ckpt_tool.device.library import Device
from ckpt_tool.device.quantising import FLOATS as FLOATS_TO_QUANTISE
from ckpt_tool.device.quantising import FloatBox, pack_floats
from ckpt_tool.errors import StorageError
from ckpt_tool.quantised import nearest_codes
from ckpt_tool.quantised.codecs.code_bits import list_byte_values
from ckpt_tool.run import compute
from ckpt_tool.run.compare import Worst, differ
from ckpt_tool.run.digest import LEAF
from ckpt_tool.weight_schemes.written_schemes import SCHEMES, Scheme

Trial = Callable[[Device, np.random.Generator], tuple[int, str]]  # bytes of work, what is wrong ("" for nothing)

MOST_FINDINGS = 5  # a kernel: after so many it is broken enough


class Outcome(NamedTuple):
    """What the trials of one kernel came to."""

    kernel: str
    cases: int
    nbytes: int
    seconds: float
    findings: tuple[str, ...]


def trials(device: Device, *, cases: int, seed: int, only: Iterable[str] = ()) -> list[Outcome]:
    """Run the trials of all kernels, or of those in `only`. A call that fails is a finding, not an error."""
    names = set(only) or set(TRIALS)
    return [_outcome(device, name, cases, seed) for name in TRIALS if name in names]


def _outcome(device: Device, name: str, cases: int, seed: int) -> Outcome:
    began = time.monotonic()
    nbytes = 0
    findings = []
    done = 0
    for case in range(cases):
        rng = np.random.default_rng([seed, case, *name.encode()])
        done += 1
        try:
            moved_bytes, wrong = TRIALS[name](device, rng)
        except StorageError as e:  # the device is lost with the first: nothing after it says anything
            findings.append(f"case {case} of seed {seed}: {e.message}")
            break
        nbytes += moved_bytes
        if wrong:
            findings.append(f"case {case} of seed {seed}: {wrong}")
        if len(findings) >= MOST_FINDINGS:
            break
    return Outcome(name, done, nbytes, round(time.monotonic() - began, 3), tuple(findings))


# ----------------------------------------------------------------------------------------------------
# Trials of the kernels that move bytes: random boxes and transposes against NumPy's strided assignments.


Bytes = npt.NDArray[np.uint8]

POISON = 0xA5
RUNS = (1, 2, 3, 5, 7, 8, 12, 16, 31, 48, 64, 96, 130, 255, 256, 511, 512, 513, 1040, 4096, 5003, 40_000)


class CheckedSide(NamedTuple):
    """One side of a box: the strides of its levels and the bytes from its first to beyond its last."""

    strides: tuple[int, ...]
    span: int


def side(rng: np.random.Generator, extents: Sequence[int], run: int, grain: int) -> CheckedSide:
    """Strides that keep rows apart, with gaps of multiples of `grain` bytes, or none."""
    strides: list[int] = []
    span = run
    for extent in reversed(extents):
        step = span + int(rng.integers(0, 4)) * grain
        strides.insert(0, step)
        span += (extent - 1) * step if extent else 0
    return CheckedSide(tuple(strides), span)


def random_boxes(rng: np.random.Generator, most: int = 12) -> tuple[list[Strided], int, int]:
    """Boxes whose addresses are offsets into a source and a target, and the bytes that the two must have. Boxes that
    are written are apart from each other."""
    boxes: list[Strided] = []
    source_end = target_end = 0
    for _ in range(int(rng.integers(0, most))):
        grain = int(rng.choice((1, 2, 4, 8, 16)))
        run = ceil_div(int(rng.choice(RUNS)), grain) * grain
        extents = tuple(int(n) for n in rng.integers(1, 7 if run < 5000 else 3, int(rng.integers(0, 4))))
        read = side(rng, extents, run, grain)
        written = side(rng, extents, run, grain)
        begin = int(rng.integers(0, max(1, source_end))) // grain * grain
        to = target_end + int(rng.integers(0, 64)) // grain * grain
        to += -to % grain
        boxes.append(Strided(begin, to, extents, read.strides, written.strides, run))
        source_end = max(source_end, begin + read.span)
        target_end = to + written.span
    order = rng.permutation(len(boxes))
    return [boxes[i] for i in order], source_end, target_end + 64


def moved(boxes: Iterable[Strided], source: Bytes, target: Bytes) -> Bytes:
    """The target after all boxes, by NumPy: target[box] = source[box]."""
    result = target.copy()
    for box in boxes:
        if box.run * prod(box.extents):
            np.copyto(
                _view(result, box.target, box.target_strides, box), _view(source, box.source, box.source_strides, box)
            )
    return result


def _view(memory: Bytes, offset: int, strides: tuple[int, ...], box: Strided) -> Bytes:
    return np.lib.stride_tricks.as_strided(memory[offset:], (*box.extents, box.run), (*strides, 1))


def difference(found: Bytes, wanted: Bytes) -> str:
    """Where two outputs first differ, "" where they don't."""
    wrong = np.flatnonzero(found != wanted)
    if not len(wrong):
        return ""
    first_wrong = int(wrong[0])
    return (
        f"{len(wrong)} of {len(wanted)} bytes are wrong, the first at {first_wrong}: "
        f"0x{int(found[first_wrong]):02x}, want 0x{int(wanted[first_wrong]):02x}"
    )


def box_copy(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Random boxes against NumPy's strided copies."""
    boxes, source_bytes, target_bytes = random_boxes(rng)
    source = rng.integers(0, 256, source_bytes, np.uint8)
    poison = np.full(target_bytes, POISON, np.uint8)
    with device.upload(source) as read, device.upload(poison) as written:
        device_boxes = [
            box._replace(source=box.source + read.address, target=box.target + written.address) for box in boxes
        ]
        packed = pack(device_boxes)
        kernels.box_copy(device, packed, blocks=int(rng.choice((0, 1, 3))))
        result = device.download(written.address, target_bytes)
    return packed.nbytes, difference(result, moved(boxes, source, poison))


def box_transpose(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Random batches of rows and columns, swapped, of items of 1 to 16 bytes."""
    boxes: list[Turned] = []
    source_end = target_end = 0
    for _ in range(int(rng.integers(0, 5))):
        item = int(rng.choice((1, 2, 4, 8, 16)))
        batch = int(rng.integers(1, 4))
        rows = int(rng.integers(1, 150))
        columns = int(rng.integers(1, 150))
        grid = 16 if rng.integers(0, 2) else item  # 16: both sides can be moved 16 bytes at a time
        s1, t2 = (ceil_div(n * item + int(rng.integers(0, 3)) * item, grid) * grid for n in (columns, rows))
        s0 = rows * s1 + int(rng.integers(0, 2)) * grid
        t0 = columns * t2 + int(rng.integers(0, 2)) * grid
        source_begin, to = (ceil_div(end + int(rng.integers(0, 9)), grid) * grid for end in (source_end, target_end))
        boxes.append(Turned(source_begin, to, item, (batch, rows, columns), (s0, s1), (t0, t2)))
        source_end = source_begin + batch * s0
        target_end = to + batch * t0

    source = rng.integers(0, 256, source_end, np.uint8)
    poison = np.full(target_end + 64, POISON, np.uint8)
    with device.upload(source) as read, device.upload(poison) as written:
        device_boxes = [
            box._replace(source=box.source + read.address, target=box.target + written.address) for box in boxes
        ]
        packed = pack_turned(device_boxes)
        kernels.box_transpose(device, packed, blocks=int(rng.choice((0, 1, 3))))
        result = device.download(written.address, len(poison))

    return packed.nbytes, difference(result, moved([as_strided(box) for box in boxes], source, poison))


# ----------------------------------------------------------------------------------------------------
# Trials of the kernels that know what values are: casts, dequantising, hashes and comparisons, against the CPU's own
# way.


FLOATS = tuple(DTYPES[name] for name in ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"))
MOST = 70_000  # elements of a trial
LENGTHS = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 5000, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF + 77)


def box_cast(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """A line of any bits from one float type to another, begun off any grid, and how many values were lost."""
    source, target = (FLOATS[int(k)] for k in rng.choice(len(FLOATS), 2, replace=False))
    numel, (before, behind) = int(rng.choice((1, 7, 300, 5000, MOST))), (int(n) for n in rng.integers(0, 3, 2))
    step = source.bits // 8
    item = target.bits // 8
    values = _values(rng, source, numel + before)
    poison = np.full((numel + behind) * item + 64, POISON, np.uint8)
    with device.upload(values) as read, device.upload(poison) as written:
        boxes = line(read.address + before * step, written.address + behind * item, numel)
        lost_count = kernels.box_cast(device, pack_casts(boxes, source, target))[0]
        result = device.download(written.address, len(poison))
    expected, beyond = compute.cast(values[before * step :].data, source, target)
    poison[behind * item : (behind + numel) * item] = expected
    wrong = difference(result, poison) or (f"{lost_count} values lost, want {beyond}" if lost_count != beyond else "")
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
    rows = int(rng.integers(1, 300))
    columns = int(rng.integers(1, 10)) * 32 + (int(rng.integers(0, 32)) if codes.bits == 8 else 0)
    top = int(rng.integers(0, rows))
    first_column = int(rng.integers(0, columns // 32)) * 32
    shape = (1, rows - top, columns - first_column)
    item = target.bits // 8
    powers = rng.integers(100, 140, (ceil_div(rows, high), ceil_div(columns, wide)), np.uint8)
    stored = _codes(rng, codes, rows * columns)
    numel = shape[1] * shape[2]

    with device.upload(stored) as read, device.upload(powers) as scaled, device.alloc(numel * item) as written:
        device.fill(written.address, POISON, numel * item)
        first_scale = powers.shape[1] * (top // high) + first_column // wide
        scales = CastScales(scaled.address + first_scale, DTYPES["F8_E8M0"], (high, wide), (0, powers.shape[1]))
        halves = 2 if codes.bits == 4 else 1
        begin = read.address * halves + top * columns + first_column
        box = CodeBox(
            begin, written.address, shape, (0, columns), (0, shape[2] * item), scales, top % high, first_column % wide
        )
        kernels.box_dequantise(device, pack_codes([box], codes, target))
        result = device.download(written.address, numel * item)

    grown = np.repeat(np.repeat(np.ldexp(np.float32(1), powers.astype(np.int32) - 127), high, 0), wide, 1)[
        :rows, :columns
    ]
    floats = (_decode(stored, codes).reshape(rows, columns) * grown)[top:, first_column:].astype(np.float32)
    raw = np.ascontiguousarray(floats).reshape(-1).view(np.uint8)
    expected = raw if target.name == "F32" else np.asarray(compute.cast(raw.data, DTYPES["F32"], target)[0])
    return len(stored) + numel * item, difference(result, expected)


def _codes(rng: np.random.Generator, codes: DType, numel: int) -> Bytes:
    stored = rng.integers(0, 256, -(-numel * codes.bits // 8), np.uint8)
    if codes.bits == 8:
        stored[stored & 0x7F == 0x7F] = 0x38  # a NaN has many spellings
    return stored


def _decode(stored: Bytes, codes: DType) -> npt.NDArray[np.float32]:
    if codes.bits == 8:
        return list_byte_values(codes)[stored]
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    return table[np.stack([stored & 15, stored >> 4], 1).reshape(-1)]


def box_quantise(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Matrices of any scheme, of values of many sizes, with rows that run on or have gaps, codes and scales alike."""
    scheme = SCHEMES[str(rng.choice([*SCHEMES]))]
    source = DTYPES[str(rng.choice(FLOATS_TO_QUANTISE))]
    wide = scheme.block[1] if scheme.block[0] == 1 else 0
    matrices, rows, columns = (int(rng.integers(1, n)) for n in (3, 300 if scheme.block[0] > 1 else 40, 9))
    columns = columns * wide if wide else int(rng.choice((1, 8, 100, 128, 384, 1000)))
    values = rng.standard_normal((matrices, rows, columns), np.float32)
    values *= np.float32(10.0) ** rng.integers(-4, 4, (matrices, rows, 1))
    values[rng.random(values.shape) < 0.1] = -0.0
    values[:, : int(rng.integers(0, rows))] *= bool(rng.integers(0, 4))  # now and then zeros
    floats = np.frombuffer(compute.cast(values.reshape(-1).view(np.uint8).data, DTYPES["F32"], source)[0], np.uint8)
    item = source.bits // 8
    gap = int(rng.choice((0, 1, 16))) * source.bits // 8
    pitch = columns * item + gap
    stored = np.zeros((matrices, rows, pitch), np.uint8)
    stored[..., : columns * item] = floats.reshape(matrices, rows, -1)
    expected = quantise_by_cpu(floats.view(compute.numpy_type(source)), (matrices, rows, columns), source, scheme)
    across, down = expected.scales.shape[-2:][::-1]
    size = expected.scales.itemsize
    step = columns * scheme.bits // 8
    poison = np.full(expected.codes.nbytes + 64, POISON, np.uint8)
    around = np.full(expected.scales.nbytes + 64, POISON, np.uint8)

    with device.upload(stored) as read, device.upload(poison) as coded, device.upload(around) as scaled:
        box = FloatBox(
            read.address,
            coded.address,
            (matrices, rows, columns),
            (rows * pitch, pitch),
            (rows * step, step),
            scaled.address,
            (down * across * size, across * size),
            expected.whole,
        )
        bad = kernels.box_quantise(device, pack_floats([box], source, scheme))
        codes, scales = (device.download(memory.address, memory.nbytes) for memory in (coded, scaled))

    poison[: expected.codes.nbytes] = expected.codes
    around[: expected.scales.nbytes] = np.frombuffer(expected.scales.tobytes(), np.uint8)
    wrong = difference(codes, poison) or ((scale_fault := difference(scales, around)) and f"scales: {scale_fault}")
    wrong = wrong or (f"{bad[0]} blocks are not finite, want 0" if bad != [0] else "")
    about = f"{scheme.name} of {source.name} {matrices, rows, columns}"
    return stored.nbytes + codes.nbytes + scales.nbytes, f"{about}: {wrong}" if wrong else ""


class QuantisedCheck(NamedTuple):
    """What the CPU makes: codes as bytes, scales as (matrices, rows, columns) of blocks, nvfp4's factor or 1."""

    codes: Bytes
    scales: npt.NDArray[np.generic]
    whole: float


def quantise_by_cpu(
    values: npt.NDArray[np.generic], shape: tuple[int, int, int], source: DType, scheme: Scheme
) -> QuantisedCheck:
    """The same by `quantised.nearest_codes`, matrix by matrix and band by band."""
    (matrices, rows, columns), (high, _) = shape, scheme.block
    width = scheme.group(columns)
    scale_dtype = DTYPES[scheme.scales] if scheme.scales else source
    tensor_scale = None
    if scheme.name == "nvfp4":
        size = nearest_codes.largest(nearest_codes.Values(values, source), columns, columns, of_all=True)
        tensor_scale = nearest_codes.whole_of(size.reshape(1))

    codes = []
    scales = []
    for matrix in values.reshape(matrices, rows * columns):
        for row in range(0, rows, high):
            band = nearest_codes.Values(matrix[row * columns : min(row + high, rows) * columns], source)
            band_scales = nearest_codes.scales_of(
                nearest_codes.largest(band, columns, width, of_all=high > 1), scheme, scale_dtype, tensor_scale
            )
            divisors = nearest_codes.divisors_of(band_scales, scale_dtype, "", tensor_scale)
            scales.append(band_scales.reshape(1, -1))
            with np.errstate(over="ignore"):  # in the error statistics, which are not used here
                codes.append(np.empty(len(band.line), np.uint8))
                nearest_codes.codes_of(band, nearest_codes.ValuePlace(columns, 0, width), divisors, scheme, codes[-1])

    packed = nearest_codes.pack_codes(np.concatenate(codes), scheme)
    return QuantisedCheck(
        packed,
        np.concatenate(scales).reshape(matrices, ceil_div(rows, high), -1),
        float(tensor_scale[0]) if tensor_scale is not None else 1.0,
    )


def digest(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """The hashes of the leaves of lines that begin anywhere, by xxhash."""
    lines = [
        (int(rng.integers(0, 40)), int(rng.choice(LENGTHS)) + int(rng.integers(0, 3)))
        for _ in range(rng.integers(0, 5))
    ]
    memory = rng.integers(0, 256, sum(before + nbytes for before, nbytes in lines), np.uint8)
    position = 0
    placed = []
    expected = b""
    with device.upload(memory) as read:
        for before, nbytes in lines:
            placed.append(DigestLine(read.address + position + before, nbytes))
            line = memory[position + before : position + before + nbytes]
            expected += b"".join(xxhash.xxh3_128_digest(line[k : k + LEAF].tobytes()) for k in range(0, nbytes, LEAF))
            position += before + nbytes
        result = leaf_hashes(device, placed)
    return len(memory), difference(np.frombuffer(result, np.uint8), np.frombuffer(expected, np.uint8))


def compare(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Two lines of which little differs: how many, the first, the greatest distance."""
    dtype = FLOATS[int(rng.integers(0, len(FLOATS)))]
    numel = int(rng.choice((1, 7, 300, 5000, MOST)))
    item = dtype.bits // 8
    a = _values(rng, dtype, numel)
    b = a.copy()
    b[rng.integers(0, len(b), int(rng.choice((0, 1, 5))))] ^= np.uint8(1 << int(rng.integers(0, 8)))
    with device.upload(a) as left_line, device.upload(b) as right:
        box = Strided(left_line.address, right.address, (), (), (), numel * item)
        result = comparisons.compare(device, [box], [dtype])[0]
    worst = Worst((numel,))
    if not np.array_equal(a, b):
        with np.errstate(invalid="ignore"):
            differ(worst, 0, a, b, dtype, dtype, 0.0, 0.0)
    expected = (worst.count, worst.first, worst.ulp, worst.gap)
    got = (result.elements, result.first, result.ulp, result.max_abs)
    return len(a) + len(b), "" if got == expected else f"{dtype.name}: found {got}, want {expected}"


def adamw_ema(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """One step over adjacent flat buffers, compared with NumPy doing each operation of the formula in fp32."""
    count = int(rng.choice((1, 3, 300, 5001)))
    constants = adamw.Constants.of(step=int(rng.integers(1, 2000)), rate=1e-3, scale=float(rng.choice((1.0, 0.37))))
    g, p, m, v, e = (rng.standard_normal(count, np.float32) for _ in range(5))
    v *= v
    state = np.concatenate([g, p, m, v, e])
    poison = np.full(2 * count + 64, POISON, np.uint8)
    with device.upload(state) as buffers, device.upload(poison) as written:
        address = buffers.address
        step = 4 * count
        flat = adamw.Flat(
            count, address, address + step, address + 2 * step, address + 3 * step, address + 4 * step, written.address
        )
        adamw.step(device, constants, flat)
        result = device.download(buffers.address, state.nbytes)
        narrow = device.download(written.address, len(poison))
    k = {name: np.float32(value) for name, value in constants._asdict().items()}
    g = g * k["scale"]
    m = m * k["beta1"] + g * k["beta1_rest"]
    v = v * k["beta2"] + (g * g) * k["beta2_rest"]
    p = p * k["decay"] - (m / k["correction1"]) / (np.sqrt(v / k["correction2"]) + k["eps"]) * k["rate"]
    e = e * k["average"] + p * k["average_rest"]
    poison[: 2 * count] = compute.cast(p.view(np.uint8).data, DTYPES["F32"], DTYPES["BF16"])[0]
    expected = np.concatenate([state[:count], p, m, v, e]).view(np.uint8)
    return state.nbytes, difference(result, expected) or difference(narrow, poison)


def ema_swap(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Two buffers exchanged, and the parameter made of what came in."""
    count = int(rng.choice((1, 3, 300, 5001)))
    values = rng.standard_normal(2 * count, np.float32)
    poison = np.full(2 * count + 64, POISON, np.uint8)
    with device.upload(values) as buffer, device.upload(poison) as written:
        adamw.swap(device, count, buffer.address, buffer.address + 4 * count, parameter=written.address)
        result = device.download(buffer.address, values.nbytes)
        narrow = device.download(written.address, len(poison))
    expected = np.concatenate([values[count:], values[:count]])
    poison[: 2 * count] = compute.cast(expected[:count].view(np.uint8).data, DTYPES["F32"], DTYPES["BF16"])[0]
    return values.nbytes, difference(result, expected.view(np.uint8)) or difference(narrow, poison)


TRIALS: dict[str, Trial] = {
    "box_copy": box_copy,
    "box_transpose": box_transpose,
    "box_cast": box_cast,
    "box_dequantise": box_dequantise,
    "box_quantise": box_quantise,
    "digest": digest,
    "compare": compare,
    "adamw_ema": adamw_ema,
    "ema_swap": ema_swap,
}
