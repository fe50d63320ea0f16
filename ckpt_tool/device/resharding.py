"""Resharding of tensors that are on the device already: a job that loads a checkpoint of another layout, or changes its
own.

Every process states what it holds (boxes of tensors at addresses) and what it wants; this module knows neither layouts
nor ranks. One destination is one call, and one call is one launch of `box_copy`, with one of `box_transpose` where
a side is the other way round:

    held = [DeviceBox("w", (8, 6), BF16, Box((0, 0), (4, 6)), a), DeviceBox("w", (8, 6), BF16, Box((4, 0), (4, 6)), b)]
    reshard(device, held, [DeviceBox("w", (8, 6), BF16, Box((0, 0), (8, 3)), c)])    # columns 0..2, from two ranks'
    rows

What several hold is taken from the first that was named. A plan of many steps over the same addresses is made once
(`planned`) and run as often as needed. Addresses are those of this device, or of others that it may read. Nothing is
waited for but the kernels. Cost: some 10 us of Python a pair of boxes that meet; the device moves the bytes at the
speed of a copy. What it does not do: casts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.dtype import DType
from ckpt_tool.device import kernels
from ckpt_tool.device.descriptors import Launch, launches
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.plan.copy import Copy


class DeviceBox(NamedTuple):
    """A box of a tensor in device memory: its first element is at `address`."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: DType
    box: Box
    address: int
    # bytes from one element to the next in each dim, None where the box is row by row without gaps
    strides: tuple[int, ...] | None = None


class Resharding(NamedTuple):
    """What one destination's launches are; `nbytes`: bytes that they move."""

    launches: tuple[Launch, ...]
    nbytes: int

    def run(self, device: Device, *, stream: int = 0) -> None:
        """Move the bytes and wait for them."""
        for launch in self.launches:
            kernels.launch(device, launch, stream=stream)


def reshard(device: Device, held: Sequence[DeviceBox], wanted: Sequence[DeviceBox], *, stream: int = 0) -> int:
    """Fill what is wanted from what is held. Returns the bytes moved. Raises as `planned`."""
    plan = plan_resharding(held, wanted)
    plan.run(device, stream=stream)
    return plan.nbytes


def plan_resharding(held: Sequence[DeviceBox], wanted: Sequence[DeviceBox]) -> Resharding:
    """The launches that fill `wanted`, boxes apart from each other and from what is held.

    Raises UsageError E1565 where two speak of one tensor with another shape or dtype, or of a box outside it, and
    InconsistentCheckpoint E1566 naming what no process holds; InternalError E1571 for memory that is written twice, or
    written and read.
    """
    _agree((*held, *wanted))
    held = [_convert_to_bytes(shard) for shard in held]
    wanted = [_convert_to_bytes(shard) for shard in wanted]
    by_name: dict[str, list[tuple[int, DeviceBox]]] = {}
    for number, shard in enumerate(held):
        by_name.setdefault(shard.tensor, []).append((number, shard))

    copies: list[tuple[Copy, int]] = []
    missing: list[str] = []
    for number, shard in enumerate(wanted):
        left = [shard.box] if shard.box.numel else []
        for source, other_box in by_name.get(shard.tensor, ()):
            still_missing: list[Box] = []
            for box in left:
                shared = box & other_box.box
                if shared is None:
                    still_missing.append(box)
                else:
                    copies.append(_copy(other_box, source, shard, number, shared))
                    still_missing += _without(box, shared)
            left = still_missing
            if not left:
                break
        missing += [f"{shard.tensor}: no rank holds {box.shape} from {box.offset} on" for box in left]

    if missing:
        raise InconsistentCheckpoint(
            missing[0], code="E1566", faults=missing[1:], hint="pass the shards of every rank that holds a part"
        )

    planned_launches = launches(copies, [shard.address for shard in held], [shard.address for shard in wanted])
    return Resharding(planned_launches, sum(prod(copy.extents) * item for copy, item in copies))


def _agree(shards: Sequence[DeviceBox]) -> None:
    """Every tensor has one shape and one dtype, and its boxes are in it."""
    first_of: dict[str, DeviceBox] = {}
    for shard in shards:
        reference = first_of.setdefault(shard.tensor, shard)
        if (shard.shape, shard.dtype) != (reference.shape, reference.dtype):
            expected = f"{reference.dtype.name} {reference.shape}"
            actual = f"{shard.dtype.name} {shard.shape}"
            raise UsageError(
                f"{shard.tensor} is {expected} here and {actual} there",
                code="E1565",
                key=shard.tensor,
                hint="resharding moves bytes: cast before or after it",
            )
        if not shard.box.inside(shard.shape) or (shard.strides is not None and len(shard.strides) != len(shard.shape)):
            raise UsageError(
                f"{shard.tensor}: {shard.box.shape} from {shard.box.offset} on, strides {shard.strides}, in "
                f"{shard.shape}",
                code="E1565",
                key=shard.tensor,
                hint="offset and shape count elements of the whole tensor",
            )


def _copy(held: DeviceBox, source: int, wanted: DeviceBox, target: int, shared: Box) -> tuple[Copy, int]:
    """The copy of a box from one shard to another, and the bytes of its element."""
    item = max(1, held.dtype.bits // 8)
    sides = []
    for shard in (held, wanted):
        strides = shard.strides or tuple(step * item for step in contiguous_strides(shard.box.shape))
        offset = sum((a - b) * s for a, b, s in zip(shared.offset, shard.box.offset, strides, strict=True))
        sides.append((offset, strides))
    (begin, by_source), (end, by_target) = sides
    return Copy(source, begin, by_source, target, end, by_target, shared.shape), item


def _convert_to_bytes(shard: DeviceBox) -> DeviceBox:
    """A shard of elements of less than a byte as one of bytes: its last dim counts them. Others as they are."""
    bits = shard.dtype.bits
    if bits >= 8:
        return shard
    ends = (shard.shape[-1:], shard.box.offset[-1:], shard.box.shape[-1:])
    if not shard.shape or shard.strides is not None or any(n * bits % 8 for (n,) in ends):
        raise UsageError(
            f"{shard.tensor}: a box of {shard.dtype.name} that begins or ends inside a byte, or has strides",
            code="E1565",
            key=shard.tensor,
            hint="cut the last dim at whole bytes, and arrange the box row by row",
        )
    (last_dim,), (start,), (count,) = ((n * bits // 8 for n in end) for end in ends)
    box = Box((*shard.box.offset[:-1], start), (*shard.box.shape[:-1], count))
    return shard._replace(shape=(*shard.shape[:-1], last_dim), box=box)


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """What is left of a box without a box inside it: at most two slabs a dim."""
    offset = list(box.offset)
    shape = list(box.shape)
    for dim, (low, count) in enumerate(zip(hole.offset, hole.shape, strict=True)):
        before = low - offset[dim]
        if before:
            yield Box(tuple(offset), (*shape[:dim], before, *shape[dim + 1 :]))
        after = offset[dim] + shape[dim] - low - count
        if after:
            yield Box((*offset[:dim], low + count, *offset[dim + 1 :]), (*shape[:dim], after, *shape[dim + 1 :]))
        offset[dim], shape[dim] = low, count
