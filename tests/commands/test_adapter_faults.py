"""What is wrong with an adapter by its headers and its config, and where the values of an empty one are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.adapters.fold import fold
from ckpt_tool.commands.audit import audit
from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Auditing
from ckpt_tool.options.writing import Writing

PEFT = Path(__file__).parents[2] / "fixtures/peft"
ADAPTERS = sorted(path.name for path in PEFT.iterdir() if (path / "adapter_config.json").is_file())


def without_values(match):
    return lambda tensors: {name: torch.empty(0) if match(name) else value for name, value in tensors.items()}


def lone_half(tensors):
    name = next(name for name in tensors if ".lora_B." in name)
    return {other: value for other, value in tensors.items() if other != name}


def other_rank(tensors):
    def cut(name, value):
        return value[:1] if ".lora_A." in name else value[:, :1] if ".lora_B." in name else value

    return {name: cut(name, value).clone() for name, value in tensors.items()}


def no_pair(tensors):
    name = next(name for name in tensors if ".lora_A." in name)
    return {**tensors, name: tensors[name][:1].clone()}


def other_target(tensors):
    return {name.replace(".q_proj.", ".k_proj."): value for name, value in tensors.items()}


# what is done to the tensors -> the code of the finding
BROKEN = {
    "all_empty": (without_values(lambda name: True), "E2935"),
    "some_empty": (without_values(lambda name: "layers.0" in name and "lora_B" in name), "E2935"),
    "lone_half": (lone_half, "E2936"),
    "other_rank": (other_rank, "E2936"),
    "no_pair": (no_pair, "E2936"),
    "other_target": (other_target, "E2936"),
}


def codes(document):
    return [row["code"] for row in document["findings"]]


@pytest.mark.parametrize("case", BROKEN)
def test_audit_verify_and_writers_find_it(case, tmp_path):
    change, code = BROKEN[case]
    shutil.copytree(PEFT / "lora_bf16", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})

    path = str(tmp_path / "adapter")
    assert set(codes(audit(path, Reading(), Auditing(), progress=Silent()))) == {code}
    assert set(codes(verify(path, Reading(), progress=Silent()))) == {code}
    with pytest.raises(CkptError) as e:
        convert(path, str(tmp_path / "out"), Reading(), Writing(to="peft"), Silent())
    assert e.value.code == code and not (tmp_path / "out").exists()


def test_what_the_config_promises(tmp_path):
    shutil.copytree(PEFT / "lora_bf16", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "modules_to_save": ["lm_head"]}))
    (finding,) = audit(str(tmp_path / "adapter"), Reading(), Auditing(), progress=Silent())["findings"]
    assert finding["code"] == "E2936" and "lm_head" in finding["message"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_pefts_own_adapters_have_no_finding(name):
    assert not audit(str(PEFT / name), Reading(), Auditing(), progress=Silent())["findings"]
    assert verify(str(PEFT / name), Reading(), progress=Silent())["ok"]


def whole_state(adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The wrapped model that the adapter was trained in."""
    state = {}
    for name, value in adapter.items():
        module, _, part = name.rpartition(".lora_")
        state[f"{module}.lora_{part.removesuffix('.weight')}.default.weight"] = value.float()
        if part.startswith("B"):
            a = adapter[f"{module}.lora_A.weight"]
            state[f"{module}.base_layer.weight"] = (
                torch.arange(value.shape[0] * a.shape[1]).reshape(value.shape[0], -1).float() / 64
            )
    return state | {"base_model.model.model.norm.weight": torch.ones(4)}


@pytest.mark.parametrize("frozen", ["with its base", "alone"])
def test_a_trainers_folder_of_zero_3(frozen, tmp_path):
    """The adapter's own file is empty, and DeepSpeed's files below have the values, as fp32 masters."""
    adapter = load_file(PEFT / "lora_bf16/adapter_model.safetensors")
    state = whole_state(adapter)
    if frozen == "alone":
        state = {name: value for name, value in state.items() if ".lora_" in name}
    torch.save({"model": state, "master_weights": state}, tmp_path / "job.pt")
    folder = tmp_path / "checkpoint-5"
    convert(
        str(tmp_path / "job.pt"),
        str(folder),
        Reading(),
        Writing(to="deepspeed", zero=3, degrees={"dp": 2}),
        Silent(),
    )
    shutil.copy(PEFT / "lora_bf16/adapter_config.json", folder)
    empty = {name: torch.empty(0) for name in adapter}
    save_file(empty, folder / "adapter_model.safetensors", {"format": "pt"})

    for source in (folder, folder / "global_step0"):
        out = tmp_path / f"out_{source.name}"
        convert(str(source), str(out), Reading(), Writing(to="peft"), Silent())
        ours = load_file(out / "adapter_model.safetensors")
        assert ours.keys() == adapter.keys()
        assert all(torch.equal(ours[name], adapter[name].float()) for name in ours)
        assert json.loads((out / "adapter_config.json").read_text()) == json.loads(
            (folder / "adapter_config.json").read_text()
        )
    found = codes(audit(str(folder), Reading(from_format="peft"), Auditing(), progress=Silent()))
    assert found == ["E2935"]

    if frozen != "alone":
        fold([str(folder)], str(tmp_path / "folded"), Reading(), Writing(to="safetensors"), Silent())
        folded = load_file(tmp_path / "folded/model.safetensors")
        scaling = json.loads((folder / "adapter_config.json").read_text())
        for name, value in folded.items():
            if not name.endswith("_proj.weight"):
                continue
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a = adapter[f"{module}.lora_A.weight"].float()
            b = adapter[f"{module}.lora_B.weight"].float()
            want = state[f"{module}.base_layer.weight"] + b @ a * (scaling["lora_alpha"] / scaling["r"])
            torch.testing.assert_close(value, want)
