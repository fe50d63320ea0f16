"""Slices of a model that sees: the language model's layers are picked, the towers stay; and names that differ by a
prefix are said to."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.merge import merge
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.merging.options import MergeOptions
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

SLICES = """
- sources: [{model: SRC, layer_range: [0, 2]}]
- sources: [{model: SRC, layer_range: [1, 3]}]
"""
ORIGINS = [0, 1, 1, 2]
STACKS = {
    "gemma3": ("language_model.model.layers.", "vision_tower.encoder.layers."),
    "qwen2_vl": ("model.layers.", "visual.blocks."),
    "qwen3_omni": ("thinker.model.layers.", "thinker.audio_tower.layers."),
}


def source(kind: str, folder: Path) -> Path:
    """A model with three layers of language and two of a tower."""
    text, tower = STACKS[kind]
    torch.manual_seed(1)
    outside = text.removesuffix("layers.")
    names = [f"{text}{layer}.mlp.up_proj.weight" for layer in range(3)]
    names += [f"{tower}{layer}.mlp.fc1.weight" for layer in range(2)]
    names += [f"{outside}embed_tokens.weight", f"{outside}norm.weight", f"{tower.split('.')[0]}.post.weight"]
    folder.mkdir(parents=True)
    save_file({name: torch.randn(4, 4) for name in names}, folder / "model.safetensors", {"format": "pt"})
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = {"text_config": {"num_hidden_layers": 3, "layer_types": kinds}, "vision_config": {"num_hidden_layers": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(text: str, out: Path):
    file = out.parent / "cfg.yaml"
    file.write_text(text)
    options = MergeOptions(config=str(file))
    return merge([], str(out), Reading(), Writing(), options, Silent())


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("form", ["slices", "modules"])
def test_layers_are_repeated_and_towers_stay(kind, form, tmp_path):
    src = source(kind, tmp_path / "src")
    slices = SLICES.replace("SRC", str(src))
    if form == "slices":
        text = f"merge_method: passthrough\ndtype: float32\nslices:{slices}"
    else:
        inner = slices.replace("\n", "\n    ")
        text = (
            f"merge_method: passthrough\ndtype: float32\nmodules:\n  text_decoder:\n    slices:{inner}\n"
            f"  vision_tower:\n    models: [{{model: {src}}}]\n"
        )
    run(text, tmp_path / "out")
    before = load_file(src / "model.safetensors")
    after = load_file(tmp_path / "out/model.safetensors")
    stack = STACKS[kind][0]
    pattern = re.compile(rf"({re.escape(stack)})(\d+)")
    for name, value in after.items():
        origin = pattern.sub(lambda found: f"{found[1]}{ORIGINS[int(found[2])]}", name)
        assert torch.equal(value, before[origin]), name
    assert {name for name in before if not name.startswith(stack)} <= after.keys()
    assert sum(name.startswith(stack) for name in after) == len(ORIGINS)

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == 4 and config["vision_config"]["num_hidden_layers"] == 2
    assert len(config["text_config"]["layer_types"]) == 4


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("[]", "mapping of modules"),
        ("{a: {models: [{model: SRC}]}}", "one of them may have slices"),
        ("{a: {models: [{model: SRC}, {model: SRC}]}, b: {slices: []}}", "one of them may have slices"),
        ("{a: {slices: [{sources: [{model: SRC, layer_range: [0, 1]}]}]}, b: {models: [{model: OTHER}]}}", "OTHER"),
    ],
)
def test_modules_that_are_merged_are_refused(modules, words, tmp_path):
    src = source("gemma3", tmp_path / "src")
    shutil.copytree(src, tmp_path / "OTHER")
    text = modules.replace("SRC", str(src)).replace("OTHER", str(tmp_path / "OTHER"))
    with pytest.raises(CkptError) as e:
        run(f"merge_method: passthrough\nmodules: {text}\n", tmp_path / "out")
    assert e.value.code == "E1444" and words in " ".join([e.value.message, *e.value.faults])


@pytest.mark.parametrize("prefix", ["bert.", "model.", "transformer."])
def test_a_prefix_that_one_model_has_is_named(prefix, tmp_path):
    names = [f"encoder.layer.{layer}.attention.query.weight" for layer in range(9)]
    for number, front in enumerate(("", prefix)):
        folder = tmp_path / f"model_{number}"
        folder.mkdir()
        own = {"cls.predictions.bias": torch.ones(3)} if front else {}
        save_file({**{f"{front}{name}": torch.ones(2, 2) for name in names}, **own}, folder / "model.safetensors")
    sources = [str(tmp_path / f"model_{number}") for number in range(2)]
    with pytest.raises(CkptError) as e:
        merge(sources, str(tmp_path / "out"), Reading(), Writing(), MergeOptions("linear"), Silent())
    assert e.value.code == "E1447" and repr(prefix) in e.value.hint and "model_1" in e.value.hint
