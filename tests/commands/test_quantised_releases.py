"""Newer families as released, quantised (`fixtures/quantized-families`): as bytes, and as floats in Megatron."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, Incomplete
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Comparison
from ckpt_tool.options.writing import Writing

ml_dtypes = pytest.importorskip("ml_dtypes")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "quantized-families"
CASES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def run(source: Path, out: Path, **writing: Any) -> dict[str, Any]:
    return convert(
        str(source), str(out), Reading(), Writing(**{"to": "safetensors", "fsync": False, **writing}), Silent()
    )


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes, along the last dim."""
    return tensor.contiguous().reshape(*(tensor.shape or (1,))).view(torch.uint8).numpy()


def decoded(name: str, stored: dict[str, torch.Tensor]) -> np.ndarray:
    """The floats of a weight, element by element of its definition: a code's value times its group's scale, in fp32."""
    packed = f"{name}_packed"
    module = name.removesuffix("weight")
    codes = stored.get(packed, stored.get(name))
    scales = next(stored[each] for each in (f"{name}_scale", f"{name}_scale_inv", f"{module}scale") if each in stored)
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = np.exp2(raw(scales).astype(np.float32) - 127)
    else:
        scale = scales.float().numpy()
    if codes.dtype == torch.int32:  # eight of four bits, the lowest first
        words = codes.numpy().view(np.uint32)
        values = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.float32) - 8
        values = values.reshape(len(words), -1)
        assert stored[f"{name}_shape"].tolist() == list(values.shape)
    elif codes.dtype == torch.float8_e4m3fn:
        values = raw(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:  # two of E2M1
        halves = np.stack([raw(codes) & 15, raw(codes) >> 4], -1).reshape(len(codes), -1)
        values = E2M1[halves & 7] * np.where(halves & 8, np.float32(-1), np.float32(1))
    if f"{name}_scale_2" in stored:
        # -0 is 0
        values = values + np.float32(0)
        scale = scale * stored[f"{name}_scale_2"].numpy()
    grid = scale.reshape(scale.shape if scale.ndim == 2 else (1, 1))
    spread = np.kron(grid, np.ones([n // k for n, k in zip(values.shape, grid.shape, strict=True)], np.float32))
    return (values * spread).astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("case", CASES)
def test_the_floats_are_those_of_the_libraries_and_of_the_definition(case: str, tmp_path: Path) -> None:
    stored = load_file(FIXTURES / case / "model.safetensors")
    truth = load_file(FIXTURES / f"{case}.truth.safetensors")
    notes = run(FIXTURES / case, tmp_path / "out", dequantize=True)["notes"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert any(f"{len(truth)} quantised weights are written as BF16" in note for note in notes)
    assert found.keys() == {name for name in stored if not is_part(name, truth)} | truth.keys()
    for name, tensor in found.items():
        want = truth.get(name, stored.get(name))
        assert tensor.dtype == want.dtype and np.array_equal(raw(tensor), raw(want)), name
    for name in truth:
        np.testing.assert_array_equal(raw(found[name]).view(np.uint16), decoded(name, stored), err_msg=name)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


def is_part(name: str, weights: dict[str, torch.Tensor]) -> bool:
    """Is it one of the tensors that a weight is stored in?"""
    fronts = (each.removesuffix("weight") for each in weights)
    ends = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_shape",
        "scale",
        "input_scale",
    )
    return any(name.startswith(front) and name.removeprefix(front) in ends for front in fronts)


@pytest.mark.parametrize("case", CASES)
def test_unasked_every_byte_stays_over_other_files(case: str, tmp_path: Path) -> None:
    run(FIXTURES / case, tmp_path / "out", max_shard_size=30_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    stored = load_file(FIXTURES / case / "model.safetensors")
    assert len(files) > 1 and found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert found[name].dtype == tensor.dtype and np.array_equal(raw(found[name]), raw(tensor)), name
    assert (tmp_path / "out" / "config.json").read_bytes() == (FIXTURES / case / "config.json").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_floats_on_the_way_to_megatron(case: str, tmp_path: Path) -> None:
    """The same bytes as of the model whose weights are the libraries' floats."""
    stored = load_file(FIXTURES / case / "model.safetensors")
    truth = load_file(FIXTURES / f"{case}.truth.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if not is_part(name, truth)} | truth
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((FIXTURES / case / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    degrees = {"tp": 1 if case == "deepseek_v4" else 2, "ep": 2, "etp": 1}  # of that core takes one rank alone
    run(FIXTURES / case, tmp_path / "a", to="megatron-dist", dequantize=True, degrees=degrees)
    run(tmp_path / "plain", tmp_path / "b", to="megatron-dist", degrees=degrees)
    pair = str(tmp_path / "a"), str(tmp_path / "b")
    assert diff(*pair, Reading(), Comparison(), progress=Silent())["equal"]


@pytest.mark.parametrize("case", CASES)
def test_codes_are_not_laid_out_otherwise(case: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as caught:
        run(FIXTURES / case, tmp_path / "out", to="megatron-dist")
    assert caught.value.code == "E1486" and "--dequantize" in (caught.value.hint or ""), caught.value


@pytest.mark.parametrize("case", CASES)
def test_a_scale_that_is_lost_is_named(case: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / case, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name in stored if name.endswith((".weight_scale", ".weight_scale_inv", ".wo_a.scale")))
    del stored[name]
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(Incomplete) as caught:
        run(tmp_path / "model", tmp_path / "out", dequantize=True)
    assert caught.value.code == "E1460" and name.rpartition(".")[0] in str(caught.value)
