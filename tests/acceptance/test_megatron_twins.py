"""One model in both worlds, made by the real systems: transformers' files, Megatron-Core's tensors and its checkpoints.

`fixtures/convert/NAME`: `hf/` (transformers), `megatron.safetensors` (the same weights in a GPTModel of megatron-core,
local spec, whose logits equal transformers'), `torch_dist*/` (that model saved by `dist_checkpointing`). Every arrow
between them must lead to the other's own tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from writings import writing_of

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

TWINS = Path(__file__).parents[2] / "fixtures" / "convert"
CHECKPOINTS = [("llama", "torch_dist"), ("llama", "torch_dist_tp2"), ("mixtral", "torch_dist")]


def hop(source: Path, out: Path, to: str, config: Path | None = None, **writing: Any) -> dict[str, Any]:
    reading = Reading(config=str(config) if config else None)
    return convert(str(source), str(out), reading, writing_of(to=to, fsync=False, **writing), Silent())


def assert_same(found: Path, want: Path) -> None:
    mine = load_file(found)
    theirs = load_file(want)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_hub_s_tensors_become_megatron_s(name: str, tmp_path: Path) -> None:
    hop(TWINS / name / "hf", tmp_path / "out", "sharded", dialect="megatron")
    assert_same(tmp_path / "out" / "model.safetensors", TWINS / name / "megatron.safetensors")


@pytest.mark.parametrize(("name", "made"), CHECKPOINTS)
@pytest.mark.parametrize("told", ["config", "arguments"])
def test_megatron_s_checkpoint_becomes_the_hub_s(name: str, made: str, told: str, tmp_path: Path) -> None:
    """The model's sizes stand in config.json or in the arguments that Megatron saved."""
    config = str(TWINS / name / "hf" / "config.json")
    reading = Reading(config=config) if told == "config" else Reading(family=name)
    writing = Writing(to="safetensors", fsync=False)
    convert(str(TWINS / name / made), str(tmp_path / "out"), reading, writing, Silent())
    assert_same(tmp_path / "out" / "model.safetensors", TWINS / name / "hf" / "model.safetensors")


@pytest.mark.parametrize(("name", "made"), CHECKPOINTS)
def test_our_checkpoint_holds_what_megatron_s_holds(name: str, made: str, tmp_path: Path) -> None:
    """hub -> torch_dist of ours and torch_dist of Megatron, both laid open."""
    hop(TWINS / name / "hf", tmp_path / "ours", "megatron-dist", degrees={"tp": 2} if "tp2" in made else {})
    hop(tmp_path / "ours", tmp_path / "mine", "sharded")
    hop(TWINS / name / made, tmp_path / "theirs", "sharded")
    assert_same(tmp_path / "mine" / "model.safetensors", tmp_path / "theirs" / "model.safetensors")
    assert_same(tmp_path / "mine" / "model.safetensors", TWINS / name / "megatron.safetensors")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_transformer_engine_s_names_are_those_of_its_layers(name: str, tmp_path: Path) -> None:
    """`mapping.json`: what a tensor of the local spec is called by Transformer Engine's."""
    told = json.loads((TWINS / name / "mapping.json").read_text())
    want = load_file(TWINS / name / "megatron.safetensors")
    hop(TWINS / name / "hf", tmp_path / "out", "megatron", spec="te")
    file = tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    found = {key: t for key, t in torch.load(file, weights_only=False)["model"].items() if isinstance(t, torch.Tensor)}
    assert found.keys() == {each["te"] for each in told.values()}
    assert all(torch.equal(found[each["te"]], want[key]) for key, each in told.items())


def test_what_can_t_be_told_is_an_error_that_says_what_to_pass(tmp_path: Path) -> None:
    """No config beside the weights: the names are those of many families."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((TWINS / "llama" / "hf" / "model.safetensors").read_bytes())
    with pytest.raises(UsageError, match="several families") as caught:
        hop(bare, tmp_path / "out", "megatron-dist")
    assert caught.value.code == "E1232" and "--config" in str(caught.value.hint)
    with pytest.raises(InputError) as sizes:  # heads can't be told from shapes
        convert(str(bare), str(tmp_path / "out"), Reading(family="llama"), Writing(to="megatron-dist"), Silent())
    assert sizes.value.code == "E1376" and "--config" in str(sizes.value.hint)
    assert not (tmp_path / "out").exists()
    kept = hop(bare, tmp_path / "kept", "megatron-dist", dialect="keep")
    assert kept["digest_checked"]
