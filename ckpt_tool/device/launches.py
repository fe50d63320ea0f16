"""Copies as launches: which kernel moves which of them, one launch a kernel.

    for launch in launches([(copy, 2), ...], sources=[address, ...], targets=[address, ...]):
        kernels.launch(device, launch)

A copy that swaps dims goes to box_transpose, every other to box_copy; both kernels may run at once, since no box of the whole
list may meet another that is written (`overlap.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_tool.device.descriptors import Descriptors, Strided, levelled, merged, pack
from ckpt_tool.device.overlap import refuse_overlap
from ckpt_tool.device.transposes import Turned, pack_turned, turned
from ckpt_tool.plan.copy import Copy


class Launch(NamedTuple):
    """A kernel (`box_copy` or `box_transpose`) and its list."""

    kernel: str
    boxes: Descriptors


def boxes_of(copy: Copy, item: int, sources: Sequence[int], targets: Sequence[int]) -> Sequence[Strided | Turned]:
    """What a copy comes to. item: bytes of an element; sources, targets: the addresses of byte 0 of the files that the copy
    numbers."""
    if 0 in copy.extents:
        return ()
    dims, run = merged(copy, item)
    source, target = sources[copy.source] + copy.source_offset, targets[copy.output] + copy.output_offset
    return list(turned(source, target, dims, run)) or list(levelled(source, target, dims, run))


def launches(
    copies: Iterable[tuple[Copy, int]], sources: Sequence[int], targets: Sequence[int], *, apart: bool = False
) -> tuple[Launch, ...]:
    """The launches that carry out copies, each with the bytes of its element. Copies of nothing make none.

    apart: the caller knows that no byte is written twice, nor written and read. Else that is looked at: InternalError E1571
    or E1572.
    """
    boxes = [box for copy, item in copies for box in boxes_of(copy, item, sources, targets)]
    plain = [box for box in boxes if isinstance(box, Strided)]
    swapped = [box for box in boxes if isinstance(box, Turned)]
    if not apart:
        refuse_overlap([*plain, *(as_strided(box) for box in swapped)])
    found = []
    if plain:
        found.append(Launch("box_copy", pack(plain)))
    if swapped:
        found.append(Launch("box_transpose", pack_turned(swapped)))
    return tuple(found)


def as_strided(box: Turned) -> Strided:
    """The same bytes item by item: what box_copy would do."""
    (s0, s1), (t0, t2) = box.source_strides, box.target_strides
    return Strided(box.source, box.target, box.extents, (s0, s1, box.item), (t0, box.item, t2), box.item)
