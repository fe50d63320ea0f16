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
    "a critic": ({"model": weights(1), "critic": weights(0)}, "critic holds 2 tensors under the model's names too"),
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
        assert "E3070" in error and "--prefer model, or --prefer state_dict" in error
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


PAIR = {"model": weights(1), "state_dict": weights(2), "epoch": 3}
GAN = {"generator": weights(1), "discriminator": weights(2)}
OF_TEACHER = {"model": weights(1), "teacher": weights(2), "optimizer": {"state": {0: {"exp_avg": torch.zeros(4, 3)}}}}
# state, --prefer, the value of its weights, what is left
NAMED: dict[str, tuple[dict[str, Any], str, float, list[str]]] = {
    "the usual": (PAIR, "model", 1, ["state_dict holds 2 tensors"]),
    "the other": (PAIR, "state_dict", 2, ["read from state_dict", "model (2 tensors)"]),
    "a teacher": (OF_TEACHER, "teacher", 2, ["read from teacher", "model (2 tensors), optimizer (1 tensors)"]),
    "one of two": (GAN, "generator", 1, ["read from generator", "discriminator (2 tensors)"]),
    "below": ({"model": GAN}, "model.discriminator", 2, ["model.generator (2 tensors)"]),
    "with a level of its own": ({"g": {"state_dict": weights(3)}, "d": weights(4)}, "g", 3, ["d (2 tensors)"]),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_level_is_named(kind: str, tmp_path: Path) -> None:
    state, level, value, lines = NAMED[kind]
    source = str(tmp_path / "in.pt")
    torch.save(state, source)

    report = ckpt.convert(source, str(tmp_path / "out"), to="safetensors", prefer=level)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights(1).keys() and all((tensor == value).all() for tensor in written.values())
    for line in lines:
        assert any(line in note for note in map(str, report["notes"])), report["notes"]
    assert {"extras": 2} in [{row["state"]: row["tensors"]} for row in report["dropped"]] or kind == "a teacher"

    # what holds everything loses nothing, and is read without the option afterwards
    for target in ("torch", "dcp", "sharded"):
        out = str(tmp_path / target)
        ckpt.convert(source, out, to=target, prefer=level)
        assert run(["verify", out]) == 0
        assert run(["diff", source, out, "--prefer", level]) == 0


def test_a_level_that_is_not_there(tmp_path: Path) -> None:
    torch.save(OF_TEACHER, tmp_path / "in.pt")
    for level in ("techer", "optimizer", "model.layers"):
        with pytest.raises(CkptError) as caught:
            ckpt.convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), to="safetensors", prefer=level)
        assert caught.value.code == "E3016" and "model, teacher" in (caught.value.hint or "")


def test_without_the_model_nothing_is_to_be_chosen(tmp_path: Path) -> None:
    torch.save(PAIR | {"ema": weights(5)}, tmp_path / "in.pt")
    ckpt.convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), to="torch", drop=["model"])
    assert run(["verify", str(tmp_path / "out")]) == 0
