"""What `--quantize` and `--repack` write, as servers read it: the parameters that vLLM allocates, torchao's tensors.

vLLM itself was not run. `ALLOCATED` states what its `create_weights` allocate on one rank, as its sources have it
(`vllm/model_executor/layers/quantization/`: `fp8.py`, and in `compressed_tensors/schemes/` the files
`compressed_tensors_*.py` of w8a8_fp8, w8a8_int8, wNa16, w8a8_mxfp8, w4a16_mxfp4 and w4a16_nvfp4): a tensor is copied
into the parameter of its name, of its shape, cast where the dtypes differ.
"""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

INPUTS = Path(__file__).parents[2] / "fixtures/quantized-inputs"
MODULE = "model.layers.0.mlp.up_proj"
OUT = 200
IN = 384
E4M3 = torch.float8_e4m3fn
FLOATS = torch.bfloat16


def words(size: int, bits: int) -> int:
    return ceil(size * bits / 32)


# scheme -> parameter -> (shape, dtypes that it takes without loss)
ALLOCATED: dict[str, dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]] = {
    "fp8-block": {
        "weight": ((OUT, IN), (E4M3,)),
        "weight_scale_inv": ((ceil(OUT / 128), ceil(IN / 128)), (torch.float32,)),
    },
    "fp8-channel": {"weight": ((OUT, IN), (E4M3,)), "weight_scale": ((OUT, 1), (torch.float32, FLOATS))},
    "int8": {"weight": ((OUT, IN), (torch.int8,)), "weight_scale": ((OUT, 1), (torch.float32, FLOATS))},
    "int4-g128": {
        "weight_packed": ((OUT, words(IN, 4)), (torch.int32,)),
        "weight_scale": ((OUT, IN // 128), (FLOATS,)),
        "weight_shape": ((2,), (torch.int64,)),
    },
    "mxfp8": {"weight": ((OUT, IN), (E4M3,)), "weight_scale": ((OUT, IN // 32), (torch.uint8,))},
    "mxfp4": {"weight_packed": ((OUT, IN // 2), (torch.uint8,)), "weight_scale": ((OUT, IN // 32), (torch.uint8,))},
    "nvfp4": {
        "weight_packed": ((OUT, IN // 2), (torch.uint8,)),
        "weight_scale": ((OUT, IN // 16), (E4M3,)),
        "weight_global_scale": ((1,), (torch.float32,)),
    },
}


def run(source: Path, out: Path, **writing: Any) -> None:
    convert(str(source), str(out), Reading(), Writing(to="safetensors", fsync=False, **writing), Silent())


def parts_of(folder: Path) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{MODULE}."): value for name, value in tensors.items() if name.startswith(f"{MODULE}.")}


@pytest.mark.parametrize("scheme", ALLOCATED)
def test_vllm_allocates_what_is_written(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    weight = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(2)).to(FLOATS)
    save_file({f"{MODULE}.weight": weight}, tmp_path / "m/model.safetensors")
    (tmp_path / "m/config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    run(tmp_path / "m", tmp_path / "q", quantize=scheme)
    found = parts_of(tmp_path / "q")
    assert found.keys() == ALLOCATED[scheme].keys()
    for name, (shape, dtypes) in ALLOCATED[scheme].items():
        assert found[name].shape == shape and found[name].dtype in dtypes, name


@pytest.mark.parametrize(
    ("case", "bits", "group", "symmetric"),
    [
        ("gptq_int4", 4, 32, True),
        ("gptq_int8_channel", 8, 64, True),
        ("gptq_int8_v2", 8, 32, False),
        ("awq_gemm", 4, 32, False),
    ],
)
def test_vllm_allocates_what_is_repacked(case: str, bits: int, group: int, symmetric: bool, tmp_path: Path) -> None:
    run(INPUTS / case, tmp_path / "q", repack="compressed-tensors")
    found = parts_of(tmp_path / "q")
    rows, columns = found["weight_shape"].tolist()
    want = {"weight_packed": (rows, words(columns, bits)), "weight_scale": (rows, columns // group)}
    want |= {} if symmetric else {"weight_zero_point": (words(rows, bits), columns // group)}
    assert {name: tuple(value.shape) for name, value in found.items()} == {**want, "weight_shape": (2,)}
    assert all(found[name].dtype == torch.int32 for name in want if name != "weight_scale")
    stated = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert stated["weights"]["num_bits"] == bits and stated["weights"]["symmetric"] is symmetric
    assert stated["weights"].get("group_size", group) == group


@pytest.mark.peers
@pytest.mark.parametrize("scheme", ["fp8-channel", "int8"])
def test_torchao_has_a_place_for_the_same_codes_and_scales(scheme: str, tmp_path: Path) -> None:
    """torchao's tensors, made of the codes and scales of compressed-tensors' schemes, are our floats, and its own
    quantising gives them, but for a few codes of int8 next to ours. Its own folders: `test_torchao_weights`."""
    quantization = pytest.importorskip("torchao.quantization")
    (tmp_path / "m").mkdir()
    weight = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(2)).to(FLOATS)
    save_file({f"{MODULE}.weight": weight}, tmp_path / "m/model.safetensors")
    (tmp_path / "m/config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    run(tmp_path / "m", tmp_path / "q", quantize=scheme)
    run(tmp_path / "q", tmp_path / "f", dequantize=True)
    ours = parts_of(tmp_path / "q")
    floats = parts_of(tmp_path / "f")["weight"]
    parts = {"qdata": ours["weight"], "scale": ours["weight_scale"].float(), "block_size": [1, IN], "dtype": FLOATS}
    kind = quantization.Float8Tensor if scheme == "fp8-channel" else quantization.Int8Tensor
    if scheme == "int8":
        parts["scale"] = ours["weight_scale"]
    assert torch.equal(kind(**parts).dequantize(), floats)
    linear = torch.nn.Linear(IN, OUT, bias=False, dtype=FLOATS)
    linear.weight.data = weight
    per_row = quantization.PerRow()
    how = (
        quantization.Float8WeightOnlyConfig(version=2)
        if scheme == "fp8-channel"
        else quantization.Int8WeightOnlyConfig(version=2, granularity=per_row)
    )
    quantization.quantize_(torch.nn.Sequential(linear), how)
    assert torch.equal(linear.weight.scale.float(), ours["weight_scale"].float())
    differ = (linear.weight.qdata.float() - ours["weight"].float()).abs()
    assert int((differ > 0).sum()) <= (0 if scheme == "fp8-channel" else OUT * IN // 1000) and differ.max() <= 1
