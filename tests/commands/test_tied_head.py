"""`--tied-head`: written once or twice, in every state, never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import ckpt_tool as ckpt
from ckpt_tool.errors import InputError, UsageError

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TIED = "tie_word_embeddings"


def model(folder: Path, head: np.ndarray[Any, Any] | None) -> str:
    folder.mkdir()
    embed = np.arange(24, dtype=np.float32).reshape(6, 4)
    tensors = {EMBED: embed, "model.norm.weight": np.ones(4, np.float32)}
    if head is not None:
        tensors[HEAD] = head
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": head is None}))
    return str(folder)


def test_untie_writes_the_embedding_twice(tmp_path: Path) -> None:
    report = ckpt.convert(model(tmp_path / "in", None), str(tmp_path / "out"), to="safetensors", tied_head="untie")
    have = ckpt.open(str(tmp_path / "out"))
    assert np.array_equal(have[HEAD].numpy(), have[EMBED].numpy()) and set(have) == {EMBED, HEAD, "model.norm.weight"}
    assert any("copy of model.embed_tokens.weight" in note for note in report["notes"])


def test_tie_leaves_an_equal_head_out_by_name(tmp_path: Path) -> None:
    same = np.arange(24, dtype=np.float32).reshape(6, 4)
    report = ckpt.convert(model(tmp_path / "in", same), str(tmp_path / "out"), to="safetensors", tied_head="tie")
    assert set(ckpt.open(str(tmp_path / "out"))) == {EMBED, "model.norm.weight"}
    (entry,) = report["dropped"]
    assert entry["names"] == [HEAD] and entry["bytes"] == 96


def test_tie_refuses_a_head_that_differs_by_one_bit(tmp_path: Path) -> None:
    other = np.arange(24, dtype=np.float32).reshape(6, 4)
    other[3, 2] = np.nextafter(other[3, 2], np.float32(99))
    with pytest.raises(UsageError, match=r"differ at \[3, 2\]"):
        ckpt.convert(model(tmp_path / "in", other), str(tmp_path / "out"), to="safetensors", tied_head="tie")
    with pytest.raises(UsageError, match=r"F32 \[5, 4\] and F32 \[6, 4\]"):
        ckpt.convert(model(tmp_path / "in5", other[:5]), str(tmp_path / "out"), to="safetensors", tied_head="tie")
    assert not (tmp_path / "out").exists()


def test_states_go_along_and_names_that_are_not_known_are_told(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(6, 4)
    state = {
        "model": {EMBED: weight},
        "optimizer": {
            "state": {0: {"exp_avg": weight * 2, "step": torch.tensor(3.0)}},
            "param_groups": [{"params": [0], "lr": 0.1}],
        },
    }
    torch.save(state, tmp_path / "in.pt")
    ckpt.convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), to="sharded", tied_head="untie")
    have = ckpt.open(str(tmp_path / "out"))
    assert np.array_equal(have.state("exp_avg")[HEAD].numpy(), (weight * 2).numpy())
    torch.save({"w": weight}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="no embedding"):
        ckpt.convert(str(tmp_path / "w.pt"), str(tmp_path / "out2"), to="sharded", tied_head="tie")


def qwen(folder: Path, *, differs: bool) -> str:
    """A tied model that holds its output layer all the same, as some trainers save it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[EMBED] + np.float32(differs)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_a_copy_that_the_target_leaves_out_must_be_one(tmp_path: Path) -> None:
    report = ckpt.convert(qwen(tmp_path / "same", differs=False), str(tmp_path / "out"), to="megatron-dist")
    assert [entry["names"] for entry in report["dropped"]] == [[HEAD]]
    other = qwen(tmp_path / "other", differs=True)
    with pytest.raises(InputError, match="should be copies") as caught:
        ckpt.convert(other, str(tmp_path / "out2"), to="megatron-dist")
    assert (caught.value.code, caught.value.exit_code) == ("E1481", 3) and not (tmp_path / "out2").exists()
    ckpt.convert(other, str(tmp_path / "out3"), to="megatron-dist", tied_head="untie")
    assert "output_layer.weight" in ckpt.open(str(tmp_path / "out3"))


# -- a config that ties a head which is no copy ------------------------------------------------------------------------

PART = {"gemma3": "gemma3_text", "mistral3": "mistral", "internvl": "qwen2", "nobodys_vlm": "nobodys"}


def model_of_parts(folder: Path, kind: str, *, differs: bool, part_states: bool | None = True) -> str:
    """A model that sees, whose config ties the head, with a head that is a copy or is not."""
    folder.mkdir()
    embedding = np.arange(24, dtype=np.float32).reshape(6, 4)
    tensors = {
        "language_model.model.embed_tokens.weight": embedding,
        "language_model.lm_head.weight": embedding + np.float32(differs),
        "language_model.model.norm.weight": np.ones(4, np.float32),
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    part = {"model_type": PART[kind]} | ({} if part_states is None else {TIED: part_states})
    document = {"model_type": kind, TIED: True, "text_config": part}
    (folder / "config.json").write_text(json.dumps(document))
    return str(folder)


def flags(folder: Path) -> tuple[Any, Any]:
    """What the config states at its top and in the language model's part."""
    config = json.loads((folder / "config.json").read_text())
    return config.get(TIED), config.get("text_config", {}).get(TIED)


@pytest.mark.parametrize("target", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("kind", PART)
def test_a_config_that_ties_another_head_is_corrected(kind: str, target: str, tmp_path: Path) -> None:
    source = model_of_parts(tmp_path / "in", kind, differs=True)
    report = ckpt.convert(source, str(tmp_path / "out"), to=target)
    assert flags(tmp_path / "out") == (False, False)
    notes = [note for note in report["notes"] if f"{TIED} becomes False" in note]
    assert len(notes) == 2 and "differ at [0, 0]" in notes[0]


def test_a_config_that_ties_a_copy_stays_as_it_is(tmp_path: Path) -> None:
    ckpt.convert(model_of_parts(tmp_path / "in", "gemma3", differs=False), str(tmp_path / "out"), to="safetensors")
    assert flags(tmp_path / "out") == (True, True)


def test_a_class_that_ties_without_a_flag_is_given_one(tmp_path: Path) -> None:
    source = model_of_parts(tmp_path / "in", "gemma3", differs=True, part_states=None)
    ckpt.convert(source, str(tmp_path / "out"), to="safetensors")
    assert flags(tmp_path / "out") == (False, False)


@pytest.mark.parametrize("kind", ["gemma3", "nobodys_vlm"])
def test_untie_is_stated_in_every_part(kind: str, tmp_path: Path) -> None:
    source = model_of_parts(tmp_path / "in", kind, differs=False, part_states=None)
    ckpt.convert(source, str(tmp_path / "out"), to="safetensors", tied_head="untie")
    assert flags(tmp_path / "out") == (False, False)


def test_a_flat_config_that_ties_another_head_is_corrected(tmp_path: Path) -> None:
    ckpt.convert(qwen(tmp_path / "in", differs=True), str(tmp_path / "out"), to="safetensors")
    assert flags(tmp_path / "out") == (False, None)


def test_a_config_of_the_user_that_contradicts_the_head_is_an_error(tmp_path: Path) -> None:
    source = qwen(tmp_path / "in", differs=True)
    given = tmp_path / "given.json"
    given.write_text((tmp_path / "in" / "config.json").read_text())
    with pytest.raises(InputError, match="tie_word_embeddings is true by") as caught:
        ckpt.convert(source, str(tmp_path / "out"), to="safetensors", config=str(given))
    assert caught.value.code == "E3017" and not (tmp_path / "out").exists()
    ckpt.convert(source, str(tmp_path / "out"), to="safetensors", config=str(given), tied_head="untie")
    assert flags(tmp_path / "out") == (False, None)


def test_a_model_of_parts_without_the_head_that_its_config_states_is_noted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    model_of_parts(folder, "gemma3", differs=True, part_states=False)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    del tensors["language_model.lm_head.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, TIED: False}))
    report = ckpt.convert(str(folder), str(tmp_path / "out"), to="safetensors")
    assert any("there is no lm_head.weight" in note for note in report["notes"])
