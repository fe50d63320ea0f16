"""Optimizer states that torchao keeps as codes (`fixtures/torchao-states`): listed, left behind, or as torchao's own
`dequantize()` makes them, bit for bit. The fixtures' maker ran torchao 0.18."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

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
    out, truth = tmp_path / "out", load_file(FIXTURES / f"{case.removesuffix('.pt')}.truth.safetensors")
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
    assert run(["convert", source, str(tmp_path / "a"), "--to", "dcp"]) == 2
    error = capfd.readouterr().err
    assert "E1469" in error and "--drop optimizer" in error and not (tmp_path / "a").exists()
    assert run(["convert", source, str(tmp_path / "a"), "--to", "safetensors", "--state", "model"]) == 0
    assert "exp_avg@codes: 1 tensor" in capfd.readouterr().out
    truth = load_file(FIXTURES / "adamw8bit_dp2.truth.safetensors")
    got = load_file(tmp_path / "a" / "model.safetensors")
    assert all(np.array_equal(got[name], truth[f"model/{name}"]) for name in got) and len(got) == 2


class Foreign(torch.Tensor):
    """A subclass that nobody here knows."""

    def __reduce_ex__(self, protocol: int) -> object:
        return Foreign, (), {"codes": torch.arange(4.0)}


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
    assert any("model.x (F32 [4])" in note for note in map(str, document["notes"]))
    for words in ([], ["--state", "model", "--drop", "extras"]):
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
