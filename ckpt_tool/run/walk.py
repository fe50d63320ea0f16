"""One item of a unit: elements [start, stop) of a tensor walked block by block from its sources to its outputs.

The hash that the journal keeps (`written`) and the leaves of the digest are taken from the very bytes that are drained.
A block is 256 KiB of plain runs, one leaf, which stays in L2 on its way from file to file: with 512 KiB a copy took a
quarter more CPU where the neighbours use the cache too. Where a side is strided it is up to 1 MiB and whole rows.
Blocks for transposed outputs gather in a panel (`run/transposed_outputs.py`) and end where it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import xxhash

from ckpt_tool.errors import InputError
from ckpt_tool.plan.copy import Region, clip, is_transposed
from ckpt_tool.plan.plan import Move
from ckpt_tool.plan.schedule import MoveRange
from ckpt_tool.run.blocks import BlockReader, Writer
from ckpt_tool.run.digest import LEAF, LeafStream
from ckpt_tool.run.lanes import Bands, Runs, Transfer, bands_of, runs_of
from ckpt_tool.run.transposed_outputs import TransposedOutputs
from ckpt_tool.storage.source import Tree

BLOCK = 256 << 10  # bytes of a plain run: stays in L2
STRIDED_BLOCK = 1 << 20  # bytes where a side is strided: fewer calls
ROOM = STRIDED_BLOCK + LEAF  # bytes of the buffer that a walk needs


class WalkBuffers(NamedTuple):
    """What a thread lends to its walks."""

    reader: BlockReader
    writer: Writer
    block: memoryview  # at least ROOM bytes, scratch: STRIDED_BLOCK
    scratch: memoryview
    hashing: bool  # False moves bytes unseen
    stopped: Callable[[], bool]
    advance: Callable[[int], None]


class Walked(Protocol):
    """What the journal wants of an item that was moved. lost: values beyond the range of a cast."""

    lost: int
    source_leaves: LeafStream
    out_leaves: LeafStream

    def written(self) -> str: ...


class Mover(Protocol):
    """Moves units, for one thread. None: the run was stopped in it."""

    def unit(self, items: Sequence[MoveRange]) -> Sequence[Walked] | None: ...
    def close(self) -> None: ...


class Movers(Protocol):
    """Gives each thread its mover, for at most `threads` of them. Called on that thread."""

    threads: int

    def open(self, job: WalkBuffers, moves: Sequence[Move]) -> Mover: ...


class Walks:
    """The mover of this machine's CPU: item by item."""

    def __init__(self, job: WalkBuffers, moves: Sequence[Move]) -> None:
        self._job = job
        self._moves = moves

    def unit(self, items: Sequence[MoveRange]) -> list[Walked] | None:
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


def is_made(move: Move, remote: Callable[[int], Tree | None]) -> bool:
    """Is the move's line computed, and rounded then? What is written is all that is hashed of it: nobody has stated a
    digest of what it was before. remote: the tree of a source file that has no descriptor."""
    if move.dtype == move.dtype_out:
        return False
    return any((tree := remote(region.file)) is not None and tree.computed for region in move.sources)


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
        self._made = is_made(move, self.reader.remote)
        self.source_leaves = (
            LeafStream(0, 0, 0)
            if self._made
            else LeafStream(start * move.item, stop * move.item, move.numel * move.item)
        )
        self.out_leaves = (
            LeafStream(start * move.item_out, stop * move.item_out, move.numel * move.item_out)
            if self.cast
            else self.source_leaves
        )
        out = self.out_leaves
        want = max(self.source_leaves.end // move.item, out.end // move.item_out) if job.hashing else stop
        self.until = max(stop, want)  # the element up to which is read
        self.pieces = (
            out
            if out.aligned
            else LeafStream(start * move.item_out, stop * move.item_out, move.numel * move.item_out, exact=True)
        )

    def written(self) -> str:
        """The hash of what this walk wrote, as `read_back` computes it again."""
        return xxhash.xxh3_128_hexdigest(bytes(self.pieces.leaves))

    def run(self) -> None:
        """Move all blocks of the item, or end early where the job was stopped."""
        move = self.move
        hashing = self.job.hashing
        if not hashing and not self.cast and self._copy_runs():
            return
        per_block = self._choose_lanes()
        at = self.start
        while at < self.stop and not self.job.stopped():
            end = min((at // per_block + 1) * per_block, self.stop)
            if self._turns:
                end = self._turns.begin(at, end)
            out = self._step(at, end)
            self._drain(out, at, end)
            if self._turns:
                self._turns.take(out, at, end)
            if hashing and self.pieces is not self.out_leaves:
                self.pieces.feed(at * move.item_out, out)
            self.job.advance((end - at) * move.item)
            at = end
        if hashing and not self.job.stopped():  # the last leaf may run on into the next item's elements
            while at < self.until:
                end = min(at + per_block, self.until)
                self._step(at, end, count=False)
                at = end

    def _step(self, at: int, end: int, *, count: bool = True) -> memoryview:
        """Read, hash and cast elements [at, end). Returns the bytes to write."""
        move = self.move
        rounded = self._rounded(at, end) if self._made else None
        if rounded is not None:
            if self.job.hashing:
                self.out_leaves.feed(at * move.item_out, rounded)
            return rounded
        block = self._taken(at, end)
        if block is None and count and self._direct and self._turns:
            block = self._turns.room(at, end)
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
        """Find the lane of each side, if it has one. Returns the elements of a block: whole leaves where both sides
        are plain runs, else whole rows of the coarsest strided dim where they fit."""
        move = self.move
        self._plain = tuple(region for region in move.outputs if not is_transposed(region))
        self._reads = self._lane(move.sources, move.item, self.reader.pread, reads=True)
        self._writes = self._lane(self._plain, move.item_out, self.writer.pwrite, reads=False)
        many = len(self._plain) < len(move.outputs)
        turned = self.reader.turned(move) if self._reads is None or many else None
        self._panels = turned if isinstance(self._writes, Runs) else None
        self._turns = (
            TransposedOutputs(move, (self.start, self.stop, self.until), self.reader.strips, self.writer, turned)
            if many
            else None
        )
        self._direct = many and turned is None and not self.cast and not isinstance(self._reads, Bands)
        self._direct = self._direct and not isinstance(self._writes, Bands)
        if self._panels:  # blocks are slices: no buffer bounds them
            return STRIDED_BLOCK // move.item
        if isinstance(self._reads, Runs) and isinstance(self._writes, Runs):
            return BLOCK // (move.item_out if self._made else move.item)
        most = STRIDED_BLOCK // move.item
        rows = [region.steps[0] for region in (*move.sources, *self._plain) if len(region.extents) > 1]
        row = max((row for row in rows if row <= most), default=1)
        return most // row * row

    def _lane(self, regions: Sequence[Region], item: int, transfer: Transfer, *, reads: bool) -> Runs | Bands | None:
        if reads and any(region.replica for region in regions):
            return None
        runs = runs_of(regions, item, self.start, self.stop)
        if runs is not None:
            return Runs(runs, transfer)
        found = bands_of(regions, item)
        if found is None or self.cast:
            return None
        row, bands = found
        return Bands(bands, row, item, self.block, self.job.scratch, transfer, reads=reads)

    def _taken(self, at: int, end: int) -> memoryview | None:
        """Elements [at, end) where they lie in a panel already and nothing wants them in the block."""
        return self._panels.view(at, end, self.until) if self._panels else None

    def _rounded(self, at: int, end: int) -> memoryview | None:
        """Computed elements [at, end) as they are written, None where there is no short way to them."""
        move = self.move
        lane = self._reads
        place = lane.one(at * move.item, end * move.item) if isinstance(lane, Runs) else None
        tree = self.reader.remote(place[0]) if place else None
        if place is None or tree is None:
            return None
        out = self.block[: (end - at) * move.item_out]
        short = tree.rounded(self.reader.path(place[0]), place[1] // move.item, move.dtype_out, out)
        return out if short else None

    def _fill(self, block: memoryview, at: int, end: int) -> None:
        lane = self._reads
        item = self.move.item
        if isinstance(lane, Runs):
            lane.pass_by(block, at * item, end * item)
        elif lane is not None and lane.whole(at, end):
            lane.pass_by(block, at, end)
        else:
            self.reader.fill(self.move, block, at, end, until=self.until)

    def _drain(self, out: memoryview, at: int, end: int) -> None:
        lane = self._writes
        item = self.move.item_out
        if isinstance(lane, Runs):
            lane.pass_by(out, at * item, end * item)
        elif lane is not None and lane.whole(at, end):
            lane.pass_by(out, at, end)
        else:
            self.writer.drain(self._plain, out, at, end, item)

    def _copy_runs(self) -> bool:
        """Unhashed plain runs go from file to file in the kernel. False when a side is strided, remote or
        replicated."""
        move = self.move
        if any(
            len(side.extents) > 1 or side.strides not in ((), (move.item,)) for side in (*move.sources, *move.outputs)
        ):
            return False
        if any(source.replica for source in move.sources) or any(self.writer.checksummed(o.file) for o in move.outputs):
            return False
        for output in move.outputs:
            for wanted in clip(output, self.start, self.stop):
                for source in move.sources:
                    for part in clip(source, wanted.at, wanted.at + wanted.numel):
                        to = wanted.offset + (part.at - wanted.at) * move.item
                        fd = self.writer.fds[wanted.file]
                        if not self.reader.copy_range(part.file, part.offset, fd, to, part.numel * move.item):
                            return False
        self.job.advance((self.stop - self.start) * move.item)
        return True


def read_back(reader: BlockReader, move: Move, start: int, stop: int) -> str | None:
    """The hash of elements [start, stop) as written, read from the output regions; None when two copies differ.

    reader: over the written files.
    """
    seen: dict[tuple[object, ...], int] = {}
    regions = []
    for region in move.outputs:
        same = (region.at, region.extents, region.steps)
        regions.append(region._replace(replica=seen.get(same, 0)))
        seen[same] = seen.get(same, 0) + 1
    written = move._replace(sources=tuple(regions), outputs=(), item=move.item_out)
    item = move.item_out
    at = start
    stream = LeafStream(start * item, stop * item, move.numel * item, exact=True)
    step = STRIDED_BLOCK // item
    block = memoryview(bytearray(STRIDED_BLOCK))
    while at < stop:
        end = min(at + step, stop)
        part = block[: (end - at) * item]
        try:
            reader.fill(written, part, at, end, until=stop)
        except InputError:
            return None
        stream.feed(at * item, part)
        at = end
    return xxhash.xxh3_128_hexdigest(bytes(stream.leaves))
