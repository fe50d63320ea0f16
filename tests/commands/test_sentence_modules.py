"""sentence-transformers models of several modules: all of them travel with the first, or nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tool.cli import run

CARRIED = ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json", "2_Dense/config.json")
DENSE = "2_Dense/model.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder as sentence-transformers 6.2.0 saves one (names and places; the values are ours)."""
    folder = tmp_path / "saved"
    paths = ("", "1_Pooling", "2_Dense")
    listed = [{"idx": i, "name": str(i), "path": path, "type": "a.b"} for i, path in enumerate(paths)]
    for name in CARRIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(listed if name == "modules.json" else {"of": name}))
    (folder / "config.json").write_text('{"model_type": "bert", "dtype": "float32"}')
    save_file(
        {"embeddings.weight": torch.arange(64.0).reshape(8, 8), "pooler.bias": torch.ones(8)},
        folder / "model.safetensors",
    )
    save_file({"linear.weight": torch.arange(16.0).reshape(2, 8)}, folder / DENSE)
    return folder


def test_all_modules_are_in_a_folder_of_safetensors(saved: Path, tmp_path: Path, capfd) -> None:
    out = tmp_path / "out"
    assert (
        run(["convert", str(saved), str(out), "--to", "safetensors", "--dtype", "bf16", "--max-shard-size", "100"]) == 0
    )
    assert f"{DENSE}: weights of other modules" in capfd.readouterr().out
    for name in (*CARRIED, DENSE):
        assert (out / name).read_bytes() == (saved / name).read_bytes()
    assert len(list(out.glob("model-*-of-00002.safetensors"))) == 2


@pytest.mark.parametrize("words", [("--to", "dcp"), ("--to", "torch"), ("--to", "safetensors", "--single")])
def test_where_they_would_be_lost_nothing_is_written(
    words: tuple[str, ...], saved: Path, tmp_path: Path, capfd
) -> None:
    out = tmp_path / ("out.safetensors" if "--single" in words else "out")
    assert run(["convert", str(saved), str(out), *words[:2]]) == 2
    error = capfd.readouterr().err
    assert "E1470" in error and DENSE in error and not out.exists()
    assert run(["convert", str(saved / "model.safetensors"), str(out), *words[:2]]) == 0


def test_a_module_kept_as_a_pickle_and_a_path_that_leaves_are_not_taken_along(
    saved: Path, tmp_path: Path, capfd
) -> None:
    (saved / DENSE).rename(saved / "2_Dense" / "pytorch_model.bin")
    assert run(["convert", str(saved), str(tmp_path / "out"), "--to", "safetensors"]) == 3
    assert "E1640" in capfd.readouterr().err
    (saved / "2_Dense" / "pytorch_model.bin").unlink()
    (saved / "modules.json").write_text('[{"path": ""}, {"path": "../beside"}]')
    (saved.parent / "beside").mkdir()
    (saved.parent / "beside" / "config.json").write_text("{}")
    assert run(["convert", str(saved), str(tmp_path / "out"), "--to", "safetensors"]) == 0
    assert "not read: 1_Pooling/config.json" in capfd.readouterr().out
    assert not (tmp_path / "out" / "modules.json").exists()
