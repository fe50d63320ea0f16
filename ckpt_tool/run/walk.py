"""One item of a unit: elements [start, stop) of a tensor walked block by block from its sources to its outputs.

The hash for the journal (`hash_written`) and the leaves of the digest are computed from the very buffer that is
written. A block is 256 KiB of plain runs, one leaf, which stays in L2 on its way from file to file: with 512 KiB a copy
took a quarter more CPU where other processes use the cache too. Where a side is strided a block is up to 1 MiB and
whole rows. Blocks for transposed outputs gather in a panel (`run/transposed_outputs.py`) and end where it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from ckpt_tool.errors import InputError
from ckpt_tool.plan.copy import Region, clip, is_transposed
from ckpt_tool.plan.plan import Move
from ckpt_tool.plan.schedule import MoveRange
from ckpt_tool.run.blocks import BlockReader, Writer
from ckpt_tool.run.digest import LEAF, LeafStream
from ckpt_tool.run.lanes import Bands, Runs, Transfer, bands_of, runs_of
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    pass

BLOCK = 256 << 10  # bytes of a plain run: stays in L2
STRIDED_BLOCK = 1 << 20  # bytes where a side is strided: fewer calls
ROOM = STRIDED_BLOCK + LEAF  # bytes of the buffer that a walk needs


class WalkBuffers(NamedTuple):
    """The reader, writer and buffers of one thread, which all its walks use."""

    reader: BlockReader
    writer: Writer
    block: memoryview  # at least ROOM bytes
    scratch: memoryview  # STRIDED_BLOCK bytes
    hashing: bool  # False copies bytes without looking at them
    stopped: Callable[[], bool]
    advance: Callable[[int], None]  # called with the source bytes of each block that is done


class Walked(Protocol):
    """The result of moving one item: what goes into its journal line."""

    lost: int  # values beyond the range of a cast
    source_leaves: LeafStream
    out_leaves: LeafStream

    def hash_written(self) -> str:
        """The hash of the bytes that were written."""
        ...


class Mover(Protocol):
    """Moves units, for one thread."""

    def move_unit(self, items: Sequence[MoveRange]) -> Sequence[Walked] | None:
        """Move all items of a unit. Returns one result per item, None if the run was stopped before the end."""
        ...

    def close(self) -> None:
        """Release what the mover has reserved."""
        ...


class Movers(Protocol):
    """Makes the mover of each thread, on that thread."""

    threads: int  # at most so many threads may have a mover

    def open(self, job: WalkBuffers, moves: Sequence[Move]) -> Mover:
        """The mover of the calling thread."""
        ...


class Walks:
    """The mover of this machine's CPU: item by item."""

    def __init__(self, job: WalkBuffers, moves: Sequence[Move]) -> None:
        self._job = job
        self._moves = moves

    def move_unit(self, items: Sequence[MoveRange]) -> list[Walked] | None:
        """Move a unit."""
        walked: list[Walked] = []
        for index, start, stop in items:
            if self._job.stopped():
                return None
            walk = Walk(self._job, self._moves[index], start, stop)
            walk.run()
            walked.append(walk)
        return None if self._job.stopped() else walked

    def close(self) -> None:
        """Nothing is held."""


def is_computed(move: Move, remote: Callable[[int], Tree | None]) -> bool:
    """Is the move's line computed, and then rounded to another dtype?

    If so, only the written bytes are hashed: no source file exists whose digest the unrounded values could be compared
    with.

    Args:
        remote: returns the tree of a source file that has no descriptor, else None.
    """
    if move.dtype == move.dtype_out:
        return False
    trees = [remote(region.file) for region in move.sources]
    return any(tree is not None and tree.computed for tree in trees)


class Walk:
    """One item of a unit: elements [start, stop) of a move, block by block."""

    def __init__(self, job: WalkBuffers, move: Move, start: int, stop: int) -> None:
        self.job = job
        self.move = move
        self.start = start
        self.stop = stop
        self.reader = job.reader
        self.writer = job.writer
        self.block = job.block
        self.cast = move.dtype != move.dtype_out
        self.lost = 0
        self._is_computed = is_computed(move, self.reader.remote)

        # One stream of leaves for what is read, one for what is written; the same where nothing is cast.
        if self._is_computed:
            self.source_leaves = LeafStream(0, 0, 0)
        else:
            self.source_leaves = LeafStream(start * move.item, stop * move.item, move.numel * move.item)
        if self.cast:
            self.out_leaves = LeafStream(start * move.item_out, stop * move.item_out, move.numel * move.item_out)
        else:
            self.out_leaves = self.source_leaves

        # A leaf belongs to the item that it begins in: its end may be read beyond `stop`.
        last_leaf = max(self.source_leaves.end // move.item, self.out_leaves.end // move.item_out)
        self.until = max(stop, last_leaf) if job.hashing else stop

        # What the journal hashes ends exactly at `stop`.
        self.pieces = self.out_leaves
        if not self.out_leaves.aligned:
            self.pieces = LeafStream(
                start * move.item_out, stop * move.item_out, move.numel * move.item_out, exact=True
            )

    def hash_written(self) -> str:
        """The hash of what this walk wrote, as `read_back` computes it again."""
        return xxhash.xxh3_128_hexdigest(bytes(self.pieces.leaves))

    def run(self) -> None:
        """Move all blocks of the item; returns early if the job is stopped."""
        move = self.move
        hashing = self.job.hashing

        # Without hashes the bytes need not pass through this process.
        if not hashing and not self.cast and self._copy_runs():
            return

        per_block = self._choose_lanes()
        at = self.start
        while at < self.stop and not self.job.stopped():
            end = min((at // per_block + 1) * per_block, self.stop)
            if self._transposed_outputs:
                end = self._transposed_outputs.begin(at, end)
            out = self._produce(at, end)
            self._drain(out, at, end)
            if self._transposed_outputs:
                self._transposed_outputs.take(out, at, end)
            if hashing and self.pieces is not self.out_leaves:
                self.pieces.feed(at * move.item_out, out)
            self.job.advance((end - at) * move.item)
            at = end

        # The last leaf may run on into the next item's elements: they are hashed, not written.
        if hashing and not self.job.stopped():
            while at < self.until:
                end = min(at + per_block, self.until)
                self._produce(at, end, count=False)
                at = end

    def _produce(self, at: int, end: int, *, count: bool = True) -> memoryview:
        """Read, hash and cast elements [at, end). Returns the bytes to write. count: False for a look beyond `stop`."""
        move = self.move

        # Computed values may come rounded at once, without a pass over them in the wide dtype.
        rounded = self._compute_rounded(at, end) if self._is_computed else None
        if rounded is not None:
            if self.job.hashing:
                self.out_leaves.feed(at * move.item_out, rounded)
            return rounded

        # The bytes are already in a panel, or go into the panel of the outputs, or into the block.
        block = self._view_panel(at, end)
        if block is None and count and self._fills_panel_directly and self._transposed_outputs:
            block = self._transposed_outputs.room(at, end)
            self._fill(block, at, end)
        elif block is None:
            block = self.block[: (end - at) * move.item]
            if count:
                self._fill(block, at, end)
            else:
                self.reader.fill(move, block, at, end, count=False, until=self.until)

        if self.job.hashing:
            self.source_leaves.feed(at * move.item, block)
        if not self.cast:
            return block
        from ckpt_tool.run.compute import cast

        out, lost = cast(block, move.dtype, move.dtype_out)
        self.lost += lost if count else 0
        if self.job.hashing:
            self.out_leaves.feed(at * move.item_out, out)
        return out

    # -- sides ------------------------------------------------------------------------------------------------------

    def _choose_lanes(self) -> int:
        """Find the lane of each side, if it has one. Returns the number of elements of a block.

        A block is one leaf if both sides are plain runs. Else it is whole rows of the coarsest strided dim whose row
        fits into STRIDED_BLOCK.
        """
        move = self.move
        self._plain_outputs = tuple(region for region in move.outputs if not is_transposed(region))
        self._read_lane = self._find_lane(move.sources, move.item, self.reader.pread, reads=True)
        self._write_lane = self._find_lane(self._plain_outputs, move.item_out, self.writer.pwrite, reads=False)

        # Transposed sides go through panels: the source's, which writes can take slices of, and the outputs'.
        has_transposed = len(self._plain_outputs) < len(move.outputs)
        panels = self.reader.find_panels(move) if self._read_lane is None or has_transposed else None
        self._panels = panels if isinstance(self._write_lane, Runs) else None
        self._transposed_outputs = None
        if has_transposed:
            from ckpt_tool.run.transposed_outputs import TransposedOutputs

            ends = (self.start, self.stop, self.until)
            self._transposed_outputs = TransposedOutputs(move, ends, self.reader.strips, self.writer, panels)
        self._fills_panel_directly = (
            has_transposed
            and panels is None
            and not self.cast
            and not isinstance(self._read_lane, Bands)
            and not isinstance(self._write_lane, Bands)
        )

        if self._panels:  # blocks are slices: no buffer bounds them
            return STRIDED_BLOCK // move.item
        if isinstance(self._read_lane, Runs) and isinstance(self._write_lane, Runs):
            return BLOCK // (move.item_out if self._is_computed else move.item)
        limit = STRIDED_BLOCK // move.item
        rows = [region.steps[0] for region in (*move.sources, *self._plain_outputs) if len(region.extents) > 1]
        row = max((row for row in rows if row <= limit), default=1)
        return limit // row * row

    def _find_lane(
        self, regions: Sequence[Region], item: int, transfer: Transfer, *, reads: bool
    ) -> Runs | Bands | None:
        """The quick way between regions and block: plain runs, or bands of columns. None: part by part."""
        # Replicas must be compared, which lanes can't do.
        if reads and any(region.replica for region in regions):
            return None
        runs = runs_of(regions, item, self.start, self.stop)
        if runs is not None:
            return Runs(runs, transfer)
        row_and_bands = bands_of(regions, item)
        # Bands move bytes of one element size between block and file: a cast changes the size.
        if row_and_bands is None or self.cast:
            return None
        row, bands = row_and_bands
        return Bands(bands, row, item, self.block, self.job.scratch, transfer, reads=reads)

    def _view_panel(self, at: int, end: int) -> memoryview | None:
        """Elements [at, end) where they are in a panel already and nothing needs them in the block."""
        return self._panels.view(at, end, self.until) if self._panels else None

    def _compute_rounded(self, at: int, end: int) -> memoryview | None:
        """Computed elements [at, end), already rounded; None if the source can't round while it computes."""
        move = self.move
        lane = self._read_lane
        # Only a single run of one computed file can be rounded in one pass.
        place = lane.one(at * move.item, end * move.item) if isinstance(lane, Runs) else None
        tree = self.reader.remote(place[0]) if place else None
        if place is None or tree is None:
            return None
        out = self.block[: (end - at) * move.item_out]
        short = tree.compute_rounded(self.reader.path(place[0]), place[1] // move.item, move.dtype_out, out)
        return out if short else None

    def _fill(self, block: memoryview, at: int, end: int) -> None:
        lane = self._read_lane
        item = self.move.item
        if isinstance(lane, Runs):
            lane.pass_by(block, at * item, end * item)
        elif lane is not None and lane.whole(at, end):
            lane.pass_by(block, at, end)
        else:
            self.reader.fill(self.move, block, at, end, until=self.until)

    def _drain(self, out: memoryview, at: int, end: int) -> None:
        lane = self._write_lane
        item = self.move.item_out
        if isinstance(lane, Runs):
            lane.pass_by(out, at * item, end * item)
        elif lane is not None and lane.whole(at, end):
            lane.pass_by(out, at, end)
        else:
            self.writer.drain(self._plain_outputs, out, at, end, item)

    def _copy_runs(self) -> bool:
        """Unhashed plain runs go from file to file in the kernel. False when a side is strided, remote or
        replicated."""
        move = self.move
        if any(
            len(side.extents) > 1 or side.strides not in ((), (move.item,)) for side in (*move.sources, *move.outputs)
        ):
            return False
        if any(source.replica for source in move.sources) or any(
            self.writer.is_checksummed(o.file) for o in move.outputs
        ):
            return False

        for output in move.outputs:
            for wanted in clip(output, self.start, self.stop):
                for source in move.sources:
                    for part in clip(source, wanted.at, wanted.at + wanted.numel):
                        to = wanted.offset + (part.at - wanted.at) * move.item
                        fd = self.writer.fds[wanted.file]
                        # What was copied before is written again by the general way.
                        if not self.reader.copy_range(part.file, part.offset, fd, to, part.numel * move.item):
                            return False
        self.job.advance((self.stop - self.start) * move.item)
        return True


def read_back(reader: BlockReader, move: Move, start: int, stop: int) -> str | None:
    """The hash of elements [start, stop) as written, read from the output regions; None when two copies differ.

    reader: over the written files.
    """
    # The outputs are read as if they were sources. Further copies of the same elements become replicas, which the
    # reader compares with the first copy.
    seen: dict[tuple[object, ...], int] = {}
    regions = []
    for region in move.outputs:
        same = (region.at, region.extents, region.steps)
        regions.append(region._replace(replica=seen.get(same, 0)))
        seen[same] = seen.get(same, 0) + 1

    hash_written = move._replace(sources=tuple(regions), outputs=(), item=move.item_out)
    item = move.item_out
    at = start
    # The same pieces as `Walk.pieces`: the hash must be equal to the one in the journal.
    stream = LeafStream(start * item, stop * item, move.numel * item, exact=True)
    step = STRIDED_BLOCK // item
    block = memoryview(bytearray(STRIDED_BLOCK))

    while at < stop:
        end = min(at + step, stop)
        part = block[: (end - at) * item]
        try:
            reader.fill(hash_written, part, at, end, until=stop)
        # Replicas that differ: two copies of the same elements are not equal.
        except InputError:
            return None
        stream.feed(at * item, part)
        at = end
    return xxhash.xxh3_128_hexdigest(bytes(stream.leaves))
