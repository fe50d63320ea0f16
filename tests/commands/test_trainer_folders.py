"""Folders of torchtune, OLMo-core, prime-rl and VeOmni, as their own save calls left them: opened whole, every state in
its place, the rest named (fixtures/make/trainer_folders.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckpt_tool as ckpt
from ckpt_tool.api import convert, merge
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.options.reading import Reading

HERE = Path(__file__).parents[2] / "fixtures/trainers"
RECIPE = "recipe_state/recipe_state.pt"


def holds(path: Path, case: str, states: tuple[str, ...] = ("model", "exp_avg", "exp_avg_sq")) -> None:
    """Every element of the live model and optimizer is there, and nothing else in these states."""
    opened = ckpt.open(str(path))
    truth = load_file(HERE / f"{case}.truth.safetensors")
    wanted = {key: value for key, value in truth.items() if key.split("/")[0] in states}
    assert {f"{key.state}/{key.name}" for key in opened.catalog.tensors if key.state in states} == wanted.keys()
    for key, value in wanted.items():
        state, _, name = key.partition("/")
        np.testing.assert_array_equal(opened.state(state)[name].numpy(), value, err_msg=key)


@pytest.mark.parametrize(
    ("case", "step", "rest"),
    [
        ("prime_rl", "checkpoints/step_2", "orchestrator/progress.pt, trainer/dataloader/rank_0.pt"),
        ("veomni", "global_step_2", "extra_state/extra_state_rank_0.pt"),
    ],
)
def test_a_run_opens_at_its_step_with_its_optimizer(case: str, step: str, rest: str) -> None:
    for path in (HERE / case, HERE / case / step):
        holds(path, case)
        document = inspect(str(path), Reading())
        assert document["path"] == str(HERE / case / step)
        assert any(note.endswith(rest) for note in document["notes"])


@pytest.mark.parametrize(
    ("case", "hub"),
    [("olmo_core", "olmo2"), ("olmo_core_moe", "olmo_core_moe_hub"), ("olmo_core_llama", "olmo_core_llama_hub")],
)
def test_olmo_core_is_read_and_mapped_as_its_own_converter_maps_it(case: str, hub: str, tmp_path: Path) -> None:
    """Its `.metadata` names a record of its own, which is data like torch's. A layer's experts are one matrix there."""
    assert any("train/rank0.pt" in note for note in inspect(str(HERE / case), Reading())["notes"])
    config = str(HERE / hub)
    convert(str(HERE / case), str(tmp_path / "dcp"), to="dcp", dialect="hf", config=config)
    holds(tmp_path / "dcp", case)
    convert(str(HERE / case), str(tmp_path / "hub"), to="safetensors", config=config)
    holds(tmp_path / "hub", case, ("model",))
    convert(str(tmp_path / "dcp"), str(tmp_path / "back"), to="dcp", dialect="olmo-core", config=config)
    made = ckpt.open(str(tmp_path / "back"))
    own = ckpt.open(str(HERE / case))
    assert made.catalog.tensors.keys() == own.catalog.tensors.keys()
    for state in ("model", "exp_avg"):
        for name in own.state(state):
            np.testing.assert_array_equal(made.state(state)[name].numpy(), own.state(state)[name].numpy(), err_msg=name)


def test_torchtunes_own_names_are_mapped_with_the_moments(tmp_path: Path) -> None:
    """Rows of q and k lie as Meta's rotations have them, those of their moments too."""
    config = str(HERE / "llama")
    convert(str(HERE / "torchtune_dcp"), str(tmp_path / "hub"), to="dcp", dialect="hf", config=config)
    holds(tmp_path / "hub", "torchtune_dcp")
    convert(str(tmp_path / "hub"), str(tmp_path / "back"), to="dcp", dialect="torchtune", config=config)
    own = ckpt.open(str(HERE / "torchtune_dcp"))
    made = ckpt.open(str(tmp_path / "back"))
    assert made.catalog.tensors.keys() == own.catalog.tensors.keys()
    for name in ("layers.0.attn.q_proj.weight", "norm.scale"):
        np.testing.assert_array_equal(made.state("exp_avg")[name].numpy(), own.state("exp_avg")[name].numpy())


def test_a_recipes_optimizer_joins_a_step_that_is_passed_itself_by_two_commands(tmp_path: Path) -> None:
    """What lies above a folder that was passed is not looked at."""
    run = HERE / "torchtune_full"
    config = str(HERE / "torchtune_full/epoch_0")
    holds(run, "torchtune_full")
    holds(run / "epoch_0", "torchtune_full", ("model",))
    convert(str(run / RECIPE), str(tmp_path / "optimizer"), to="dcp", dialect="hf", config=config)
    merge([config, str(tmp_path / "optimizer")], str(tmp_path / "whole"), to="dcp")
    holds(tmp_path / "whole", "torchtune_full")
    convert(str(run), str(tmp_path / "joined"), to="dcp")
    holds(tmp_path / "joined", "torchtune_full")


def test_its_lora_opens_as_pefts() -> None:
    document = inspect(str(HERE / "torchtune_lora"), Reading())
    assert (document["format"], document["total"]["tensors"]) == ("peft", 24)
    assert any("adapter_model.pt" in note for note in document["notes"])
