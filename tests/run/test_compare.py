"""What `ckpt diff` says of values: numbers, and nothing else."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.run.compare import Worst, differ


@pytest.mark.parametrize(
    ("name", "kind"), [("F32", np.uint32), ("F16", np.uint16), ("BF16", np.uint16), ("F64", np.uint64)]
)
def test_signalling_nans_are_no_warning(name, kind):
    """A NaN with its quiet bit off is cast to fp64 on the way: NumPy would warn whoever runs `ckpt diff`."""
    bits = DTYPES[name].bits
    ones = {"F32": 0x7F800001, "F16": 0x7C01, "BF16": 0x7F81, "F64": 0x7FF0000000000001}[name]
    left = np.array([0, ones, 1], kind).view(np.uint8)
    right = np.array([0, ones, 3], kind).view(np.uint8)
    worst = Worst((3,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        differ(worst, 0, left, right, DTYPES[name], DTYPES[name], 0.0, 0.0)
    report = worst.report()
    assert (
        report is not None and report["first_index"] == [2] and report["max_ulp"] == 2 and bits // 8 == kind().itemsize
    )
