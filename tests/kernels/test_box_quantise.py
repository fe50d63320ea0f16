"""box_quantise against quantised/nearest_codes.py: every bfloat16 and float16, quotients beside ties, blocks at the
ends of
the range, rows longer than registers, what is not finite.

The oracle is the CPU's own arithmetic (`trial.check.quantise_by_cpu`).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.kernels import box_quantise
from ckpt_tool.device.library import Device
from ckpt_tool.device.quantising import TABLE, FloatBox, pack_floats
from ckpt_tool.device.trial.check import quantise_by_cpu
from ckpt_tool.errors import InternalError
from ckpt_tool.run.compute import numpy_type
from ckpt_tool.weight_schemes.written_schemes import SCHEMES, Scheme

SOURCES = [DTYPES[name] for name in ("F32", "BF16", "F16")]
Array = npt.NDArray[Any]


def made(
    device: Device, values: Array, source: DType, scheme: Scheme, whole: float, **grid: int
) -> tuple[Array, Array, int]:
    """(codes as bytes, scales as bytes, blocks that are not finite) of (matrices, rows, columns)."""
    matrices, rows, columns = values.shape
    high, wide = scheme.block
    down = ceil_div(rows, high)
    across = ceil_div(columns, wide or columns)
    of = DTYPES[scheme.scales] if scheme.scales else source
    item = source.bits // 8
    size = of.bits // 8
    step = columns * scheme.bits // 8
    with (
        device.upload(np.ascontiguousarray(values)) as read,
        device.alloc(matrices * rows * step) as codes,
        device.alloc(matrices * down * across * size) as scales,
    ):
        box = FloatBox(
            read.address,
            codes.address,
            (matrices, rows, columns),
            (rows * columns * item, columns * item),
            (rows * step, step),
            scales.address,
            (down * across * size, across * size),
            whole,
        )
        (bad,) = box_quantise(device, pack_floats([box], source, scheme), **grid)
        return device.download(codes.address, codes.nbytes), device.download(scales.address, scales.nbytes), bad


def same(device: Device, values: Array, source: DType, scheme: Scheme, **grid: int) -> None:
    want = quantise_by_cpu(values.reshape(-1), values.shape, source, scheme)
    codes, scales, bad = made(device, values, source, scheme, want.whole, **grid)
    assert bad == 0
    np.testing.assert_array_equal(scales, np.frombuffer(want.scales.tobytes(), np.uint8))
    np.testing.assert_array_equal(codes, want.codes)


def every(source: DType) -> Array:
    """All finite values of 16 bits, in an order that puts large beside small."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(numpy_type(source))
    values = np.where(np.isfinite(values.astype(np.float32)), values, values.dtype.type(0))
    return np.concatenate([values.reshape(256, 256), values.reshape(256, 256).T])[None]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("source", SOURCES[1:], ids=lambda dtype: dtype.name)
def test_every_value_of_16_bits(device: Device, source: DType, scheme: Scheme) -> None:
    """By rows of like sizes, and of unlike ones."""
    same(device, every(source)[:, :: 1 if scheme.block[1] else 16], source, scheme)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_quotients_beside_ties(device: Device, scheme: Scheme) -> None:
    """fp32 that are a few ulp from halfway between two codes, in blocks whose largest is any."""
    rng = np.random.default_rng(5)
    most = {"F8_E4M3": 448.0, "I8": 127.5, "I32": 7.5, "U8": 6.0}[scheme.dtype]
    top = rng.uniform(0.5, 1, (1, 24, 1)).astype(np.float32) * np.float32(2.0) ** rng.integers(-120, 60, (1, 24, 1))
    few = (rng.integers(0, 32, (1, 24, 512)) / 16) * 2.0 ** rng.integers(-10, 9, (1, 24, 512))
    halves = np.where(rng.random(few.shape) < 0.5, few, np.round(few) + 0.5)
    values = (np.minimum(halves, most) * (top / np.float32(most)).astype(np.float64)).astype(np.float32)
    values = (values.view(np.uint32) + rng.integers(-2, 3, values.shape).astype(np.uint32)).view(np.float32)
    values = np.where(np.isfinite(values), np.minimum(values, top), 0).astype(np.float32)
    values[..., ::16] = top
    same(device, values * rng.choice([-1, 1], values.shape).astype(np.float32), DTYPES["F32"], scheme)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: dtype.name)
def test_blocks_at_the_ends_of_the_range(device: Device, source: DType, scheme: Scheme) -> None:
    """Zeros of both signs, the least and the greatest numbers alone and together."""
    about = ml_dtypes.finfo(numpy_type(source))
    least = float(about.smallest_subnormal)
    top = float(about.max)
    rows = np.zeros((1, 12, 128), np.float32)
    rows[0, 1] = -0.0
    for row, value in enumerate((least, -least, float(about.tiny), top, -top, top * 0.87, 1.75, 448.0, 1e-38), 2):
        rows[0, row, ::3] = value
        rows[0, row, 1] = least
    same(device, rows.astype(numpy_type(source)), source, scheme)
    for row in range(12):
        same(device, rows[:, row : row + 1].astype(numpy_type(source)), source, scheme)


@pytest.mark.parametrize("columns", [16384, 16384 + 8, 40_000, 40_003])
def test_rows_longer_than_registers(device: Device, columns: int) -> None:
    rng = np.random.default_rng(columns)
    values = rng.standard_normal((1, 2, columns)).astype(ml_dtypes.bfloat16)
    values[0, 1, -1] = 9  # the largest is the last
    for name in ("fp8-channel", "int8"):
        for threads in (0, 64):
            same(device, values, DTYPES["BF16"], SCHEMES[name], threads=threads)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: dtype.name)
def test_blocks_that_are_not_finite_are_counted(device: Device, source: DType, scheme: Scheme, bad: float) -> None:
    values = np.ones((2, 130, 256), np.float32)
    values[0, 3, 40] = values[0, 3, 41] = values[1, 129, 255] = bad
    assert made(device, values.astype(numpy_type(source)), source, scheme, 1.0)[2] == 2
    assert made(device, values.astype(numpy_type(source))[..., :128], source, scheme, 1.0)[2] == 1


def test_boxes_are_counted_by_the_caller_s_numbers(device: Device) -> None:
    """Many boxes in one launch, some of nothing."""
    values = np.ones((3, 64), np.float32)
    values[1, 5] = np.nan
    with device.upload(values) as read, device.alloc(3 * 64) as codes, device.alloc(3 * 2) as scales:
        boxes = [
            FloatBox(
                read.address + 256 * k,
                codes.address + 64 * k,
                (1, n, 64),
                (0, 256),
                (0, 64),
                scales.address + 2 * k,
                (0, 2),
            )
            for k, n in ((0, 1), (1, 0), (1, 1), (2, 1))
        ]
        assert box_quantise(device, pack_floats(boxes, DTYPES["F32"], SCHEMES["mxfp8"])) == [0, 0, 1, 0]
        assert box_quantise(device, pack_floats([], DTYPES["F32"], SCHEMES["mxfp8"])) == []


def test_what_no_kernel_makes_is_refused() -> None:
    box = FloatBox(0, 0, (1, 4, 48), (0, 96), (0, 48), 0, (0, 1))
    with pytest.raises(InternalError, match="mxfp8 of"):
        pack_floats([box], DTYPES["BF16"], SCHEMES["mxfp8"])
    with pytest.raises(InternalError, match="no kernel makes mxfp8 of F64"):
        pack_floats([box], DTYPES["F64"], SCHEMES["mxfp8"])
    with pytest.raises(InternalError, match="scales at 0x2"):
        pack_floats([box._replace(scales=2)], DTYPES["BF16"], SCHEMES["fp8-block"])
    assert TABLE.itemsize == 48


def test_a_row_has_as_many_threads_as_hold_it() -> None:
    box = FloatBox(0, 0, (1, 4, 4096), (0, 8192), (0, 4096), 0, (0, 2))
    widths = {1: 32, 2048: 32, 2049: 64, 4096: 64, 16384: 256, 1 << 20: 256}
    for columns, threads in widths.items():
        boxes = [box._replace(shape=(1, 4, columns))]
        assert pack_floats(boxes, DTYPES["BF16"], SCHEMES["fp8-channel"]).threads == threads
    assert pack_floats([box], DTYPES["BF16"], SCHEMES["mxfp8"]).threads == 0
