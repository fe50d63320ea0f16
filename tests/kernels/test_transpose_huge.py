"""box_transpose where numbers outgrow 32 bits: extents, batches and strides.

Nothing of that size is touched: a list whose first tile number is -F (mod 2^64) begins with tile F of its box, over
memory that is mostly holes, or from a base so far off that only these tiles lie in a small buffer.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from ckpt_tool.device.descriptors import PackedDescriptors, Turned, pack_turned
from ckpt_tool.device.kernels import box_transpose
from ckpt_tool.device.library import Device

NORESERVE = 0x4000


def holes(nbytes: int) -> np.ndarray:
    """Zeros that take no memory until they are touched."""
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    except OSError as e:
        pytest.skip(f"no {nbytes >> 30} GiB of address space here: {e}")


def last_tiles(boxes: PackedDescriptors, count: int) -> PackedDescriptors:
    packed = boxes.packed.copy()
    packed["tile0"] = np.uint64(-(boxes.tiles - count) % (1 << 64))
    return PackedDescriptors(packed, count, 0)


def test_extents_up_to_31_bits(shim: Device) -> None:
    rows = 1 << 31
    columns = 40
    source = holes(rows * columns)
    target = holes(rows * columns)
    source[(rows - 300) * columns :] = np.arange(300 * columns) % 251 + 1
    boxes = pack_turned(
        [Turned(source.ctypes.data, target.ctypes.data, 1, (1, rows, columns), (0, columns), (0, rows))]
    )
    box_transpose(shim, last_tiles(boxes, 2))
    got = np.stack([target[(k + 1) * rows - 256 : (k + 1) * rows] for k in range(columns)])
    np.testing.assert_array_equal(got, source.reshape(rows, columns)[-256:].T)
    assert not target[rows - 400 : rows - 256].any()


@pytest.mark.parametrize(
    ("batch", "by_target"), [(3, (1 << 33) + 4096), ((1 << 31) + 3, 1 << 31), ((1 << 32) - 1, 1 << 30)]
)
def test_batches_up_to_32_bits(device: Device, batch: int, by_target: int) -> None:
    """Three matrices of (20, 24) at the end of as many as a list may have, far apart on one side."""
    by_source = 20 * 24 * 4 + 16
    count = 3
    source = np.arange(count * by_source // 4, dtype=np.uint32)
    with device.upload(source) as src, device.alloc(20 * 24 * 4) as dst:
        for k in range(count):
            first = (src.address - (batch - count) * by_source) % (1 << 64)
            to = (dst.address - (batch - count + k) * by_target) % (1 << 64)
            boxes = pack_turned([Turned(first, to, 4, (batch, 20, 24), (by_source, 24 * 4), (by_target, 20 * 4))])
            assert boxes.tiles == batch
            packed = boxes.packed.copy()
            packed["tile0"] = np.uint64(-(batch - count + k) % (1 << 64))
            device.fill(dst.address, 0xA5, dst.nbytes)
            box_transpose(device, PackedDescriptors(packed, 1, 0))
            want = source[k * by_source // 4 :][: 20 * 24].reshape(20, 24).T
            np.testing.assert_array_equal(device.download(dst.address, dst.nbytes).view("<u4").reshape(24, 20), want)
