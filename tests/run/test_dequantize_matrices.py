"""GPTQ and AWQ as floats: against GPTQModel's own kernel, and against a plain decode of what is packed here.

`fixtures/quantized-inputs/gptq_int4` was made by GPTQModel 7.7.0 on a CPU; its truth are the floats of its TorchLinear.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run

FIXTURE = Path(__file__).parents[2] / "fixtures/quantized-inputs/gptq_int4"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def streams(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each row of codes as little-endian words, bit by bit."""
    bits_of = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(bits_of.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little").view(np.int32)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """AWQ: eight columns a word, in its own order."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, column in enumerate(AWQ_ORDER):
        words |= codes[:, column::8].astype(np.uint32) << (4 * place)
    return words.view(np.int32)


def packed(folder: Path, method: str, bits: int, *, act: bool = False, **config: object) -> np.ndarray:
    """A model of one matrix of 96 inputs and 64 outputs in groups of 32; returns its floats, (outputs, inputs)."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (96, 64))
    zeros = rng.integers(0, 1 << bits, (3, 64))
    scales = rng.normal(size=(3, 64)).astype(np.float16)
    groups = (rng.permutation(96) if act else np.arange(96)) // 32
    tensors = {"m.scales": scales, "norm.weight": np.ones(4, np.float16)}
    if method == "awq":
        tensors |= {"m.qweight": nibbles(codes), "m.qzeros": nibbles(zeros)}
    else:
        less = zeros if config.get("checkpoint_format") == "gptq_v2" else (zeros - 1) % (1 << bits)
        tensors |= {"m.qweight": streams(codes.T, bits).T.copy(), "m.qzeros": streams(less, bits)}
        tensors["m.g_idx"] = groups.astype(np.int32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    stated = {"quant_method": method, "bits": bits, "group_size": 32, "desc_act": act, **config}
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", "quantization_config": stated}))
    return (scales.astype(np.float32)[groups] * (codes - zeros[groups]).astype(np.float32)).T


def test_it_is_what_gptqmodel_computes_with(tmp_path: Path) -> None:
    words = ["--dequantize", "--dtype", "fp16", "-q"]
    assert run(["convert", str(FIXTURE), str(tmp_path / "out"), "--to", "safetensors", *words]) == 0
    made, truth = load_file(tmp_path / "out/model.safetensors"), load_file(f"{FIXTURE}.truth.safetensors")
    assert {f"model/{name}" for name in made} == truth.keys()
    assert all(np.array_equal(value, truth[f"model/{name}"]) for name, value in made.items())
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()


@pytest.mark.parametrize(
    ("method", "bits", "config"),
    [("gptq", bits, {}) for bits in (2, 3, 4, 8)]
    + [("gptq", 4, {"act": True}), ("gptq", 4, {"checkpoint_format": "gptq_v2"}), ("awq", 4, {"version": "gemm"})],
    ids=str,
)
def test_every_layout_is_a_plain_decode(method: str, bits: int, config: dict[str, object], tmp_path: Path) -> None:
    want = packed(tmp_path / "in", method, bits, **config)
    words = ["--dequantize", "--dtype", "fp32", "-q"]
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "safetensors", *words]) == 0
    made = load_file(tmp_path / "out/model.safetensors")
    assert made.keys() == {"m.weight", "norm.weight"} and np.array_equal(made["m.weight"], want)


def test_floats_of_it_are_a_model_that_megatron_takes(tmp_path: Path) -> None:
    hub, ranks = tmp_path / "hub", tmp_path / "ranks"
    assert run(["convert", str(FIXTURE), str(hub), "--to", "safetensors", "--dequantize", "-q"]) == 0
    words = ["--to", "megatron-dist", "--tp", "2", "--dequantize", "-q"]
    assert run(["convert", str(FIXTURE), str(ranks), *words]) == 0
    assert run(["convert", str(ranks), str(tmp_path / "back"), "--to", "safetensors", "-q"]) == 0
    assert run(["diff", str(hub), str(tmp_path / "back"), "-q"]) == 0


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("m.g_idx", lambda value: value + 1, "E1468"),
        ("m.scales", lambda value: value[:, :32].copy(), "E1461"),
        ("m.qzeros", None, "E1460"),
    ],
)
def test_parts_that_do_not_belong_together(name: str, change, code: str, tmp_path: Path, capfd) -> None:
    packed(tmp_path / "in", "gptq", 4)
    tensors = load_file(tmp_path / "in/model.safetensors")
    tensors = {key: change(value) if key == name else value for key, value in tensors.items() if change or key != name}
    save_file(tensors, tmp_path / "in/model.safetensors")
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "dcp", "--dequantize", "--json"]) == 3
    assert json.loads(capfd.readouterr().err)["error"]["code"] == code and not (tmp_path / "out").exists()


def test_a_layout_that_nobody_here_knows(tmp_path: Path, capfd) -> None:
    packed(tmp_path / "in", "gptq", 4, checkpoint_format="marlin")
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "dcp", "--dequantize", "--json"]) == 2
    assert json.loads(capfd.readouterr().err)["error"]["code"] == "E1464"


def test_codes_under_the_names_of_a_family_are_one_cause(tmp_path: Path, capfd) -> None:
    assert run(["convert", str(FIXTURE), str(tmp_path / "out"), "--to", "megatron-dist", "--json"]) == 3
    error = json.loads(capfd.readouterr().err)["error"]
    assert error["code"] == "E1486" and "gptq" in error["message"] and not error.get("faults")
    assert "--dequantize" in error["hint"]
