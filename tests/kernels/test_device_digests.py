"""The digest kernel against xxhash, and digests of tensors on the device against `run.digest`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xxhash
from box_cases import Watched

from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device import kernels
from ckpt_tool.device.descriptors import DESC, PackedDescriptors
from ckpt_tool.device.digests import DigestLine, PlacedTensor, digests, leaf_hashes, pack_lines
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InternalError, StorageError
from ckpt_tool.plan.copy import Region, box_region
from ckpt_tool.run.digest import LEAF, LeafStream, digest

LENGTHS = [*range(1, 260), *range(1000, 1050, 7), 1024, 1025, 1088, 1089, 2047, 2048, 2049, 4096, 4097, 5000, 16 << 10]
LANES = (4, 8, 16, 32)


def values(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def hashed(
    device: Device, lines: PackedDescriptors, out: int, lanes: int = 0, blocks: int = 0, threads: int = 0
) -> bytes:
    kernels.digest(device, lines, lanes=lanes, blocks=blocks, threads=threads)
    return device.download(out, lines.tiles * 16).tobytes()


@pytest.mark.parametrize("lanes", LANES)
def test_every_length_class_at_many_alignments(device: Device, lanes: int) -> None:
    data = values(64 << 10)
    with device.upload(data) as memory, device.alloc(16 * len(LENGTHS)) as out:
        for shift in (0, 1, 2, 4, 7, 8, 15):
            lines = [DigestLine(memory.address + shift, length) for length in LENGTHS]
            got = hashed(device, pack_lines(lines, out.address), out.address, lanes)
            for k, length in enumerate(LENGTHS):
                want = xxhash.xxh3_128_digest(data[shift : shift + length])
                assert got[k * 16 : k * 16 + 16] == want, f"{length} bytes at {shift}, {lanes} lanes"


def test_the_hash_of_nothing(device: Device) -> None:
    with device.alloc(16) as out:
        row = np.zeros(1, DESC)
        row["src"], row["dst"], row["rows"], row["tiles_per_row"] = out.address, out.address, 1, 1
        assert hashed(device, PackedDescriptors(row, 1, 0), out.address) == xxhash.xxh3_128_digest(b"")


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("shift", [0, 3, 8])
def test_leaves_of_a_long_line_beside_short_ones(device: Device, lanes: int, shift: int) -> None:
    data = values(2 * LEAF + 4000)
    with device.upload(data) as memory, device.alloc(16 * 30) as out:
        lengths = [5, 2 * LEAF + 1077, 200, LEAF, 1300, LEAF - 1, 16, LEAF + 17, 0, 241]
        lines = [DigestLine(memory.address + shift, length) for length in lengths]
        packed = pack_lines(lines, out.address)
        got = hashed(device, packed, out.address, lanes, blocks=2, threads=64)
    want = b""
    for length in lengths:
        part = data[shift : shift + length]
        want += b"".join(xxhash.xxh3_128_digest(part[at : at + LEAF]) for at in range(0, length, LEAF))
    assert got == want
    assert packed.tiles == sum(line.leaves for line in lines)


def test_pieces_that_begin_inside_a_leaf(device: Device) -> None:
    data = values(3 * LEAF)
    spans = [(100, 50), (LEAF - 5, 5), (LEAF - 5, 6), (77, LEAF), (LEAF // 2, 2 * LEAF), (LEAF, LEAF), (9, 0)]
    with device.upload(data) as memory:
        got = leaf_hashes(device, [DigestLine(memory.address + at, size, at) for at, size in spans])
    want = b""
    for at, size in spans:
        stream = LeafStream(at, at + size, len(data), exact=True)
        stream.feed(at, data.data[at : at + size])
        want += bytes(stream.leaves)
    assert got == want


def test_what_lies_beside_a_line_is_not_read_into_it(device: Device) -> None:
    quiet = np.zeros(9000, np.uint8)
    loud = np.full(9000, 0xFF, np.uint8)
    for data in (quiet, loud):
        data[1001:6001] = values(5000)
    hashes = []
    for data in (quiet, loud):
        with device.upload(data) as memory:
            hashes.append(leaf_hashes(device, [DigestLine(memory.address + 1001, 5000)]))
    assert hashes[0] == hashes[1] == xxhash.xxh3_128_digest(quiet[1001:6001])


def test_leaves_far_beyond_32_bits(device: Device) -> None:
    """The list says that the line began 2^40 leaves before: 2^58 bytes of which only the last are there."""
    data = values(LEAF + 3000)
    before = 1 << 40
    with device.upload(data) as memory, device.alloc(32) as out:
        for lanes in LANES:
            lines = pack_lines([DigestLine(memory.address, len(data))], out.address)
            row = lines.packed
            row["tile0"] = (1 << 64) - before
            row["src"] -= np.uint64(before * LEAF)
            row["run"] += np.uint64(before * LEAF)
            row["dst"] = np.uint64((out.address - before * 16) % (1 << 64))
            got = hashed(device, lines, out.address, lanes)
            assert got == xxhash.xxh3_128_digest(data[:LEAF]) + xxhash.xxh3_128_digest(data[LEAF:])


@pytest.mark.parametrize("lanes", LANES)
def test_nothing_is_read_outside_a_line(shim: Device, lanes: int) -> None:
    """Lines whose last whole KiB ends so near the end that a neighbour of its last vector lies outside, at every
    alignment."""
    data = values(8192)
    with shim.upload(data) as memory, shim.alloc(16) as out:
        for shift in range(1, 17):
            for length in (
                1,
                17,
                129,
                241,
                1024,
                1025,
                1025 + shift,
                1040 - shift,
                1039,
                1040,
                1041,
                2049,
                4097 + shift,
                5121,
            ):
                legal = np.zeros(8192, np.uint8)
                legal[shift : shift + length] = 1
                line = pack_lines([DigestLine(memory.address + shift, length)], out.address)
                with Watched(shim, [(memory.address, legal)], [(out.address, np.ones(16, np.uint8))]) as watched:
                    kernels.digest(shim, line, lanes=lanes)
                assert watched.fault() == "", f"{length} bytes at {shift}"
                assert shim.download(out.address, 16).tobytes() == xxhash.xxh3_128_digest(data[shift : shift + length])


def test_no_lines_launch_nothing_and_wrong_calls_are_refused(device: Device) -> None:
    assert leaf_hashes(device, []) == b""
    assert leaf_hashes(device, [DigestLine(0, 0)]) == b""
    with device.alloc(64) as memory:
        with pytest.raises(InternalError) as error:
            pack_lines([DigestLine(memory.address, 4)], memory.address + 8)
        assert error.value.code == "E1576"
        line = pack_lines([DigestLine(memory.address, 4)], memory.address + 16)
        for wrong in ({"lanes": 5}, {"lanes": 64}, {"threads": 33}, {"threads": 512}, {"lanes": -4}, {"threads": -32}):
            with pytest.raises(StorageError):
                kernels.digest(device, line, **wrong)


# -- tensors ----------------------------------------------------------------------------------------------------------


def whole(dtype: str, shape: tuple[int, ...], address: int, offset: int = 0) -> PlacedTensor:
    kind = DTYPES[dtype]
    region = Region(
        0, offset, 0, shape, tuple(s * kind.bits // 8 for s in contiguous_strides(shape)), contiguous_strides(shape)
    )
    flat = Region(0, offset, 0, (math.prod(shape),), (kind.bits // 8,), (1,))
    return PlacedTensor(kind, shape, (flat if 0 not in shape and shape else region,), (address,))


def test_whole_tensors_have_the_digest_of_verify(device: Device) -> None:
    data = values(LEAF + 100_000)
    cases = [
        ("F32", (2, 3)),
        ("BF16", (LEAF // 2 + 7,)),
        ("U8", ()),
        ("F64", (0, 4)),
        ("I16", (1,)),
        ("F32", (90, 100)),
    ]
    with device.upload(data) as memory:
        placed = [whole(dtype, shape, memory.address, 8) for dtype, shape in cases]
        got = digests(device, placed)
    for (dtype, shape), tensor, found in zip(cases, placed, got, strict=True):
        assert found == digest(dtype, shape, data[8 : 8 + tensor.nbytes].tobytes()), (dtype, shape)


def shards(shape: tuple[int, ...], dim: int, ways: int, item: int) -> list[Box]:
    size = ceil_div(shape[dim], ways)
    out = []
    for k in range(ways):
        offset = [0] * len(shape)
        extent = list(shape)
        offset[dim], extent[dim] = min(k * size, shape[dim]), max(0, min(size, shape[dim] - k * size))
        out.append(Box(tuple(offset), tuple(extent)))
    return [box for box in out if box.numel]


@pytest.mark.parametrize("window", [LEAF, 3 * LEAF, 1 << 30])
def test_tensors_in_boxes_are_laid_out_first(device: Device, window: int) -> None:
    rng = np.random.default_rng(5)
    shapes = [(64, 96), (3, 5, 7), (17,), (400, 500), (2, 130, 600), (1, 9)]
    placed = []
    want = []
    memories = []
    for n, shape in enumerate(shapes):
        array = (np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(2654435761 + n)).reshape(shape)
        regions = []
        addresses = []
        for k, box in enumerate(shards(shape, int(rng.integers(len(shape))), int(rng.integers(2, 5)), 4)):
            part = array[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
            offset = int(rng.integers(0, 9)) * 4
            memories.append(
                device.upload(
                    np.concatenate([np.zeros(offset, np.uint8), np.ascontiguousarray(part).view(np.uint8).ravel()])
                )
            )
            addresses.append(memories[-1].address)
            regions += [box_region(shape, box, 4, k, offset), box_region(shape, box, 4, k, offset, replica=1)]
        placed.append(PlacedTensor(DTYPES["U32"], shape, tuple(regions), tuple(addresses)))
        want.append(digest("U32", shape, array.tobytes()))
    got = digests(device, placed, window=window)
    for memory in memories:
        memory.close()
    assert got == want


@pytest.mark.parametrize("name", ["U8", "U16", "F32", "F64", "C128"])
def test_a_transposed_tensor_has_the_digest_of_its_line(device: Device, name: str) -> None:
    kind = DTYPES[name]
    item = kind.bits // 8
    stored = (
        np.arange(70 * 33, dtype=np.uint16).reshape(70, 33).astype(kind.numpy)
    )  # holds a (33, 70) tensor by columns
    region = box_region((33, 70), Box((0, 0), (33, 70)), item, 0, 0, strides=(1, 33))
    with device.upload(stored) as memory:
        got = digests(device, [PlacedTensor(kind, (33, 70), (region,), (memory.address,))])
    assert got == [digest(name, (33, 70), stored.T.tobytes())]


def test_regions_that_leave_a_gap_are_an_error(device: Device) -> None:
    region = box_region((4, 4), Box((0, 0), (4, 3)), 4, 0, 0)
    with device.alloc(64) as memory, pytest.raises(InternalError) as error:
        digests(device, [PlacedTensor(DTYPES["F32"], (4, 4), (region,), (memory.address,))])
    assert error.value.code == "E1577"
