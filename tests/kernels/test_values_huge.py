"""Casts, digests and comparisons where numbers outgrow 32 bits: long lines, many rows, far elements.

As in test_box_huge.py, a list whose first tile number is -F (mod 2^64) makes a kernel begin with tile F of its box, and
a base far below the buffer makes these tiles lie in it. Nothing of that size is allocated.
"""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.device import kernels
from ckpt_tool.device.casts import CAST_TILE, line, pack_casts
from ckpt_tool.device.comparisons import RECORD, TILE, pack_pairs
from ckpt_tool.device.descriptors import PackedDescriptors, Strided
from ckpt_tool.device.digests import DigestLine, pack_lines
from ckpt_tool.device.library import Device
from ckpt_tool.run.compute import cast
from ckpt_tool.run.digest import LEAF

F32 = DTYPES["F32"]
BF16 = DTYPES["BF16"]
NONE = (1 << 64) - 1


def window(boxes: PackedDescriptors, first: int, count: int) -> PackedDescriptors:
    """Tiles first..first+count of a list of one box."""
    packed = boxes.packed.copy()
    packed["tile0"] = np.uint64(-first % (1 << 64))
    return PackedDescriptors(packed, count, 0)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("numel", [(1 << 33) + 77, (1 << 40) + 5])
def test_casts_of_more_elements_than_32_bits_count(device: Device, numel: int, shift: int) -> None:
    first = numel // CAST_TILE - 1  # the last whole tile and the rest
    values = np.random.default_rng(3).standard_normal(numel - first * CAST_TILE).astype(np.float32)
    want, _ = cast(values.view(np.uint8).data, F32, BF16)
    with (
        device.upload(np.concatenate([np.zeros(shift, np.uint8), values.view(np.uint8)])) as src,
        device.alloc(len(want) + 32) as dst,
    ):
        device.fill(dst.address, 0xA5, len(want) + 32)
        base = src.address + shift - first * CAST_TILE * 4, dst.address - first * CAST_TILE * 2
        casts = pack_casts(line(*base, numel), F32, BF16)
        kernels.box_cast(device, casts._replace(boxes=window(casts.boxes, first, 2)))
        got = device.download(dst.address, len(want) + 32)
    assert got[: len(want)].tobytes() == bytes(want) and (got[len(want) :] == 0xA5).all()


@pytest.mark.parametrize("lanes", [4, 32])
def test_digests_of_lines_beyond_4_gib(device: Device, lanes: int) -> None:
    first = 5 << 30  # leaves: 1.25 PiB
    data = np.random.default_rng(4).integers(0, 256, LEAF + 999, np.uint8)
    with device.upload(data) as src, device.alloc(32) as out:
        lines = pack_lines([DigestLine(src.address, len(data))], out.address).packed.copy()
        lines["run"], lines["src"] = first * LEAF + len(data), (src.address - first * LEAF) % (1 << 64)
        lines["dst"] = out.address - first * 16
        kernels.digest(device, window(PackedDescriptors(lines, 2, 0), first, 2), lanes=lanes)
        got = device.download(out.address, 32).tobytes()
    assert got == xxhash.xxh3_128_digest(data[:LEAF]) + xxhash.xxh3_128_digest(data[LEAF:])


@pytest.mark.parametrize(
    ("run", "rows"), [((1 << 36) + 16, 1), ((1 << 36) + 6, 1), (64, (1 << 32) - 1), (6, (1 << 32) - 3)]
)
def test_the_first_difference_may_lie_beyond_32_bits(device: Device, run: int, rows: int) -> None:
    box = Strided(0, 0, (rows,), (run,), (run,), run) if rows > 1 else Strided(0, 0, (), (), (), run)
    boxes = pack_pairs([box], [BF16])
    tile = int(boxes.packed["rows_per_tile"][0]) * run if rows > 1 else TILE
    first = boxes.tiles - 1
    left = np.random.default_rng(5).integers(0, 256, run * rows - first * tile, np.uint8)
    right = left.copy()
    right[[len(left) // 2 // 2 * 2, len(left) - 2]] ^= 1
    begun = np.zeros(1, RECORD)
    begun["first"] = NONE
    with device.upload(left) as a, device.upload(right) as b, device.upload(begun) as records:
        boxes.packed["src"], boxes.packed["dst"] = ((m.address - first * tile) % (1 << 64) for m in (a, b))
        kernels.compare(device, window(boxes, first, 1), records.address)
        (found,) = device.download(records.address, begun.nbytes).view(RECORD)
    assert int(found["elements"]) == 2
    assert int(found["first"]) == (first * tile + len(left) // 2 // 2 * 2) // 2
