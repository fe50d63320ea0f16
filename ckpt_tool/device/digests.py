"""Digests of tensors that are on a device: the same 32 hex digits as `run/digest.py`, the values never leaving it.

A digest is a hash of the hashes of 256-KiB leaves of the tensor's line. The kernel hashes leaves of plain lines; a
tensor that is in several boxes, or in strides, is laid out as a line first, window by window, by `box_copy` or
`box_transpose` into a buffer of bounded size. Many small tensors share a window, so that thousands of them are two
launches.

    hexes = digests(device, [PlacedTensor(DTYPES["F32"], (4, 6), (region,), (address,))])

Cost: one read of the values; two reads and a write of what has to be laid out. `region.file` numbers the tensor's own
`addresses`. Replicas are left out: the first that tiles the line is hashed (`compare` says whether the others are
equal).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.descriptors import DESC, PackedDescriptors, launches
from ckpt_tool.device.kernels import digest, launch
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InternalError
from ckpt_tool.plan.copy import Copy, Region, clip
from ckpt_tool.run.digest import LEAF, root

HASH = 16  # bytes of a leaf's hash
WINDOW = 64 << 20  # bytes of lines laid out at a time
GRID = 256  # lines begin on this many bytes in the window: 16-byte loads


class PlacedTensor(NamedTuple):
    """A tensor on the device."""

    dtype: DType
    shape: tuple[int, ...]
    # where its elements are stored, `file` a number in `addresses`, offsets in bytes from there
    regions: tuple[Region, ...]
    addresses: Sequence[int]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return self.dtype.nbytes(prod(self.shape))

    @property
    def item(self) -> int:
        """Bytes by which the line is counted: those of an element, 1 below a byte."""
        return max(1, self.dtype.bits // 8)


class DigestLine(NamedTuple):
    """`nbytes` at `address` of a tensor's line, from byte `at` of it on: leaves end where `at` is a multiple of
    LEAF."""

    address: int
    nbytes: int
    at: int = 0

    @property
    def leaves(self) -> int:
        """The number of hashes that the line needs: one for each leaf that it touches."""
        return ceil_div(self.at + self.nbytes, LEAF) - self.at // LEAF if self.nbytes else 0


def pack_lines(lines: Sequence[DigestLine], out: int) -> PackedDescriptors:
    """The list for the digest kernel: the hashes of all pieces of the lines go to `out`, 16 bytes each, in order.

    A piece ends where a leaf ends: what begins inside a leaf, or ends there, has a hash of its own (as
    `LeafStream(exact=True)`).
    out: a multiple of 16.
    """
    if out % HASH:
        raise InternalError(f"hashes go to address {out:#x}, want a multiple of {HASH}", code="E1576")
    spans = []
    for line in lines:
        head = min(line.nbytes, -line.at % LEAF)
        spans += [(line.address, head), (line.address + head, line.nbytes - head)]
    spans = [span for span in spans if span[1]]
    packed = np.zeros(len(spans), DESC)
    if not spans:
        return PackedDescriptors(packed, 0, 0)
    columns = np.array(spans, np.uint64)
    counts = (columns[:, 1] + np.uint64(LEAF - 1)) // np.uint64(LEAF)
    ends = np.cumsum(counts)
    packed["src"] = columns[:, 0]
    packed["run"] = columns[:, 1]
    packed["tile0"] = ends - counts
    packed["dst"] = np.uint64(out) + (ends - counts) * np.uint64(HASH)
    packed["ext"], packed["rows"], packed["rows_per_tile"] = 1, 1, 1
    packed["tiles_per_row"] = counts
    return PackedDescriptors(packed, int(ends[-1]), int(columns[:, 1].sum()))


def leaf_hashes(device: Device, lines: Sequence[DigestLine], *, stream: int = 0) -> bytes:
    """The hashes of all pieces of the lines, one after another, 16 bytes each: what `run.digest.root` takes."""
    count = sum(line.leaves for line in lines)
    with device.alloc(count * HASH) as digests:
        digest(device, pack_lines(lines, digests.address), stream=stream)
        return device.download(digests.address, count * HASH, stream).tobytes()


def digests(device: Device, tensors: Sequence[PlacedTensor], *, window: int = WINDOW, stream: int = 0) -> list[str]:
    """The digest of each tensor, 32 hex digits. window: bytes of device memory for what must be laid out (at least
    LEAF).

    Raises InternalError E1577 where the regions of a tensor do not tile it.
    """
    leaves = [bytearray() for _ in tensors]
    lines_of = enumerate(map(_plain, tensors))
    plain = [(number, line) for number, line in lines_of if line is not None]
    _hash(device, plain, leaves, stream)
    waiting = {number for number, _ in plain}
    remaining = [(number, tensor) for number, tensor in enumerate(tensors) if number not in waiting and tensor.nbytes]
    if remaining:
        room = max(LEAF, window // LEAF * LEAF)
        room = min(room, sum(ceil_div(tensor.nbytes, GRID) * GRID for _, tensor in remaining))
        with device.alloc(room) as buffer:
            for batch in _batches(remaining, room):
                copies = [copy for part in batch for copy in part.copies(buffer.address)]
                for one in launches(copies, (0,), (0,), apart=True):  # the regions of a line are apart
                    launch(device, one, stream=stream)
                lines = [(part.number, DigestLine(buffer.address + part.to, part.nbytes, part.at)) for part in batch]
                _hash(device, lines, leaves, stream)
    return [
        root(tensor.dtype.name, tensor.shape, tensor_leaves)
        for tensor, tensor_leaves in zip(tensors, leaves, strict=True)
    ]


def _plain(tensor: PlacedTensor) -> DigestLine | None:
    """The tensor as one line where it is stored, if it does."""
    owned = [region for region in tensor.regions if not region.replica]
    if len(owned) != 1:
        return None
    region = owned[0]
    is_whole = region.numel * tensor.item == tensor.nbytes and region.at == 0
    runs_on = not region.extents or (region.strides, region.steps) == ((tensor.item,), (1,))
    return DigestLine(tensor.addresses[region.file] + region.offset, tensor.nbytes) if is_whole and runs_on else None


def _hash(device: Device, lines: Sequence[tuple[int, DigestLine]], leaves: list[bytearray], stream: int) -> None:
    digests = leaf_hashes(device, [line for _, line in lines], stream=stream)
    position = 0
    for number, line in lines:
        leaves[number] += digests[position : position + line.leaves * HASH]
        position += line.leaves * HASH


class _LinePart(NamedTuple):
    """Bytes [at, at + nbytes) of a tensor's line, laid out `to` bytes into the window."""

    number: int
    tensor: PlacedTensor
    at: int
    nbytes: int
    to: int

    def copies(self, base: int) -> Iterator[tuple[Copy, int]]:
        """What lays it out in the window at address `base`; offsets are addresses."""
        item = self.tensor.item
        tensor = self.tensor
        start = self.at // item
        stop = (self.at + self.nbytes) // item
        covered = 0
        for region in tensor.regions:
            if region.replica:
                continue
            for piece in clip(region, start, stop):
                covered += piece.numel
                to = base + self.to + (piece.at - start) * item
                steps = tuple(step * item for step in piece.steps)
                source = tensor.addresses[piece.file] + piece.offset
                yield Copy(0, source, piece.strides, 0, to, steps, piece.extents), item
        if covered != stop - start:
            raise InternalError(
                f"regions give {covered} of the elements [{start}, {stop}) of a tensor of shape {tensor.shape}",
                code="E1577",
            )


def _batches(tensors: Sequence[tuple[int, PlacedTensor]], room: int) -> Iterator[list[_LinePart]]:
    """The tensors' lines cut into windows of `room` bytes: small ones together, large ones by whole leaves."""
    batch = list[_LinePart]()
    used = 0
    for number, tensor in tensors:
        position = 0
        while position < tensor.nbytes:
            remaining = tensor.nbytes - position
            fits = remaining if remaining <= room - used else (room - used) // LEAF * LEAF
            if fits:
                batch.append(_LinePart(number, tensor, position, fits, used))
                position = position + fits
                used = min(room, ceil_div(used + fits, GRID) * GRID)
            if position < tensor.nbytes:
                yield batch
                batch = []
                used = 0
    if batch:
        yield batch
