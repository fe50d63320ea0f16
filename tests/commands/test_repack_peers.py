"""`--repack compressed-tensors` against compressed-tensors and transformers: what GPTQModel and AutoAWQ wrote is, once
repacked, bit for bit what those libraries make of it themselves.

The truth beside each folder are the floats of the library that wrote it (`fixtures/README.md`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.cli import run

INPUTS = Path(__file__).parents[2] / "fixtures/quantized-inputs"
# but the one in the order of activations
WRITTEN = sorted(path.name for path in INPUTS.iterdir() if path.is_dir() and path.name != "gptq_int4_act")


@pytest.fixture(params=WRITTEN)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """(the repacked folder, the floats that the library which wrote it makes)."""
    source = INPUTS / request.param
    words = ["--to", "safetensors", "--repack", "compressed-tensors", "-q"]
    assert run(["convert", str(source), str(tmp_path / "out"), *words]) == 0
    truth = load_file(f"{source}.truth.safetensors")
    return tmp_path / "out", {name.removeprefix("model/"): value for name, value in truth.items()}


def test_the_library_decompresses_it_to_the_same_floats(made: tuple[Path, dict[str, Any]]) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    folder, truth = made
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(stated)
    (scheme,) = config.config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    tensors = load_file(folder / "model.safetensors")
    seen = 0
    for name in [name for name in tensors if name.endswith("_packed")]:
        weight = name.removesuffix("_packed")
        module = weight.removesuffix("weight")
        parts = {key.removeprefix(module): value for key, value in tensors.items() if key.startswith(f"{weight}_")}
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], truth[weight])
        seen += 1
    assert seen >= 6


def test_the_librarys_own_converter_of_awq_writes_the_same_tensors(tmp_path: Path) -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    source = INPUTS / "awq_gemm"
    words = ["--to", "safetensors", "--repack", "compressed-tensors", "-q"]
    assert run(["convert", str(source), str(tmp_path / "out"), *words]) == 0
    stated = json.loads((source / "config.json").read_text())["quantization_config"]
    converter = converters.AutoAWQConverter.from_autoawq_config(stated)
    want = converter.process(load_file(source / "model.safetensors"))
    made = load_file(tmp_path / "out/model.safetensors")
    assert made.keys() == want.keys()
    for name, value in want.items():
        assert made[name].dtype == value.dtype and torch.equal(made[name], value), name
    ours = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    theirs = converter.update_config(None).config_groups["config_group_0"].weights.model_dump()
    assert {key: theirs[key] for key in ours["weights"]} == ours["weights"]


@pytest.mark.peers
def test_transformers_opens_it_and_has_the_logits_of_the_floats(made: tuple[Path, dict[str, Any]]) -> None:
    """Weights with zero points are asked for as floats: with compressed-tensors 0.20, transformers 5.23 allocates their
    zero points unpacked, and loads no such model otherwise, compressed-tensors' own neither."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    folder, truth = made
    config_text = (folder / "config.json").read_text()
    symmetric = '"symmetric": false' not in config_text
    if not symmetric and '"symmetric": true' in config_text:
        pytest.skip("transformers 5.23 opens no model of both kinds of groups, with dequantize=True neither")
    how = {} if symmetric else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float16, output_loading_info=True, **how
    )
    assert not any(info.values()), info
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():  # the first call is what decompresses
        logits = model.eval()(tokens).logits
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    plain.load_state_dict(truth)
    with torch.no_grad():
        want = plain.eval()(tokens).logits
    assert torch.equal(logits, want) and want.abs().max() > 0
    theirs = model.state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in truth.items())
