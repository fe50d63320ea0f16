"""The move of one tensor, and moves that are made on access: a plan of two million boxes is kept as rules for them.

A plan of 184,732 tensors on 2,048 ranks is shown, summed and saved far more often than it is run, and a run needs a
move at a time. So the moves of a large target, and those of a dry run, are not listed: each is made from its stored
tensor and its places when asked for, and the sums for a report come from groups of tensors with the same distribution:

    moves.copies    768 experts of stage 7 on rank 11, each from one stored chunk to 8 boxes: 6,144

Cost: 0.3 us a tensor for all sums, some 10 us a box for a move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import compress, repeat
from math import prod
from operator import attrgetter, ge, gt, ne, or_
from typing import NamedTuple, overload

from ckpt_tool.core.box import Box, contiguous_strides, whole
from ckpt_tool.core.target import Places, TargetArray, Wanted, WantedTensor
from ckpt_tool.core.tensor import Chunk, LogicalTensor
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import (
    Region,
    box_region,
    byte_view,
    common_order,
    hull,
    intersect,
    is_transposed,
    refuse_strides,
    source_region,
)
from ckpt_tool.plan.plan import Move, Moves

_BITS, _SHAPE = attrgetter("tensor.dtype.bits"), attrgetter("tensor.shape")  # of a Stored
_STATE_BITS_SHAPE = tuple(map(attrgetter, ("key.state", "dtype.bits", "shape")))  # of a WantedTensor
_, _ITEM_BITS, _ITEM_SHAPE = _STATE_BITS_SHAPE


class Stored(NamedTuple):
    """A source tensor and the number of the checkpoint that holds it (0 for a single source)."""

    source: int
    tensor: LogicalTensor


Placed = Sequence[tuple[int, TargetArray]]  # (number of the output file, array)
FileNumber = Callable[[int, str], int]  # (source, path) -> number of the plan's source file


def output_region(array: TargetArray, item: WantedTensor, file: int, order: Sequence[int] = ()) -> Region:
    """The region of a target's array, which is in output file number `file`. order: of the line's dims."""
    line = item.shape
    box = array.box
    size = item.dtype.bits // 8
    if not size:
        if array.strides not in (None, contiguous_strides(array.box.shape)):
            refuse_strides(item.dtype, str(item.key))
        line, box, size = byte_view(line, box, item.dtype)
    return box_region(line, box, size, file, array.offset, stored=array.shape, strides=array.strides, order=order)


def move_of(
    row: Stored, item: WantedTensor, places: Placed, file_number: FileNumber, *, digested: bool = False
) -> Move:
    """The move of one tensor to its places. digested: its digest is written, so its line is in the dims' own order."""
    tensor = row.tensor
    if tensor.shape != item.shape:
        raise InternalError(f"{item.key}: stored {tensor.shape}, wanted {item.shape}")

    chunks = [chunk for chunk in tensor.chunks if 0 not in chunk.box.shape]
    order = () if digested else _order_of(chunks, places, tensor.dtype.bits)
    reads = tuple(
        source_region(chunk, tensor.shape, file_number(row.source, chunk.array.path), order) for chunk in chunks
    )
    outputs = tuple(output_region(array, item, number, order) for number, array in places if 0 not in array.box.shape)

    size = max(1, tensor.dtype.bits // 8)
    numel = tensor.nbytes // size if tensor.dtype.bits < 8 else tensor.numel
    size_out = max(1, item.dtype.bits // 8)
    return Move(item.key, item.shape, tensor.dtype, item.dtype, numel, size, size_out, reads, outputs, order)


def _order_of(chunks: Sequence[Chunk], places: Placed, bits: int) -> tuple[int, ...]:
    """The order of dims in which all files store the tensor, () for the dims' own. With replicas it is always their
    own, because differences between replicas are reported in it."""
    if bits < 8 or all(array.strides is None for _, array in places) or any(chunk.replica for chunk in chunks):
        return ()
    written = [
        (array.box.shape, array.strides or contiguous_strides(array.shape or array.box.shape))
        for _, array in places
        if array.box.numel
    ]
    return common_order([*((chunk.box.shape, chunk.region()[1]) for chunk in chunks), *written])


def count_copies(moves: Sequence[Move]) -> int:
    """The number of strided source-to-destination copies in the moves: pairs of regions that share elements."""
    if isinstance(moves, Moves):
        return moves.copies
    total = 0
    known_pairs: dict[tuple[object, ...], int] = {}  # layers and experts repeat
    for move in moves:
        sources = [region for region in move.sources if region.replica == 0]
        if len(sources) == 1 or len(move.outputs) == 1:
            total += max(len(sources), len(move.outputs)) if sources and move.outputs else 0
            continue
        case = (move.line_shape, len(sources), *[(r.at, r.extents, r.steps) for r in (*sources, *move.outputs)])
        if case not in known_pairs:
            known_pairs[case] = _pairs_that_share(move, sources)
        total += known_pairs[case]
    return total


def _pairs_that_share(move: Move, sources: Sequence[Region]) -> int:
    """Pairs of a source and an output region with a common element. If both are boxes, their corners decide."""
    source_corners = [(region, _corners(region, move)) for region in sources]
    total = 0
    for output in move.outputs:
        output_corners = _corners(output, move)
        low, high = hull(output)
        for source, corners in source_corners:
            if corners and output_corners:
                total += all(a <= d and c <= b for (a, b), (c, d) in zip(corners, output_corners, strict=True))
            else:
                first, last = hull(source)
                total += first < high and low < last and next(intersect(source, output), None) is not None
    return total


def _corners(region: Region, move: Move) -> list[tuple[int, int]]:
    """(first, last) index along each dim of the tensor, see `_spans`; [] for a region that is no box of it."""
    return [] if move.dtype.bits < 8 else _spans(region, move.line_shape)


def box_of(region: Region, move: Move) -> Box | None:
    """The box of the tensor that a region holds, None for one that is no box of it."""
    shape = move.shape
    bits = move.dtype.bits
    if not shape or region.numel == move.numel:
        return whole(shape)
    per_byte = 8 // bits if bits < 8 else 1  # a line of less than bytes is one of bytes (`plan.copy.byte_view`)
    line = _spans(region, (*move.line_shape[:-1], move.line_shape[-1] // per_byte))[::-1]
    if not line:
        return None
    spans = [line[move.order.index(dim)] for dim in range(len(shape))] if move.order else line
    offset = [first for first, _ in spans]
    extents = [last - first + 1 for first, last in spans]
    return Box((*offset[:-1], offset[-1] * per_byte), (*extents[:-1], extents[-1] * per_byte))


def _spans(region: Region, shape: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) index along each dim of a line of that shape, the last dim first; [] for a region that is no box of
    it."""
    if 0 in region.extents:
        return []
    low, end = hull(region)
    high = end - 1
    spans = list[tuple[int, int]]()
    for extent in reversed(shape):
        spans.append((low % extent, high % extent))
        low = low // extent
        high = high // extent
    is_box = all(a <= b for a, b in spans) and prod(b - a + 1 for a, b in spans) == region.numel
    return spans if is_box else []


class LaterMoves(Moves):
    """The moves of `stored` to `places`. first_replica: the other replicas are neither read nor compared."""

    def __init__(
        self,
        stored: Sequence[Stored],
        wanted: Wanted,
        places: Places,
        file_number: FileNumber,
        *,
        first_replica: bool = False,
    ) -> None:
        self._stored = stored
        self._wanted = wanted
        self._places = places
        self._number = file_number
        self._first = first_replica

    def first_replicas(self) -> LaterMoves:
        """The same moves without the other replicas."""
        return LaterMoves(self._stored, self._wanted, self._places, self._number, first_replica=True)

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, index: int) -> Move: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Move]: ...
    def __getitem__(self, index: int | slice) -> Move | Sequence[Move]:
        if isinstance(index, slice):
            return [self._move(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._move(index % len(self))

    def _move(self, index: int) -> Move:
        move = move_of(self._stored[index], self._wanted.tensors[index], self._places.of(index), self._number)
        return move._replace(sources=tuple(r for r in move.sources if r.replica == 0)) if self._first else move

    def _alike(self, index: int) -> Move:
        """A move of the same elements to the same boxes, regardless of files and offsets."""
        boxes = [(0, TargetArray(index, box, 0)) for box in self._places.boxes(self._places.group(index))]
        return move_of(self._stored[index], self._wanted.tensors[index], boxes, lambda source, path: 0)

    def check(self) -> None:
        """Raise the errors that making any of the moves would raise."""
        wanted = self._wanted.tensors
        stored = self._stored
        differs_in_shape = map(ne, map(_SHAPE, stored), map(_ITEM_SHAPE, wanted))
        has_bits = map(gt, repeat(8), map(min, map(_BITS, stored), map(_ITEM_BITS, wanted)))
        for number in compress(range(len(stored)), map(or_, differs_in_shape, has_bits)):
            self._alike(number)

    @cached_property
    def has_transposed(self) -> bool:
        """Is any source stored transposed with respect to its line? Moves made on access have row-major outputs."""
        # Strides that never rise can't be transposed, whatever dims have one element.
        falling_strides: dict[tuple[int, ...], bool] = {}
        seen_kinds = set[tuple[object, ...]]()
        for _, tensor in self._stored:
            for box, array, within, _ in tensor.chunks:
                strides = array.strides
                if strides is None:
                    continue
                is_falling = falling_strides.get(strides)
                if is_falling is None:
                    is_falling = falling_strides[strides] = all(map(ge, strides, strides[1:]))
                if is_falling or not box.numel:
                    continue

                # Layers and experts repeat: each kind of array is looked at once.
                kind = (tensor.shape, box, strides, within.shape, tensor.dtype.bits)
                if kind not in seen_kinds:
                    seen_kinds.add(kind)
                    if is_transposed(source_region(Chunk(box, array, within), tensor.shape, 0)):
                        return True
        return False

    def _read(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        return [chunk for chunk in chunks if not chunk.replica] if self._first else chunks

    # -- sums ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _several(self) -> list[int]:
        """The numbers of the tensors that are not stored in one piece."""
        return [i for i, row in enumerate(self._stored) if len(row.tensor.chunks) != 1]

    @cached_property
    def bytes_read(self) -> int:
        """As `Moves.bytes_read`: whole tensors by shape, those in several pieces chunk by chunk."""
        rows = Counter(zip(map(_BITS, self._stored), map(_SHAPE, self._stored), strict=True))
        total = sum(count * _nbytes(bits, shape) for (bits, shape), count in rows.items())
        several = [self._stored[index].tensor for index in self._several]
        rows.clear()
        rows.update([(tensor.dtype.bits, tensor.shape) for tensor in several])
        total -= sum(count * _nbytes(bits, shape) for (bits, shape), count in rows.items())
        rows.clear()
        rows.update([(tensor.dtype.bits, chunk.box.shape) for tensor in several for chunk in self._read(tensor.chunks)])
        return total + sum(count * _nbytes(bits, shape) for (bits, shape), count in rows.items())

    @cached_property
    def copies(self) -> int:
        """As `Moves.copies`: tensors in one piece by their group, the others move by move, once for each case."""
        sizes = {group: sum(box.numel > 0 for box in self._places.boxes(group)) for group in self._places.groups()}
        total = sum(count * sizes[group] for group, (count, _) in self._places.groups().items())
        known_copies: dict[tuple[object, ...], int] = {}
        for index in self._several:
            group = self._places.group(index)
            tensor = self._stored[index].tensor
            key = (group, *((chunk.box, chunk.replica) for chunk in tensor.chunks))
            if key not in known_copies:
                known_copies[key] = count_copies([self._alike(index)])
            total += known_copies[key] - sizes[group]
        return total

    @cached_property
    def states(self) -> Mapping[str, tuple[int, int]]:
        """State -> (tensors, bytes) of what is written."""
        wanted = self._wanted.tensors
        rows = Counter(zip(*(map(column, wanted) for column in _STATE_BITS_SHAPE), strict=True))
        totals: dict[str, tuple[int, int]] = {}
        for (state, bits, shape), count in rows.items():
            tensors, nbytes = totals.get(state, (0, 0))
            totals[state] = (tensors + count, nbytes + count * _nbytes(bits, shape))
        return totals

    @property
    def identity(self) -> str:
        from hashlib import blake2b  # as in `Plan.identifier`, which alone asks for it

        digest = blake2b(f"{self._places.identity()} {self._first}".encode(), digest_size=16)
        for source, tensor in self._stored:
            digest.update(repr((source, tensor.dtype.name, tensor.chunks)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def _nbytes(bits: int, shape: Sequence[int]) -> int:
    for extent in shape:
        bits *= extent
    return bits // 8
