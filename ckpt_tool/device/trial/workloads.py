"""What the kernels are measured on: lists of boxes as reshards have them, over a source and a target of the same size.

    WORKS["columns 512 B"].prepare(device, arena)  ->  Prepared(call, moved, cleanup)

A payload is split into boxes that read or write all of it once, so the floor of a work is its bytes read and written at
the speed of a plain copy. An arena has several slots of a payload, used in turn, so that no call finds in a cache what
the one before left there. Values are random: normal floats where a kernel computes, bytes elsewhere.

The names stay: they identify figures of different days. Runs are in bytes, shapes in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.adamw import Constants, Flat, step, swap
from ckpt_tool.device.casts import CastScales, CodeBox, line, pack_casts, pack_codes
from ckpt_tool.device.comparisons import RECORD, pack_pairs
from ckpt_tool.device.descriptors import SPANS_FROM, TILE, PackedDescriptors, Strided, Turned, pack, pack_turned
from ckpt_tool.device.digests import DigestLine, pack_lines
from ckpt_tool.device.library import Device, Memory
from ckpt_tool.device.quantising import FloatBox, pack_floats
from ckpt_tool.weight_schemes.written_schemes import SCHEMES

WHOLE = 256.0  # nvfp4's factor: the scales of normal values stay below the 448 of F8_E4M3
QUANTISED = (("F32", "fp8-block"), *(("BF16", name) for name in SCHEMES))
PAD = 4096  # bytes after each slot, for what begins a little off


class Arena(NamedTuple):
    """Device memory: slot k of the source at `source + k * stride`, `payload` bytes, and so for the target."""

    source: int
    target: int
    payload: int
    slots: int

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return self.payload + PAD

    @property
    def nbytes(self) -> int:
        """Of either side."""
        return self.stride * self.slots

    def at(self, slot: int) -> tuple[int, int]:
        """The addresses of source and target for a launch; slots are used in turn."""
        step = slot % self.slots * self.stride
        return self.source + step, self.target + step


class Knobs(NamedTuple):
    """What a sweep turns. 0: the kernel's own choice."""

    tile: int = TILE
    blocks: int = 0
    threads: int = 0
    spans_from: tuple[int, ...] = SPANS_FROM


class Prepared(NamedTuple):
    """A work on a device. call(slot) queues it;"""

    call: Callable[[int], None]
    moved: int  # bytes that it reads and writes at least
    boxes: int  # in its list
    held: tuple[Memory, ...]

    def close(self) -> None:
        for memory in self.held:
            memory.close()


class Workload(NamedTuple):
    """What a kernel is measured with."""

    name: str
    kernel: str  # its name in the C ABI
    values: str  # what the source holds: "bytes", or a dtype whose normal values fill it
    prepare: Callable[[Device, Arena, Knobs], Prepared]


def _counting(
    device: Device,
    kernel: str,
    lists: Sequence[PackedDescriptors],
    kinds: tuple[int, int],
    counts: npt.NDArray[np.uint64],
    moved: int,
    knobs: Knobs,
    *,
    tables: Sequence[npt.NDArray[np.void]] = (),
    beside: Memory | None = None,
) -> Prepared:
    """A work of a kernel that counts. lists: by slot; kinds, tables: as `kernels` gives them to it. beside: what the
    boxes point to."""
    counted = device.upload(counts)
    stored = [device.upload(buffer) for buffer in tables]
    packed = [device.upload(buffer.packed) for buffer in lists]

    def call(slot: int) -> None:
        k = slot % len(lists)
        addresses = [buffer.address for buffer in (*stored[k : k + 1], counted)]
        work = (packed[k].address, len(lists[k].packed), lists[k].tiles, *kinds, *addresses)
        device.library.call(kernel, *work, knobs.blocks, knobs.threads, 0)

    buffers = (*([] if beside is None else [beside]), counted, *stored, *packed)
    return Prepared(call, moved, len(lists[0].packed), buffers)


Lists = Callable[[int, int, int], Iterable[Strided]]  # source, target, payload


def _boxes(
    device: Device, arena: Arena, knobs: Knobs, kernel: str, lists: Sequence[PackedDescriptors], moved: int
) -> Prepared:
    """A kernel that takes a list and nothing else: one list a slot."""
    uploads = tuple(device.upload(boxes.packed) for boxes in lists)

    def call(slot: int) -> None:
        k = slot % arena.slots
        device.library.call(
            kernel, uploads[k].address, len(lists[k].packed), lists[k].tiles, knobs.blocks, knobs.threads, 0
        )

    return Prepared(call, moved, len(lists[0].packed), uploads)


def _copy(make: Lists) -> Callable[[Device, Arena, Knobs], Prepared]:
    def prepare(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
        slots = [
            pack(make(*arena.at(k), arena.payload), tile=knobs.tile, spans_from=knobs.spans_from)
            for k in range(arena.slots)
        ]
        return _boxes(device, arena, knobs, "box_copy", slots, 2 * slots[0].nbytes)

    return prepare


def pieces(nbytes: int, *, source_skew: int = 0, target_skew: int = 0) -> Lists:
    """Contiguous boxes of `nbytes`, the source's in another order than the target's."""

    def make(source: int, target: int, payload: int) -> Iterable[Strided]:
        count = max(1, payload // nbytes)
        order = np.random.default_rng(1).permutation(count).tolist()
        return [
            Strided(
                source + source_skew + position * nbytes,
                target + target_skew + k * nbytes,
                (),
                (),
                (),
                min(nbytes, payload),
            )
            for k, position in enumerate(order)
        ]

    return make


def columns(run: int, ways: int = 8, *, merge: bool = False, gap: int = 0) -> Lists:
    """A tensor whose rows are cut into `ways` (the columns of TP ranks), each a tensor of its own; merge: the other way
    round.
    gap: bytes between the cuts' rows, which shifts them on the 16-byte grid."""

    def make(source: int, target: int, payload: int) -> Iterable[Strided]:
        rows = max(1, (payload - PAD) // (ways * (run + gap)))
        for k in range(ways):
            row_begin = k * run
            part = k * rows * (run + gap)
            if merge:
                yield Strided(source + part, target + row_begin, (rows,), (run + gap,), (ways * run,), run)
            else:
                yield Strided(source + row_begin, target + part, (rows,), (ways * run,), (run + gap,), run)

    return make


def levels(run: int) -> Lists:
    """Groups of query, key and value rows of which a rank takes columns: three levels above the run."""

    def make(source: int, target: int, payload: int) -> Iterable[Strided]:
        groups = 4
        parts = 3
        rows = 64
        pitch = 2 * run
        block = groups * (parts + 1) * rows * pitch
        for k in range(max(1, payload // block)):
            for half in (0, 1):
                strides = ((parts + 1) * rows * pitch, rows * pitch, pitch)
                to = (parts * rows * run, rows * run, run)
                begin = target + k * block + half * groups * parts * rows * run
                yield Strided(source + k * block + half * run, begin, (groups, parts, rows), strides, to, run)

    return make


def swaps(item: int, rows: int, columns_: int) -> Callable[[Device, Arena, Knobs], Prepared]:
    """Matrices of (rows, columns) items to (columns, rows), as many as fit."""

    def prepare(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
        r = rows
        c = columns_
        if r * c * item > arena.payload:
            r = c = isqrt(arena.payload // item)
        count = arena.payload // (r * c * item)
        nbytes = r * c * item
        slots = []
        for k in range(arena.slots):
            source, target = arena.at(k)
            slots.append(
                pack_turned([Turned(source, target, item, (count, r, c), (nbytes, c * item), (nbytes, r * item))])
            )
        return _boxes(device, arena, knobs, "box_transpose", slots, 2 * slots[0].nbytes)

    return prepare


def cast(source: str, target: str, pieces_of: int = 0) -> Callable[[Device, Arena, Knobs], Prepared]:
    """A line from one dtype to another, whole or in pieces of so many elements; the wider side is the payload."""
    source_dtype = DTYPES[source]
    target_dtype = DTYPES[target]

    def prepare(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
        count = arena.payload * 8 // max(source_dtype.bits, target_dtype.bits)
        piece = min(pieces_of or count, count)
        slots = []
        for k in range(arena.slots):
            begin, to = arena.at(k)
            boxes = [
                box
                for at in range(0, count, piece)
                for box in line(
                    begin + at * source_dtype.bits // 8, to + at * target_dtype.bits // 8, min(piece, count - at)
                )
            ]
            slots.append(pack_casts(boxes, source_dtype, target_dtype))
        nbytes = count * (source_dtype.bits + target_dtype.bits) // 8
        counts = np.zeros(2, np.uint64)
        return _counting(
            device,
            "box_cast",
            [packed.boxes for packed in slots],
            (slots[0].source, slots[0].target),
            counts,
            nbytes,
            knobs,
        )

    return prepare


def code_shape(payload: int, item: int = 2) -> tuple[int, int]:
    """Rows and columns of a matrix of bfloat16, or of items of other sizes, of that many bytes, whole blocks of 128
    both."""
    wide = min(4096, isqrt(payload // item) // 128 * 128)
    return payload // item // wide // 128 * 128, wide


def code_scales(rows: int, wide: int, block: tuple[int, int], scale: str) -> npt.NDArray[np.generic]:
    """Random scales of a matrix, 2^-7 to 2^2 as exponents and about 1 as floats."""
    table = np.random.default_rng(3).integers(120, 130, (ceil_div(rows, block[0]), ceil_div(wide, block[1])), np.uint8)
    return table if scale == "F8_E8M0" else table.astype(np.float32) / 128


def codes(kind: str, block: tuple[int, int], scale: str) -> Callable[[Device, Arena, Knobs], Prepared]:
    """A matrix of codes with a scale a block as bfloat16; the bfloat16 are the payload."""
    code_dtype = DTYPES[kind]
    scales = DTYPES[scale]

    def prepare(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
        rows, wide = code_shape(arena.payload)
        values = code_scales(rows, wide, block, scale)
        per_row = values.shape[1]
        beside = device.upload(values)
        about = CastScales(beside.address, scales, block, (0, per_row * scales.bits // 8))
        pitch = wide if code_dtype.bits == 4 else wide * code_dtype.bits // 8  # F4 counts half bytes
        lists = []
        for k in range(arena.slots):
            source, target = arena.at(k)
            first_code = 2 * source if code_dtype.bits == 4 else source
            box = CodeBox(first_code, target, (1, rows, wide), (0, pitch), (0, wide * 2), about)
            lists.append(pack_codes([box], code_dtype, DTYPES["BF16"]))
        counts = np.zeros((max(len(packed.scales) for packed in lists), 2), np.uint64)
        return _counting(
            device,
            "box_dequantise",
            [packed.boxes for packed in lists],
            (lists[0].source, lists[0].target),
            counts,
            rows * wide * (code_dtype.bits + 16) // 8 + values.nbytes,
            knobs,
            tables=[packed.scales for packed in lists],
            beside=beside,
        )

    return prepare


def make_quantised(source: str, name: str) -> Callable[[Device, Arena, Knobs], Prepared]:
    """A matrix of floats, which are the payload, quantised to codes in the target and scales in another buffer."""
    floats = DTYPES[source]
    scheme = SCHEMES[name]

    def prepare(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
        rows, wide = code_shape(arena.payload, floats.bits // 8)
        scale_dtype = DTYPES[scheme.scales] if scheme.scales else floats
        across = wide // scheme.group(wide)
        size = rows // scheme.block[0] * across * scale_dtype.bits // 8
        pitch = wide * scheme.bits // 8
        beside = device.alloc(size)
        steps = ((0, wide * floats.bits // 8), (0, pitch), (0, across * scale_dtype.bits // 8))
        lists = []
        for k in range(arena.slots):
            slot_source, to = arena.at(k)
            box = FloatBox(slot_source, to, (1, rows, wide), steps[0], steps[1], beside.address, steps[2], whole=WHOLE)
            lists.append(pack_floats([box], floats, scheme))
        return _counting(
            device,
            "box_quantise",
            [packed.boxes for packed in lists],
            (lists[0].source, lists[0].scheme),
            np.zeros(1, np.uint64),
            rows * (wide * floats.bits // 8 + pitch) + size,
            knobs._replace(threads=knobs.threads or lists[0].threads),
            tables=[packed.table for packed in lists],
            beside=beside,
        )

    return prepare


def digest(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
    """The leaves of one line."""
    digests = device.alloc(arena.payload // 1024 + PAD)
    lists = [pack_lines([DigestLine(arena.at(k)[0], arena.payload)], digests.address) for k in range(arena.slots)]
    buffers = (digests, *(device.upload(packed.packed) for packed in lists))

    def call(slot: int) -> None:
        k = slot % arena.slots
        device.library.call(
            "digest", buffers[1 + k].address, len(lists[k].packed), lists[k].tiles, 0, knobs.blocks, knobs.threads, 0
        )

    return Prepared(call, arena.payload, len(lists[0].packed), buffers)


def compare(dtype: str) -> Callable[[Device, Arena, Knobs], Prepared]:
    """Both sides as one line; the target is made a copy of the source."""

    def prepare(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
        begun = np.zeros(1, RECORD)
        begun["first"] = (1 << 64) - 1
        records = device.upload(begun)
        kind = DTYPES[dtype]
        lists = []
        for k in range(arena.slots):
            source, target = arena.at(k)
            device.library.call("move", target, source, arena.payload, 0)
            lists.append(pack_pairs([Strided(source, target, (), (), (), arena.payload // 8 * 8)], [kind]))
        buffers = (records, *(device.upload(packed.packed) for packed in lists))

        def call(slot: int) -> None:
            k = slot % arena.slots
            device.library.call(
                "compare",
                buffers[1 + k].address,
                len(lists[k].packed),
                lists[k].tiles,
                records.address,
                knobs.blocks,
                knobs.threads,
                0,
            )

        return Prepared(call, 2 * arena.payload, 1, buffers)

    return prepare


def flat_buffers(arena: Arena, slot: int) -> Flat:
    """Gradient, master and first moment in the source of a slot, the others in its target: 12 and 10 bytes an
    element."""
    source, target = arena.at(slot)
    count = arena.payload // 12 // 64 * 64
    return Flat(count, source, source + 4 * count, source + 8 * count, target, target + 4 * count, target + 8 * count)


def optimizer(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
    """A step of AdamW with its average on fp32 state, writing bfloat16 parameters: 20 bytes read and 18 written an
    element."""
    device.fill(arena.target, 0, arena.nbytes)  # second moments are never negative
    flats = [flat_buffers(arena, k) for k in range(arena.slots)]
    constants = Constants.of(step=7, rate=1e-4)

    def call(slot: int) -> None:
        step(device, constants, flats[slot % arena.slots], blocks=knobs.blocks, threads=knobs.threads)

    return Prepared(call, flats[0].elements * 38, 1, ())


def exchange(device: Device, arena: Arena, knobs: Knobs) -> Prepared:
    """Weights and their average change places, and the bfloat16 parameters follow: 8 bytes read and 10 written an
    element."""
    flats = [flat_buffers(arena, k) for k in range(arena.slots)]

    def call(slot: int) -> None:
        flat = flats[slot % arena.slots]
        swap(
            device,
            flat.elements,
            flat.master,
            flat.ema,
            parameter=flat.parameter,
            blocks=knobs.blocks,
            threads=knobs.threads,
        )

    return Prepared(call, flats[0].elements * 18, 1, ())


COPIES: dict[str, Lists] = {
    "one run": pieces(1 << 62),
    "pieces of 8 MiB": pieces(8 << 20),
    "pieces of 64 KiB": pieces(64 << 10),
    "pieces of 4 KiB": pieces(4 << 10),
    **{f"columns {run} B": columns(run) for run in (64, 128, 256, 512, 1024, 4096)},
    **{f"merged columns {run} B": columns(run, merge=True) for run in (64, 256, 512, 4096)},
    "three levels, 512 B": levels(512),
    "pieces of 8 MiB, 8 off": pieces(8 << 20, source_skew=8),
    "pieces of 8 MiB, 1 off": pieces(8 << 20, source_skew=1),
    "columns 512 B, 8 off": columns(512, gap=8),
    "columns 4096 B, 2 off": columns(4096, gap=2),
    "columns 130 B": columns(130),
}


def _all() -> Iterable[Workload]:
    for name, lists in COPIES.items():
        yield Workload(name, "box_copy", "bytes", _copy(lists))
    for item in (1, 2, 4, 8):
        yield Workload(f"{item} B, 4096 x 4096", "box_transpose", "bytes", swaps(item, 4096, 4096))
    yield Workload("2 B, 4095 x 4097", "box_transpose", "bytes", swaps(2, 4095, 4097))
    yield Workload("2 B, 128 x 7168", "box_transpose", "bytes", swaps(2, 128, 7168))
    for source, target in (("F32", "BF16"), ("BF16", "F32"), ("F32", "F16"), ("BF16", "F8_E4M3")):
        yield Workload(f"{source} to {target}", "box_cast", source, cast(source, target))
    yield Workload("F32 to BF16 by 16,384", "box_cast", "F32", cast("F32", "BF16", 16384))
    yield Workload("F8_E4M3, 128 x 128, to BF16", "box_dequantise", "F8_E4M3", codes("F8_E4M3", (128, 128), "F32"))
    yield Workload("F4, 1 x 32, to BF16", "box_dequantise", "bytes", codes("F4", (1, 32), "F8_E8M0"))
    for source, scheme in QUANTISED:
        yield Workload(f"{source} to {scheme}", "box_quantise", source, make_quantised(source, scheme))
    yield Workload("leaves of 256 KiB", "digest", "bytes", digest)
    yield Workload("BF16", "compare", "BF16", compare("BF16"))
    yield Workload("F32", "compare", "F32", compare("F32"))
    yield Workload("AdamW and average, BF16 parameters", "adamw_ema", "F32", optimizer)
    yield Workload("weights and average swapped", "ema_swap", "F32", exchange)


WORKS: dict[tuple[str, str], Workload] = {(work.kernel, work.name): work for work in _all()}


def values(kind: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """Random bytes, or those of normal values of a dtype."""
    rng = np.random.default_rng(2)
    if kind == "bytes":
        return rng.integers(0, 256, nbytes, np.uint8)
    if kind == "F8_E4M3":  # no NaN
        return rng.integers(0, 0x70, nbytes, np.uint8)
    floats = rng.standard_normal(nbytes // 2, np.float32)
    if kind == "BF16":
        return np.ascontiguousarray(floats.view("<u2")[1::2]).view(np.uint8)[:nbytes]
    return floats.view(np.uint8)[:nbytes]
