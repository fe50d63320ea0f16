"""Schedule: from tensors and a target to moves, and from moves to units of work.

`build_moves` is pure and checks what every conversion promises: each element of the output is written by exactly one
box (and its replicas), no two arrays of a file overlap, every source box is used. `units` cuts the moves into shares of
about 64 MiB, at the places where the set of output files changes: one thread works on a unit, so that two threads
seldom write one file (the kernel locks a file while it is written, which doubles the cost).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import lcm, prod
from operator import le
from typing import NamedTuple

from ckpt_tool.core.box import Box, first_overlap
from ckpt_tool.core.inner_path import check_outputs
from ckpt_tool.core.target import Later, Places, Target, TargetArray, TargetFile, Wanted, WantedTensor
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import hull, is_transposed, row_of
from ckpt_tool.plan.moves import FileNumber, LaterMoves, Stored, move_of
from ckpt_tool.plan.plan import Extent, Move, Record
from ckpt_tool.plan.spans import Comb, Span, comb_of, first_clash

UNIT = 64 << 20  # bytes of source values in one unit, about
LEAF = 256 << 10  # bytes of a leaf of the digest, see `run.digest`


def build_moves(
    stored: Sequence[Stored], wanted: Wanted, target: Target, file_number: FileNumber
) -> tuple[Sequence[Move], tuple[Record, ...], Sequence[Sequence[Extent]]]:
    """The moves, the checksum records they touch, and each output file's arrays.

    stored: aligned with `wanted.tensors`: where each wanted tensor's values come from. Where the target lists its
    placements on demand (`Target.places`), so are the moves. Raises UnsafeInput E1600 for files that would be written
    outside the output, InputError E0306, E1390 for elements of less than a byte that can't be moved.
    """
    _check_paths(target, wanted)
    if target.places is not None:
        return _build_moves_by_group(stored, wanted, target, target.places, file_number)

    # Which boxes of which files each tensor goes to. Empty boxes have no values to move.
    placed: list[list[tuple[int, TargetArray]]] = [[] for _ in wanted.tensors]
    digested = {patch.of for file in target.files for patch in file.patches if patch.kind == "digest"}
    arrays = []
    for number, file in enumerate(target.files):
        extents = _list_extents(file, wanted)
        for array in file.arrays:
            if 0 not in array.box.shape:
                placed[array.tensor].append((number, array))
        _check_disjoint(file, extents, wanted)
        arrays.append(tuple(extents))

    # Layers and experts repeat a layout: the check is made once for each shape and set of boxes.
    checked_layouts: set[tuple[object, ...]] = set()
    for item, places in zip(wanted.tensors, placed, strict=True):
        _check_cover(item, [array.box for _, array in places], checked_layouts)

    records: dict[Record, None] = {}
    moves = []
    for number, (row, item, places) in enumerate(zip(stored, wanted.tensors, placed, strict=True)):
        moves.append(move_of(row, item, places, file_number, digested=number in digested))
        for chunk in row.tensor.chunks:
            if chunk.array.crc is not None and chunk.box.numel:
                records[Record(file_number(row.source, chunk.array.path), *chunk.array.crc)] = None
    return tuple(moves), tuple(records), tuple(arrays)


def _build_moves_by_group(
    stored: Sequence[Stored], wanted: Wanted, target: Target, places: Places, file_number: FileNumber
) -> tuple[Sequence[Move], tuple[Record, ...], Sequence[Sequence[Extent]]]:
    """`build_moves` for a target whose moves and extents are built only when they are accessed. Groups of tensors are
    checked at once, files when their extents are built."""
    for group, (_, tensor) in places.groups().items():
        _check_cover(wanted.tensors[tensor], [box for box in places.boxes(group) if box.numel], set())

    # Files are numbered now, in the order in which `build_moves` would number them.
    chunks_read = [
        (source, chunk.array.path, chunk.array.crc)
        for source, tensor in stored
        for chunk in tensor.chunks
        if 0 not in chunk.box.shape
    ]
    for source, path in dict.fromkeys([(source, path) for source, path, _ in chunks_read]):
        file_number(source, path)
    records = {Record(file_number(source, path), *crc): None for source, path, crc in chunks_read if crc is not None}

    def list_arrays(file: TargetFile) -> list[Extent]:
        """The arrays of a file, checked for overlaps."""
        extents = _list_extents(file, wanted)
        _check_disjoint(file, extents, wanted)
        return extents

    moves = LaterMoves(stored, wanted, places, file_number)
    moves.check()
    return moves, tuple(records), [Later(partial(list_arrays, file)) for file in target.files]


def _check_paths(target: Target, wanted: Wanted) -> None:
    """Check the names of output files: some formats make them from tensor names, which are data."""
    files = {file.path: file for file in target.files}

    def find_tensor(path: str) -> str | None:
        """The first tensor that is stored in an output file, None if it holds none."""
        return next((str(wanted.tensors[array.tensor].key) for array in files[path].arrays), None)

    check_outputs(
        (file.path for file in target.files),
        named_by=find_tensor,
        path=None,
        hint="a name of the source becomes a file's name here: rename it there, leave it out with "
        "--remove-keys, or write "
        "another format",
    )


def _list_extents(file: TargetFile, wanted: Wanted) -> list[Extent]:
    """The extents of the file's arrays, from the first to the last byte of each."""
    extents: list[Extent] = []
    known_reaches: dict[tuple[object, ...], int] = {}  # layers and experts repeat
    for array in file.arrays:
        item = wanted.tensors[array.tensor]
        box = array.box
        case = item.dtype.bits, box.shape, array.shape, array.strides
        reach = known_reaches.get(case)
        if reach is None:
            reach = known_reaches[case] = _compute_reach(array, item)
        extents.append(Extent(array.offset, reach, -1 if 0 in box.shape else array.tensor))
    return extents


def _compute_reach(array: TargetArray, item: WantedTensor) -> int:
    """Bytes from the first to the end of the last element of an array."""
    if array.strides is None or not array.box.numel:
        return item.dtype.nbytes(prod(array.shape if array.shape is not None else array.box.shape))
    steps = sum((n - 1) * stride for n, stride in zip(array.box.shape, array.strides, strict=True))
    return item.dtype.nbytes(steps + 1)


def _check_disjoint(file: TargetFile, extents: Sequence[Extent], wanted: Wanted) -> None:
    """Check that no two arrays or literals of an output file overlap and that none leaves the file. Arrays with gaps
    may fill each other's gaps: columns of one matrix."""
    # Most often all are one after the other, without a look at gaps.
    plain = sorted([(at, at + n) for at, n, _ in extents if n] + [(at, at + len(data)) for at, data in file.literals])
    starts, stops = zip(*plain, strict=True) if plain else ((), ())
    if all(map(le, stops, (*starts[1:], file.size))):
        return

    spans = [
        Span(at, at + n, _make_comb(array, wanted.tensors[array.tensor]))
        for (at, n, _), array in zip(extents, file.arrays, strict=True)
        if n
    ]
    spans += [Span(at, at + len(data)) for at, data in file.literals if data]
    wrong = next((span for span in spans if span.stop > file.size), None) or first_clash(spans)
    if wrong is not None:
        raise InternalError(
            f"{file.path}: bytes {wrong.start}..{wrong.stop} are written twice or are outside {file.size}"
        )


def _make_comb(array: TargetArray, item: WantedTensor) -> Comb | None:
    """The comb of an array with gaps, whose other bytes may belong to other arrays; None for an array without gaps."""
    if array.strides is None:
        return None
    size = max(1, item.dtype.bits // 8)
    return comb_of(array.offset, array.box.shape, [stride * size for stride in array.strides], size)


def _check_cover(item: WantedTensor, boxes: Sequence[Box], checked_layouts: set[tuple[object, ...]]) -> None:
    """Check that the distinct boxes of a wanted tensor tile it. checked_layouts: cases that passed already."""
    if len(boxes) == 1 and boxes[0].shape == item.shape:
        return

    distinct = list(dict.fromkeys(boxes))
    case = (item.shape, *distinct)
    if case in checked_layouts:
        return
    if first_overlap(distinct) is not None or sum(box.numel for box in distinct) != prod(item.shape):
        raise InternalError(f"{item.key}: the target's boxes do not tile shape {item.shape}: {distinct[:8]}")
    checked_layouts.add(case)


class MoveRange(NamedTuple):
    """Elements [start, stop) of the line of move number `move`."""

    move: int
    start: int
    stop: int


class Unit(NamedTuple):
    """A share of the work, for one thread."""

    files: frozenset[int]  # the output files it writes
    items: tuple[MoveRange, ...]
    nbytes: int  # source bytes it reads


def units(moves: Sequence[Move], *, size: int = UNIT) -> tuple[Unit, ...]:
    """Cut the moves into shares of about `size` bytes, ordered by the first source bytes they read.

    The result depends on `moves` alone, so that shares of a plan are the same on every machine.
    """
    open_units: dict[frozenset[int], tuple[list[MoveRange], int]] = {}  # by the files that they write
    done: list[Unit] = []
    order = sorted(range(len(moves)), key=lambda i: _first_byte(moves[i]))
    for index in order:
        move = moves[index]
        if not move.numel:
            continue
        for start, stop, files in cut_segments(move, size):
            items, nbytes = open_units.get(files, ([], 0))
            items.append(MoveRange(index, start, stop))
            nbytes += (stop - start) * move.item
            if nbytes >= size:
                done.append(Unit(files, tuple(items), nbytes))
                open_units.pop(files, None)
            else:
                open_units[files] = (items, nbytes)

    done += [Unit(files, tuple(items), nbytes) for files, (items, nbytes) in open_units.items()]
    return tuple(done)


def _first_byte(move: Move) -> tuple[int, int]:
    """(source file, offset) where the move begins to read; moves without elements come first."""
    return min(((region.file, region.offset) for region in move.sources), default=(0, 0))


def cut_segments(move: Move, size: int) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Cut the move's line into (start, stop, output files): where no output region runs across, and at `size` bytes."""
    all_files = frozenset(region.file for region in move.outputs)
    if move.nbytes <= 4 << 20 or len(all_files) == 1:
        parts: Iterable[tuple[int, int, frozenset[int]]] = ((0, move.numel, all_files),)
    else:
        spans = sorted((*hull(region), region.file) for region in move.outputs)
        parts = _group_overlapping(spans, move.numel)

    step = max(1, size // move.item)
    step -= step % find_grain(move, step)
    for start, stop, files in parts:
        for at in range(start, stop, step):
            yield at, min(at + step, stop), files


def find_grain(move: Move, most: int) -> int:
    """Elements of the line that no cut should divide, at most `most`.

    Those are rows of a transposed region, which two units would otherwise both read, and write in single elements; if
    it fits, whole leaves of the digest too. 1 where nothing is transposed or the rows are too long.
    """
    row = max((row_of(region) for region in (*move.sources, *move.outputs) if is_transposed(region)), default=1)
    if row == 1:
        return 1

    with_leaves = lcm(row, LEAF // move.item)
    if with_leaves <= most:
        return with_leaves
    return row if row <= most else 1


def _group_overlapping(spans: Sequence[tuple[int, int, int]], numel: int) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Group overlapping hulls: each group is one part with the files of its members."""
    start = 0
    stop = 0
    files = set[int]()
    for low, high, file in spans:
        if low >= stop and files:
            yield start, stop, frozenset(files)
            start = stop
            files = set()
        stop = max(stop, high)
        files.add(file)
    yield start, max(stop, numel), frozenset(files)
