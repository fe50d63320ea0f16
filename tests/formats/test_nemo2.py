"""NeMo 2's folder, saved by megatron-core as NeMo saves it: fixtures/make/nemo2.py says what is NeMo's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.api import latest
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UnknownFormat
from ckpt_tool.formats.megatron.args import arguments
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source

NEMO = Path(__file__).parents[2] / "fixtures" / "nemo2" / "llama_tp2"
TRUTH = NEMO.with_name("llama_tp2.truth.safetensors")


def held(path: Path) -> tuple[dict[str, torch.Tensor], OpenCatalog]:
    opened = open_source(str(path), Reading())
    lazy = OpenCatalog(opened.tree, opened.catalog)
    names = [key for key in opened.catalog.tensors if key.state not in ("extras", "step")]
    return {f"{key.state}/{key.name}": lazy.state(key.state)[key.name].torch() for key in names}, lazy


def same(path: Path) -> OpenCatalog:
    truth, (found, lazy) = load_file(TRUTH), held(path)
    assert found.keys() == truth.keys()
    assert not [key for key, value in truth.items() if not torch.equal(found[key], value)]
    return lazy


def test_it_opens_from_its_root_with_the_sizes_of_its_config_and_from_its_weights(tmp_path):
    lazy = same(NEMO)
    args = arguments(lazy.catalog.extras)
    assert (args["swiglu"], args["untie_embeddings_and_output_weights"]) == (True, True)
    assert "tensor_model_parallel_size" not in args and "activation_func" not in args
    notes = [note.message for note in lazy.catalog.notes]
    assert any("context/io.json" in note for note in notes)
    assert not arguments(same(NEMO / "weights").catalog.extras)
    out = tmp_path / "out"
    convert(str(NEMO), str(out), Reading(), Writing(to="megatron-dist", degrees={"tp": 2, "pp": 2}), Silent())
    same(out)


def test_it_becomes_a_model_of_the_hub_whose_config_comes_from_nemo_s(tmp_path):
    convert(str(NEMO), str(tmp_path / "hub"), Reading(), Writing(to="safetensors"), Silent())
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (2, 2, 5)


def test_a_config_that_is_no_plain_yaml_is_named_and_nothing_is_made_of_it(tmp_path):
    copy = Path(shutil.copytree(NEMO, tmp_path / "copy"))
    (copy / "context" / "model.yaml").write_text("!!python/object/apply:os.system ['true']")
    _, lazy = held(copy)
    assert not arguments(lazy.catalog.extras)
    assert any("sizes are not known" in note.message for note in lazy.catalog.notes)


def test_a_run_opens_at_its_only_step_and_lists_several(tmp_path):
    """`checkpoints/NAME--val_loss=...-step=N...`, as NeMo's callback calls them, `-last` for a copy of the newest."""
    steps = tmp_path / "run" / "checkpoints"
    first = steps / "gpt--val_loss=2.10-step=9-consumed_samples=80.0"
    shutil.copytree(NEMO, first)
    for path in (steps, steps.parent):
        opened = open_source(str(path), Reading())
        assert opened.tree.display() == str(first) and "only checkpoint" in opened.resolved
        same(path)
    shutil.copytree(NEMO, steps / "gpt--val_loss=1.90-step=19-consumed_samples=160.0-last")
    for path in (steps, steps.parent):
        with pytest.raises(UnknownFormat, match="holds 2 checkpoints") as caught:
            open_source(str(path), Reading())
        assert "step=19-consumed_samples=160.0-last" in str(caught.value.hint)
    assert latest(str(steps))["path"].endswith("step=19-consumed_samples=160.0-last")
