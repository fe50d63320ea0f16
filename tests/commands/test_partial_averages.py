"""Averages that lack a part of the model: buffers are the model's own, with a line; parameters only where that is asked
for. In every form in which averages are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

import ckpt_tool as ckpt
from ckpt_tool.errors import InconsistentCheckpoint

BUFFERS = {
    "bn.running_mean": torch.ones(4),
    "bn.num_batches_tracked": torch.tensor(3),
    "rotary_emb.inv_freq": torch.ones(2),
    "embeddings.position_ids": torch.arange(6),
    "attn.mask": torch.ones(2, 2, dtype=torch.bool),
}
PARAMETERS = {"a.weight": torch.ones(4, 3), "a.bias": torch.ones(4), "bn.weight": torch.ones(4)}
FORMS = ("level", "within", "wrapped", "safetensors")


def save(form: str, live: dict[str, Any], average: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    if form == "level":
        torch.save({"model": live, "ema": average}, folder / "state.pt")
    elif form == "within":
        torch.save({**live, **{f"model_ema.{name}": value for name, value in average.items()}}, folder / "state.pt")
    elif form == "wrapped":
        wrapped = {f"module.{name}": value for name, value in average.items()}
        torch.save({"model": live, "swa_model": {**wrapped, "n_averaged": torch.tensor(4)}}, folder / "state.pt")
    else:
        arrays = {**live, **{f"model_ema.{name}": value for name, value in average.items()}}
        save_file({name: value.numpy() for name, value in arrays.items()}, folder / "model.safetensors")
        return str(folder)
    return str(folder / "state.pt")


@pytest.mark.parametrize("form", FORMS)
def test_buffers_are_the_models_own_with_a_line(form: str, tmp_path: Path) -> None:
    average = {name: value * 0.5 for name, value in PARAMETERS.items()}
    source = save(form, {**PARAMETERS, **BUFFERS}, average, tmp_path / "in")

    report = ckpt.convert(source, str(tmp_path / "out"), to="safetensors", as_model="ema")

    written = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {**BUFFERS, **average}
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], value) for name, value in wanted.items())
    assert not any(row["state"] == "ema" for row in report["dropped"]), "what is written is not left out"
    (note,) = [note for note in report["notes"] if "go as the model has them (buffers)" in note]
    assert all(name in note for name in BUFFERS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lacking", ["a.weight", "bn.weight"])
def test_a_parameter_that_is_lacking_is_an_error_unless_it_is_asked_for(
    lacking: str, form: str, tmp_path: Path
) -> None:
    live = {**PARAMETERS, **BUFFERS}
    average = {name: value * 0.5 for name, value in PARAMETERS.items() if name != lacking}
    source = save(form, live, average, tmp_path / "in")

    with pytest.raises(InconsistentCheckpoint) as caught:
        ckpt.convert(source, str(tmp_path / "out"), to="safetensors", as_model="ema")
    assert (caught.value.code, caught.value.exit_code) == ("E3012", 3)
    assert lacking in caught.value.message and "--as-model ema,model" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()

    report = ckpt.convert(source, str(tmp_path / "filled"), to="safetensors", as_model="ema,model")
    written = load_file(tmp_path / "filled" / "model.safetensors")
    assert torch.equal(written[lacking], live[lacking]) and written.keys() == live.keys()
    assert any(note.endswith(f"(--as-model ema,model): {lacking}") for note in report["notes"])

    ckpt.convert(source, str(tmp_path / "less"), to="safetensors", as_model="ema", remove_keys=[lacking])
    assert lacking not in load_file(tmp_path / "less" / "model.safetensors")


def test_masters_take_what_has_none_from_the_model(tmp_path: Path) -> None:
    """A job keeps no master of a weight that it does not train, so the model has its only values."""
    live = {name: value.bfloat16() for name, value in PARAMETERS.items()}
    masters = {"a.weight": torch.full((4, 3), 0.25)}
    torch.save({"model": live, "master_weights": masters}, tmp_path / "state.pt")
    report = ckpt.convert(str(tmp_path / "state.pt"), str(tmp_path / "out"), to="safetensors", as_model="master")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["a.weight"], masters["a.weight"]) and written.keys() == live.keys()
    assert any("weights that have none" in note for note in report["notes"])
