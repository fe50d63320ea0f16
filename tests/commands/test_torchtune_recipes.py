"""Runs of torchtune's own recipes (fixtures/make/torchtune_recipes.py): the optimizer of `recipe_state.pt` under the
names of the model's files, element by element as torchtune's converter takes the live states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import ckpt_tool as ckpt
from ckpt_tool.api import convert
from ckpt_tool.commands.apply import apply
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.progress import SILENT
from ckpt_tool.errors import UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Share
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source

HERE = Path(__file__).parents[2] / "fixtures/trainers/torchtune_recipes"
RECIPE = "recipe_state/recipe_state.pt"
GEMMA2 = "gemma2:torchtune-0.6"


def holds(catalog: Any, case: str) -> None:
    """Every element of the live model and optimizer is there, and nothing else but steps."""
    truth = load_file(HERE / f"{case}.truth.safetensors")
    assert {f"{key.state}/{key.name}" for key in catalog.catalog.tensors if key.state != "step"} == truth.keys()
    for key, value in truth.items():
        state, _, name = key.partition("/")
        np.testing.assert_array_equal(catalog.state(state)[name].numpy(), value, err_msg=key)
    assert catalog.state("step").keys() == catalog.state("model").keys()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that may be changed."""
    return Path(shutil.copytree(HERE / "llama", tmp_path / "run"))


def rewritten(run: Path, change: Any) -> None:
    state = torch.load(run / RECIPE, weights_only=True)
    change(state)
    torch.save(state, run / RECIPE)


def why_left(path: Path, reading: Reading | None = None) -> str:
    """The note on a recipe's state that is not read; conversions that would have a place for it are refused."""
    opened = open_source(str(path), reading or Reading())
    assert opened.catalog.states() == ("model",)
    (note,) = [note for note in opened.catalog.notes if note.path == RECIPE]
    with pytest.raises(UsageError) as caught:
        convert(str(path), str(path / "no"), to="dcp", dry_run=True)
    assert (caught.value.code, str(caught.value.path)) == ("E1643", str(path / RECIPE))
    return note.message


@pytest.mark.parametrize("case", ["llama", "qwen2", "backward", "own_names", "distributed", "distributed_backward"])
def test_a_run_opens_with_its_optimizer(case: str) -> None:
    """By number, by name, and an optimizer a parameter; rotated rows, tied heads, what Phi has fused on the hub."""
    holds(ckpt.open(str(HERE / case)), case)
    extras = inspect(str(HERE / case), Reading())["extras"]
    (group,) = extras["optimizer"]["param_groups"]
    assert (extras["epochs_run"], group["lr"], group["weight_decay"]) == (1, 0.01, 0.01)


def test_it_converts_whole_and_back_to_what_the_recipe_saved(tmp_path: Path) -> None:
    convert(str(HERE / "backward"), str(tmp_path / "hub"), to="dcp")
    holds(ckpt.open(str(tmp_path / "hub")), "backward")
    convert(str(HERE / "backward"), str(tmp_path / "own"), to="dcp", dialect="torchtune")
    made = ckpt.open(str(tmp_path / "own"))
    saved = torch.load(HERE / "backward" / RECIPE, weights_only=True)["optimizer"]
    assert made.state("exp_avg").keys() == saved.keys()
    for name, own in saved.items():
        np.testing.assert_array_equal(made.state("exp_avg")[name].numpy(), own["state"][0]["exp_avg"].numpy())


def test_a_plan_of_a_run_is_carried_out_by_its_file(tmp_path: Path) -> None:
    convert(str(HERE / "llama"), str(tmp_path / "out"), to="dcp", plan=str(tmp_path / "plan.json"))
    apply(str(tmp_path / "plan.json"), Share(), Writing(), SILENT)
    holds(ckpt.open(str(tmp_path / "out")), "llama")


def test_side_files_come_from_the_step(tmp_path: Path) -> None:
    convert(str(HERE / "llama"), str(tmp_path / "hub"), to="safetensors")
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == ["config.json", "model.safetensors"]


def test_norms_that_two_versions_exchange_are_asked_for() -> None:
    assert "--family gemma2:torchtune or --family gemma2:torchtune-0.6" in why_left(HERE / "gemma2")
    opened = open_source(str(HERE / "gemma2"), Reading(family=GEMMA2))
    holds(OpenCatalog(opened.tree, opened.catalog), "gemma2")


def test_an_adapters_optimizer_is_not_the_models() -> None:
    """The recipe numbers frozen weights too: 21 and 24 of the adapter."""
    assert "numbers 45 parameters" in why_left(HERE / "lora")
    assert "the optimizer of an adapter" in why_left(HERE / "lora")


def test_the_state_of_another_epoch_is_not_taken(run: Path) -> None:
    rewritten(run, lambda state: state.update(epochs_run=2))
    assert "it goes on from epoch_1, and this is epoch_0" in why_left(run)
    shutil.copytree(run / "epoch_0", run / "epoch_1")
    opened = open_source(str(run), Reading())
    assert opened.resolved == f"{RECIPE} goes on from epoch_1"
    assert "epoch_1/model-00001-of-00001.safetensors" in opened.catalog.files
    holds(OpenCatalog(opened.tree, opened.catalog), "llama")
    rewritten(run, lambda state: state.pop("epochs_run"))
    shutil.rmtree(run / "epoch_1")
    assert "does not say of which epoch" in why_left(run)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state["optimizer"]["param_groups"][0]["params"].pop(), "numbers 20 parameters"),
        (lambda state: state["optimizer"]["state"][1].update(exp_avg=torch.zeros(3, 3)), "numbers its parameters"),
        (lambda state: state.update(optimizer={}), "it is empty"),
        (lambda state: state.pop("optimizer"), "it is empty"),
        (lambda state: state.update(optimizer={"w": {"state": {}, "param_groups": []}}), "not one for each parameter"),
    ],
)
def test_what_does_not_fit_the_model_stays_behind(change: Any, why: str, run: Path) -> None:
    rewritten(run, change)
    assert why in why_left(run)


def test_a_cut_file_is_named_as_such(run: Path) -> None:
    whole = (run / RECIPE).read_bytes()
    (run / RECIPE).write_bytes(whole[: len(whole) // 2])
    opened = open_source(str(run), Reading())
    assert opened.catalog.states() == ("model",)
    assert any(note.path == RECIPE for note in opened.catalog.notes)
