"""Quantised models whose tensors have other names, or lie otherwise, than on the hub (`fixtures/quantized-layouts`),
and what `ckpt audit` says of quantised models of every scheme."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.cli import run
from ckpt_tool.quantised.layer_choice import is_conv1d

FIXTURES = Path(__file__).parents[2] / "fixtures"
LAYOUTS = FIXTURES / "quantized-layouts"
CASES = sorted(path.name for path in LAYOUTS.iterdir() if path.is_dir())
QUANTISED = [
    path
    for folder in ("quantized", "quantized-inputs", "quantized-families", "quantized-layouts")
    for path in sorted((FIXTURES / folder).iterdir())
    if path.is_dir()
]


def call(*words):
    return run([*map(str, words), "-q", *(["--no-fsync"] if words[0] == "convert" else [])])


@pytest.mark.parametrize("case", CASES)
def test_the_floats_have_the_hub_s_names_and_layout(case, tmp_path) -> None:
    """bf16, but for what bitsandbytes makes of int8 in fp32, which is rounded once here and in the truth."""
    assert call("convert", LAYOUTS / case, tmp_path / "out", "--to", "safetensors", "--dequantize") == 0
    have = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(LAYOUTS / f"{case}.truth.safetensors")
    want = {key.removeprefix("model/"): value for key, value in truth.items()}
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].shape == tensor.shape and torch.equal(have[name].float(), tensor.float()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization" not in config and "quantization_config" not in config


@pytest.mark.parametrize("case", CASES)
def test_unasked_codes_keep_their_names_and_bytes(case, tmp_path) -> None:
    assert call("convert", LAYOUTS / case, tmp_path / "out", "--to", "safetensors") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (LAYOUTS / case, tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("case", CASES)
def test_into_a_training_format(case, tmp_path) -> None:
    assert call("convert", LAYOUTS / case, tmp_path / "hub", "--to", "safetensors", "--dequantize") == 0
    assert call("convert", LAYOUTS / case, tmp_path / "job", "--to", "megatron-dist", "--dequantize") == 0
    assert call("diff", tmp_path / "hub", tmp_path / "job", "--dialect", "hf") == 0


def test_floats_of_mlx_get_the_hub_s_names_too(tmp_path) -> None:
    """A model that mlx-lm saved without quantising it: the same tensors, of which nothing but names says so."""
    case = LAYOUTS / "mlx_mixtral"
    assert call("convert", case, tmp_path / "mlx", "--to", "safetensors", "--dequantize", "--dialect", "keep") == 0
    names = load_file(tmp_path / "mlx" / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.switch_mlp.up_proj.weight" in names
    assert call("convert", tmp_path / "mlx", tmp_path / "out", "--to", "safetensors") == 0
    assert call("convert", case, tmp_path / "want", "--to", "safetensors", "--dequantize") == 0
    assert call("diff", tmp_path / "want", tmp_path / "out") == 0


def test_a_name_that_nobody_knows_is_no_code_once_all_are_floats(tmp_path, capsys) -> None:
    shutil.copytree(LAYOUTS / "mlx_qwen2_moe", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.mlp.odd.weight": torch.zeros(2, 2)}, file)
    words = ("convert", tmp_path / "in", tmp_path / "out", "--to", "megatron-dist")
    assert call(*words) == 3
    assert "E1486" in (said := capsys.readouterr().err) and "--dequantize" in said
    assert call(*words, "--dequantize") == 3
    assert "E1485" in (said := capsys.readouterr().err) and "--dequantize" not in said and "mlp.odd.weight" in said


@pytest.mark.parametrize("path", QUANTISED, ids=lambda path: path.name)
def test_an_audit_takes_codes_and_scales_for_the_weights_that_they_are(path, capsys) -> None:
    assert run(["audit", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_an_audit_sees_a_weight_that_is_gone(tmp_path, capsys) -> None:
    shutil.copytree(LAYOUTS / "mlx_mixtral", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    gone = "model.layers.1.self_attn.k_proj"
    save_file({name: each for name, each in load_file(file).items() if not name.startswith(f"{gone}.")}, file)
    assert run(["audit", str(tmp_path / "in"), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert any(each["code"] == "A0101" and gone in each["message"] for each in findings)


def test_weights_of_gpt2_alone_lie_turned() -> None:
    assert is_conv1d("transformer.h.0.attn.c_proj.weight", "gpt2")
    assert not is_conv1d("transformer.h.0.attn.c_proj.weight", "gpt_bigcode")  # nn.Linear under the same names
    assert not is_conv1d("transformer.wte.weight", "gpt2")
