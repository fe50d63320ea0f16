"""`--dequantize` of weights: what the real libraries wrote, as the floats that they make of it
(`fixtures/quantized`)."""

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
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures" / "quantized"
CASES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


def run(source: Path, out: Path, to: str = "safetensors", **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(), Writing(to=to, fsync=False, **writing), Silent())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers 5 holds them: gate and up of all in one tensor."""
    out = dict(tensors)
    experts = {name.split(".experts.0.")[0] for name in tensors if ".experts.0." in name}
    for layer in experts:
        count = len({name for name in tensors if name.startswith(f"{layer}.experts.") and "gate_proj.weight" in name})
        each = [
            {kind: out.pop(f"{layer}.experts.{e}.{kind}_proj.weight") for kind in ("gate", "up", "down")}
            for e in range(count)
        ]
        out[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in each])
        out[f"{layer}.experts.down_proj"] = torch.stack([one["down"] for one in each])
    return out


@pytest.mark.parametrize("case", CASES)
def test_the_floats_are_those_of_the_library_that_quantised(case: str, tmp_path: Path) -> None:
    report = run(FIXTURES / case, tmp_path / "out", dequantize=True)
    found = in_memory(load_file(tmp_path / "out" / "model.safetensors"))
    want = {
        key.removeprefix("model/"): value for key, value in load_file(FIXTURES / f"{case}.truth.safetensors").items()
    }
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name
    assert any("quantised weights are written as BF16" in note for note in report["notes"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["hidden_size"] == 64


@pytest.mark.parametrize("case", CASES)
def test_unasked_every_byte_stays(case: str, tmp_path: Path) -> None:
    run(FIXTURES / case, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (FIXTURES / case, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and bits(after[name]) == bits(tensor), name
    assert (tmp_path / "out" / "config.json").read_bytes() == (FIXTURES / case / "config.json").read_bytes()


@pytest.mark.parametrize("case", ["fp8_block", "int4_group_asym", "nvfp4", "mxfp4_gpt_oss"])
def test_fp32_keeps_what_bf16_rounds(case: str, tmp_path: Path) -> None:
    run(FIXTURES / case, tmp_path / "a", dequantize=True)
    run(FIXTURES / case, tmp_path / "b", dequantize=True, dtypes={"": "F32"})
    a, b = (load_file(tmp_path / each / "model.safetensors") for each in "ab")
    assert all(tensor.dtype == torch.float32 for tensor in b.values())
    assert all(bits(tensor.to(torch.bfloat16)) == bits(a[name]) for name, tensor in b.items())


@pytest.mark.parametrize("case", ["fp8_ue8m0", "int3_channel_asym", "mxfp4_gpt_oss", "nvfp4", "int8_packed"])
def test_a_source_in_pieces_and_small_blocks(case: str, tmp_path: Path) -> None:
    """Codes and scales in other boxes than they are used in: a sharded source, little memory."""
    run(FIXTURES / case, tmp_path / "whole", dequantize=True)
    tensors = load_file(FIXTURES / case / "model.safetensors")
    for part in range(3):
        names = sorted(tensors)[part::3]
        (tmp_path / "src").mkdir(exist_ok=True)
        save_file(
            {name: tensors[name] for name in names}, tmp_path / "src" / f"model-{part + 1:05}-of-00003.safetensors"
        )
    place = {
        name: f"model-{part + 1:05}-of-00003.safetensors" for part in range(3) for name in sorted(tensors)[part::3]
    }
    (tmp_path / "src" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    shutil.copy(FIXTURES / case / "config.json", tmp_path / "src")
    report = run(tmp_path / "src", tmp_path / "cut", "sharded", dequantize=True, degrees={"tp": 2}, dialect="keep")
    assert report["digest_checked"]
    assert diff(str(tmp_path / "whole"), str(tmp_path / "cut"), Reading(), progress=Silent())["equal"]


def broken(case: str, folder: Path, change: Any) -> Path:
    tensors = load_file(FIXTURES / case / "model.safetensors")
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(FIXTURES / case / "config.json", folder)
    return folder


Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("case", "change", "kind", "code"),
    [
        ("fp8_block", lambda t: t.pop(f"{Q}_scale_inv"), Incomplete, "E1460"),
        ("fp8_block", lambda t: t.pop(Q), Incomplete, "E1460"),
        ("fp8_block", lambda t: t.update({f"{Q}_scale_inv": torch.ones(7, 2)}), InconsistentCheckpoint, "E1461"),
        ("mxfp4_gpt_oss", lambda t: t.pop(f"{DOWN}_scales"), Incomplete, "E1460"),
        (
            "mxfp4_gpt_oss",
            lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][:, :5].contiguous()}),
            InconsistentCheckpoint,
            "E1461",
        ),
        ("mxfp4_gpt_oss", lambda t: t[f"{DOWN}_scales"].fill_(255), InconsistentCheckpoint, "E1463"),
        ("fp8_ue8m0", lambda t: t[f"{Q}_scale_inv"].view(torch.uint8).fill_(255), InconsistentCheckpoint, "E1463"),
        ("int4_group", lambda t: t.pop(f"{Q}_shape"), Incomplete, "E1460"),
        ("int4_group", lambda t: t.pop(f"{Q}_scale"), Incomplete, "E1460"),
        ("int4_group", lambda t: t[f"{Q}_shape"].fill_(1000), InconsistentCheckpoint, "E1462"),
        (
            "int4_group",
            lambda t: t.update({f"{Q}_g_idx": torch.zeros(64, dtype=torch.int32)}),
            InconsistentCheckpoint,
            "E1462",
        ),
        (
            "int4_group_asym",
            lambda t: t.update({f"{Q}_zero_point": torch.zeros(5, 2, dtype=torch.int32)}),
            InconsistentCheckpoint,
            "E1461",
        ),
        ("int4_group", lambda t: t.update({Q: torch.ones(64, 64)}), InconsistentCheckpoint, "E1461"),
        ("mxfp4_gpt_oss", lambda t: t.update({DOWN: torch.ones(4, 96, 64)}), InconsistentCheckpoint, "E1461"),
        ("nvfp4", lambda t: t.update({f"{Q}_global_scale": torch.ones(3)}), InconsistentCheckpoint, "E1461"),
    ],
)
def test_what_does_not_fit_is_said(case: str, change: Any, kind: type[CkptError], code: str, tmp_path: Path) -> None:
    source = broken(case, tmp_path / "src", change)
    with pytest.raises(kind) as found:
        run(source, tmp_path / "out", dequantize=True)
    assert found.value.code == code and found.value.exit_code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("told", "names", "scheme"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            ["qweight", "qzeros", "scales", "g_idx"],
            "gptq",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["qweight", "qzeros", "scales"], "awq"),
        ({"quant_method": "hqq"}, ["W_q", "meta"], "hqq"),
        (None, ["W_q", "meta"], "HQQ"),
        (None, ["qweight", "qzeros", "scales"], "GPTQ or AWQ"),
        ({"quant_method": "gguf"}, ["weight"], "gguf"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
            ["weight_packed"],
            "marlin-24",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"R1": {}}},
            ["w"],
            "transform",
        ),
    ],
)
def test_other_schemes_pass_through_and_are_named_when_floats_are_asked_for(
    told: Any, names: list[str], scheme: str, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    source.mkdir()
    tensors = {
        f"model.layers.0.mlp.up_proj.{name}": torch.arange(64, dtype=torch.int32).reshape(8, 8) for name in names
    }
    save_file(tensors, source / "model.safetensors")
    if told is not None:
        (source / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": told}))
    with pytest.raises(UsageError, match="(?i)" + scheme) as found:
        run(source, tmp_path / "out", dequantize=True)
    assert found.value.code == "E1464" and found.value.exit_code == 2
    run(source, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: bits(tensor) for name, tensor in tensors.items()} == {
        name: bits(tensor) for name, tensor in after.items()
    }


def test_experts_fused_as_transformers_holds_them(tmp_path: Path) -> None:
    """`gate_up_proj` and `gate_up_proj_scale_inv` of all experts (transformers 5, `save_original_format=False`)."""
    tensors = load_file(FIXTURES / "fp8_experts" / "model.safetensors")
    base = "model.layers.1.mlp.experts"
    each = [
        {
            end: tensors.pop(f"{base}.{e}.{end}")
            for end in (f"{kind}_proj.weight{scale}" for kind in ("gate", "up", "down") for scale in ("", "_scale_inv"))
        }
        for e in range(4)
    ]
    for scale in ("", "_scale_inv"):
        joined = [
            torch.cat([one[f"{kind}_proj.weight{scale}"].view(torch.uint8) for kind in ("gate", "up")]) for one in each
        ]
        kind = each[0][f"down_proj.weight{scale}"].dtype
        tensors[f"{base}.gate_up_proj{scale}"] = torch.stack(joined).view(kind)
        tensors[f"{base}.down_proj{scale}"] = torch.stack([one[f"down_proj.weight{scale}"] for one in each])
    (tmp_path / "src").mkdir()
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    shutil.copy(FIXTURES / "fp8_experts" / "config.json", tmp_path / "src")
    run(tmp_path / "src", tmp_path / "out", dequantize=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(FIXTURES / "fp8_experts.truth.safetensors")
    assert {f"model/{name}" for name in found} == want.keys()
    assert all(bits(found[name]) == bits(want[f"model/{name}"]) for name in found)


def test_groups_of_another_scheme_each(tmp_path: Path) -> None:
    """compressed-tensors' mixed-precision: attention in int4, the MLP in FP8, as Kimi's checkpoints are."""
    cases = {"int4_group": "self_attn", "fp8_channel": "mlp"}
    tensors = {}
    want = {}
    for case, module in cases.items():
        found = load_file(FIXTURES / case / "model.safetensors")
        tensors |= {name: tensor for name, tensor in found.items() if module in name or "_proj" not in name}
        truth = load_file(FIXTURES / f"{case}.truth.safetensors")
        want |= {name: tensor for name, tensor in truth.items() if module in name or "_proj" not in name}
    told = [json.loads((FIXTURES / case / "config.json").read_text())["quantization_config"] for case in cases]
    groups = {
        f"group_{k}": {**each["config_groups"]["group_0"], "format": each["format"]} for k, each in enumerate(told)
    }
    (tmp_path / "src").mkdir()
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    config = {
        "dtype": "bfloat16",
        "quantization_config": {**told[0], "format": "mixed-precision", "config_groups": groups},
    }
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    run(tmp_path / "src", tmp_path / "out", dequantize=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {f"model/{name}" for name in found} == want.keys()
    assert all(bits(found[name]) == bits(want[f"model/{name}"]) for name in found)


@pytest.mark.parametrize("case", ["fp8_block", "int4_group_asym", "mxfp4_gpt_oss"])
@pytest.mark.parametrize("to", ["dcp", "torch", "sharded"])
def test_sources_of_other_formats(case: str, to: str, tmp_path: Path) -> None:
    """Codes that lie in ranks' boxes, or in a pickle; the config is the one that travelled along, or --config's."""
    run(FIXTURES / case, tmp_path / "src", to, degrees={} if to == "torch" else {"tp": 2})
    reading = Reading(config=str(FIXTURES / case / "config.json"))
    writing = Writing(to="safetensors", fsync=False, dequantize=True, dialect="keep")
    convert(str(tmp_path / "src"), str(tmp_path / "out"), reading, writing, Silent())
    run(FIXTURES / case, tmp_path / "want", dequantize=True)
    found, want = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "want"))
    assert found.keys() == want.keys() and all(bits(found[name]) == bits(want[name]) for name in want)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("ending", ["scale", "qscale_weight"])
def test_scales_under_other_names(ending: str, tmp_path: Path) -> None:
    """DeepSeek's own files and V4 (`X.scale`), Mistral's (`X.qscale_weight`)."""
    tensors = load_file(FIXTURES / "fp8_block" / "model.safetensors")
    named = {name.replace("weight_scale_inv", ending): tensor for name, tensor in tensors.items()}
    (tmp_path / "src").mkdir()
    save_file(named, tmp_path / "src" / "model.safetensors")
    shutil.copy(FIXTURES / "fp8_block" / "config.json", tmp_path / "src")
    run(tmp_path / "src", tmp_path / "out", dequantize=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(FIXTURES / "fp8_block.truth.safetensors")
    assert {f"model/{name}" for name in found} == want.keys()
    assert all(bits(found[name]) == bits(want[f"model/{name}"]) for name in found)


def test_nothing_quantised_is_said(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="no quantised state here"):
        run(tmp_path / "model.safetensors", tmp_path / "out", dequantize=True)


def test_a_damaged_scale_shows(tmp_path: Path) -> None:
    """The comparison above is one that can fail."""
    source = broken("fp8_block", tmp_path / "src", lambda t: t[f"{Q}_scale_inv"].mul_(1.01))
    run(source, tmp_path / "out", dequantize=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(FIXTURES / "fp8_block.truth.safetensors")
    assert not np.array_equal(found[Q].float().numpy(), want[f"model/{Q}"].float().numpy())
