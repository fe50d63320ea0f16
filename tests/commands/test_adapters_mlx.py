"""Adapters of mlx-lm's are folded as PEFT folds the same adapter, and become PEFT's folders."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from adapter_models import load, merged, save_adapter, save_base
from safetensors.torch import load_file, save_file

from ckpt_tool.adapters.fold import fold
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source

pytestmark = pytest.mark.skipif(find_spec("peft") is None or find_spec("transformers") is None, reason="without PEFT")
CASES = {
    "lora": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "up_proj"]},
    "embedding": {"r": 2, "lora_alpha": 5, "target_modules": ["v_proj", "embed_tokens"]},
}
PARTS = {
    ".lora_A.weight": ".lora_a",
    ".lora_B.weight": ".lora_b",
    ".lora_embedding_A": ".lora_a",
    ".lora_embedding_B": ".lora_b",
    ".lora_magnitude_vector": ".m",
}


def as_mlx(adapter, folder, **config):
    """PEFT's adapter as mlx-lm writes it, `__metadata__: null` included."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {}
    for name, value in load_file(adapter / "adapter_model.safetensors").items():
        for ours, theirs in PARTS.items():
            if name.endswith(ours):
                module = name.removeprefix("base_model.model.").removesuffix(ours)
                tensors[module + theirs] = (value.T if value.dim() == 2 else value).contiguous()
    folder.mkdir()
    save_file(tensors, folder / "adapters.safetensors")
    save_file(tensors, folder / "0000100_adapters.safetensors")
    raw = (folder / "adapters.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.dumps({"__metadata__": None, **json.loads(raw[8 : 8 + size])}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "adapters.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    stated = {
        "fine_tune_type": "dora" if settings["use_dora"] else "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": settings["r"], "scale": settings["lora_alpha"] / settings["r"], "dropout": 0.0},
        "model": "mlx_model",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**stated, **config}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_it_is_folded_as_peft_folds_it(case, tmp_path):
    base = save_base("llama", tmp_path / "base")
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES[case])
    mlx = as_mlx(adapter, tmp_path / "mlx")
    fold([str(base), str(mlx)], str(tmp_path / "out"), Reading(), Writing(verify="full"), Silent())
    ours = load(tmp_path / "out")
    theirs = merged(base, adapter)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]

    convert(str(mlx), str(tmp_path / "peft"), Reading(), Writing(to="peft"), Silent())
    written = load_file(tmp_path / "peft/adapter_model.safetensors")
    trained = load_file(adapter / "adapter_model.safetensors")
    assert all(torch.equal(written[name], trained[name]) for name in written)
    again = merged(base, tmp_path / "peft")
    assert not [name for name in again if not torch.equal(again[name], theirs[name])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fine_tune_type": "full"}, "full"),
        ({"lora_parameters": {"rank": 2}}, "scale"),
        ({"lora_parameters": None}, "scale"),
    ],
)
def test_what_is_no_such_sum_is_refused(change, words, tmp_path):
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES["lora"])
    mlx = as_mlx(adapter, tmp_path / "mlx", **change)
    with pytest.raises(CkptError, match=words) as e:
        open_source(str(mlx), Reading())
    assert e.value.code == "E2937" and "mlx" in e.value.message


def test_stacked_experts_and_missing_weights(tmp_path):
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES["lora"])
    mlx = as_mlx(adapter, tmp_path / "mlx")
    save_file({"model.layers.0.mlp.switch_mlp.up_proj.lora_a": torch.ones(2, 2, 4)}, mlx / "adapters.safetensors")
    with pytest.raises(CkptError, match="stacked") as e:
        open_source(str(mlx), Reading())
    assert e.value.code == "E2937"
    shutil.rmtree(mlx)
    mlx = as_mlx(adapter, tmp_path / "mlx")
    (mlx / "adapters.safetensors").unlink()
    with pytest.raises(CkptError, match="mlx") as e:
        open_source(str(mlx), Reading(from_format="peft"))
    assert e.value.code == "E1431"
