"""`--config` of another model than the tensors: an error before a byte moves, by the rules that `audit` has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

import ckpt_tool as ckpt
from ckpt_tool.errors import InconsistentCheckpoint

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's folder of a Qwen 3 of four layers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=4)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["dcp", "torch", "safetensors"])
def job(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors as a job saves them, or in the hub's folder with its own config."""
    if request.param == "safetensors":
        return model
    out = tmp_path_factory.mktemp("job") / "saved"
    ckpt.convert(model, out, to=request.param)
    return out


def config_file(folder: Path, model_type: str = "qwen3", **changes: Any) -> Path:
    """A config.json as transformers writes it."""
    classes = {"qwen3": Qwen3Config, "llama": LlamaConfig}
    architectures = [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[model_type]]
    config = classes[model_type](**{**SIZES, "num_hidden_layers": 4, **changes}, architectures=architectures)
    file = folder / "given.json"
    file.write_text(json.dumps(config.to_dict()))
    return file


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("llama", {"num_hidden_layers": 6}, ["model.layers.4.* is not there", "q_norm.weight is in a layer"]),
        ("qwen3", {"num_hidden_layers": 6}, ["model.layers.4.* is not there", "model.layers.5.*"]),
        ("qwen3", {"hidden_size": 8}, ["is [16, 24], by the config [8, 24]"]),
        ("qwen3", {"intermediate_size": 48}, ["is [24, 16], by the config [48, 16]"]),
    ],
)
def test_a_config_of_another_model_is_refused(
    model_type: str, changes: dict[str, Any], said: list[str], job: Path, tmp_path: Path
) -> None:
    given = config_file(tmp_path, model_type, **changes)
    with pytest.raises(InconsistentCheckpoint) as caught:
        ckpt.convert(job, tmp_path / "out", to="safetensors", config=given)

    error = caught.value
    assert (error.code, error.exit_code) == ("E3061", 3)
    shown = f"{error.message} {error.faults}"
    assert not [text for text in said if text not in shown]
    assert "--config" in (error.hint or "") and "--lenient" in (error.hint or "")
    assert str(given) in str(error.path)
    assert not (tmp_path / "out").exists()


def test_what_is_refused_is_what_audit_finds(model: Path, tmp_path: Path) -> None:
    """One statement of the rule: `--lenient` writes the folder, and audit says of it what the error said."""
    ckpt.convert(model, tmp_path / "dcp", to="dcp")
    given = config_file(tmp_path, "llama", num_hidden_layers=6)
    with pytest.raises(InconsistentCheckpoint) as caught:
        ckpt.convert(tmp_path / "dcp", tmp_path / "out", to="safetensors", config=given)
    written = ckpt.convert(tmp_path / "dcp", tmp_path / "out", to="safetensors", config=given, lenient=True)
    assert any("model.layers.4.* is not there" in note for note in written["notes"])
    assert any("more of what contradicts" in note for note in written["notes"])

    found = {finding["message"] for finding in ckpt.audit(tmp_path / "out")["findings"]}
    refused = {caught.value.message.partition("these tensors: ")[2], *caught.value.faults}
    assert refused == found


def test_the_right_config_and_other_rows_of_the_vocabulary_pass(job: Path, tmp_path: Path) -> None:
    ckpt.convert(job, tmp_path / "right", to="safetensors", config=config_file(tmp_path))
    written = ckpt.convert(job, tmp_path / "rows", to="safetensors", config=config_file(tmp_path, vocab_size=64))
    assert any("vocab_size becomes 32" in note for note in written["notes"])


def test_names_of_another_family_altogether(tmp_path: Path) -> None:
    """A GPT-2's tensors and a Llama's config share no name."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=8)).save_pretrained(
        tmp_path / "gpt2"
    )
    ckpt.convert(tmp_path / "gpt2", tmp_path / "dcp", to="dcp")
    with pytest.raises(InconsistentCheckpoint) as caught:
        ckpt.convert(tmp_path / "dcp", tmp_path / "out", to="safetensors", config=config_file(tmp_path, "llama"))
    assert caught.value.code == "E3061" and "gpt2" in caught.value.message


def test_parts_that_patterns_pick_are_no_whole_model(job: Path, tmp_path: Path) -> None:
    given = config_file(tmp_path)
    ckpt.convert(job, tmp_path / "out", to="safetensors", config=given, keep_keys=["model.layers.0.*"], lenient=False)
    ckpt.convert(job, tmp_path / "less", to="safetensors", config=given, remove_keys=["model.norm.*"])


def test_a_folder_keeps_the_config_that_it_came_with(model: Path, tmp_path: Path) -> None:
    """Layers that a hub folder lacks are its own fault, also where its own config is named: audit finds them."""
    ckpt.convert(model, tmp_path / "dcp", to="dcp", remove_keys=["model.layers.3.*"])
    ckpt.convert(tmp_path / "dcp", tmp_path / "part", to="safetensors")
    (tmp_path / "part" / "config.json").write_bytes((model / "config.json").read_bytes())
    ckpt.convert(tmp_path / "part", tmp_path / "as_it_is", to="safetensors")
    ckpt.convert(tmp_path / "part", tmp_path / "named", to="safetensors", config=tmp_path / "part")


def test_reshard_refuses_it_too(model: Path, tmp_path: Path) -> None:
    given = config_file(tmp_path, num_hidden_layers=6)
    with pytest.raises(InconsistentCheckpoint, match=r"model\.layers\.4"):
        ckpt.reshard(model, tmp_path / "out", config=given)
