"""Schedule: from tensors and a target to moves, and from moves to units of work.

`build_moves` is pure and checks what the house promises: every element of the output is written by exactly one box (and
its replicas), no two arrays of a file overlap, every source box is used. `units` cuts the moves into shares of about
64 MiB, at the places where the set of output files changes: one thread works on a unit, so that two threads seldom
write one file (the inode lock makes that cost double; see performance rules in DESIGN.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box, first_overlap
from ckpt_tool.core.target import Target, TargetFile, Wanted
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import Region, box_region, byte_view, hull, intersect, source_region
from ckpt_tool.plan.plan import Move, Record

UNIT = 64 << 20  # bytes of source values in one unit, about


class Stored(NamedTuple):
    """A source tensor and the checkpoint it lies in (0 for a single source)."""

    source: int
    tensor: LogicalTensor


FileNumber = Callable[[int, str], int]  # (source, path) -> number of the plan's source file


def build_moves(
    stored: Sequence[Stored], wanted: Wanted, target: Target, file_number: FileNumber
) -> tuple[tuple[Move, ...], tuple[Record, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """The moves, the checksum records they touch, and each output file's arrays as (offset, nbytes).

    stored: aligned with `wanted.tensors`: where each wanted tensor's values come from.
    """
    outputs: list[list[Region]] = [[] for _ in wanted.tensors]
    boxes: list[list[Box]] = [[] for _ in wanted.tensors]
    arrays = []
    for number, file in enumerate(target.files):
        extents = []
        for array in file.arrays:
            item = wanted.tensors[array.tensor]
            line, box, size = byte_view(item.shape, array.box, item.dtype)
            nbytes = item.dtype.nbytes(prod(array.shape if array.shape is not None else array.box.shape))
            extents.append((array.offset, nbytes))
            if array.box.numel:
                outputs[array.tensor].append(box_region(line, box, size, number, array.offset, stored=array.shape))
                boxes[array.tensor].append(array.box)
        _check_disjoint(file, extents)
        arrays.append(tuple(extents))
    _check_cover(wanted, boxes)
    records: dict[Record, None] = {}
    moves = []
    for (source, tensor), item, regions in zip(stored, wanted.tensors, outputs, strict=True):
        if tensor.shape != item.shape:
            raise InternalError(f"{item.key}: stored {tensor.shape}, wanted {item.shape}")
        reads = []
        for chunk in tensor.chunks:
            if not chunk.box.numel:
                continue
            file_index = file_number(source, chunk.array.path)
            reads.append(source_region(chunk, tensor.shape, file_index))
            if chunk.array.crc is not None:
                records[Record(file_index, *chunk.array.crc)] = None
        size = max(1, tensor.dtype.bits // 8)
        numel = tensor.nbytes // size if tensor.dtype.bits < 8 else tensor.numel
        size_out = max(1, item.dtype.bits // 8)
        moves.append(
            Move(item.key, item.shape, tensor.dtype, item.dtype, numel, size, size_out, tuple(reads), tuple(regions))
        )
    return tuple(moves), tuple(records), tuple(arrays)


def _check_disjoint(file: TargetFile, extents: Sequence[tuple[int, int]]) -> None:
    """No two arrays or literals of an output file overlap, none leaves the file."""
    spans = sorted(
        [(at, at + n) for at, n in extents if n] + [(at, at + len(data)) for at, data in file.literals if data]
    )
    end = 0
    for start, stop in spans:
        if start < end or stop > file.size:
            raise InternalError(f"{file.path}: bytes {start}..{stop} are written twice or lie outside {file.size}")
        end = stop


def _check_cover(wanted: Wanted, boxes: Sequence[Sequence[Box]]) -> None:
    """The distinct boxes of every wanted tensor tile it. Layouts repeat, so verdicts are kept by shape and boxes."""
    known: set[tuple[object, ...]] = set()
    for item, held in zip(wanted.tensors, boxes, strict=True):
        if len(held) == 1 and held[0].shape == item.shape:
            continue
        distinct = list(dict.fromkeys(held))
        case = (item.shape, *distinct)
        if case in known:
            continue
        numel = prod(item.shape)
        if first_overlap(distinct) is not None or sum(box.numel for box in distinct) != numel:
            raise InternalError(f"{item.key}: the target's boxes do not tile shape {item.shape}: {distinct[:8]}")
        known.add(case)


def count_copies(moves: Sequence[Move]) -> int:
    """Strided source-to-destination copies that the moves come to: pairs of regions that share elements."""
    total = 0
    for move in moves:
        sources = [region for region in move.sources if region.replica == 0]
        if len(sources) == 1 or len(move.outputs) == 1:
            total += max(len(sources), len(move.outputs)) if sources and move.outputs else 0
            continue
        for output in move.outputs:
            low, high = hull(output)
            for source in sources:
                first, last = hull(source)
                if first < high and low < last and next(intersect(source, output), None) is not None:
                    total += 1
    return total


class Item(NamedTuple):
    """Elements [start, stop) of move number `move`'s line."""

    move: int
    start: int
    stop: int


class Unit(NamedTuple):
    """One share of work. files: the output files it writes. nbytes: source bytes it reads."""

    files: frozenset[int]
    items: tuple[Item, ...]
    nbytes: int


def units(moves: Sequence[Move], *, size: int = UNIT) -> tuple[Unit, ...]:
    """Shares of about `size` bytes, in order of the first source bytes they read. Derived from `moves` alone."""
    open_units: dict[frozenset[int], tuple[list[Item], int]] = {}
    done: list[Unit] = []
    order = sorted(range(len(moves)), key=lambda i: _first_byte(moves[i]))
    for index in order:
        move = moves[index]
        if not move.numel:
            continue
        for start, stop, files in segments(move, size):
            items, nbytes = open_units.get(files, ([], 0))
            items.append(Item(index, start, stop))
            nbytes += (stop - start) * move.item
            if nbytes >= size:
                done.append(Unit(files, tuple(items), nbytes))
                open_units.pop(files, None)
            else:
                open_units[files] = (items, nbytes)
    done += [Unit(files, tuple(items), nbytes) for files, (items, nbytes) in open_units.items()]
    return tuple(done)


def _first_byte(move: Move) -> tuple[int, int]:
    return min(((region.file, region.offset) for region in move.sources), default=(0, 0))


def segments(move: Move, size: int) -> Iterator[tuple[int, int, frozenset[int]]]:
    """(start, stop, output files) that part the move's line: cut where no output region runs across, and at `size`."""
    every = frozenset(region.file for region in move.outputs)
    if move.nbytes <= 4 << 20 or len(every) == 1:
        parts: Iterable[tuple[int, int, frozenset[int]]] = ((0, move.numel, every),)
    else:
        spans = sorted((*hull(region), region.file) for region in move.outputs)
        parts = _parts(spans, move.numel)
    most = max(1, size // move.item)
    for start, stop, files in parts:
        for at in range(start, stop, most):
            yield at, min(at + most, stop), files


def _parts(spans: Sequence[tuple[int, int, int]], numel: int) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Group overlapping hulls: each group is one part with the files of its members."""
    start, stop, files = 0, 0, set[int]()
    for low, high, file in spans:
        if low >= stop and files:
            yield start, stop, frozenset(files)
            start, files = stop, set()
        stop = max(stop, high)
        files.add(file)
    yield start, max(stop, numel), frozenset(files)
