"""A state with two levels that a model may be called by: the one that is not read is named, and two that contradict
each other are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.errors import CkptError


def weights(value: float, rows: int = 4) -> dict[str, torch.Tensor]:
    return {"layers.0.weight": torch.full((rows, 3), float(value)), "layers.0.bias": torch.full((3,), float(value))}


CONTRADICTING: dict[str, dict[str, Any]] = {
    "values": {"state_dict": weights(0), "model": weights(1)},
    "shapes": {"state_dict": weights(1, rows=5), "model": weights(1)},
    "one value": {"state_dict": weights(1) | {"layers.0.bias": torch.zeros(3)}, "model": weights(1)},
    "a part": {"state_dict": {"layers.0.bias": torch.zeros(3)}, "model": weights(1)},
}
shared = weights(1)
AGREEING: dict[str, tuple[dict[str, Any], str]] = {
    "the same": ({"model": shared, "state_dict": shared}, "2 tensors under the model's names too"),
    "copies": ({"model": weights(1), "state_dict": weights(1)}, "2 tensors under the model's names too"),
    "another": ({"model": weights(1), "state_dict": {"critic.weight": torch.ones(3)}}, "1 tensors of another model"),
    "more names": (
        {"model": weights(1), "net": weights(0) | {"critic.weight": torch.ones(3)}},
        "3 tensors of another model",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTING)
def test_two_that_contradict_each_other(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.pt"
    torch.save(CONTRADICTING[kind], source)
    out = tmp_path / "out"
    command = ["convert", str(source), str(out), "--to", "safetensors"]

    for more in ([], ["--state", "model"], ["--dry-run"]):
        assert run([*command, *more]) == 3
        error = capfd.readouterr().err
        assert "E3070" in error and "--remove-keys 'state_dict.*'" in error
    assert not out.exists()
    assert run(["verify", str(source), "--json"]) == 1
    assert "E3070" in [row["code"] for row in json.loads(capfd.readouterr().out)["findings"]]

    assert run([*command, "--remove-keys", "state_dict.*"]) == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == weights(1).keys() and all((tensor == 1).all() for tensor in written.values())
    assert run(["convert", str(source), str(tmp_path / "lenient"), "--to", "safetensors", "--lenient"]) == 0


@pytest.mark.parametrize("kind", AGREEING)
def test_what_is_not_read_is_named(kind: str, tmp_path: Path) -> None:
    state, expected = AGREEING[kind]
    torch.save(state, tmp_path / "in.pt")
    report = ckpt.convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), to="safetensors")
    assert any(expected in note for note in map(str, report["notes"])), report["notes"]
    assert run(["verify", str(tmp_path / "in.pt")]) == 0


def test_the_same_holds_for_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": weights(1), "state_dict": weights(0)}, checkpoint_id=tmp_path / "in", no_dist=True)
    with pytest.raises(CkptError) as caught:
        ckpt.convert(str(tmp_path / "in"), str(tmp_path / "out"), to="safetensors")
    assert caught.value.code == "E3070"
