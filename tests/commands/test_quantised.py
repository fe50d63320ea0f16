"""Quantised weights in inspect, under --remove-keys, --keep-keys and --dtype."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.commands.merge import merge
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UsageError
from ckpt_tool.merging.options import MergeOptions
from ckpt_tool.options.reading import Inspection, Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.quantised.keep_together import refuse_codes
from ckpt_tool.report.inspection import inspection
from ckpt_tool.report.plain import Look, render
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures" / "quantized"
CASES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


def page(document: dict[str, Any]) -> str:
    return render(inspection(document), Look())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("columns", [False, True])
def test_parameters_are_those_of_the_model_and_bytes_those_of_the_file(case: str, columns: bool) -> None:
    """As many as the floats have, scales not counted; of packed integers where the config or whole groups tell the
    width."""
    found = inspect(str(FIXTURES / case), Reading(), columns=columns)
    with safe_open(FIXTURES / f"{case}.truth.safetensors", "pt") as truth:
        assert found["total"]["parameters"] == sum(prod(truth.get_slice(key).get_shape()) for key in truth.keys())
    tensors = load_file(FIXTURES / case / "model.safetensors")
    assert found["total"]["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    told = json.loads((FIXTURES / case / "config.json").read_text())["quantization_config"]
    quantised = found["quantization"]
    assert quantised["scheme"].startswith(told.get("quant_method", "mlx")) and quantised["dequantizes"]
    assert "faults" not in quantised and "more_parameters" not in quantised
    assert quantised["weights"] == len(
        [
            name
            for name in tensors
            if (
                ("_proj" in name or f"{name.removesuffix('.weight')}.scales" in tensors)
                and not name.endswith(("bias", ".biases", ".SCB", "_format"))
                and ".weight." not in name
                and (tensors[name].element_size() != 2 or f"{name}.absmax" in tensors)
                and "scale" not in name
                and "shape" not in name
                and "zero" not in name
            )
            or name.endswith("embed_tokens._weight_qdata")
        ]
    )


def test_a_line_tells_the_scheme() -> None:
    text = page(inspect(str(FIXTURES / "fp8_block"), Reading()))
    assert "fp8: 7 weights of 8 bits, a scale for each 32 x 32" in text


def test_what_is_listed_is_counted() -> None:
    found = inspect(str(FIXTURES / "mxfp4_gpt_oss"), Reading(), Inspection(match=("*down_proj_blocks",)))
    assert found["total"]["parameters"] == 4 * 64 * 96 == 2 * found["total"]["bytes"]
    only = inspect(str(FIXTURES / "mxfp4_gpt_oss"), Reading(), Inspection(match=("*down_proj_scales",)))
    assert only["total"]["parameters"] == 0


def test_a_scheme_that_is_not_known_is_named(tmp_path: Path) -> None:
    save_file({"m.qweight": torch.zeros(4, 4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    found = inspect(str(tmp_path), Reading())
    assert found["quantization"]["scheme"] == "GPTQ or AWQ" and not found["quantization"]["dequantizes"]
    assert "--dequantize does not know it" in page(found)


def test_floats_are_not_quantised(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 4), "ids": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    assert "quantization" not in inspect(str(tmp_path), Reading())


def run(source: Path, out: Path, **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(), Writing(to="safetensors", fsync=False, **writing), Silent())


Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


def test_a_removed_weight_takes_its_scales_along(tmp_path: Path) -> None:
    report = run(FIXTURES / "fp8_block", tmp_path / "out", remove_keys=(Q,))
    left = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(name.startswith(Q) for name in left) and f"{K}_scale_inv" in left
    assert {row["name"] for row in report["removed"]} == {Q, f"{Q}_scale_inv"}
    assert report["removed_bytes"] == 64 * 64 + 4 * 4
    run(FIXTURES / "int4_group_asym", tmp_path / "packed", remove_keys=(f"{Q}_packed",))
    assert not any(name.startswith(Q) for name in load_file(tmp_path / "packed" / "model.safetensors"))


def test_a_kept_weight_keeps_its_scales(tmp_path: Path) -> None:
    run(FIXTURES / "fp8_block", tmp_path / "out", keep_keys=(Q,))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {Q, f"{Q}_scale_inv"}
    run(FIXTURES / "fp8_block", tmp_path / "bare", remove_keys=(f"{Q}_scale_inv",))
    assert Q in load_file(tmp_path / "bare" / "model.safetensors"), "scales alone may go, where a pattern names them"


@pytest.mark.parametrize("case", ["fp8_block", "fp8_ue8m0", "nvfp4", "mxfp8"])
def test_dtype_leaves_codes_and_scales_alone(case: str, tmp_path: Path) -> None:
    report = run(FIXTURES / case, tmp_path / "out", dtypes={"": "F32"})
    before, after = (load_file(folder / "model.safetensors") for folder in (FIXTURES / case, tmp_path / "out"))
    for name, tensor in before.items():
        plain_float = tensor.dtype == torch.bfloat16 and "scale" not in name
        assert after[name].dtype == (torch.float32 if plain_float else tensor.dtype), name
        if not plain_float:
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))
    assert any("as they are" in note for note in report["notes"])


def test_plain_fp8_values_are_cast(tmp_path: Path) -> None:
    values = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    save_file({"w": values.to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    run(tmp_path / "model.safetensors", tmp_path / "out", dtypes={"": "BF16"})
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"].float(), values)


def test_arithmetic_refuses_codes() -> None:
    opened = open_source(str(FIXTURES / "fp8_block"), Reading())
    tensors = [opened.catalog.tensors[key] for key in opened.catalog.tensors]
    with pytest.raises(UsageError, match="quantised") as found:
        refuse_codes(tensors, "merge --method linear", opened.path)
    assert found.value.code == "E1465"
    refuse_codes([tensor for tensor in tensors if tensor.dtype.name == "BF16"], "merge --method linear", opened.path)


@pytest.mark.share(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["dcp", "torch", "sharded"])
def test_there_and_back_every_byte(case: str, to: str, tmp_path: Path) -> None:
    """Pass-through, with cuts for tensor parallel ranks where the format has them."""
    degrees = {} if to == "torch" else {"tp": 2}
    convert(
        str(FIXTURES / case), str(tmp_path / "there"), Reading(), Writing(to=to, fsync=False, degrees=degrees), Silent()
    )
    again = Writing(to=to, fsync=False, degrees={} if to == "torch" else {"tp": 4})
    reshard(str(tmp_path / "there"), str(tmp_path / "again"), Reading(), again, Silent())
    run(tmp_path / "again", tmp_path / "back", dialect="keep")
    before, after = (load_file(folder / "model.safetensors") for folder in (FIXTURES / case, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(
            tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)
        ), name


def test_merge_joins_shards_and_makes_floats_of_one_source(tmp_path: Path) -> None:
    tensors = load_file(FIXTURES / "fp8_block" / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    save_file(scales, tmp_path / "scales.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in scales}, tmp_path / "codes.safetensors")
    parts = [str(tmp_path / f"{kind}.safetensors") for kind in ("codes", "scales")]
    merge(parts, str(tmp_path / "joined"), Reading(), Writing(fsync=False), MergeOptions(), Silent())
    joined = load_file(tmp_path / "joined" / "model.safetensors")
    assert joined.keys() == tensors.keys() and f"{Q}_scale_inv" in joined
    merge(
        [str(FIXTURES / "fp8_block")],
        str(tmp_path / "floats"),
        Reading(),
        Writing(fsync=False, dequantize=True),
        MergeOptions(),
        Silent(),
    )
    assert load_file(tmp_path / "floats" / "model.safetensors")[Q].dtype == torch.bfloat16
    with pytest.raises(UsageError) as found:
        merge(parts, str(tmp_path / "no"), Reading(), Writing(fsync=False, dequantize=True), MergeOptions(), Silent())
    assert found.value.code == "E1467"
