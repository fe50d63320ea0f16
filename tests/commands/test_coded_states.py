"""Optimizer states that torchao keeps as codes (`fixtures/torchao-states`): listed, left behind, or as torchao's own
`dequantize()` makes them, bit for bit. The fixtures' maker ran torchao 0.18."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file

import ckpt_tool
from ckpt_tool.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures" / "torchao-states"
EXTRAS = {f"extras/{root}.param_groups.0.lr" for root in ("optim", "optimizer")}  # a tensor in torchao's groups
CASES = ("adamw8bit_dp2", "adamw4bit.pt", "adamwfp8")


@pytest.mark.parametrize("case", CASES)
def test_states_come_out_as_torchao_makes_them(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    truth = load_file(FIXTURES / f"{case.removesuffix('.pt')}.truth.safetensors")
    words = ["--to", "sharded", "--dequantize", "--dp", "2"]
    assert run(["convert", str(FIXTURES / case), str(out), *words, "-q"]) == 0
    catalog = ckpt_tool.open(out)
    assert {f"{key.state}/{key.name}" for key in catalog.catalog.tensors} - EXTRAS == set(truth)
    for name, want in truth.items():
        state, _, parameter = name.partition("/")
        got = catalog.state(state)[parameter].numpy()
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes()), name


def test_inspect_lists_and_the_model_converts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = str(FIXTURES / "adamw8bit_dp2")
    assert run(["inspect", source]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "exp_avg@codes" in shown and "--dequantize writes them as F32" in shown
    assert run(["inspect", str(FIXTURES / "adamw4bit.pt")]) == 0
    assert "--dequantize writes them as F32" in " ".join(capfd.readouterr().out.split())
    assert run(["convert", source, str(tmp_path / "a"), "--to", "dcp"]) == 2
    error = capfd.readouterr().err
    assert "E1469" in error and "--drop optimizer" in error and not (tmp_path / "a").exists()
    for words in ([], ["--state", "model"]):
        assert run(["convert", source, str(tmp_path / "a"), "--to", "safetensors", "--force", *words]) == 0
        assert "exp_avg@codes: 1 tensor" in capfd.readouterr().out
    truth = load_file(FIXTURES / "adamw8bit_dp2.truth.safetensors")
    got = load_file(tmp_path / "a" / "model.safetensors")
    assert all(np.array_equal(got[name], truth[f"model/{name}"]) for name in got) and len(got) == 2


def test_codes_cut_by_columns_are_listed_and_the_model_converts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As AdamW8bit leaves them under tensor parallelism: blocks of a piece's own lines, which make no whole."""
    source = tmp_path / "source"
    out = str(tmp_path / "out")
    shutil.copytree(FIXTURES / "adamw8bit_dp2", source)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    name, known = next((n, m) for n, m in metadata.state_dict_metadata.items() if n.endswith("weight.exp_avg"))
    known.size = torch.Size((64, 128))
    moved = known.chunks[1]
    for index in [index for index in metadata.storage_data if index.fqn == name and index.offset == moved.offsets]:
        place = metadata.storage_data.pop(index)
        metadata.storage_data[dataclasses.replace(index, offset=torch.Size((0, 64)))] = place
    moved.offsets = torch.Size((0, 64))
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    assert run(["inspect", str(source)]) == 0
    assert "1 tensor is not read: 0.weight [exp_avg] (F32 [64, 128])" in " ".join(capfd.readouterr().out.split())
    assert run(["convert", str(source), out, "--to", "sharded", "--dequantize"]) == 3
    error = capfd.readouterr().err
    assert "E1379" in error and "--drop optimizer" in error and not Path(out).exists()
    for number, words in enumerate((["--to", "safetensors"], ["--to", "dcp", "--drop", "optimizer"])):
        assert run(["convert", str(source), f"{out}{number}", *words]) == 0
        assert "exp_avg: 1 tensor, 0.weight (not read: " in " ".join(capfd.readouterr().out.split())


class Foreign(torch.Tensor):
    """A subclass that nobody here knows."""

    def __reduce_ex__(self, protocol: int) -> object:
        return Foreign, (), {"codes": torch.arange(4.0)}


class Subclass(torch.Tensor):
    """Another, pickled as torch pickles subclasses."""


@pytest.mark.parametrize("kind", ["file", "dcp"])
def test_states_on_foreign_objects_stay_behind_and_the_model_converts(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"w": torch.arange(6.0), "x": torch.ones(4)}
    states: dict[Any, Any] = {n: {"exp_avg": w.as_subclass(Subclass), "step": w[0]} for n, w in weights.items()}
    if kind == "dcp":
        dcp.save({"model": weights, "optim": {"state": states}}, checkpoint_id="source", no_dist=True)
    else:
        numbered = {"state": dict(enumerate(states.values())), "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        torch.save({"model": weights, "optimizer": numbered}, "source")
    capfd.readouterr()
    assert run(["inspect", "source"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "w [exp_avg] (F32 [6]), x [exp_avg] (F32 [4]); held by objects of class" in shown
    for words in ([], ["--drop", "extras"]):
        assert run(["convert", "source", "out", "--to", "safetensors", *words]) == 4
        assert "--state model leaves out" in capfd.readouterr().err and not Path("out").exists()
    assert run(["convert", "source", "out", "--to", "safetensors", "--state", "model"]) == 0
    assert "exp_avg: 2 tensors, w, x (not read: held by objects of class" in " ".join(capfd.readouterr().out.split())
    got = load_file("out/model.safetensors")
    assert set(got) == {"w", "x"} and np.array_equal(got["w"], np.arange(6.0))
    assert run(["diff", "source", "out", "--state", "model"]) == 0


@pytest.mark.parametrize("root", ["model", "module"])
def test_a_module_that_was_saved_whole_is_no_state_to_leave(root: str, tmp_path: Path) -> None:
    """`torch.save(model)` inside a state: its weights are the model's, whatever else holds tensors."""
    others = {"net": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}}
    torch.save({root: Whole(), **others}, tmp_path / "a.pt")
    assert (
        run(["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--to", "safetensors", "--state", "model"]) == 4
    )


class Whole:
    def __init__(self) -> None:
        self.weight = torch.zeros(4)


def test_a_tensor_on_a_foreign_object_is_listed_and_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    dcp.save({"model": {"w": torch.arange(6.0), "x": torch.zeros(4)}}, checkpoint_id=source, no_dist=True)
    capfd.readouterr()
    _swap(source, torch.zeros(4), Foreign([0.0] * 4))
    assert run(["inspect", str(source), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [row["name"] for row in document["tensors"]] == ["w"]
    assert any("x (F32 [4])" in note for note in map(str, document["notes"]))
    for words in ([], ["--state", "model"], ["--state", "model", "--drop", "extras"]):
        assert run(["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", *words]) == 4
        assert "Foreign" in capfd.readouterr().err and not (tmp_path / "out").exists()


def _swap(folder: Path, old: torch.Tensor, new: torch.Tensor) -> None:
    """Put `new` behind the items, and let the metadata say that it is the item that held `old`."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(each for each in metadata.storage_data if each.fqn == "model.x")
    where = metadata.storage_data[index]
    with (folder / where.relative_path).open("ab") as file:
        where.offset = file.tell()
        torch.save(new, file)
        where.length = file.tell() - where.offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
