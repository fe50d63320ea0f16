"""torchtune's names against its own converters, run as they are on small models (fixtures/make/torchtune_families.py):
both ways, element by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.api import convert
from ckpt_tool.errors import UsageError

HERE = Path(__file__).parents[2] / "fixtures/trainers/torchtune_families"
CASES = sorted(path.stem for path in HERE.glob("*.safetensors"))


def told(case: str, kind: str) -> dict[str, np.ndarray]:
    """The tensors of one side of a case: `tune` or `hf`."""
    return {
        name.removeprefix(f"{kind}/"): value
        for name, value in load_file(HERE / f"{case}.safetensors").items()
        if name.startswith(f"{kind}/")
    }


@pytest.mark.parametrize(("source", "target"), [("tune", "hf"), ("hf", "tune")])
@pytest.mark.parametrize("case", CASES)
def test_a_model_goes_as_torchtunes_own_converter_takes_it(case: str, source: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file(told(case, source), tmp_path / "in/model.safetensors")
    own = "torchtune-0.6" if case == "gemma2_released" else "torchtune"
    dialect, family = {"hf": ("hf", case.split("_")[0]), "tune": (own, None)}[target]
    family = f"{family}:{own}" if family == "gemma2" else None
    convert(
        str(tmp_path / "in"), str(tmp_path / "out"), to="dcp", dialect=dialect, family=family, config=str(HERE / case)
    )
    made = ckpt.open(str(tmp_path / "out")).state("model")
    wanted = told(case, target)
    assert set(made) == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(made[name].numpy(), value, err_msg=name)


def test_norms_that_two_versions_exchange_are_asked_for(tmp_path: Path) -> None:
    """Names and shapes are the same: nothing is taken for granted."""
    (tmp_path / "in").mkdir()
    save_file(told("gemma2", "tune"), tmp_path / "in/model.safetensors")
    with pytest.raises(UsageError, match=r"torchtune, torchtune-0\.6") as caught:
        convert(str(tmp_path / "in"), str(tmp_path / "out"), to="dcp", dialect="hf", config=str(HERE / "gemma2"))
    assert caught.value.code == "E1233"


def test_the_eyes_of_llama_4_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    seen = {"encoders.vision.clip.layers.0.attn.q_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(told("llama4_text", "tune") | seen, tmp_path / "in/model.safetensors")
    document = convert(
        str(tmp_path / "in"), str(tmp_path / "out"), to="dcp", dialect="hf", config=str(HERE / "llama4_text")
    )
    assert any("in no rule of llama4" in note and "encoders.vision" in note for note in document["notes"])
