"""Adapter folders: what is one, what is not, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.merge import merge
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.formats.adapters.lone import adapter_config, is_adapter
from ckpt_tool.merging.options import MergeOptions
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source
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
    refused(adapter, "E1612", 3)


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
    assert len(catalog.tensors) == 4 and adapter_config(catalog) == json.loads(
        (adapter / "adapter_config.json").read_text()
    )


# -- without a config --------------------------------------------------------------------------------------------------

ADAPTERS = sorted(path for path in (FIXTURES / "peft").iterdir() if (path / "adapter_config.json").is_file())
MISSING = "this is an adapter, and its adapter_config.json is missing"


def notes_of(path):
    return [note.message for note in open_source(str(path), Reading()).catalog.notes if "adapter" in note.message]


@pytest.mark.parametrize("how", ["folder", "file", "file beside its config", "renamed"])
@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_without_its_config_is_called_that(path, how, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(path, folder)
    if how != "file beside its config":
        (folder / "adapter_config.json").unlink()
    (weights,) = folder.glob("adapter_model.*")
    if how == "renamed":
        weights = weights.rename(folder / f"mine{weights.suffix}")
    src = folder if how == "folder" else weights
    known = any(
        ".lora_" in name or "base_model.model." in name for name, _ in open_source(str(src), Reading()).catalog.tensors
    )
    assert known, "a fixture of another method?"
    (note,) = notes_of(src)
    said = "adapter_config.json is next to it" if how == "file beside its config" else MISSING
    assert said in note and "pass the folder" in note
    base = str(FIXTURES / "convert/llama/hf")
    with pytest.raises(CkptError, match="this is an adapter, and") as e:
        merge([base, str(src)], str(tmp_path / "out"), Reading(), Writing(), MergeOptions("lora"), Silent())
    assert (e.value.code, e.value.exit_code) == ("E1612", 3) and "pass the folder" in e.value.hint
    if how == "file beside its config":  # it is read from there
        convert(str(src), str(tmp_path / "out"), Reading(), Writing(to="peft"), Silent())
        ours, theirs = (open_source(str(each), Reading()).catalog for each in (tmp_path / "out", folder))
        assert adapter_config(ours) == adapter_config(theirs) and set(ours.tensors) == set(theirs.tensors)
    else:
        with pytest.raises(CkptError, match="adapter whose adapter_config.json is missing") as e:
            convert(str(src), str(tmp_path / "out"), Reading(), Writing(to="peft"), Silent())
        assert e.value.code == "E1433"
    written = convert(
        str(src), str(tmp_path / "plain"), Reading(), Writing(to="dcp", dialect="keep", fsync=False), Silent()
    )
    assert any("this is an adapter" in line for line in written["notes"])


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.name)
def test_one_with_its_config_has_no_such_note(path):
    assert not notes_of(path)


def test_nothing_else_is_called_an_adapter():
    for name in ("safetensors", "torch"):
        for path in sorted((FIXTURES / name).iterdir()):
            if ".truth." not in path.name and path.suffix not in (".md", ".json"):
                assert not notes_of(path), path
    assert not any(is_adapter(keys) for keys in ([], [TensorKey("a.lora_A.weight"), TensorKey("w")], [TensorKey("w")]))
    assert is_adapter([TensorKey("a.lora_A.weight"), TensorKey("a.lora_B.weight")])
