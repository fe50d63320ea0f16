"""Balance: divides consecutive layers into pipeline stages of about the same size in bytes.

The largest stage is as small as possible; among the divisions with that maximum, the one with the most equal stages
(least sum of squares) is chosen, and of several such the one whose first stages have more layers. Exact, in time that
grows with the square of the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance_stages(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """The number of layers in each stage, at least one each.

    sizes: bytes of each layer in order, for at least as many layers as stages. Tensors before the first layer count as
    part of it, tensors after the last layer as part of that.

    >>> balance_stages([9, 4, 4, 4, 4, 7], 3)
    (1, 3, 2)
    >>> balance_stages([30, 4, 4, 4, 4, 4, 4], 3)
    (1, 3, 3)
    """
    until = [0, *accumulate(sizes)]
    limit = _smallest_maximum(until, stages)
    layers = len(sizes)

    # best_splits[n]: (sum of squares, layers of each stage negated) of the first n layers in the stages so far.
    # Negated, because ties go to the split whose first stages have more layers.
    best_splits: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begun, (squares, split) in best_splits.items():
            last = layers - (stages - stage)
            for end in range(begun + 1, last + 1) if stage < stages else (layers,):
                size = until[end] - until[begun]
                if size > limit:
                    break
                candidate = squares + size * size, (*split, begun - end)
                if end not in longer or candidate < longer[end]:
                    longer[end] = candidate
        best_splits = longer
    return tuple(-count for count in best_splits[layers][1])


def _smallest_maximum(until: Sequence[int], stages: int) -> int:
    """The smallest possible size of the largest stage, by bisection. until[n]: bytes of the first n layers."""
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
    """Do all layers fit into so many stages of at most `most` bytes? If fewer do, some can be split further."""
    begun = 0
    used = 1
    for end in range(1, len(until)):
        if until[end] - until[end - 1] > most:
            return False
        if until[end] - until[begun] > most:
            begun = end - 1
            used = used + 1
    return used <= stages
