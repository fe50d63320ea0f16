"""One item of a unit: elements [start, stop) of a tensor walked block by block from its sources to its outputs.

The hash that the journal keeps (`written`) and the leaves of the digest are taken from the very bytes that are drained.
A block is 256 KiB of a plain run, which stays in L2; where a side is strided it is up to 1 MiB and whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from ckpt_tool.errors import InputError
from ckpt_tool.plan.copy import clip
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import Bytes, Reader, Writer
from ckpt_tool.run.compute import cast
from ckpt_tool.run.digest import LEAF, LeafStream

BLOCK = 256 << 10  # bytes of a plain run: stays in L2
STRIDED_BLOCK = 1 << 20  # bytes where a side is strided: fewer calls
ROOM = STRIDED_BLOCK + LEAF  # bytes of the buffer that a walk needs


class Job(NamedTuple):
    """What a thread lends to its walks. block: at least ROOM bytes. hashing: False moves bytes unseen."""

    reader: Reader
    writer: Writer
    block: Bytes
    hashing: bool
    stopped: Callable[[], bool]
    advance: Callable[[int], None]


class Walk:
    """One item of a unit: elements [start, stop) of a move, block by block."""

    def __init__(self, job: Job, move: Move, start: int, stop: int) -> None:
        self.job, self.move, self.start, self.stop = job, move, start, stop
        self.reader, self.writer, self.block = job.reader, job.writer, job.block
        self.cast = move.dtype != move.dtype_out
        self.lost = 0
        self.source_leaves = LeafStream(start * move.item, stop * move.item, move.numel * move.item)
        self.out_leaves = (
            LeafStream(start * move.item_out, stop * move.item_out, move.numel * move.item_out)
            if self.cast
            else self.source_leaves
        )
        out = self.out_leaves
        self.pieces = (
            out
            if out.aligned
            else LeafStream(start * move.item_out, stop * move.item_out, move.numel * move.item_out, exact=True)
        )

    def written(self) -> str:
        """The hash of what this walk wrote, as `read_back` computes it again."""
        return xxhash.xxh3_128_hexdigest(bytes(self.pieces.leaves))

    def run(self) -> None:
        move, hashing = self.move, self.job.hashing
        if not hashing and not self.cast and self._copy_runs():
            return
        per_block = self._block_elements()
        at = self.start
        while at < self.stop and not self.job.stopped():
            end = min((at // per_block + 1) * per_block, self.stop)
            out = self._step(at, end)
            self.writer.drain(move.outputs, out, at, end, move.item_out)
            if hashing and self.pieces is not self.out_leaves:
                self.pieces.feed(at * move.item_out, out.data)
            self.job.advance((end - at) * move.item)
            at = end
        if hashing and not self.job.stopped():  # the last leaf may run on into the next item's elements
            want = max(self.source_leaves.end // move.item, self.out_leaves.end // move.item_out)
            while at < want:
                end = min(at + per_block, want)
                self._step(at, end, count=False)
                at = end

    def _step(self, at: int, end: int, *, count: bool = True) -> Bytes:
        """Read, hash and cast elements [at, end). Returns the bytes to write."""
        move = self.move
        block = self.block[: (end - at) * move.item]
        self.reader.fill(move, block, at, end, count=count)
        if self.job.hashing:
            self.source_leaves.feed(at * move.item, block.data)
        if not self.cast:
            return block
        out, lost = cast(block, move.dtype, move.dtype_out)
        self.lost += lost if count else 0
        if self.job.hashing:
            self.out_leaves.feed(at * move.item_out, out.data)
        return out

    def _block_elements(self) -> int:
        """Elements of a block: whole rows of the coarsest strided dim where they fit, whole leaves otherwise."""
        move = self.move
        rows = [region.steps[0] for region in (*move.sources, *move.outputs) if len(region.extents) > 1]
        if not rows and all(region.steps in ((), (1,)) for region in (*move.sources, *move.outputs)):
            return BLOCK // move.item
        most = STRIDED_BLOCK // move.item
        fitting = [row for row in rows if row <= most]
        if not fitting:
            return most
        row = max(fitting)
        return max(1, most // row) * row

    def _copy_runs(self) -> bool:
        """Unhashed plain runs go from file to file in the kernel. False when a side is strided, remote or replicated."""
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


def read_back(reader: Reader, move: Move, start: int, stop: int) -> str | None:
    """The hash of elements [start, stop) as written, read from the output regions; None when two copies differ.

    reader: over the written files.
    """
    seen: dict[tuple[object, ...], int] = {}
    regions = []
    for region in move.outputs:
        same = (region.at, region.extents, region.steps)
        regions.append(region._replace(replica=seen.get(same, 0)))
        seen[same] = seen.get(same, 0) + 1
    written = move._replace(sources=tuple(regions), item=move.item_out)
    item, at = move.item_out, start
    stream = LeafStream(start * item, stop * item, move.numel * item, exact=True)
    step = STRIDED_BLOCK // item
    block: Bytes = np.empty(STRIDED_BLOCK, np.uint8)
    while at < stop:
        end = min(at + step, stop)
        part = block[: (end - at) * item]
        try:
            reader.fill(written, part, at, end)
        except InputError:
            return None
        stream.feed(at * item, part.data)
        at = end
    return xxhash.xxh3_128_hexdigest(bytes(stream.leaves))
