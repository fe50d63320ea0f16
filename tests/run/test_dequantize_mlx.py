"""MLX as floats where parts are missing or a config says what does not fit. That the floats are its own:
`commands/test_dequantized_weights.py`, on `fixtures/quantized/mlx_*`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures/quantized"
FIXTURE = FIXTURES / "mlx_4bit"
MODULE = "model.layers.0.mlp.down_proj"
Tensors = dict[str, np.ndarray[Any, np.dtype[Any]]]
Change = Callable[[Tensors, dict[str, Any]], object]


def stated(**more: Any) -> Change:
    return lambda tensors, config: config["quantization"].update(more)


def part(name: str, value: Callable[[Any], Any]) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{MODULE}.{name}"] = np.ascontiguousarray(value(tensors[f"{MODULE}.{name}"]))

    return change


HOSTILE: list[tuple[Change, str, int]] = [
    (lambda tensors, config: tensors.pop(f"{MODULE}.scales"), "E1460", 3),
    (lambda tensors, config: tensors.pop(f"{MODULE}.biases"), "E1460", 3),
    (part("scales", lambda a: a[:-1]), "E1461", 3),
    (part("biases", lambda a: a.astype(np.float32)), "E1461", 3),
    (part("weight", lambda a: a[:, :-1]), "E1461", 3),
    (part("weight", lambda a: a[:0]), "E1461", 3),
    (part("weight", lambda a: a.reshape(-1)), "E1461", 3),
    (part("scales", lambda a: a * ml_dtypes.bfloat16(np.nan)), "E1463", 3),
    (part("biases", lambda a: a * ml_dtypes.bfloat16(np.nan)), "E1463", 3),
    (stated(group_size=48), "E1461", 3),
    (stated(bits=8), "E1461", 3),
    (stated(bits=7), "E1464", 2),
    (stated(bits="4"), "E1464", 2),
    (stated(group_size=0), "E1464", 2),
    (stated(group_size=True), "E1464", 2),
    (stated(mode="mxfp4"), "E1461", 3),
    (stated(mode="mxfp4", group_size=64), "E1464", 2),
    (stated(mode="nvfp4"), "E1464", 2),
    (stated(mode="mxfp6"), "E1464", 2),
    (stated(mode=["affine"]), "E1464", 2),
    (stated(global_scale=True), "E1464", 2),
    (stated(**{MODULE: {"mode": "nvfp4"}}), "E1464", 2),
    (stated(**{MODULE: {"mode": "nvfp4", "group_size": 16, "bits": 4}}), "E1461", 3),
    (stated(**{MODULE: {"bits": 0}}), "E1464", 2),
    (stated(**{MODULE: {"bits": 8, "group_size": 64}}), "E1461", 3),
    (lambda tensors, config: config.clear(), "E1464", 2),
]

NUMBER = np.array([1], np.float32)
OF_MODES: list[tuple[str, Change, str, int]] = [
    ("mxfp8", lambda tensors, config: tensors.pop(f"{MODULE}.scales"), "E1460", 3),
    ("mxfp8", lambda tensors, config: tensors.update({f"{MODULE}.biases": NUMBER}), "E1461", 3),
    ("nvfp4", lambda tensors, config: tensors.update({f"{MODULE}.global_scale": NUMBER}), "E1461", 3),
    ("mxfp8", part("scales", lambda a: a[:, :-1]), "E1461", 3),
    ("mxfp8", part("scales", lambda a: a.astype(np.float16)), "E1461", 3),
    ("mxfp8", part("scales", lambda a: a | np.uint8(255)), "E1463", 3),
    ("nvfp4", part("scales", lambda a: a | np.uint8(127)), "E1463", 3),
    ("nvfp4", part("weight", lambda a: a[:, :-1]), "E1461", 3),
    ("nvfp4", part("weight", lambda a: a.reshape(-1)), "E1461", 3),
    ("mxfp8", stated(mode="affine"), "E1460", 3),
    ("mxfp8", stated(mode="mxfp4", bits=4), "E1461", 3),
    ("mxfp4", stated(bits=8), "E1464", 2),
    ("mxfp4", stated(**{MODULE: {"mode": "mxfp4", "bits": 8}}), "E1464", 2),
]
ROWS = [*(("4bit", *row) for row in HOSTILE), *OF_MODES]


@pytest.mark.parametrize(("name", "change", "code", "status"), ROWS, ids=[str(n) for n in range(len(ROWS))])
def test_what_does_not_fit_is_an_error(
    name: str, change: Change, code: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fixture = FIXTURES / f"mlx_{name}"
    tensors = load_file(fixture / "model.safetensors")
    config = json.loads((fixture / "config.json").read_text())
    del config["quantization_config"]  # as mlx-lm wrote it at first
    change(tensors, config)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    words = ["--to", "safetensors", "--dequantize", "--json"]
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), *words]) == status
    assert json.loads(capfd.readouterr().err)["error"]["code"] == code
    assert not (tmp_path / "out").exists()


def test_scales_that_are_no_floats(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(FIXTURE / "model.safetensors")
    for name in ("scales", "biases"):
        tensors[f"{MODULE}.{name}"] = tensors[f"{MODULE}.{name}"].view(np.int16)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_bytes((FIXTURE / "config.json").read_bytes())
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "dcp", "--dequantize", "--json"]) == 3
    assert json.loads(capfd.readouterr().err)["error"]["code"] == "E1461"


def test_the_config_says_nothing_of_it_afterwards(tmp_path: Path) -> None:
    assert run(["convert", str(FIXTURE), str(tmp_path / "out"), "--to", "safetensors", "--dequantize", "-q"]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization" not in config and "quantization_config" not in config
