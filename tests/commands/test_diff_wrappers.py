"""`ckpt diff` of a model whose trainer's wrapper left its words in the names, and of the model without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.cli import run

NAMES = ("blocks.0.attn.weight", "blocks.1.attn.weight", "head.bias")


def save(folder: Path, *names: str) -> Path:
    folder.mkdir()
    values = {name: np.full((2, 3), number, np.float32) for number, name in enumerate(names)}
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "wrapped",
    [
        [f"module.{name}" for name in NAMES],
        [f"module._orig_mod.{name}" for name in NAMES],
        [name.replace("attn", "_checkpoint_wrapped_module.attn") for name in NAMES],
    ],
)
def test_a_wrapper_is_no_difference(wrapped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a", *wrapped)
    b = save(tmp_path / "b", *NAMES)
    for left, right, side in ((a, b, "first"), (b, a, "second")):
        found = ckpt.diff(left, right)
        assert found["equal"] and found["compared"] == 3
        (note,) = found["notes"]
        assert f"of the {side} are compared without" in note and "--dialect keep" in note
    assert run(["diff", str(a), str(b)]) == 0
    assert "wrapper" in capsys.readouterr().out

    kept = ckpt.diff(a, b, dialect="keep")
    assert not kept["equal"] and not kept["notes"]
    assert not ckpt.diff(a, a)["notes"]


def test_a_part_of_the_names_that_is_the_models_own_stays(tmp_path: Path) -> None:
    """`model.` is in front of both; what differs is found under the names that both have."""
    a = save(tmp_path / "a", *(f"model.{name}" for name in NAMES))
    b = save(tmp_path / "b", *(f"model.{name}" for name in NAMES[:2]))
    found = ckpt.diff(a, b)
    assert found["notes"] == [] and [row["kind"] for row in found["differences"]] == ["missing_right"]
