"""`--quantize` against compressed-tensors: the very bytes that its own compressors store, read back by it, and by
transformers as a model.

The library is called with the weights in fp32 and the scales as they are stored, which is the arithmetic of its kernels
for GPUs; given bf16 weights its CPU road divides in bf16 and rounds twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

pytest.importorskip("compressed_tensors", reason="the library whose bytes these are: pip install compressed-tensors")
library = pytest.importorskip("compressed_tensors.quantization")
compressors = pytest.importorskip("compressed_tensors.compressors")
utils = pytest.importorskip("compressed_tensors.quantization.utils")
formats = pytest.importorskip("compressed_tensors.compressors.format")

PRESETS = {
    "fp8-channel": "FP8_DYNAMIC",
    "int8": "W8A8",
    "int4-g128": "W4A16",
    "mxfp8": "MXFP8A16",
    "mxfp4": "MXFP4A16",
    "nvfp4": "NVFP4A16",
}
NAME = "model.layers.0.mlp.up_proj.weight"
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run(source: Path, out: Path, **writing: Any) -> None:
    convert(str(source), str(out), Reading(), Writing(to="safetensors", fsync=False, **writing), Silent())


def weight_of(shape: tuple[int, int], floats: str) -> Any:
    """Rows of very different sizes, ties, zeros of both signs, a row and a group of nothing but zeros."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-4, 2, shape[0]).reshape(-1, 1)
    weight[3], weight[4, :128], weight[5, ::3], weight[6, ::2] = 0, 0, -0.0, 1e-7
    weight[7] = torch.arange(shape[1]) % 33 - 16  # many quotients are ties
    return weight.to(FLOATS[floats])


def scheme_of(name: str) -> Any:
    scheme = library.preset_name_to_scheme(PRESETS[name], ["Linear"])
    scheme.format = formats.infer_module_format(torch.nn.Linear, scheme)
    return scheme


def compressed(name: str, weight: Any) -> dict[str, Any]:
    """What the library stores of a weight."""
    scheme, rows, columns = scheme_of(name), *weight.shape
    args = scheme.weights
    group = args.group_size or columns
    seen = weight.float().reshape(rows, columns // group, group)
    low = seen.amin(-1)
    high = seen.amax(-1)
    whole = None
    state = {"weight": weight.float()}
    if name == "nvfp4":
        whole = utils.generate_gparam(weight.float().amin(), weight.float().amax()).reshape(1)
        state["weight_global_scale"] = whole
    if name in ("fp8-channel", "int8", "int4-g128"):  # its scales are of the model's dtype
        low = low.to(weight.dtype)
        high = high.to(weight.dtype)
    scales, _ = utils.calculate_qparams(low, high, args, global_scale=whole)
    state["weight_scale"] = scales.float()
    stored = compressors.BaseCompressor.get_value_from_registry(scheme.format.value).compress(state, scheme)
    if name in ("fp8-channel", "int8", "int4-g128"):
        stored["weight_scale"] = scales
    return {key: value for key, value in stored.items() if value is not None}


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("name", PRESETS)
def test_the_bytes_are_those_of_the_library(name: str, floats: str, tmp_path: Path) -> None:
    weight = weight_of((96, 384), floats)
    (tmp_path / "m").mkdir()
    save_file({NAME: weight}, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    run(tmp_path / "m", tmp_path / "q", quantize=name)
    found = {key.removeprefix(NAME[:-6]): value for key, value in load_file(tmp_path / "q/model.safetensors").items()}
    want = compressed(name, weight)
    assert found.keys() == want.keys()
    for key, value in want.items():
        mine = found[key]
        assert mine.shape == value.shape and mine.dtype == value.dtype, (key, mine.dtype, value.dtype)
        assert torch.equal(mine.reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8)), key
    scheme = scheme_of(name)  # and it reads ours as `--dequantize` does
    theirs = compressors.BaseCompressor.get_value_from_registry(scheme.format.value).decompress(dict(found), scheme)[
        "weight"
    ]
    run(tmp_path / "q", tmp_path / "f", dequantize=True, dtypes={"": "F32"})
    ours = load_file(tmp_path / "f" / "model.safetensors")[NAME]
    assert torch.equal(ours.to(theirs.dtype), theirs)  # it makes bf16 of nvfp4 whatever the model


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_is_the_librarys(name: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_file({NAME: torch.ones(4, 128)}, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    run(tmp_path / "m", tmp_path / "q", quantize=name)
    stated = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    read = library.QuantizationConfig.model_validate(stated)
    assert read.config_groups["group_0"] == scheme_of(name) and read.ignore == ["lm_head"]


@pytest.mark.peers
@pytest.mark.parametrize("name", PRESETS)
def test_transformers_opens_it_and_has_our_floats(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    run(tmp_path / "m", tmp_path / "q", quantize=name)
    run(tmp_path / "q", tmp_path / "f", dequantize=True)
    models = []
    for folder in ("q", "f"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(info.values()), info
        models.append(model.eval())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():  # the first call is what decompresses
        logits = [model(tokens).logits for model in models]
    assert torch.equal(*logits) or name in ("fp8-channel", "int8")  # there it rounds activations too
    theirs, ours = (model.state_dict() for model in models)
    assert all(torch.equal(theirs[key], value) for key, value in ours.items())
