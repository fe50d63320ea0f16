"""Quantised weights on their way to systems that know no scales, under an adapter, and with a quantiser's own config:
what would be other numbers is an error that says `--dequantize`; what a library saved whole has no findings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.quantised.keep_together import found_in
from ckpt_tool.weight_schemes.quantised_weights import TABLED, Quantised, TensorKind

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDERS = ("quantized", "quantized-families", "quantized-inputs", "quantized-layouts", "quantized-others")
CASES = sorted(f"{folder}/{path.name}" for folder in FOLDERS for path in (FIXTURES / folder).iterdir() if path.is_dir())
TARGETS = (
    ("gguf",),
    ("gguf", "--dialect", "keep"),
    ("gguf", "--lenient"),
    ("megatron",),
    ("megatron-dist",),
    ("paddle",),
    ("paddle-unified",),
    ("meta",),
    ("dcp", "--dialect", "megatron"),
)
# No family, or one that this system has no names for: there is no output for another reason.
NO_SUCH_NAMES = ("E1231", "E1372", "E1373", "E1232", "E1233")


def weights_of(case: str) -> list[Quantised]:
    raw = (FIXTURES / case / "model.safetensors").read_bytes()
    head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    kinds = {
        name: TensorKind(DTYPES[each["dtype"]], tuple(each["shape"]))
        for name, each in head.items()
        if name != "__metadata__"
    }
    _, found = found_in(kinds, json.loads((FIXTURES / case / "config.json").read_text()))
    return list(found.weights.values())


@pytest.mark.share(8)
@pytest.mark.parametrize("target", TARGETS, ids=" ".join)
@pytest.mark.parametrize("case", CASES)
def test_a_system_without_scales_gets_no_codes(
    case: str, target: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["convert", str(FIXTURES / case), str(tmp_path / "out"), "--to", *target, "--json"]
    assert run(line) in (2, 3)

    error = json.loads(capfd.readouterr().err)["error"]
    assert "--dequantize" in (error["hint"] or "") or error["code"] in NO_SUCH_NAMES, error
    assert "--remove-keys" not in (error["hint"] or "") or error["code"] in NO_SUCH_NAMES
    assert not (tmp_path / "out").exists()


@pytest.mark.share(4)
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_on_codes_wants_floats(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weight = next((each for each in weights_of(case) if len(each.floats) == 2 or each.codes == TABLED), None)
    if weight is None:
        pytest.skip("its weights are stacked experts")
    rows, columns = weight.floats if weight.codes != TABLED else (64, 64)
    module = weight.made.removesuffix(".weight")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(
        {
            f"base_model.model.{module}.lora_A.weight": np.ones((2, columns), np.float32),
            f"base_model.model.{module}.lora_B.weight": np.ones((rows, 2), np.float32),
        },
        adapter / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [module], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))

    line = ["merge", str(FIXTURES / case), str(adapter), str(tmp_path / "out"), "--method", "lora", "--json"]
    assert run(line) == 2
    error = json.loads(capfd.readouterr().err)["error"]
    assert error["code"] == "E1427" and "--dequantize" in error["hint"]


@pytest.mark.parametrize(
    ("case", "file", "words"),
    [
        ("quantized-inputs/gptq_int4", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("quantized-inputs/gptq_int4_asym", "quantize_config.json", {"bits": 4, "group_size": 32, "sym": False}),
        ("quantized-inputs/awq_gemm", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
    ],
)
def test_a_quantisers_own_file_says_what_the_config_does(
    case: str, file: str, words: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(FIXTURES / case, alone)
    config = json.loads((alone / "config.json").read_text())
    del config["quantization_config"]
    (alone / "config.json").write_text(json.dumps(config))
    (alone / file).unlink(missing_ok=True)

    line = ["--to", "safetensors", "--dequantize", "--json"]
    assert run(["audit", str(alone), "--json"]) == 1  # nothing says how the codes are stored
    assert run(["convert", str(alone), str(tmp_path / "no"), *line]) == 2
    capfd.readouterr()

    (alone / file).write_text(json.dumps(words))
    assert run(["audit", str(alone), "--json"]) == 0
    for source, out in ((alone, "a"), (FIXTURES / case, "b")):
        assert run(["convert", str(source), str(tmp_path / out), *line]) == 0
    found = load_file(tmp_path / "a/model.safetensors")
    want = load_file(tmp_path / "b/model.safetensors")
    assert found.keys() == want.keys()
    assert all(found[name].tobytes() == want[name].tobytes() for name in want)
    assert not (tmp_path / "a" / file).exists()

    assert run(["convert", str(alone), str(tmp_path / "copy"), "--to", "safetensors", "-q"]) == 0
    assert (tmp_path / "copy" / file).read_bytes() == (alone / file).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_what_a_library_saved_has_no_findings(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(["audit", str(FIXTURES / case), "--json"])
    findings = json.loads(capfd.readouterr().out)["findings"]
    assert not [each for each in findings if each["code"] in ("A0102", "A0103", "A0501") or each["code"] > "E"]
    assert run(["verify", str(FIXTURES / case), "--json"]) == 0


def of_hqq(module: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """What `HQQLinear.state_dict()` of hqq 0.2.8 holds of a layer of 64 inputs and 64 outputs, with its encoded
    settings, each a tensor."""
    yield f"{module}.W_q", np.zeros((32, 64), np.uint8)
    for name in ("scale", "zero"):
        yield f"{module}.{name}", np.ones((64, 1), np.float16)
    for name in ("nbits", "group_size", "axis", "channel_wise", "optimize", "round_zero", "view_as_float"):
        yield f"{module}.{name}", np.array([1], np.int64)
    for name in ("packing", "unpack_view_dtype", "compute_dtype", "encoded_state_dict", "stores_quant_config"):
        yield f"{module}.{name}", np.zeros(9, np.uint8)
    yield f"{module}.shape", np.array([64, 64], np.int64)


def test_modules_of_an_unknown_scheme_are_not_strange(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "hqq"
    shutil.copytree(FIXTURES / "quantized/fp8_tensor", source)
    tensors = {}
    for name, value in load_of_bytes(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= dict(of_hqq(name.removesuffix(".weight")))
        elif "scale" not in name:
            tensors[name] = value
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(config))
    assert run(["audit", str(source), "--json"]) == 0, capfd.readouterr().out

    tensors["model.layers.0.self_attn.stray.weight"] = np.ones((2, 2), np.float32)  # of no module of codes
    save_file(tensors, source / "model.safetensors")
    assert run(["audit", str(source), "--json"]) == 1


def load_of_bytes(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of 16 bits as bytes of that width: NumPy has no bfloat16 and no FP8."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])
    body = raw[8 + size :]
    kinds = {"BF16": np.float16, "F16": np.float16, "F32": np.float32, "F8_E4M3": np.int8}
    return {
        name: np.frombuffer(body[slice(*each["data_offsets"])], kinds[each["dtype"]]).reshape(each["shape"])
        for name, each in head.items()
        if name != "__metadata__"
    }


@pytest.mark.parametrize(
    ("option", "values"),
    [("--quantize", ("int8", "fp8-block")), ("--quantize", ("int8", "int8")), ("--gguf-type", ("q8_0", "f16"))],
)
def test_a_scheme_given_twice_is_an_error(
    option: str, values: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    to = "gguf" if option == "--gguf-type" else "safetensors"
    line = ["convert", str(FIXTURES / "safetensors/llama_one_file"), str(tmp_path / "out"), "--to", to]
    assert run([*line, option, values[0], option, values[1]]) == 2
    assert "2 times" in capfd.readouterr().err and not (tmp_path / "out").exists()
