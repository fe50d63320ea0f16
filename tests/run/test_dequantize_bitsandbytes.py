"""bitsandbytes as floats where parts are missing, or say what does not fit. That the floats are its own:
`commands/test_dequantized_weights.py`, on `fixtures/quantized/bnb_*`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy its bfloat16
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures/quantized"
Array = np.ndarray[Any, np.dtype[Any]]
NAME = "model.layers.0.mlp.down_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__"
VALUES = 64 * 96
BITS = {"bnb_nf4": 4, "bnb_fp4_double": 4, "bnb_nf4_bf16": 4, "bnb_int8": 8}


def copied(case: str, folder: Path, change: Callable[[dict[str, Array]], None]) -> Path:
    tensors = load_file(FIXTURES / case / "model.safetensors")
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((FIXTURES / case / "config.json").read_bytes())
    return folder


def said(kind: str, **more: Any) -> Callable[[dict[str, Array]], None]:
    """A state that says something else."""

    def change(tensors: dict[str, Array]) -> None:
        state = json.loads(tensors[STATE + kind].tobytes()) | more
        tensors[STATE + kind] = np.frombuffer(json.dumps(state).encode(), np.uint8)

    return change


def other(ending: str, value: Callable[[Array], Array]) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        name = NAME.removesuffix("weight") + ending
        tensors[name] = np.ascontiguousarray(value(tensors[name]))

    return change


def text(raw: bytes) -> Callable[[dict[str, Array]], None]:
    return other("weight.quant_state.bitsandbytes__nf4", lambda a: np.frombuffer(raw, np.uint8))


def without(ending: str) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        del tensors[NAME.removesuffix("weight") + ending]

    return change


HOSTILE = [
    ("bnb_nf4", without("weight.quant_map"), "E1460", 3),
    ("bnb_nf4", without("weight.quant_state.bitsandbytes__nf4"), "E1460", 3),
    ("bnb_fp4_double", without("weight.nested_absmax"), "E1460", 3),
    ("bnb_nf4", other("weight.absmax", lambda a: a[:-1]), "E1462", 3),
    ("bnb_nf4", other("weight.absmax", lambda a: a[:0]), "E1461", 3),
    ("bnb_nf4", other("weight.absmax", lambda a: a.astype(np.float64)), "E1461", 3),
    ("bnb_nf4", other("weight.absmax", lambda a: a * np.nan), "E1463", 3),
    ("bnb_nf4", other("weight.quant_map", lambda a: a[:8]), "E1461", 3),
    ("bnb_nf4", other("weight", lambda a: a[:-1]), "E1462", 3),
    ("bnb_nf4", said("nf4", shape=[64, 97]), "E1462", 3),
    ("bnb_nf4", said("nf4", shape=[-64, -96]), "E1462", 3),
    ("bnb_nf4", said("nf4", shape=[1 << 62, 1 << 62]), "E1462", 3),
    ("bnb_nf4", said("nf4", shape="64"), "E1462", 3),
    ("bnb_nf4", said("nf4", blocksize=0), "E1462", 3),
    ("bnb_nf4", said("nf4", blocksize=True), "E1462", 3),
    ("bnb_nf4", said("nf4", blocksize=32), "E1462", 3),
    ("bnb_nf4", said("nf4", more="x" * 5000), "E1461", 3),
    ("bnb_nf4", other("weight.quant_state.bitsandbytes__nf4", lambda a: a[:-1]), "E1462", 3),
    ("bnb_nf4", text(b"[1]"), "E1462", 3),
    (
        "bnb_nf4",
        text(b"[" * 4000),
        "E1462",
        3,
    ),
    ("bnb_fp4_double", said("fp4", nested_blocksize=2), "E1462", 3),
    ("bnb_fp4_double", said("fp4", nested_offset=None), "E1462", 3),
    ("bnb_fp4_double", said("fp4", nested_offset=float("inf")), "E1462", 3),
    ("bnb_fp4_double", other("weight.nested_quant_map", lambda a: a[:255]), "E1461", 3),
    ("bnb_int8", other("SCB", lambda a: a[:-1]), "E1461", 3),
    ("bnb_int8", other("SCB", lambda a: a * np.nan), "E1463", 3),
    ("bnb_int8", other("weight_format", lambda a: a + 2), "E1464", 2),
]


@pytest.mark.parametrize(("case", "change", "code", "status"), HOSTILE, ids=[str(n) for n in range(len(HOSTILE))])
def test_what_does_not_fit_is_an_error(
    case: str,
    change: Callable[[dict[str, Array]], None],
    code: str,
    status: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = copied(case, tmp_path / "in", change)
    words = ["--to", "safetensors", "--dequantize", "--json"]
    assert run(["convert", str(source), str(tmp_path / "out"), *words]) == status
    assert json.loads(capfd.readouterr().err)["error"]["code"] == code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "bits"), [("bnb_nf4", 4), ("bnb_fp4_double", 4), ("bnb_nf4_bf16", 4), ("bnb_int8", 8)]
)
def test_inspect_counts_values(case: str, bits: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(FIXTURES / case), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["quantization"]
    assert (found["scheme"], found["weights"], found["bits"], found["dequantizes"]) == ("bitsandbytes", 7, [bits], True)
    assert found["parameters"] == 2 * 64 * 64 + 2 * 32 * 64 + 3 * VALUES


def test_names_alone_tell_it(tmp_path: Path) -> None:
    """The same floats without a config: they are written as bf16, which these models are."""
    plain = copied("bnb_nf4", tmp_path / "in", lambda tensors: None)
    (plain / "config.json").unlink()
    for source, out in ((plain, "a"), (FIXTURES / "bnb_nf4", "b")):
        assert run(["convert", str(source), str(tmp_path / out), "--to", "safetensors", "--dequantize", "-q"]) == 0
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-q"]) == 0


def test_other_names_want_floats(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = ["convert", str(FIXTURES / "bnb_nf4"), str(tmp_path / "out"), "--to", "megatron"]
    assert run(line) == 3 and "--dequantize converts it to floats" in capfd.readouterr().err
    assert run([*line, "--dequantize"]) == 0


# Widths whose zeros of code 8 bitsandbytes 0.50.2 makes negative on a CPU with AVX-512 (bf16, blocks of 64): all widths
# from 2 to 69 were computed by `torch.ops.bitsandbytes.dequantize_4bit`.
NEGATIVE = {width for width in range(2, 70, 2) if width not in (16, 32, 48, 64)}


@pytest.mark.parametrize("width", [16, 24, 30, 33, 64, 66])
def test_the_sign_of_zero_is_the_librarys(width: int, tmp_path: Path) -> None:
    shape = (8, width)
    state = {"quant_type": "fp4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    name = "model.layers.0.mlp.down_proj.weight"
    source = tmp_path / "in"
    source.mkdir()
    tensors = {
        name: np.full((8 * width // 2, 1), 0x88, np.uint8),
        f"{name}.absmax": np.ones(-(-8 * width // 64), np.float32),
        f"{name}.quant_map": np.zeros(16, np.float32),
        f"{name}.quant_state.bitsandbytes__fp4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    save_file(tensors, source / "model.safetensors")

    line = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--dequantize", "-q"]
    assert run(line) == 0

    floats = load_file(tmp_path / "out/model.safetensors")[name]
    assert (np.signbit(floats.astype(np.float32)) == (width in NEGATIVE)).all()
