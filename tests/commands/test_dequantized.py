"""`--dequantize`: what the real trainer's functions quantised, as the floats that they give back
(`fixtures/paddle-quant`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle-quant"


def unified(folder: Path, stage: str) -> dict[str, np.ndarray]:
    """A unified checkpoint around the quantised tensors; the floats that Paddle makes of them."""
    every = load_file(FIXTURES / f"{stage}.safetensors")
    stored = {key[7:]: value for key, value in every.items() if key.startswith("stored/")}
    made = {key[5:]: value for key, value in every.items() if key.startswith("made/")}
    shapes = {key.split("/")[0]: value.shape for key, value in made.items()}
    shapes |= {key.split("/")[0]: value.shape for key, value in stored.items() if key.split("/")[0] not in shapes}
    model = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    folder.mkdir()
    for kind, arrays in (("model", model), ("optimizer", stored)):
        file = f"{kind}-00001-of-00001.safetensors"
        save_file(arrays, folder / file, {"format": "np"})
        index = {
            "metadata": {"total_size": sum(a.nbytes for a in arrays.values())},
            "weight_map": dict.fromkeys(arrays, file),
        }
        if kind == "optimizer":
            index |= {"master_weights": False, "ckpt_quant_stage": stage.upper()}
        (folder / f"{kind}.safetensors.index.json").write_text(json.dumps(index))
    return made


def run(source: Path, out: Path, **writing: object) -> dict[str, object]:
    return convert(str(source), str(out), Reading(), Writing(to="sharded", fsync=False, **writing), Silent())  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["o1", "o2"])
def test_quantised_states_become_floats(stage: str, tmp_path: Path) -> None:
    made = unified(tmp_path / "uc", stage)
    report = run(tmp_path / "uc", tmp_path / "out", dequantize=True)
    assert any("--dequantize" in str(note) for note in report["notes"])  # type: ignore[attr-defined]
    for state, kind in (("exp_avg", "moment1_0"), ("exp_avg_sq", "moment2_0")):
        found = load_file(tmp_path / "out" / f"{state}.safetensors")
        theirs = {key.split("/")[0]: value for key, value in made.items() if key.endswith(kind)}
        assert theirs.keys() <= found.keys()
        for name, want in theirs.items():
            apart = np.abs(found[name].view(np.int32).astype(np.int64) - want.view(np.int32)).max()
            assert apart <= (0 if state == "exp_avg" else 4), name
    assert not list((tmp_path / "out").glob("*scales*"))


def test_unasked_they_are_moved_as_they_are(tmp_path: Path) -> None:
    unified(tmp_path / "uc", "o1")
    run(tmp_path / "uc", tmp_path / "out")
    assert diff(str(tmp_path / "uc"), str(tmp_path / "out"), Reading(), progress=Silent())["equal"]
    assert list((tmp_path / "out").glob("*scales*"))


def test_what_can_not_be_done_is_a_usage_error(tmp_path: Path) -> None:
    unified(tmp_path / "uc", "o1")
    with pytest.raises(UsageError, match="saved plan"):
        run(tmp_path / "uc", tmp_path / "out", dequantize=True, plan_file=str(tmp_path / "p.json"))
    with pytest.raises(UsageError, match="no quantised state here"):
        run(tmp_path / "uc", tmp_path / "out", dequantize=True, drop=("optimizer",))
