"""Adapter folders: what is one, what is not, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.options import Reading, Writing
from ckpt_tool.commands.source import open_source
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.storage.source import Tree

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def adapter(tmp_path):
    shutil.copytree(FIXTURES / "peft/lora_bf16", tmp_path / "adapter")
    return tmp_path / "adapter"


def refused(path, code, exit_code, **reading):
    with pytest.raises(CkptError) as e:
        open_source(str(path), Reading(from_format="peft", **reading)).refuse_unsafe()
    assert (e.value.code, e.value.exit_code) == (code, exit_code) and e.value.hint, e.value
    return e.value


def test_a_whole_model_beside_it_is_what_the_folder_is(adapter):
    save_file({"w": torch.ones(2)}, adapter / "model.safetensors")
    assert registry.detect(Tree(adapter))[0].name == "safetensors"
    (adapter / "model.safetensors").unlink()
    torch.save({"w": torch.ones(2)}, adapter / "pytorch_model.bin")
    assert registry.detect(Tree(adapter))[0].name == "torch"


def test_what_a_trainer_puts_beside_an_adapter(adapter):
    torch.save({"state": {}, "param_groups": []}, adapter / "optimizer.pt")
    torch.save([1], adapter / "rng_state.pth")
    for name in ("trainer_state.json", "tokenizer.json"):
        (adapter / name).write_text("{}")
    opened = open_source(str(adapter), Reading())
    assert opened.catalog.format == "peft" and opened.catalog.sidefiles == ("tokenizer.json",)
    assert any("optimizer.pt" in note.message for note in opened.catalog.notes)
    shutil.copy(FIXTURES / "peft/bin/adapter_model.bin", adapter)
    (adapter / "adapter_model.safetensors").unlink()
    assert open_source(str(adapter), Reading()).catalog.format == "peft"


def test_configs(adapter):
    config = adapter / "adapter_config.json"
    for text in ('{"peft_type": 5}', "[]", "{}"):
        config.write_text(text)
        assert refused(adapter, "E1423", 3).path.endswith("adapter_config.json")
    config.write_text('{"peft_type": "LORA", "peft_type": "LORA"}')
    with pytest.raises(CkptError, match="duplicate key"):
        open_source(str(adapter), Reading())
    config.unlink()
    refused(adapter, "E0393", 3)


def test_weights(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    refused(adapter, "E1431", 3)
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, adapter / "adapter_model.bin")
    assert "epoch" in refused(adapter, "E1432", 3).message


class Runs:
    def __reduce__(self):
        return (print, ("run",))


def test_code_in_a_bin_is_refused_and_not_run(adapter, capsys):
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"a.lora_A.weight": torch.ones(2, 2), "b": Runs()}, adapter / "adapter_model.bin")
    refused(adapter, "E0420", 4)
    assert not capsys.readouterr().out


def test_only_adapters_are_written(tmp_path):
    with pytest.raises(CkptError) as e:
        convert(
            str(FIXTURES / "safetensors/llama_one_file"), str(tmp_path / "out"), Reading(), Writing(to="peft"), Silent()
        )
    assert (e.value.code, e.value.exit_code) == ("E1433", 2)


def test_the_config_travels(adapter, tmp_path):
    (adapter / "tokenizer.json").write_text("{}")
    convert(str(adapter), str(tmp_path / "out"), Reading(), Writing(to="peft", remove_keys=("*.v_proj.*",)), Silent())
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert (tmp_path / "out/adapter_config.json").read_bytes() == (adapter / "adapter_config.json").read_bytes()
    catalog = open_source(str(tmp_path / "out"), Reading()).catalog
    assert len(catalog.tensors) == 4 and catalog.hints["peft"]["config"] == json.loads(
        (adapter / "adapter_config.json").read_text()
    )
