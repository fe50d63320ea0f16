"""Models that torchao quantised, as `torch.save` pickles them (`fixtures/torchao-weights`): read without its classes,
as what its own `dequantize()` makes of them, bit for bit."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.cli import run
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.storage.pickles.coded_weights import coded_weight
from ckpt_tool.storage.pickles.pickle_globals import CODED_WEIGHTS
from ckpt_tool.storage.pickles.pickle_reader import load
from ckpt_tool.storage.pickles.pickle_values import TensorRef

FIXTURES = Path(__file__).parents[2] / "fixtures/torchao-weights"
CASES = ("subclasses", "affine")


@pytest.mark.parametrize("case", CASES)
def test_the_floats_are_torchaos_own(case: str, tmp_path: Path) -> None:
    words = ["--to", "safetensors", "--dequantize", "-q"]
    assert run(["convert", str(FIXTURES / f"{case}.bin"), str(tmp_path / "out"), *words]) == 0
    found = load_file(tmp_path / "out/model.safetensors")
    want = load_file(FIXTURES / f"{case}.truth.safetensors")
    assert found.keys() == want.keys() and len(want) >= 16
    for name, value in want.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("case", CASES)
def test_inspect_counts_weights_and_finds_no_code(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(FIXTURES / f"{case}.bin"), "--security"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "UNSAFE" not in shown and "are not read" not in shown
    assert f"{7 if case == 'affine' else 8} weights of" in shown


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_codes_that_nothing_states_are_not_written(
    case: str, to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(FIXTURES / f"{case}.bin"), str(tmp_path / "out"), "--to", to]) == 2
    assert "E1474" in (error := capfd.readouterr().err) and "--dequantize" in error
    assert not (tmp_path / "out").exists()


def test_quantised_anew_it_is_stated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = [
        "--config",
        str(tmp_path / "config.json"),
        "--quantize",
        "int8:torchao",
        "--quantize-only",
        "*float8.weight",
        "--dialect",
        "keep",
    ]
    source = str(FIXTURES / "affine.bin")
    out = str(tmp_path / "out")
    assert run(["convert", source, out, "--to", "safetensors", "--dequantize", "-q", *words]) == 0
    assert "float8._weight_qdata" in load_file(tmp_path / "out/model.safetensors")


# -- objects that are not as torchao makes them ------------------------------------------------------------------------


def weight(case: str, name: str) -> Opaque:
    """The object of a weight in a fixture."""
    with zipfile.ZipFile(FIXTURES / f"{case}.bin") as archive:
        (member,) = (each for each in archive.namelist() if each.endswith("data.pkl"))
        found: Any = load(archive.read(member), path=case).value[f"{name}.weight"]
    assert type(found) is Opaque and found.name in CODED_WEIGHTS
    return found


def changed(value: Opaque, **state: Any) -> Opaque:
    return replace(value, state={**value.state, **state})


def inner(value: Opaque, change: Callable[[Opaque], Opaque]) -> Opaque:
    """The object with another `tensor_impl`."""
    return changed(value, tensor_impl=change(value.state["tensor_impl"]))


def test_what_an_object_holds_beside_its_parts_is_not_lost() -> None:
    int8 = weight("subclasses", "int8")
    float8 = weight("affine", "float8")
    affine = weight("affine", "int8_group")
    parts = [coded_weight(each) for each in (int8, float8, affine)]
    pair = {"qdata", "scale"}
    three = {"qdata", "scale", "zero_point"}
    assert [{*each} for each in parts if each] == [three, pair, three]
    stray = int8.state["scale"]
    assert type(stray) is TensorRef
    for strange in (
        changed(int8, another=stray),
        replace(int8, name="torchao.quantization.AnotherTensor"),
        replace(int8, args=()),
        replace(int8, state=None),
        replace(int8, state={"scale": stray}),
        changed(affine, another=stray),
        changed(affine, zero_point_domain=Symbol("torchao.quantization.quant_primitives.ZeroPointDomain", (2,))),
        changed(affine, tensor_impl=None),
        inner(affine, lambda each: replace(each, name="torchao.dtypes.uintx.TensorCoreTiledAQTTensorImpl")),
        inner(float8, lambda each: changed(each, transposed=True)),
    ):
        assert coded_weight(strange) is None, strange.name


def test_a_layout_that_only_a_kernel_reads_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The class of one weight's data by another name, in the pickle itself."""
    before = b"PlainAQTTensorImpl"
    after = b"OtherAQTTensorImpl"
    target = tmp_path / "model.bin"
    with zipfile.ZipFile(FIXTURES / "affine.bin") as old, zipfile.ZipFile(target, "w") as new:
        for item in old.infolist():
            raw = old.read(item)
            new.writestr(item, raw.replace(before, after) if item.filename.endswith("data.pkl") else raw)
    assert run(["convert", str(target), str(tmp_path / "out"), "--to", "safetensors", "--dequantize"]) == 4
    assert "OtherAQTTensorImpl" in capfd.readouterr().err and not (tmp_path / "out").exists()
