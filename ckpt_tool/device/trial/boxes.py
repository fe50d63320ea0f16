"""Trials of the kernels that move bytes: random boxes and transposes against NumPy's strided assignments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.device import kernels
from ckpt_tool.device.descriptors import Strided, pack
from ckpt_tool.device.launches import as_strided
from ckpt_tool.device.memory import Device
from ckpt_tool.device.transposes import Turned, pack_turned

Bytes = npt.NDArray[np.uint8]

POISON = 0xA5
RUNS = (1, 2, 3, 5, 7, 8, 12, 16, 31, 48, 64, 96, 130, 255, 256, 511, 512, 513, 1040, 4096, 5003, 40_000)


class Side(NamedTuple):
    """One side of a box: the strides of its levels and the bytes from its first to beyond its last."""

    strides: tuple[int, ...]
    span: int


def side(rng: np.random.Generator, extents: Sequence[int], run: int, grain: int) -> Side:
    """Strides that keep rows apart, with gaps of multiples of `grain` bytes, or none."""
    strides: list[int] = []
    span = run
    for extent in reversed(extents):
        step = span + int(rng.integers(0, 4)) * grain
        strides.insert(0, step)
        span += (extent - 1) * step if extent else 0
    return Side(tuple(strides), span)


def random_boxes(rng: np.random.Generator, most: int = 12) -> tuple[list[Strided], int, int]:
    """Boxes whose addresses are offsets into a source and a target, and the bytes that the two must have. Boxes that are
    written lie apart from each other."""
    boxes: list[Strided] = []
    source_end = target_end = 0
    for _ in range(int(rng.integers(0, most))):
        grain = int(rng.choice((1, 2, 4, 8, 16)))
        run = -(-int(rng.choice(RUNS)) // grain) * grain
        extents = tuple(int(n) for n in rng.integers(1, 7 if run < 5000 else 3, int(rng.integers(0, 4))))
        read, written = side(rng, extents, run, grain), side(rng, extents, run, grain)
        at = int(rng.integers(0, max(1, source_end))) // grain * grain
        to = target_end + int(rng.integers(0, 64)) // grain * grain
        to += -to % grain
        boxes.append(Strided(at, to, extents, read.strides, written.strides, run))
        source_end, target_end = max(source_end, at + read.span), to + written.span
    order = rng.permutation(len(boxes))
    return [boxes[i] for i in order], source_end, target_end + 64


def moved(boxes: Iterable[Strided], source: Bytes, target: Bytes) -> Bytes:
    """The target after all boxes, by NumPy: target[box] = source[box]."""
    out = target.copy()
    for box in boxes:
        if box.run * prod(box.extents):
            np.copyto(
                _view(out, box.target, box.target_strides, box), _view(source, box.source, box.source_strides, box)
            )
    return out


def _view(memory: Bytes, offset: int, strides: tuple[int, ...], box: Strided) -> Bytes:
    return np.lib.stride_tricks.as_strided(memory[offset:], (*box.extents, box.run), (*strides, 1))


def difference(found: Bytes, wanted: Bytes) -> str:
    """Where two outputs first differ, "" where they don't."""
    wrong = np.flatnonzero(found != wanted)
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (f"{len(wrong)} of {len(wanted)} bytes are wrong, the first at {first}: "
            f"0x{int(found[first]):02x}, want 0x{int(wanted[first]):02x}")  # fmt: skip


def box_copy(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Random boxes against NumPy's strided copies."""
    boxes, source_bytes, target_bytes = random_boxes(rng)
    source = rng.integers(0, 256, source_bytes, np.uint8)
    poison = np.full(target_bytes, POISON, np.uint8)
    with device.upload(source) as read, device.upload(poison) as written:
        there = [box._replace(source=box.source + read.address, target=box.target + written.address) for box in boxes]
        packed = pack(there)
        kernels.box_copy(device, packed, blocks=int(rng.choice((0, 1, 3))))
        found = device.download(written.address, target_bytes)
    return packed.nbytes, difference(found, moved(boxes, source, poison))


def box_transpose(device: Device, rng: np.random.Generator) -> tuple[int, str]:
    """Random batches of rows and columns, swapped, of items of 1 to 16 bytes."""
    boxes: list[Turned] = []
    source_end = target_end = 0
    for _ in range(int(rng.integers(0, 5))):
        item = int(rng.choice((1, 2, 4, 8, 16)))
        batch, rows, columns = int(rng.integers(1, 4)), int(rng.integers(1, 150)), int(rng.integers(1, 150))
        grid = 16 if rng.integers(0, 2) else item  # 16: both sides can be moved 16 bytes at a time
        s1, t2 = (-(-(n * item + int(rng.integers(0, 3)) * item) // grid) * grid for n in (columns, rows))
        s0, t0 = rows * s1 + int(rng.integers(0, 2)) * grid, columns * t2 + int(rng.integers(0, 2)) * grid
        at, to = (-(-(end + int(rng.integers(0, 9))) // grid) * grid for end in (source_end, target_end))
        boxes.append(Turned(at, to, item, (batch, rows, columns), (s0, s1), (t0, t2)))
        source_end, target_end = at + batch * s0, to + batch * t0
    source = rng.integers(0, 256, source_end, np.uint8)
    poison = np.full(target_end + 64, POISON, np.uint8)
    with device.upload(source) as read, device.upload(poison) as written:
        there = [box._replace(source=box.source + read.address, target=box.target + written.address) for box in boxes]
        packed = pack_turned(there)
        kernels.box_transpose(device, packed, blocks=int(rng.choice((0, 1, 3))))
        found = device.download(written.address, len(poison))
    return packed.nbytes, difference(found, moved([as_strided(box) for box in boxes], source, poison))
