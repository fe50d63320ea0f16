"""Codes and scales as floats: every byte with every scale, ragged blocks, any range, against torch and transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.options.reading import Reading
from ckpt_tool.quantised.codecs.choose_codec import make_recipe, transpose_view
from ckpt_tool.quantised.codecs.code_bits import list_byte_values, unpack_rows
from ckpt_tool.quantised.codecs.rectangles import rectangles
from ckpt_tool.quantised.dequantize import small_numbers
from ckpt_tool.quantised.keep_together import found_in, model_kinds
from ckpt_tool.run.compute import cast
from ckpt_tool.run.computed import ComputedTree, Input
from ckpt_tool.sources.opening import open_source

transformers = pytest.importorskip("transformers")


def floats_of(file: Path, config: dict[str, Any] | None = None) -> tuple[ComputedTree, dict[str, LogicalTensor]]:
    """The tree of the floats of a file's quantised weights, and how each is seen."""
    opened = open_source(str(file), Reading())
    tensors = {key.name: opened.catalog.tensors[key] for key in opened.catalog.tensors}
    _, found = found_in(model_kinds(tensors.values()), config)
    assert not found.faults, found.faults
    recipes = [
        make_recipe(
            weight,
            TensorKey(weight.made),
            {name: Input(tensors[name], opened.tree) for name in weight.names},
            small_numbers,
        )
        for weight in found.weights.values()
    ]
    tree = ComputedTree("floats", recipes)
    flips = {weight.made for weight in found.weights.values() if weight.codes == "turned nibbles"}
    seen = {t.key.name: transpose_view(t) if t.key.name in flips else t for t in tree.tensors}
    return tree, seen


def whole(tree: ComputedTree, tensor: LogicalTensor) -> np.ndarray[Any, Any]:
    array = tensor.chunks[0].array
    line = np.frombuffer(tree.read(array.path, 0, 4 * tensor.numel), "<f4")
    if array.strides is None:
        return line.reshape(tensor.shape)
    return np.lib.stride_tricks.as_strided(line, tensor.shape, [4 * step for step in array.strides])


def same(found: np.ndarray[Any, Any], want: torch.Tensor) -> None:
    """Bit for bit, whatever the payload of a NaN; then rounded to bf16 as the executor does."""
    theirs = want.float().numpy()
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found[~nan].view(np.uint32), theirs[~nan].view(np.uint32))


def as_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    line = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    return np.frombuffer(cast(line, DTYPES["F32"], DTYPES["BF16"])[0], np.uint16)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_every_byte_with_many_scales(dtype: torch.dtype, tmp_path: Path) -> None:
    """All 256 bytes times every 16-bit scale of one sign but NaN, in fp32 and rounded to bf16."""
    scales = torch.arange(0, 0x7F80, 1 if dtype == torch.float8_e4m3fn else 61, dtype=torch.int16).view(torch.bfloat16)
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(scales), 1).view(dtype)
    save_file({"m.weight": codes, "m.weight_scale": scales.reshape(-1, 1).contiguous()}, tmp_path / "w.safetensors")
    tree, seen = floats_of(tmp_path / "w.safetensors")
    found = whole(tree, seen["m.weight"])
    want = codes.float() * scales.float().reshape(-1, 1)
    same(found, want)
    theirs = want.to(torch.bfloat16).reshape(-1)
    kept = ~torch.isnan(theirs).numpy()
    assert np.array_equal(as_bf16(found)[kept], theirs.view(torch.uint16).numpy()[kept])


def test_every_half_byte_with_every_power_of_two(tmp_path: Path) -> None:
    """MXFP4 as transformers' convert_moe_packed_tensors makes it of all bytes and all scales but NaN."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).repeat(255, 1, 2, 1)
    scales = torch.arange(255, dtype=torch.uint8).reshape(255, 1, 1).repeat(1, 16, 2).contiguous()
    save_file({"e.w_blocks": blocks, "e.w_scales": scales}, tmp_path / "w.safetensors")
    tree, seen = floats_of(tmp_path / "w.safetensors")
    found = whole(tree, seen["e.w"])
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert found.shape == tuple(want.shape) == (255, 64, 16)
    assert np.array_equal(as_bf16(found), want.contiguous().reshape(-1).view(torch.uint16).numpy())
    same(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


def test_the_table_of_powers_is_that_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for dtype in (DTYPES["F8_E8M0"], DTYPES["U8"]):
        same(list_byte_values(dtype), every.view(torch.float8_e8m0fnu).float())


def deepseek(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """`weight_dequant` of DeepSeek V3, element by element: row and column of the block by division."""
    rows = torch.arange(codes.shape[-2]) // block
    columns = torch.arange(codes.shape[-1]) // block
    return codes.float() * scales[..., rows[:, None], columns[None, :]]


@pytest.mark.parametrize("shape", [(300, 200), (1, 1), (129, 257), (128, 128), (127, 640), (3, 300, 200), (2, 5, 129)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_blocks_that_do_not_divide(shape: tuple[int, ...], kind: torch.dtype, tmp_path: Path) -> None:
    codes = (torch.arange(int(np.prod(shape))) % 251).to(torch.uint8).reshape(shape).view(torch.float8_e4m3fn)
    grid = (*shape[:-2], ceil_div(shape[-2], 128), ceil_div(shape[-1], 128))
    scales = (1 + torch.arange(int(np.prod(grid)))).reshape(grid).to(kind) / 7
    save_file({"w": codes, "w_scale_inv": scales.contiguous()}, tmp_path / "w.safetensors")
    tree, seen = floats_of(
        tmp_path / "w.safetensors", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    )
    same(whole(tree, seen["w"]), deepseek(codes, scales.float(), 128))


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("packed", [False, True])
def test_grids_of_any_shape_as_transformers_reads_them(scale: torch.dtype, packed: bool, tmp_path: Path) -> None:
    """Blocks told by the grid alone; codes of four bits in int8 (DeepSeek V4); scales that are bytes."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = (torch.arange(2 * 64 * 96) * 7 % 241).to(torch.uint8).reshape(2, 64, 96)
    codes = codes.view(torch.int8 if packed else torch.float8_e4m3fn)
    grid = (2, 64, 6) if packed else (2, 4, 3)
    bytes_ = (120 + torch.arange(int(np.prod(grid))) % 9).to(torch.uint8).reshape(grid)
    scales = (
        bytes_
        if scale == torch.uint8
        else bytes_.view(torch.float8_e8m0fnu)
        if scale == torch.float8_e8m0fnu
        else (bytes_.float() / 113).to(scale)
    )
    save_file({"w": codes, "w_scale_inv": scales}, tmp_path / "w.safetensors")
    tree, seen = floats_of(tmp_path / "w.safetensors")
    want = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    same(whole(tree, seen["w"]), want)


def test_f4_is_two_values_a_byte(tmp_path: Path) -> None:
    """safetensors counts the values of F4; torch and NVIDIA's ModelOpt count bytes."""
    codes = np.arange(256, dtype=np.uint8)
    scales = np.arange(1, 9, dtype=np.float32)
    header = {
        "w": {"dtype": "F4", "shape": [8, 64], "data_offsets": [0, 256]},
        "w_scale": {"dtype": "F32", "shape": [8, 1], "data_offsets": [256, 288]},
    }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + codes.tobytes() + scales.tobytes())
    tree, seen = floats_of(tmp_path / "w.safetensors")
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    want = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(8, 64) * scales[:, None]
    assert np.array_equal(whole(tree, seen["w"]).view(np.uint32), want.view(np.uint32))


def test_modelopt_multiplies_by_a_second_scale(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    scales = (8 + torch.arange(32)).to(torch.uint8).reshape(8, 4).view(torch.float8_e4m3fn)
    save_file({"w": codes, "w_scale": scales, "w_scale_2": torch.tensor(0.37)}, tmp_path / "w.safetensors")
    tree, seen = floats_of(tmp_path / "w.safetensors")
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # its own: no -0
    values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).reshape(8, 64)
    same(whole(tree, seen["w"]), values * (scales.float() * torch.tensor(0.37)).repeat_interleave(16, 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.data())
def test_codes_of_any_width(bits: int, count: int, data: st.DataObject) -> None:
    """Against one large integer a row."""
    values = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=count, max_size=count))
    words = -(-count * bits // 32)
    line = sum(value << (k * bits) for k, value in enumerate(values)).to_bytes(4 * words, "little")
    first = data.draw(st.integers(0, count - 1))
    stream = np.frombuffer(line, np.uint8).reshape(1, -1)
    found = unpack_rows(stream, bits, first * bits, count - first, lowest=-(1 << (bits - 1)))
    assert found[0].tolist() == [value - (1 << (bits - 1)) for value in values[first:]]


CASES = Path(__file__).parents[2] / "fixtures" / "quantized"


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir() if path.is_dir()))
def test_any_range_is_a_part_of_the_whole(case: str) -> None:
    config = json.loads((CASES / case / "config.json").read_text())
    tree, _ = floats_of(CASES / case / "model.safetensors", config)
    rng = np.random.default_rng(3)
    for tensor in tree.tensors:
        path = tensor.chunks[0].array.path
        line = tree.read(tensor.chunks[0].array.path, 0, 4 * tensor.numel)
        for start, n in zip(rng.integers(0, tensor.numel, 12), rng.integers(1, 400, 12), strict=True):
            stop = min(int(start + n), tensor.numel)
            assert tree.read(path, 4 * int(start), 4 * (stop - int(start))) == line[4 * start : 4 * stop], (
                path,
                start,
                n,
            )
    tree.close()


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 60))
def test_rectangles_cover_the_range_in_order(start: int, count: int, columns: int) -> None:
    seen = [
        r * columns + c
        for low, high, left, right in rectangles(start, start + count, columns)
        for r in range(low, high)
        for c in range(left, right)
    ]
    assert seen == list(range(start, start + count))
