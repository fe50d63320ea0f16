"""How Paddle's sharding shares a stage's parameters over a group of ranks: whole by owner (v1), or as slices of buffers (v2).

The one idea: both are greedy passes over the optimizer's list of parameters, so the list's order and the shapes say all.

v1 (`DygraphShardingOptimizer`): the largest first, equal ones in the list's order, each to the rank with the least so far:

    sizes 6 4 4 2 over 2 ranks    rank 0: 6, 2    rank 1: 4, 4

v2 (`DygraphShardingOptimizerV2`): parameters of one colour (dense, experts), sorted by dtype, are laid into buffers, each
padded to a multiple of 256 bytes times the ranks; rank r holds [r, r + 1) * size / n of every buffer. A buffer is closed by
the parameter that fills it (256 MB), dtype by dtype. Two fp32 parameters of 100 and 40 elements over 2 ranks:

    128 + 128 elements: rank 0 holds elements 0 .. 100 of the first and 28 of padding, rank 1 the 40 of the second and 88

What a rank stores of a parameter is its part of the buffer with the padding, one flat array; ranks beyond it store nothing.

Sources: paddlepaddle 3.3.1, `fleet/meta_optimizers/dygraph_optimizer/dygraph_sharding_optimizer.py` (`_partition_parameters`,
`_build_comm_buffers`), `fleet/utils/tensor_fusion_helper.py` (`build_reduce_scatter_buffer`, `ShardingGradView`), and runs of
`core.eager_assign_group_by_size`. Cost: n log n. What it does not do: overlapped pipelines, whose buffers are one a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 256  # bytes, on GPU, XPU and NPU
BUFFER_MB = 256  # `sharding_comm_buffer_size_MB`, Paddle's default
_WIDTHS = {"F16": 2, "BF16": 2, "F32": 4}


class Member(NamedTuple):
    """A parameter of the optimizer's list, as a rank holds it. dtype: the model's (Paddle pads by it), in the house's names.
    width: bytes of an element of it."""

    name: str
    numel: int
    dtype: str
    width: int


class Span(NamedTuple):
    """Elements [start, stop) of a parameter's row-major line, followed by padding up to `length` elements."""

    start: int
    stop: int
    length: int


def owners(members: Sequence[Member], ranks: int) -> dict[str, int]:
    """The rank that owns each parameter under v1, in the order in which Paddle deals them."""
    sizes = [0] * ranks
    out = {}
    for member in sorted(members, key=lambda m: -m.numel):
        rank = sizes.index(min(sizes))
        out[member.name] = rank
        sizes[rank] += member.numel
    return out


def spans(members: Sequence[Member], ranks: int, rank: int, *, buffer_mb: int = BUFFER_MB) -> dict[str, Span]:
    """What rank `rank` of the group holds of each parameter of one colour under v2; parameters of which it holds nothing are
    left out."""
    out = {}
    for buffer in buffers(members, buffer_mb):
        sizes = [padded(member, ranks) for member in buffer]
        share = sum(sizes) // ranks
        low, high = rank * share, (rank + 1) * share
        index = 0
        for member, size in zip(buffer, sizes, strict=True):
            begin, end = max(index, low) - index, min(index + size, high) - index
            if begin < end:
                start = min(begin, member.numel)
                out[member.name] = Span(start, max(start, min(end, member.numel)), end - begin)
            index += size
    return out


def padded(member: Member, ranks: int) -> int:
    """Elements that a parameter takes in its buffer."""
    unit = ALIGNMENT // _WIDTHS.get(member.dtype, member.width) * ranks
    return -(-member.numel // unit) * unit


def buffers(members: Sequence[Member], buffer_mb: int = BUFFER_MB) -> list[list[Member]]:
    """The parameters of each buffer. Sorted by the name of the dtype: bfloat16, float16, float32."""
    limit = buffer_mb << 20
    order = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
    done: list[list[Member]] = []
    current: list[Member] = []
    filled = 0
    for member in sorted(members, key=lambda m: order.get(m.dtype, m.dtype)):
        if current and current[0].dtype != member.dtype:
            done, current, filled = [*done, current], [], 0
        current.append(member)
        filled += member.numel * member.width
        if filled >= limit:
            done, current, filled = [*done, current], [], 0
    return [*done, current] if current else done
