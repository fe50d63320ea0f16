"""Every kernel on random work: right, and it touches nothing but its work (`kernel_cases.py`)."""

from __future__ import annotations

import numpy as np
import pytest
from box_cases import Watched
from kernel_cases import KERNELS

from ckpt_tool.device import kernels
from ckpt_tool.device.descriptors import Strided, pack
from ckpt_tool.device.library import Device

CASES = 100


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_outside_the_boxes_is_touched(device: Device, kernel: str) -> None:
    for seed in range(CASES):
        fault = KERNELS[kernel](device, seed)
        assert not fault, f"case {seed}: {fault}"


def test_the_watch_sees_what_is_not_allowed(shim: Device) -> None:
    """A byte read, one written, one written twice and one left out, each told."""
    run = 40
    with shim.alloc(64) as source, shim.alloc(64) as target:
        boxes = [Strided(source.address, target.address, (), (), (), run)]
        legal = np.arange(64) < run
        for reads, writes, twice, said in (
            (legal, legal, 1, ""),
            (np.arange(64) < run - 1, legal, 1, "1 bytes were read or written"),
            (legal, np.arange(64) < run - 3, 1, "3 bytes were read or written"),
            (legal, legal, 2, f"{run} bytes were read or written"),
            (legal, np.arange(64) < run + 2, 1, "2 bytes were not written"),
        ):
            with Watched(shim, [(source.address, reads)], [(target.address, writes)]) as watched:
                kernels.box_copy(shim, pack(boxes * twice))
            assert watched.fault().startswith(said) and bool(watched.fault()) == bool(said)
