"""box_dequantise against quantised/: every code times every power of two, blocks of any size, boxes that begin
anywhere.

The oracle is the recipe that the CPU uses (`codec.Dequantized`, tables and products of NumPy, then compute.cast), on
whole tensors; the kernel makes a box of them out of codes that lie in rows of their own length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from box_cases import Watched

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.device.casts import CastScales, CodeBox, Counted, kind, pack_codes
from ckpt_tool.device.descriptors import magic
from ckpt_tool.device.kernels import box_dequantise
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InternalError, StorageError
from ckpt_tool.quantised.codecs.code_bits import FP4
from ckpt_tool.quantised.codecs.codec import Bytes as ByteCodes
from ckpt_tool.quantised.codecs.codec import Codec, CodeReader, Dequantized, Halves, Step, byte_table, list_values
from ckpt_tool.quantised.codecs.scale_grid import RowBlocks, ScaleGrid
from ckpt_tool.run.compute import cast, numpy_type

CODES = [DTYPES[name] for name in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "F4")]
TARGETS = [DTYPES[name] for name in ("F32", "BF16", "F16")]
POISON = 0xA5
Bytes = npt.NDArray[np.uint8]


class Tensor(NamedTuple):
    """codes: bytes, row-major. scales: of their own dtype, (matrices or 1, rows of blocks, columns of blocks)."""

    dtype: DType
    shape: tuple[int, int, int]
    codes: Bytes
    scale_dtype: DType
    scales: npt.NDArray[Any]
    block: tuple[int, int]

    def values(self, target: DType) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """(all of it as `target`, as fp32), as the CPU makes them."""
        matrices, rows, columns = self.shape
        step = self.scales.shape[1] if self.scales.shape[0] > 1 or matrices == 1 else 0
        height, width = self.block
        grid = ScaleGrid(1, self.scale_dtype, self.scales.shape[2], width, "w_scale")
        halves: CodeReader = Halves(columns, list_values(FP4))
        codes = halves if self.dtype.bits == 4 else ByteCodes(columns, byte_table(self.dtype))
        codec = Codec(columns, codes, RowBlocks(rows, step, height), (Step(np.multiply, grid),))
        weight = Dequantized(TensorKey("w", "model"), self.shape, (), "", codec)
        numel = matrices * rows * columns

        def read(number: int, start: int, stop: int) -> npt.NDArray[Any]:
            return (self.codes if number == 0 else self.scales.reshape(-1))[start:stop]

        floats = weight.values(read, 0, numel).astype(np.float32)
        bits = (
            floats.view(np.uint8).data
            if target.name == "F32"
            else cast(floats.view(np.uint8).data, DTYPES["F32"], target)[0]
        )
        return np.frombuffer(bits, f"u{target.bits // 8}").reshape(self.shape), floats.reshape(self.shape)


def scale_values(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], *, wild: bool) -> npt.NDArray[Any]:
    if dtype.bits == 8:
        return rng.integers(0 if wild else 100, 255 if wild else 150, shape, np.uint8)
    plain = rng.standard_normal(shape) * 0.02
    odd = rng.choice(
        [0.0, -0.0, 1.0, -3.0, 1e-40, 2.0**-149, 3e38, -3e38, 2.0**118, 2.0**119, 145.0, 147.0, np.inf, -np.inf], shape
    )
    return np.where(rng.random(shape) < (0.5 if wild else 0), odd, plain).astype(numpy_type(dtype))


def make(rng: np.random.Generator, dtype: DType, scale_dtype: DType, *, wild: bool) -> Tensor:
    matrices = int(rng.choice([1, 1, 2, 3]))
    block = ((128, 128), (1, 32), (128, 128), (3, 5), (1, 1 << 20), (1 << 40, 1 << 40), (7, 8), (1, 16))[
        int(rng.integers(8))
    ]
    rows = int(rng.choice([1, 5, 40, 130, 260]))
    columns = int(rng.choice([1, 7, 32, 64, 96, 129, 256, 384, 1000]))
    if rng.random() < 0.03:
        rows = 2
        columns = 9000
    if dtype.bits == 4 and matrices * rows * columns % 2:
        columns += 1
    codes = rng.integers(0, 256, matrices * rows * columns * dtype.bits // 8, np.uint8)
    if not wild and dtype.name == "F8_E4M3":
        codes[(codes & 0x7F) == 0x7F] = 0x38
    own = matrices if rng.random() < 0.7 else 1
    shape = (own, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    if own == 1 and matrices > 1:  # one serves all: a single number, as the recipes have it
        block = (rows, columns)
        shape = (1, 1, 1)
    return Tensor(
        dtype, (matrices, rows, columns), codes, scale_dtype, scale_values(rng, scale_dtype, shape, wild=wild), block
    )


def check(device: Device, rng: np.random.Generator, tensor: Tensor, target: DType) -> None:
    """A random box of the tensor, and one more list entry that is the whole of it."""
    want, floats = tensor.values(target)
    item = target.bits // 8
    width = tensor.scales.itemsize
    matrices, rows, columns = tensor.shape
    first = [int(rng.integers(0, n)) for n in tensor.shape] if rng.random() < 0.7 else [0, 0, 0]
    if rng.random() < 0.5:
        first[2] = first[2] // 16 * 16
    count = [
        int(rng.integers(1, n - f + 1)) if rng.random() < 0.5 else n - f
        for n, f in zip(tensor.shape, first, strict=True)
    ]
    wide = count[2] + (0 if rng.random() < 0.5 else int(rng.choice([1, 8])))
    shift = int(rng.choice([0, 0, 1, 4]))
    whole = matrices * rows * columns * item
    size = count[0] * count[1] * wide * item
    half = tensor.dtype.bits == 4
    with (
        device.upload(np.concatenate([np.zeros(shift, np.uint8), tensor.codes])) as codes,
        device.upload(np.ascontiguousarray(tensor.scales).view(np.uint8).reshape(-1)) as scales,
        device.alloc(size + 32 + whole) as out,
    ):
        device.fill(out.address, POISON, size + 32 + whole)
        base = (codes.address + shift) * (2 if half else 1)
        per = tensor.scales.shape[2] * width
        of = CastScales(
            scales.address,
            tensor.scale_dtype,
            tensor.block,
            (tensor.scales.shape[1] * per if tensor.scales.shape[0] > 1 else 0, per),
        )
        mine = of._replace(address=of.address + first[0] * of.strides[0])
        begin = 16 + int(rng.choice([0, 0, item, 1]))
        boxes = [
            CodeBox(
                base + (first[0] * rows + first[1]) * columns + first[2],
                out.address + begin,
                (count[0], count[1], count[2]),
                (rows * columns, columns),
                (count[1] * wide * item, wide * item),
                mine,
                first[1],
                first[2],
            ),
            CodeBox(base, out.address, (0, 3, 3), (0, 0), (0, 0), of),
            CodeBox(
                base,
                out.address + size + 32,
                tensor.shape,
                (rows * columns, columns),
                (rows * columns * item, columns * item),
                of,
            ),
        ]
        counted = box_dequantise(
            device,
            pack_codes(boxes, tensor.dtype, target),
            blocks=int(rng.choice([0, 1, 5])),
            threads=int(rng.choice([0, 32, 128])),
        )
        got = device.download(out.address, size + 32 + whole)
    box = tuple(slice(f, f + n) for f, n in zip(first, count, strict=True))
    expected = np.full(size + 32 + whole, POISON, np.uint8)
    part = np.ndarray(
        (count[0], count[1], count[2]), want.dtype, expected.data, begin, (count[1] * wide * item, wide * item, item)
    )
    part[...] = want[box]
    expected[size + 32 :] = np.ascontiguousarray(want).view(np.uint8).reshape(-1)
    wrong = np.flatnonzero(got != expected)
    assert not wrong.size, (
        tensor.dtype.name,
        tensor.scale_dtype.name,
        tensor.shape,
        tensor.block,
        first,
        count,
        wrong[:8],
        begin,
        size,
    )
    exact = floats.astype(np.float64)
    assert counted == [
        Counted(_lost(tensor, target, box), 0),
        Counted(0, 0),
        Counted(_lost(tensor, target, (slice(None),) * 3), 0),
    ], exact


def _lost(tensor: Tensor, target: DType, box: tuple[slice, ...]) -> int:
    """Finite codes and scales whose product is infinite as `target`, in another way than the kernel's."""
    out, _ = tensor.values(target)
    top = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}[target.name]
    infinite = (out & np.array((1 << (target.bits - 1)) - 1, out.dtype)) == top
    _, floats = tensor.values(DTYPES["F32"])
    return int((infinite & np.isfinite(floats))[box].sum())


@pytest.mark.parametrize("target", TARGETS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("codes", CODES, ids=lambda dtype: dtype.name)
def test_random_boxes(device: Device, codes: DType, target: DType) -> None:
    for seed in range(24):
        rng = np.random.default_rng((seed, codes.bits, target.bits))
        scale = DTYPES[("F32", "BF16", "F8_E8M0", "U8")[seed % 4]]
        check(device, rng, make(rng, codes, scale, wild=seed % 3 == 0), target)


@pytest.mark.parametrize("target", TARGETS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("codes", CODES, ids=lambda dtype: dtype.name)
def test_every_code_times_every_power_of_two(device: Device, codes: DType, target: DType) -> None:
    """All 256 codes (all pairs of F4) in a row, 255 rows with a scale each; by groups, and by elements from column 1
    on."""
    every = np.arange(256, dtype=np.uint8)
    columns = 512 if codes.bits == 4 else 256
    tensor = Tensor(
        codes, (1, 255, columns), np.tile(every, 255), DTYPES["F8_E8M0"], every[:255].reshape(1, 255, 1), (1, columns)
    )
    for seed in range(3):
        check(device, np.random.default_rng(seed), tensor, target)


def test_a_nan_scale_is_counted(device: Device) -> None:
    for name, bits in (("F8_E8M0", 255), ("BF16", 0xFFC1), ("F32", 0x7F800001)):
        scale = np.array([bits], f"u{DTYPES[name].bits // 8}")
        with (
            device.upload(np.full(40, 0x38, np.uint8)) as codes,
            device.upload(scale) as scales,
            device.alloc(80) as out,
        ):
            box = CodeBox(
                codes.address,
                out.address,
                (1, 1, 40),
                (0, 0),
                (0, 0),
                CastScales(scales.address, DTYPES[name], (1, 40), (0, 0)),
            )
            assert box_dequantise(device, pack_codes([box], DTYPES["F8_E4M3"], DTYPES["BF16"])) == [Counted(0, 40)]
            got = device.download(out.address, 80).view(np.uint16)
        assert ((got & 0x7FFF) == 0x7FC0).all()


def test_what_the_kernel_does_not_know_is_refused(device: Device) -> None:
    box = CodeBox(256, 512, (1, 1, 16), (0, 0), (0, 0), CastScales(1024, DTYPES["F16"], (1, 16), (0, 0)))
    e4m3 = DTYPES["F8_E4M3"]
    bf16 = DTYPES["BF16"]
    with pytest.raises(InternalError, match="cast them to F32 first"):
        pack_codes([box], e4m3, bf16)
    with pytest.raises(InternalError, match="cast them to F32 first"):
        pack_codes([box._replace(scales=CastScales(1026, DTYPES["F32"], (1, 16), (0, 0)))], e4m3, bf16)
    fit = pack_codes([box._replace(scales=CastScales(1024, DTYPES["F32"], (1, 16), (0, 0)))], e4m3, bf16)
    for other in (
        fit._replace(source=kind(DTYPES["F16"])),
        fit._replace(source=kind(DTYPES["F8_E8M0"])),
        fit._replace(target=kind(e4m3)),
    ):
        with pytest.raises(StorageError, match="cudaErrorInvalidValue"):
            box_dequantise(device, other)
    assert box_dequantise(device, pack_codes([], e4m3, bf16)) == []
    assert box_dequantise(device, pack_codes([box._replace(shape=(1, 0, 16))], e4m3, bf16)) == [Counted(0, 0)]


def test_huge_boxes_stay_below_32_bits_in_the_kernel() -> None:
    """5 * 2^30 rows and 2^33 columns in pieces whose counts fit; each piece finds its own scale. No memory is
    touched."""
    e4m3 = DTYPES["F8_E4M3"]
    bf16 = DTYPES["BF16"]
    f32 = DTYPES["F32"]
    tall = 5 << 30
    wide = 1 << 33
    scales = CastScales(1 << 52, f32, (128, 128), (0, 4 * (wide // 128)))
    box = CodeBox(1 << 54, 1 << 56, (1, tall, 256), (0, 256), (0, 512), scales, row=100)
    listed = pack_codes([box], e4m3, bf16)
    rows = 0
    for part, scale in zip(listed.boxes.packed, listed.scales, strict=True):
        assert int(part["src"]) == (1 << 54) + rows * 256 and int(part["dst"]) == (1 << 56) + rows * 512
        assert int(scale["address"]) == scales.address + (100 + rows) // 128 * scales.strides[1]
        assert int(scale["row0"]) == (100 + rows) % 128 and int(scale["row0"]) + int(part["rows"]) < 1 << 32
        rows += int(part["rows"])
    assert rows == tall and set(listed.records) == {0}
    for block in (128, 1 << 40, (1 << 32) + 8):
        box = CodeBox(1 << 54, 1 << 56, (1, 1, wide), (0, 0), (0, 0), scales._replace(block=(1, block)), column=40)
        listed = pack_codes([box], e4m3, bf16)
        columns = 0
        for part, scale in zip(listed.boxes.packed, listed.scales, strict=True):
            n = int(part["run"])
            width = int(scale["width"])
            column0 = int(scale["column0"])
            assert column0 + n < 1 << 32
            assert int(part["src"]) == (1 << 54) + columns and int(part["dst"]) == (1 << 56) + 2 * columns
            first = (int(scale["address"]) - scales.address) // 4
            assert first + column0 // width == (40 + columns) // block
            assert first + (column0 + n - 1) // width == (40 + columns + n - 1) // block
            columns += n
        assert columns == wide
    of = scales._replace(strides=(1 << 10, 4))
    many = pack_codes([CodeBox(1 << 54, 1 << 56, (1 << 20, 1 << 13, 8), (1 << 16, 8), (1 << 17, 16), of)], e4m3, bf16)
    matrices = 0
    for part, scale in zip(many.boxes.packed, many.scales, strict=True):
        assert int(part["src"]) == (1 << 54) + (matrices << 16) and int(part["dst"]) == (1 << 56) + (matrices << 17)
        assert int(scale["address"]) == of.address + (matrices << 10) and part["ext"].tolist()[::2] == [1, 1 << 13]
        matrices += int(part["ext"][1])
    assert len(many.boxes.packed) == 3 and matrices == 1 << 20 and many.boxes.nbytes == 8 << 34


@pytest.mark.parametrize("target", TARGETS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("codes", CODES, ids=lambda dtype: dtype.name)
def test_groups_where_all_lies_on_their_grid(codes: DType, target: DType) -> None:
    """As for casts, and the blocks of the scales must be whole groups too."""
    item = target.bits // 8
    group = 16 // item
    scales = CastScales(1 << 20, DTYPES["BF16"], (3, 4 * group), (64, 16))
    box = CodeBox(
        1 << 30,
        1 << 40,
        (2, 5, 6 * group),
        (64 * group, 8 * group),
        (64 * group * item, 8 * group * item),
        scales,
        7,
        9 * group,
    )
    listed = pack_codes([box], codes, target)
    (packed,), (scale,) = listed.boxes.packed, listed.scales
    assert (
        packed["vlog"] == group.bit_length() - 1
        and packed["divr"] == magic(6)
        and listed.boxes.nbytes == 60 * group * item
    )
    assert packed["ext"].tolist() == [1, 2, 5] and packed["sstr"].tolist() == [0, 64 * group, 8 * group]
    assert (scale["address"], scale["row0"], scale["column0"]) == ((1 << 20) + 2 * 16 + 2 * 2, 1, group)
    assert (scale["width"], scale["kind"]) == (4 * group, kind(DTYPES["BF16"]))
    assert (scale["div_height"], scale["div_width"]) == (magic(3), magic(4 * group))
    half = group // 2
    wide = (box.target_strides[0], box.target_strides[1] + half * item)
    for off in (
        box._replace(source=box.source + half),
        box._replace(target=box.target + half * item),
        box._replace(source_strides=(64 * group + half, 8 * group)),
        box._replace(source_strides=(64 * group, 8 * group + half)),
        box._replace(target_strides=wide),
        box._replace(column=9 * group + half),
        box._replace(scales=scales._replace(block=(3, 4 * group + half))),
        box._replace(shape=(2, 5, 6 * group + half)),
    ):
        packed = pack_codes([off], codes, target).boxes.packed[0]
        assert packed["vlog"] == 0 and packed["divr"] == magic(int(packed["run"])), off


@pytest.mark.parametrize("target", TARGETS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", ["F8_E4M3", "F4"])
def test_groups_go_by_their_width(shim: Device, name: str, target: DType) -> None:
    """Floats are stored 16 bytes at a time where every group has one scale; else one by one."""
    codes = DTYPES[name]
    item = target.bits // 8
    group = 16 // item
    half = codes.bits == 4
    for columns, column, wide in (
        (1024, 0, 128),
        (1024, 16, 32),
        (64, 32, 128),
        (1024, 1, 128),
        (1024, 0, 100),
        (64, 0, 6),
    ):
        with (
            shim.upload(np.full(3 * columns, 0x22, np.uint8)) as source,
            shim.upload(np.ones((3, 400), np.float32)) as scales,
            shim.alloc(3 * columns * item) as out,
        ):
            of = CastScales(scales.address, DTYPES["F32"], (1, wide), (0, 1600))
            base = source.address * 2 if half else source.address
            box = CodeBox(base, out.address, (1, 3, columns), (0, columns), (0, columns * item), of, column=column)
            read = np.ones(3 * columns // (2 if half else 1))
            with Watched(shim, [(source.address, read)], [(out.address, np.ones(3 * columns * item))]) as watched:
                box_dequantise(shim, pack_codes([box], codes, target))
        grouped = column % group == 0 and wide % group == 0
        assert not watched.fault()
        assert {k: n for k, n in watched.stores.items() if n} == (
            {16: 3 * columns // group} if grouped else {item: 3 * columns}
        )


def test_boxes_are_numbered_as_they_were_given() -> None:
    scales = CastScales(1 << 20, DTYPES["F32"], (1, 16), (0, 4))
    box = CodeBox(1 << 30, 1 << 40, (1, 2, 16), (0, 16), (0, 32), scales)
    listed = pack_codes([box, box._replace(shape=(0, 2, 16)), box], DTYPES["F8_E4M3"], DTYPES["BF16"])
    assert listed.records == (0, 2) and listed.given == 3 and listed.boxes.packed["aux"].tolist() == [0, 1]
