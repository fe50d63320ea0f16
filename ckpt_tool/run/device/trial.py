"""`ckpt kernels check`: does this device do what the kernels say? Random work with a poisoned output, held against NumPy.

Each trial makes random bytes and a random list of boxes (any alignment, any run, boxes of nothing among them), fills the output
and all around it with a pattern, lets the kernel work, and compares the whole output, gaps included, with what NumPy makes of
the same boxes on the CPU. The seed decides everything: a finding is found again.

    trials(device, cases=200, seed=0)
    [Outcome(kernel="box_copy", cases=200, nbytes=31457280, seconds=1.9, findings=())]

Cost: a second or two a kernel. It does not look for races among blocks: compute-sanitizer does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import StorageError
from ckpt_tool.run.device import kernels
from ckpt_tool.run.device.descriptors import Strided, pack
from ckpt_tool.run.device.memory import Device

Bytes = npt.NDArray[np.uint8]
Trial = Callable[[Device, np.random.Generator], tuple[int, str]]  # bytes of work, what is wrong ("" for nothing)

POISON = 0xA5
RUNS = (1, 2, 3, 5, 7, 8, 12, 16, 31, 48, 64, 96, 130, 255, 256, 511, 512, 513, 1040, 4096, 5003, 40_000)
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
    wanted = set(only) or set(TRIALS)
    return [_outcome(device, name, cases, seed) for name in TRIALS if name in wanted]


def _outcome(device: Device, name: str, cases: int, seed: int) -> Outcome:
    began, nbytes, findings, done = time.monotonic(), 0, [], 0
    for case in range(cases):
        rng = np.random.default_rng([seed, case, *name.encode()])
        done += 1
        try:
            moved, wrong = TRIALS[name](device, rng)
        except StorageError as e:  # the device is lost with the first: nothing after it says anything
            findings.append(f"case {case} of seed {seed}: {e.message}")
            break
        nbytes += moved
        if wrong:
            findings.append(f"case {case} of seed {seed}: {wrong}")
        if len(findings) >= MOST_FINDINGS:
            break
    return Outcome(name, done, nbytes, round(time.monotonic() - began, 3), tuple(findings))


# -- random boxes -------------------------------------------------------------------------------------------------------


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


# -- the trials ---------------------------------------------------------------------------------------------------------


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


TRIALS: dict[str, Trial] = {"box_copy": box_copy}
