"""Whole layers that --remove-keys takes away: the config counts those that stay, or it is an error with a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3 of four layers, whose config has a list of one entry per layer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"],
        sliding_window=8,
        use_sliding_window=True,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("verb", ["merge", "convert"])
def test_the_last_layers_go_with_their_count(verb: str, model: Path, tmp_path: Path) -> None:
    patterns = ["model.layers.[23].*"]
    if verb == "merge":
        written = ckpt.merge([model], tmp_path / "out", remove_keys=patterns)
    else:
        written = ckpt.convert(model, tmp_path / "out", to="safetensors", remove_keys=patterns)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert any("num_hidden_layers becomes 2" in note for note in written["notes"])

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert len(loaded.model.layers) == 2


@pytest.mark.parametrize("pattern", ["model.layers.0.*", "model.layers.1.*", "model.layers.[02].*"])
def test_a_layer_before_others_is_refused(pattern: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt.merge([model], tmp_path / "out", remove_keys=[pattern])
    assert caught.value.code == "E2973"
    assert "num_hidden_layers: 4" in caught.value.message
    assert "slices" in (caught.value.hint or "") and "--lenient" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_lenient_keeps_the_config_and_says_what_comes_of_it(model: Path, tmp_path: Path) -> None:
    written = ckpt.merge([model], tmp_path / "out", remove_keys=["model.layers.1.*"], lenient=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4
    assert any("random values" in note for note in written["notes"])


def test_parts_of_layers_and_other_tensors_leave_the_count_alone(model: Path, tmp_path: Path) -> None:
    ckpt.merge([model], tmp_path / "out", remove_keys=["*.q_norm.*", "lm_head.*"], lenient=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4


@pytest.mark.parametrize("to", ["dcp", "torch", "megatron-dist"])
def test_a_gap_in_the_numbers_is_noted_where_no_config_counts_layers(to: str, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    ckpt.convert(model, source, to=to)
    stack = "decoder.layers." if to == "megatron-dist" else "model.layers."
    written = ckpt.merge([source], tmp_path / "out", remove_keys=[f"{stack}1.*"])
    gap = [note for note in written["notes"] if "have a gap" in note]
    assert len(gap) == 1 and "layer 1 is removed, and 0, 2, 3 keep" in gap[0]

    last = ckpt.merge([source], tmp_path / "last", remove_keys=[f"{stack}3.*"])
    assert not any("have a gap" in note for note in last["notes"])


def test_the_gap_is_closed_as_the_note_says(model: Path, tmp_path: Path) -> None:
    ckpt.convert(model, tmp_path / "run", to="dcp")
    patterns = ["model.layers.1.*"]
    [note] = [
        note
        for note in ckpt.merge([tmp_path / "run"], tmp_path / "out", remove_keys=patterns)["notes"]
        if "have a gap" in note
    ]
    rename = "model.layers.2.*=model.layers.1.*"
    assert f"--rename '{rename}'" in note

    rules = [rename, "model.layers.3.*=model.layers.2.*"]
    written = ckpt.merge([tmp_path / "run"], tmp_path / "closed", remove_keys=patterns, rename=rules)
    names = list(ckpt.open(tmp_path / "closed"))
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2"}
    assert not any("have a gap" in note for note in written["notes"])


def test_formats_without_a_config_of_the_hub_take_any_layers(model: Path, tmp_path: Path) -> None:
    ckpt.convert(model, tmp_path / "out", to="dcp", remove_keys=["model.layers.1.*"])
    assert not any(".layers.1." in name for name in ckpt.open(tmp_path / "out"))


def test_layers_under_other_names_count_too(model: Path, tmp_path: Path) -> None:
    ckpt.convert(model, tmp_path / "megatron", to="megatron-dist")
    ckpt.convert(tmp_path / "megatron", tmp_path / "out", to="safetensors", remove_keys=["decoder.layers.3.*"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 3
