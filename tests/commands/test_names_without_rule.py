"""Tensors outside the layers that no rule knows: a system with names of its own can't hold them, whatever the source
is; formats that keep names do. `audit` names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import InputError

LLAMA = Path(__file__).parents[2] / "fixtures" / "convert" / "llama" / "hf"
SOURCES = ("safetensors", "torch", "dcp")
OF_THEIR_OWN = ("megatron-dist", "megatron", "megatron-fsdp", "gguf", "meta", "paddle", "paddle-flex", "paddle-unified")
KEEP_NAMES = ("safetensors", "dcp", "torch", "sharded", "orbax")
STRANGERS = ("my_head.weight", "value_head.summary.bias", "score.weight")
ROTARY = "model.rotary_emb.inv_freq"


def build(folder: Path, kind: str, more: tuple[str, ...], architecture: str | None = None) -> str:
    """A small Llama with more tensors, as a checkpoint of that kind."""
    folder.mkdir()
    config = json.loads((LLAMA / "config.json").read_text())
    if architecture:
        config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config))

    tensors = load_file(LLAMA / "model.safetensors") | {name: np.ones(3, np.float32) for name in more}
    values = {name: torch.from_numpy(value) for name, value in tensors.items()}
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    elif kind == "torch":
        torch.save(values, folder / "pytorch_model.bin")
    else:
        dcp.save(values, checkpoint_id=folder, no_dist=True)
    return str(folder)


@pytest.mark.parametrize("to", OF_THEIR_OWN)
@pytest.mark.parametrize("kind", SOURCES)
def test_a_system_with_names_of_its_own_gets_none_of_them(kind: str, to: str, tmp_path: Path) -> None:
    source = build(tmp_path / "in", kind, STRANGERS)
    with pytest.raises(InputError) as caught:
        ckpt.convert(source, str(tmp_path / "out"), to=to)
    error = caught.value
    assert (error.code, error.exit_code, str(error.path)) == ("E3010", 3, source)
    named = f"{error.message} {error.faults}"
    assert all(name in named for name in STRANGERS)
    hint = error.hint or ""
    assert all(option in hint for option in ("--remove-keys", "--rename", "--dialect keep"))
    assert not (tmp_path / "out").exists()


def test_each_way_of_the_hint_works(tmp_path: Path) -> None:
    source = build(tmp_path / "in", "torch", ("my_head.weight",))
    ckpt.convert(source, str(tmp_path / "less"), to="megatron-dist", remove_keys=["my_head.*"])
    ckpt.convert(source, str(tmp_path / "keep"), to="megatron-dist", dialect="keep")
    ckpt.convert(source, str(tmp_path / "as_is"), to="megatron-dist", lenient=True)
    assert "my_head.weight" not in ckpt.open(str(tmp_path / "less"))
    assert {"my_head.weight", "model.norm.weight"} <= set(ckpt.open(str(tmp_path / "keep")))
    assert {"my_head.weight", "decoder.final_layernorm.weight"} <= set(ckpt.open(str(tmp_path / "as_is")))

    tensors = load_file(LLAMA / "model.safetensors")
    tensors["last_norm.weight"] = tensors.pop("model.norm.weight")
    (tmp_path / "renamed").mkdir()
    shutil.copy(LLAMA / "config.json", tmp_path / "renamed")
    save_file(tensors, tmp_path / "renamed" / "model.safetensors")
    rename = ["last_norm.*=model.norm.*"]
    ckpt.convert(str(tmp_path / "renamed"), str(tmp_path / "named"), to="megatron-dist", rename=rename)
    assert "decoder.final_layernorm.weight" in ckpt.open(str(tmp_path / "named"))


@pytest.mark.parametrize("to", KEEP_NAMES)
def test_formats_that_keep_names_keep_these(to: str, tmp_path: Path) -> None:
    source = build(tmp_path / "in", "torch", STRANGERS)
    ckpt.convert(source, str(tmp_path / "out"), to=to)
    assert set(STRANGERS) <= set(ckpt.open(str(tmp_path / "out")))


def test_on_the_way_to_the_hub_they_stay_under_their_names(tmp_path: Path) -> None:
    source = build(tmp_path / "in", "torch", ("my_head.weight",))
    ckpt.convert(source, str(tmp_path / "there"), to="megatron-dist", lenient=True)
    report = ckpt.convert(str(tmp_path / "there"), str(tmp_path / "back"), to="safetensors")
    assert "my_head.weight" in load_file(tmp_path / "back" / "model.safetensors")
    assert any("my_head.weight" in note for note in report["notes"])


@pytest.mark.parametrize("to", ["megatron-dist", "paddle"])
def test_a_buffer_that_the_config_states_is_left_out_with_a_line(to: str, tmp_path: Path) -> None:
    source = build(tmp_path / "in", "torch", (ROTARY,))
    report = ckpt.convert(source, str(tmp_path / "out"), to=to)
    assert ROTARY not in ckpt.open(str(tmp_path / "out"))
    assert any(ROTARY in row["names"] for row in report["dropped"])


@pytest.mark.parametrize("kind", SOURCES)
def test_audit_has_one_finding_for_all_of_them(kind: str, tmp_path: Path) -> None:
    source = build(tmp_path / "in", kind, (*STRANGERS, ROTARY))
    found = ckpt.audit(source)["findings"]
    assert [(row["code"], row["severity"]) for row in found] == [("A0110", "warning")]
    assert "and 2 more" in found[0]["message"] and "llama" in found[0]["message"]


def test_audit_leaves_a_class_that_the_family_does_not_list_alone(tmp_path: Path) -> None:
    """Which head a class of one's own has nobody can say."""
    source = build(tmp_path / "in", "safetensors", ("score.weight",), "LlamaForSequenceClassification")
    assert ckpt.audit(source)["findings"] == []
