from __future__ import annotations

import numpy as np

from ckpt_tool.run.device.descriptors import Strided, pack
from ckpt_tool.run.device.kernels import box_copy
from ckpt_tool.run.device.memory import Device


def test_a_column_slice_of_rows(device: Device) -> None:
    source = np.arange(4 * 32, dtype=np.uint8)
    with device.upload(source) as src, device.alloc(48) as dst:
        box_copy(device, pack([Strided(src.address + 4, dst.address, (4,), (32,), (12,), 12)]))
        got = device.download(dst.address, 48)
    np.testing.assert_array_equal(got.reshape(4, 12), source.reshape(4, 32)[:, 4:16])
