"""Random lists of boxes with what NumPy makes of them: the food of the tests, the sanitizers and the mutants.

A case is a source buffer, some boxes cut out of tensors that lie in it, and a target buffer of tensors that they go to,
with guard bytes around all. The tensors have 0 to 6 dims and items of 1 to 16 bytes, and begin anywhere; extents may be
0. The oracle is one assignment of NumPy a box, `target[box] = source[box]`, on views of the whole buffers, so it shares
nothing with the descriptors. The whole target is compared, what lies between the boxes too.

    python tests/kernels/box_cases.py LIBRARY [CASES] [FIRST SEED]      exit 1 at the first case that differs

runs them in a process of its own (a sanitizer's, a mutant's). Some are tight there: one box that ends where its buffers
end.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterable
from ctypes import byref, c_uint64, c_void_p
from math import gcd
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.device.descriptors import ELEMENTS, SPANS, TILE, PackedDescriptors, make_strided, pack
from ckpt_tool.device.kernels import box_copy
from ckpt_tool.device.library import FUNCTIONS, Device, Library, Memory
from ckpt_tool.plan.copy import Copy

Bytes = npt.NDArray[np.uint8]
POISON = 0xA5  # what a target holds before; a byte of the source is as likely as any other
POOL = np.random.default_rng(7).integers(0, 256, 4 << 20, np.uint8)
MOST = 1 << 20  # bytes of a buffer
GRIDS = (1, 1, 2, 4, 8, 16, 16)  # everything in a case lies on one
ITEMS = (1, 1, 2, 2, 4, 4, 8, 16, 3, 12)
BLOCKS = (0, 1, 2, 3, 7, 40)
THREADS = (0, 0, 32, 96, 160, 256)


class Place(NamedTuple):
    """Where a box lies in its buffer: first element and strides, in bytes."""

    first: int
    strides: tuple[int, ...]


class Piece(NamedTuple):
    """One box on two sides, dims in the order of the source's."""

    item: int
    extents: tuple[int, ...]
    source: Place
    target: Place

    @property
    def copy(self) -> Copy:
        return Copy(0, self.source.first, self.source.strides, 0, self.target.first, self.target.strides, self.extents)

    def view(self, buffer: Bytes, place: Place) -> npt.NDArray[np.void]:
        return np.ndarray(self.extents, f"V{self.item}", buffer.data, place.first, place.strides)


class Case(NamedTuple):
    seed: int
    pieces: tuple[Piece, ...]
    source: Bytes
    want: Bytes
    shifts: tuple[int, int]  # the buffers begin so many bytes after what the device gave
    blocks: int
    threads: int


class _Buffer:
    """Lays tensors out one after another, each on the grid. tight: no guard bytes, no margins."""

    def __init__(self, rng: np.random.Generator, grid: int, tight: bool) -> None:
        self.rng = rng
        self.grid = grid
        self.tight = tight
        self.nbytes = 0

    def place(self, extents: list[int], item: int, granule: int, order: list[int]) -> Place:
        """A tensor somewhat larger than the box in it, dims stored in `order`, the innermost by granules."""
        full = list(extents)
        before = [0] * len(extents)
        for axis in range(len(extents)):
            if not self.tight and self.rng.random() < 0.4:
                low, high = (int(n) * (granule if axis == order[-1] else 1) for n in self.rng.integers(0, 3, 2))
                before[axis], full[axis] = low, low + extents[axis] + high
        strides = [0] * len(extents)
        step = item
        for axis in reversed(order):
            strides[axis], step = step, step * full[axis]
        if not self.tight:
            self.nbytes = (self.nbytes // self.grid + int(self.rng.integers(1, 64 // self.grid + 2))) * self.grid
        first = self.nbytes + sum(n * stride for n, stride in zip(before, strides, strict=True))
        self.nbytes += step + (0 if self.tight else int(self.rng.integers(0, 40)))
        return Place(first, tuple(strides))


def _extents(rng: np.random.Generator, item: int, granule: int) -> list[int]:
    """Those of a box whose innermost dim goes by granules."""
    kind = rng.random()
    if kind < 0.55:  # small, of any number of dims
        extents = [int(n) for n in rng.integers(1, 6, rng.integers(0, 7))]
        if extents:
            extents[-1] = granule * int(rng.choice([1, 2, 3, 5, 8, 16, 33]))
    elif kind < 0.85:  # rows of up to 2 KiB
        extents = [int(rng.integers(1, 40)), granule * int(rng.integers(1, max(2, 2048 // item // granule)))]
    elif kind < 0.95:  # levels above rows
        extents = [int(n) for n in rng.integers(1, 6, rng.integers(1, 4))]
        extents.append(granule * int(rng.integers(1, max(2, 640 // item // granule))))
    else:  # rows about as long as a tile, and longer
        longest = TILE * 5 // 2 // item
        extents = [int(rng.integers(1, 4)), max(1, int(rng.integers(longest // 4, longest)) // granule) * granule]
    if extents and rng.random() < 0.03:
        extents[int(rng.integers(len(extents)))] = 0
    return extents


def _pieces(rng: np.random.Generator, grid: int, tight: bool) -> tuple[list[Piece], int, int]:
    """(some boxes, bytes of the source, bytes of the target)."""
    sides = (_Buffer(rng, grid, tight), _Buffer(rng, grid, tight))
    room = (0, 0)
    pieces: list[Piece] = []
    for _ in range(1 if tight else int(rng.choice([1, 1, 2, 3, 5]))):
        item = int(rng.choice(ITEMS))
        granule = grid // gcd(grid, item)
        extents = _extents(rng, item, granule)
        plain = list(range(len(extents)))
        order = [int(axis) for axis in rng.permutation(len(extents))] if rng.random() < 0.04 else plain
        places = sides[0].place(extents, item, granule, plain), sides[1].place(extents, item, granule, order)
        if max(sides[0].nbytes, sides[1].nbytes) > MOST:
            break
        pieces.append(Piece(item, tuple(extents), *places))
        room = sides[0].nbytes, sides[1].nbytes
    return pieces, *room


def make_case(seed: int, *, tight: bool = False) -> Case:
    """Case number `seed`."""
    rng = np.random.default_rng((seed, 20))
    grid = int(rng.choice(GRIDS))
    pieces, from_bytes, to_bytes = _pieces(rng, grid, tight)
    begin = int(rng.integers(len(POOL) - from_bytes))
    source = POOL[begin : begin + from_bytes].copy()
    want = np.full(to_bytes, POISON, np.uint8)
    for piece in pieces:
        if 0 not in piece.extents:
            piece.view(want, piece.target)[...] = piece.view(source, piece.source)
    by_source, by_target = (0, 0) if tight else (int(n) * grid for n in rng.integers(0, 16 // grid + 1, 2))
    return Case(
        seed, tuple(pieces), source, want, (by_source, by_target), int(rng.choice(BLOCKS)), int(rng.choice(THREADS))
    )


def list_of(case: Case, source: int, target: int) -> PackedDescriptors:
    """The case's list for buffers that begin at these addresses."""
    return pack(box for piece in case.pieces for box in make_strided(piece.copy, piece.item, [source], [target]))


class Bench:
    """Buffers of a device that many cases share."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.source: Memory = device.alloc(2 * MOST)
        self.target: Memory = device.alloc(2 * MOST)

    def close(self) -> None:
        self.source.close()
        self.target.close()

    def run(self, case: Case, widths: Counter[str] | None = None) -> Bytes:
        """What the kernel makes of a poisoned target."""
        source = self.source.address + case.shifts[0]
        target = self.target.address + case.shifts[1]
        boxes = list_of(case, source, target)
        if widths is not None:
            widths.update(kinds(boxes))
        self.device.write(source, case.source)
        self.device.fill(target, POISON, len(case.want))
        box_copy(self.device, boxes, blocks=case.blocks, threads=case.threads)
        return self.device.download(target, len(case.want))

    def run_watched(self, case: Case) -> tuple[Bytes, str]:
        """(what the kernel makes of it, "" where it read and wrote the boxes alone, and wrote each byte once)."""
        reads = np.zeros_like(case.source)
        writes = np.zeros_like(case.want)
        for piece in case.pieces:
            if 0 not in piece.extents:
                for buffer, place in ((reads, piece.source), (writes, piece.target)):
                    piece.view(buffer, place)[...] = np.frombuffer(b"\1" * piece.item, f"V{piece.item}")
        source = self.source.address + case.shifts[0]
        target = self.target.address + case.shifts[1]
        with Watched(self.device, [(source, reads)], [(target, writes)]) as watched:
            got = self.run(case)
        return got, watched.fault()

    def run_tight(self, case: Case) -> Bytes:
        """The same in buffers of exactly the case's size."""
        with self.device.upload(case.source) as source, self.device.upload(np.full_like(case.want, POISON)) as target:
            box_copy(
                self.device, list_of(case, source.address, target.address), blocks=case.blocks, threads=case.threads
            )
            return self.device.download(target.address, len(case.want))


def kinds(boxes: PackedDescriptors) -> Iterable[str]:
    """The ways through box_copy that a list takes, a name a box."""
    for box in boxes.packed:
        if box["op"] == ELEMENTS:
            yield f"elements of {1 << int(box['vlog'])} bytes, {'one level' if box['ext'][2] == box['rows'] else 'levels'}"  # noqa: E501
        else:
            skew = "equal" if (int(box["src"]) - int(box["dst"])) % 16 == 0 else "shifted"
            yield f"{'spans' if box['op'] == SPANS else 'pieces'}, {skew} alignment"


class Watched:
    """The shim watches what the kernels read and write: nothing outside `reads` and `writes`, and all of `writes` once.

    reads, writes, updates: (address, a byte for each byte from there: may it be read, must it be written, both). A GPU
    is not watched.
    """

    def __init__(
        self,
        device: Device,
        reads: list[tuple[int, Bytes]],
        writes: list[tuple[int, Bytes]],
        updates: list[tuple[int, Bytes]] | None = None,
    ) -> None:
        self.dll = ctypes.CDLL(str(device.library.path)) if device.info.host else None
        self.maps = [(address, legal.astype(np.uint8)) for address, legal in reads]
        self.written = [(address, legal.astype(np.uint8) * 2) for address, legal in writes]
        self.written += [(address, legal.astype(np.uint8) * 3) for address, legal in updates or ()]

    def __enter__(self) -> Watched:
        if self.dll is not None:
            for address, legal in (*self.maps, *self.written):
                if not self.dll.ck_watch(c_uint64(address), c_uint64(len(legal)), c_void_p(legal.ctypes.data)):
                    raise RuntimeError("too many ranges are watched")
        return self

    def __exit__(self, *_: object) -> None:
        if self.dll is None:
            return
        first = c_uint64()
        self.dll.ck_unwatch.restype = c_uint64
        counts = (c_uint64 * 10)()
        self.complaints = self.dll.ck_unwatch(byref(first), counts)
        self.first = first.value
        self.loads, self.stores = ({1 << log: counts[row + log] for log in range(5)} for row in (0, 5))  # by width

    def fault(self) -> str:
        """What was wrong; "" where nothing was."""
        if self.dll is None:
            return ""
        if self.complaints:
            near = [
                f"{self.first - address} of {address:#x}"
                for address, legal in (*self.maps, *self.written)
                if 0 <= self.first - address < len(legal)
            ]
            return (
                f"{self.complaints} bytes were read or written, or written twice, against the rules: first byte {near}"
            )
        left = sum(int(((legal & 6) == 2).sum()) for _, legal in self.written)
        return f"{left} bytes were not written" if left else ""


def device_of(path: Path) -> Device:
    """The shim in a library that may have some kernels only."""
    dll = ctypes.CDLL(str(path))
    for name in [name for name in FUNCTIONS if not hasattr(dll, name)]:
        del FUNCTIONS[name]
    return Device(Library(path))


def main(arguments: list[str]) -> int:
    library = Path(arguments[0])
    cases = int(arguments[1]) if len(arguments) > 1 else 400
    first = 0
    if len(arguments) > 2:
        first = int(arguments[2])
    bench = Bench(device_of(library))
    for seed in sorted(range(first, first + cases), key=lambda seed: (seed % 4 > 0, seed)):
        tight = seed % 4 == 0
        case = make_case(seed, tight=tight)
        if not np.array_equal(bench.run_tight(case) if tight else bench.run(case), case.want):
            print(f"case {seed} differs: {case.pieces}")
            return 1
    print(f"{cases} cases equal")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
