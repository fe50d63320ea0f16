"""The order in which a pipeline rank processes its microbatches: one forward, one backward (1F1B), optionally
interleaved.

The one idea: simulate the entire pipeline once and record what each rank did. At every tick each rank takes a
backward that is ready, else the next forward, as long as no more than `stages - g` forwards of virtual stage g wait
for their backward (that bounds the memory as 1F1B does). An order that was simulated cannot deadlock if sends don't
block. Two stages, three microbatches:

    rank 0: F0 F1 B0 F2 B1 B2        rank 1: F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

from typing import NamedTuple


class Op(NamedTuple):
    """Forward or backward of local microbatch `microbatch` in chunk `chunk` of a rank."""

    forward: bool
    microbatch: int
    chunk: int


def schedule(pp: int, vpp: int, microbatches: int) -> list[list[Op]]:
    """The operations of every pipeline rank in order."""
    stages = pp * vpp
    done: dict[tuple[bool, int, int], int] = {}  # (forward, microbatch, virtual stage) -> tick
    orders: list[list[Op]] = [[] for _ in range(pp)]
    tick = 0
    while len(done) < 2 * stages * microbatches:
        tick += 1
        for rank in range(pp):
            op = _next(rank, pp, stages, microbatches, done, tick)
            if op:
                orders[rank].append(op)
                done[op.forward, op.microbatch, op.chunk * pp + rank] = tick
    return orders


def _next(
    rank: int, pp: int, stages: int, microbatches: int, done: dict[tuple[bool, int, int], int], tick: int
) -> Op | None:
    """What the rank does now: of what became ready before this tick."""

    def ready(forward: bool, microbatch: int, stage: int) -> bool:
        if (forward, microbatch, stage) in done:
            return False
        if forward:
            before = (True, microbatch, stage - 1) if stage else None
        else:
            before = (False, microbatch, stage + 1) if stage + 1 < stages else (True, microbatch, stage)
        return before is None or done.get(before, tick) < tick

    own_stages = range(rank, stages, pp)
    for microbatch in range(microbatches):
        for stage in reversed(own_stages):
            if ready(False, microbatch, stage) and (True, microbatch, stage) in done:
                return Op(False, microbatch, stage // pp)
    # Megatron's order of interleaved forwards: pp microbatches through one chunk, then the same through the next
    for first_microbatch in range(0, microbatches, pp):
        for stage in own_stages:
            waiting = sum((True, m, stage) in done and (False, m, stage) not in done for m in range(microbatches))
            for microbatch in range(first_microbatch, min(first_microbatch + pp, microbatches)):
                if waiting < stages - stage and ready(True, microbatch, stage):
                    return Op(True, microbatch, stage // pp)
    return None
