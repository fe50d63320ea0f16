"""The flat rules of ZeRO: which elements of which parameter lie where in a rank's flat tensor. Pure arithmetic.

ZeRO 1 and 2 (and BF16_Optimizer) lay the parameters of a group end to end and cut the whole into equal partitions;
ZeRO 3 cuts every parameter by itself:

    three parameters of 7, 4 and 3 elements over 2 ranks
    ZeRO 1, 2   14 -> padded to 16, partitions of 8    rank 0: 7 of the first, 1 of the second; rank 1: 3 and 3, 2 zeros
    ZeRO 3      7 -> 4 + 3(+1), 4 -> 2 + 2, 3 -> 2 + 1(+1)     rank 0: 4, 2, 2; rank 1: 3 and a zero, 2, 1 and a zero

Rules. 1, 2: the group's length is rounded up to a multiple of 2 * ranks; with `parameter_alignment` each parameter but
the last is padded to a multiple of 16 bytes of the 16-bit type. 3: rank r of n holds elements [r * c, (r + 1) * c) of a
parameter, c = ceil(numel / n), the last ones short (filled with zeros in the file) or empty; a parameter group is split
into sub-groups, each closed by the parameter that brings its rank's length to `sub_group_size`. Round robin: the
parameters of a group are dealt to the ranks like cards, then laid hand by hand. Source: DeepSpeed 0.19.8
`runtime/zero/stage_1_and_2.py` (__init__, `_round_robin_reorder`), `runtime/bf16_optimizer.py`,
`runtime/zero/partition_parameters.py` (`_partition_param`), `runtime/zero/stage3.py` (`_create_fp16_sub_groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple, TypeVar

START_ALIGNMENT = 2  # elements: DeepSpeed's nccl_start_alignment_factor
PARAMETER_ALIGNMENT = 16  # bytes
SUB_GROUP_SIZE = 1_000_000_000  # elements, DeepSpeed's default
T = TypeVar("T")


class Piece(NamedTuple):
    """Elements [start, stop) of parameter number `param`'s line lie at element `at` of a rank's flat tensor."""

    param: int
    start: int
    stop: int
    at: int


# -- ZeRO 1 and 2 ------------------------------------------------------------------------------------------------------


def alignment_gaps(numels: Sequence[int], itemsize: int) -> list[int]:
    """Elements of padding behind each parameter under `parameter_alignment`. itemsize: bytes of the module's dtype."""
    unit = PARAMETER_ALIGNMENT // gcd(PARAMETER_ALIGNMENT, itemsize)
    out, at = [], 0
    for number, numel in enumerate(numels):
        gap = 0 if number == len(numels) - 1 else -(at + numel) % unit
        out.append(gap)
        at += numel + gap
    return out


def partition_size(total: int, ranks: int) -> int:
    """Elements of each rank's partition of a group of `total` elements (gaps included)."""
    unit = START_ALIGNMENT * ranks
    return -(-total // unit) * unit // ranks


def partition(numels: Sequence[int], gaps: Sequence[int], size: int, rank: int) -> list[Piece]:
    """What lies in rank `rank`'s partition of `size` elements, in order."""
    low, high = rank * size, (rank + 1) * size
    out, at = [], 0
    for number, (numel, gap) in enumerate(zip(numels, gaps, strict=True)):
        start, stop = max(at, low), min(at + numel, high)
        if start < stop:
            out.append(Piece(number, start - at, stop - at, start - low))
        at += numel + gap
        if at >= high:
            break
    return out


def padding(total: int, size: int, rank: int) -> int:
    """Elements at the end of rank `rank`'s partition that belong to no parameter (gaps count as parameters)."""
    return min(size, max(0, (rank + 1) * size - total))


def deal(items: Sequence[T], hands: int) -> list[T]:
    """The order of `round_robin_gradients`: a, b, c, d, e over 2 ranks -> a, c, e, b, d."""
    return [item for hand in range(hands) for item in items[hand::hands]]


def undeal(items: Sequence[T], hands: int) -> list[T]:
    """The inverse of `deal`."""
    order = deal(range(len(items)), hands)
    return [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]


# -- ZeRO 3 ------------------------------------------------------------------------------------------------------------


def share(numel: int, ranks: int) -> int:
    """Elements of each rank's share of one parameter, padding included."""
    return -(-numel // ranks)


def shares(numels: Sequence[int], ranks: int, rank: int) -> tuple[list[Piece], int]:
    """(what lies in rank `rank`'s flat tensor of a sub-group, the tensor's elements)."""
    out, at = [], 0
    for number, numel in enumerate(numels):
        count = share(numel, ranks)
        start, stop = min(rank * count, numel), min((rank + 1) * count, numel)
        if start < stop:
            out.append(Piece(number, start, stop, at))
        at += count
    return out, at


def sub_groups(numels: Sequence[int], ranks: int, size: int) -> list[range]:
    """A parameter group's sub-groups, as ranges of parameter numbers. size: `sub_group_size`, elements of a rank."""
    counts = [share(numel, ranks) for numel in numels]
    if size >= sum(counts):
        return [range(len(counts))]
    out, begin, filled = [], 0, 0
    for number, count in enumerate(counts):
        filled += count
        if filled >= size or number == len(counts) - 1:
            out.append(range(begin, number + 1))
            begin, filled = number + 1, 0
    return out
