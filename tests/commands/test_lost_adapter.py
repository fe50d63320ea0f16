"""A model that PEFT wrapped, saved without its adapter or with a part of it: an error, not names that no library loads
or half an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError

PREFIX = "base_model.model.model."
WRAPPED: dict[str, torch.Tensor] = {}
for layer in range(2):
    module = f"{PREFIX}layers.{layer}.q_proj"
    WRAPPED |= {
        f"{module}.base_layer.weight": torch.ones(8, 8),
        f"{module}.lora_A.default.weight": torch.ones(2, 8),
        f"{module}.lora_B.default.weight": torch.ones(8, 2),
        f"{PREFIX}layers.{layer}.up_proj.weight": torch.ones(8, 8),
    }
HEAD = {f"{PREFIX}head.original_module.weight": torch.ones(4, 8), f"{PREFIX}up.weight": torch.ones(8, 8)}


def without(*parts: str) -> dict[str, torch.Tensor]:
    """The wrapped model without the tensors whose names have all of these parts."""
    return {name: tensor for name, tensor in WRAPPED.items() if not all(part in name for part in parts)}


# state, target, code
CASES = {
    "no adapter": (without("lora_"), "safetensors", "E3064"),
    "no adapter, for torch": (without("lora_"), "torch", "E3064"),
    "no trained head": (HEAD, "safetensors", "E3064"),
    "a module without": (without("lora_", "layers.1"), "peft", "E3064"),
    "half a pair": (without("lora_B", "layers.1"), "peft", "E2936"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_part_of_the_adapter_is_lost(kind: str, tmp_path: Path) -> None:
    state, target, code = CASES[kind]
    source = str(tmp_path / "in.pt")
    out = tmp_path / "out"
    torch.save(state, source)
    options = {"lora_alpha": 4.0} if target == "peft" else {}
    with pytest.raises(CkptError) as caught:
        ckpt.convert(source, str(out), to=target, **options)
    assert caught.value.code == code and not out.exists()
    ckpt.convert(source, str(out), to=target, lenient=True, **options)


def test_whole_ones_are_written(tmp_path: Path) -> None:
    source = str(tmp_path / "in.pt")
    torch.save(WRAPPED, source)
    ckpt.convert(source, str(tmp_path / "out"), to="peft", lora_alpha=4.0)
    assert len(load_file(tmp_path / "out/adapter_model.safetensors")) == 4

    # the base alone, as the hint says
    torch.save(without("lora_"), source)
    rules = ["*.base_layer.*=*.*"]
    ckpt.convert(source, str(tmp_path / "base"), to="safetensors", rename=rules)
    assert not [name for name in load_file(tmp_path / "base/model.safetensors") if "base_layer" in name]


def test_an_empty_adapter_names_its_folder(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    names = [f"{PREFIX}layers.0.q_proj.lora_{half}.weight" for half in "AB"]
    save_file({name: torch.zeros(0) for name in names}, source / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (source / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CkptError) as caught:
        ckpt.convert(str(source), str(tmp_path / "out"), to="peft")
    assert (caught.value.code, caught.value.path) == ("E2935", str(source))
    assert [row["file"] for row in ckpt.verify(str(source))["findings"]] == [str(source)]

    # a pointer to a step that is not there, and no other step to choose
    (source / "latest").write_text("global_step4")
    with pytest.raises(CkptError) as caught:
        ckpt.convert(str(source), str(tmp_path / "out"), to="peft")
    assert caught.value.code == "E2601" and "those that are there" not in (caught.value.hint or "")
