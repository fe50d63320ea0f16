"""Balance: consecutive layers parted into pipeline stages of about the same bytes.

The largest stage is as small as it can be; among the partings with that maximum the one is taken whose stages are most
alike (least sum of squares), and of those the one whose first stages have more layers. Exact, in time that grows with
the square of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Layers of each stage, at least one each. sizes: bytes of each layer in order, of what lies before the first and
    behind the last with them; as many layers as stages or more.

    >>> balanced([9, 4, 4, 4, 4, 7], 3)
    (1, 3, 2)
    >>> balanced([30, 4, 4, 4, 4, 4, 4], 3)
    (1, 3, 3)
    """
    until = [0, *accumulate(sizes)]
    most = _smallest_maximum(until, stages)
    layers = len(sizes)
    # best[n]: (sum of squares, layers of each stage negated) of the first n layers in the stages so far
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begun, (squares, split) in best.items():
            last = layers - (stages - stage)
            for end in range(begun + 1, last + 1) if stage < stages else (layers,):
                size = until[end] - until[begun]
                if size > most:
                    break
                candidate = squares + size * size, (*split, begun - end)
                if end not in found or candidate < found[end]:
                    found[end] = candidate
        best = found
    return tuple(-count for count in best[layers][1])


def _smallest_maximum(until: Sequence[int], stages: int) -> int:
    """The least size of the largest stage. until: bytes of the first n layers."""
    low = 0
    high = until[-1]
    while low < high:
        most = (low + high) // 2
        if _stages_within(until, most, stages):
            high = most
        else:
            low = most + 1
    return low


def _stages_within(until: Sequence[int], most: int, stages: int) -> bool:
    """Do all layers go into so many stages of at most `most` bytes? With fewer, some can be parted further."""
    begun = 0
    used = 1
    for end in range(1, len(until)):
        if until[end] - until[end - 1] > most:
            return False
        if until[end] - until[begun] > most:
            begun = end - 1
            used = used + 1
    return used <= stages
