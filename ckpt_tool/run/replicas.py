"""Reports replicas that differ: every affected tensor and how far the copies differ, before anything is written if that
is cheap.

    w [exp_avg]: 3 of 4,096 elements differ in mp_rank_01/model_optim_rng.pt, the first at [0, 17]; max ulp 2, max abs
    1.9e-06

Replicas are compared while values are copied, so a valid source is read once. If replicas are small (at most `SMALL`
bytes including the first copies), they are compared before the output is begun; with `--verify full` all of them are.
Otherwise the first difference ends the run, and then all are compared for the report. Either way no output is left.
Cost: without replicas a pass over the moves; else at most `SMALL` bytes read twice. What it does not do: decide which
rank is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tool.errors import REPLICAS_DIFFER, CkptError, ReplicasDiffer
from ckpt_tool.plan.copy import Region
from ckpt_tool.plan.plan import Move, Moves
from ckpt_tool.run.blocks import BlockReader, OpenFiles, Sources, Spans

if TYPE_CHECKING:  # NumPy comes where there is something to compare
    from ckpt_tool.core.tensor import LogicalTensor
    from ckpt_tool.run.compare import Worst
    from ckpt_tool.storage.source import Tree

SMALL = 64 << 20  # bytes: up to this size replicas are compared before the run
SHOWN = 100  # tensors that an error names, at most


class Apart(NamedTuple):
    """A tensor whose replicas differ."""

    name: str
    file: str  # the file of the copy that differs most from the first one
    elements: int  # how many elements differ in that file
    numel: int
    first: tuple[int, ...]  # index of the first element that differs, () for dtypes below 8 bits
    ulp: int  # the greatest difference in units in the last place
    gap: float  # the greatest absolute difference

    def line(self) -> str:
        """One line of the report."""
        position = f", the first at {list(self.first)}" if self.first else ""
        return (
            f"{self.name}: {self.elements:,} of {self.numel:,} elements differ in {self.file}{position}; "
            f"max ulp {self.ulp:,}, max abs {self.gap:.3g}"
        )


def with_replicas(moves: Iterable[Move], most: int | None = None) -> list[Move] | None:
    """The moves whose sources are stored more than once; None if comparing them would read more than `most` bytes."""
    replicated = list[Move]()
    nbytes = 0
    for move in moves:
        if any(region.replica for region in move.sources):
            replicated.append(move)
            nbytes += sum(region.numel for region in move.sources) * move.item
            if most is not None and nbytes > most:
                return None
    return replicated


def look_ahead(moves: Sequence[Move], sources: Sources, *, whole: bool, threads: int | None = None) -> None:
    """Raise ReplicasDiffer before anything is written, if comparing is cheap or `whole` is set.

    Plans so large that their moves are generated on demand (`Moves`) are skipped: a pass over them is not cheap.
    """
    if isinstance(moves, Moves) and not whole:
        return
    replicated = with_replicas(moves, None if whole else SMALL)
    if replicated and (
        whole or all(sources.remote(region.file) is None for move in replicated for region in move.sources)
    ):
        differences = differing(replicated, sources, threads=threads)
        if differences:
            raise error_of(differences, len(replicated))


def all_of_them(
    moves: Sequence[Move], sources: Sources, first: ReplicasDiffer, *, threads: int | None = None
) -> ReplicasDiffer:
    """The error that names every tensor whose replicas differ, instead of `first`, which names only one."""
    replicated = with_replicas(moves) or []
    try:
        differences = differing(replicated, sources, threads=threads)
    except CkptError:  # the source goes on changing, or fails: what is known is reported
        return first
    return error_of(differences, len(replicated)) if differences else first


def error_of(apart: Sequence[Apart], of: int | None = None) -> ReplicasDiffer:
    """The error that reports these tensors. of: how many tensors have replicas, if known."""
    lines = [difference.line() for difference in apart]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(apart) - SHOWN:,} more tensors"]
    return ReplicasDiffer(
        f"replicas differ in {len(apart):,}{f' of {of:,}' if of else ''} tensors that ranks hold in common; {lines[0]}",
        code=REPLICAS_DIFFER,
        path=apart[0].file,
        key=apart[0].name,
        faults=lines[1:],
        hint="the ranks have drifted apart; choose one with --replica-policy first, or save again",
    )


def among(sides: Iterable[tuple[Iterable[LogicalTensor], Tree]]) -> list[Apart]:
    """Every tensor of some checkpoints whose replicas differ. sides: (tensors, the tree in which they are stored)."""
    from ckpt_tool.run.scan import readable

    found: list[Apart] = []
    for tensors, tree in sides:
        source = readable(filter(_has_replicas, tensors), tree)
        found += differing(source.moves, source.files)
    return found


def _has_replicas(tensor: LogicalTensor) -> bool:
    return any(chunk.replica for chunk in tensor.chunks)


def differing(moves: Sequence[Move], sources: Sources, *, threads: int | None = None) -> list[Apart]:
    """Every move of `moves` whose replicas differ, in the order of `moves`. Reads all of their values."""
    from ckpt_tool.run.scan import Queue, Readable, share_out

    by_move: dict[int, Apart] = {}

    def read(reader: BlockReader, queue: Queue) -> None:
        """Compare the replicas of the moves in the queue, on one thread."""
        from ckpt_tool.run.walk import STRIDED_BLOCK

        block = memoryview(bytearray(STRIDED_BLOCK))
        comparing = _ReplicaReader(sources)
        try:
            for index in queue:
                move = moves[index]
                step = STRIDED_BLOCK // move.item
                for at in range(0, move.numel, step):
                    end = min(at + step, move.numel)
                    comparing.fill(move, block[: (end - at) * move.item], at, end, count=False)
                difference = comparing.apart(move)
                if difference is not None:
                    by_move[index] = difference
        finally:
            comparing.close()

    share_out(Readable(tuple(moves), sources, ()), read, threads=threads)
    return [by_move[index] for index in sorted(by_move)]


class _ReplicaReader(BlockReader):
    """A reader that records how far replicas differ, where `BlockReader` raises. For one thread."""

    def __init__(self, files: OpenFiles) -> None:
        super().__init__(files, 32, {})
        self._worst: dict[int, Worst] = {}

    def find_panels(self, move: Move) -> None:
        """No panels: strided sides are read piece by piece, which takes longer but needs no buffers."""
        if self._move is not move:
            self._move = move
            self._spans = Spans(move.sources)
            self._panels = None
            self._worst = {}

    def _compare(self, move: Move, part: Region, block: memoryview, start: int, *, count: bool) -> None:
        import numpy as np

        from ckpt_tool.run.compare import Worst, differ

        this_copy = bytearray(block)
        self._read(part, memoryview(this_copy), start, move.item, count=count)
        # Equal blocks are the common case and are compared as bytes; only others are examined by element.
        if this_copy != block:
            worst = self._worst.setdefault(part.file, Worst(move.shape))
            first_bytes = np.frombuffer(block, np.uint8)
            these_bytes = np.frombuffer(this_copy, np.uint8)
            differ(worst, start, first_bytes, these_bytes, move.dtype, move.dtype, 0.0, 0.0)

    def apart(self, move: Move) -> Apart | None:
        """The differences in the move that was read last, None if there are none."""
        if not self._worst or self._move is not move:
            return None
        file, worst = max(self._worst.items(), key=lambda item: (item[1].gap, item[1].ulp, item[1].count))
        report = worst.report() or {}
        first = () if move.dtype.bits < 8 else tuple(report.get("first_index", ()))
        return Apart(str(move.key), self._files.shown(file), worst.count, move.numel, first, worst.ulp, worst.gap)
