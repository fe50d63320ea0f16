"""`ckpt inspect` of a checkpoint that lacks a file: what is there, and what is not. Of every format's fixtures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.missing import is_collecting
from ckpt_tool.errors import Incomplete
from ckpt_tool.formats.base import WEIGHT_SUFFIXES
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDERS = (
    "dcp",
    "deepspeed",
    "deepspeed-universal",
    "megatron",
    "megatron-dist",
    "megatron-fsdp",
    "meta",
    "orbax",
    "paddle",
    "paddle-flex",
    "paddle-unified",
    "safetensors",
    "sharded",
    "torch",
)
# What lists the tensors of the other files, or is all that there is: without it no header says anything.
NOTHING_LEFT = ("E0385", "E1330", "E2601")


def _cases() -> list[Any]:
    """A file of weights of each fixture: the last, so that the first files alone do not look complete."""
    cases = []
    for folder in FOLDERS:
        for path in sorted(FIXTURES.joinpath(folder).iterdir()):
            files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
            weights = sorted(file for file in files if file.name.endswith((*WEIGHT_SUFFIXES, ".distcp")))
            if len(weights) > 1:
                cases.append(pytest.param(path, weights[-1].relative_to(path), id=f"{folder}/{path.name}"))
    return cases


@pytest.mark.parametrize(("fixture", "file"), _cases())
def test_everything_else_is_listed(fixture: Path, file: Path, tmp_path: Path) -> None:
    """Where a strict reader calls it incomplete, the tensors of all other files are listed and the rest is named."""
    folder = tmp_path / fixture.name
    shutil.copytree(fixture, folder)
    (folder / file).unlink()
    try:
        open_source(str(folder), Reading())
    except Incomplete as fault:
        code = fault.code
    except Exception:
        pytest.skip("another fault than an incomplete checkpoint")
    else:
        pytest.skip("the rest is a checkpoint of its own")

    try:
        document = inspect(str(folder), Reading(), incomplete=True)
    except Incomplete as fault:
        assert fault.code in NOTHING_LEFT
        return
    assert document["tensors"]
    missing = document["missing"]
    assert missing["error"]["code"] == code
    said = json.dumps(missing)
    assert missing["files"] or missing["tensors"] or file.name in said or file.parent.name in said

    # Whoever writes goes on refusing.
    assert not is_collecting()
    with pytest.raises(Incomplete):
        open_source(str(folder), Reading())


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """A folder of two files of safetensors and their index, of which the second is gone."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "safetensors" / "dcp_consolidated", folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def test_the_result_is_shown_and_the_exit_code_is_3(two_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(two_files)]) == 3
    shown = capsys.readouterr()
    assert "missing: 1 file and 4 tensors" in shown.out
    assert "model-00002-of-00002.safetensors" in shown.out
    assert "total" in shown.out
    assert "error[E0380]" in shown.err


def test_lenient_shows_the_same_and_ends_well(two_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(two_files), "--lenient", "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert shown.err == ""
    assert document["total"]["tensors"] == 5
    assert [file["path"] for file in document["missing"]["files"]] == ["model-00002-of-00002.safetensors"]
    assert document["missing"]["files"][0]["tensors"] == 4
    assert len(document["missing"]["tensors"]) == 4


def test_the_rank_and_the_bytes_of_a_missing_file(tmp_path: Path) -> None:
    """Where the file's name says whose it is, and the metadata how large."""
    folder = tmp_path / "fsdp2_dp4"
    shutil.copytree(FIXTURES / "dcp" / "fsdp2_dp4", folder)
    (folder / "__2_0.distcp").unlink()
    missing = inspect(str(folder), Reading(lenient=True))["missing"]
    (file,) = missing["files"]
    assert file["path"] == "__2_0.distcp"
    assert file["rank"] == {"rank": 2}
    assert file["bytes"] > 0
    assert missing["bytes"] > 0


def test_a_missing_stage_leaves_the_numbers_of_other_layers(tmp_path: Path) -> None:
    """Megatron's ranks number their layers from 0: those of later stages are found without the stage before."""
    folder = tmp_path / "gpt2"
    shutil.copytree(FIXTURES / "megatron" / "gpt2_tied_pp2_adamw", folder)
    whole = {row["name"] for row in inspect(str(folder), Reading())["tensors"]}
    shutil.rmtree(folder / "iter_0000002" / "mp_rank_00_000")
    document = inspect(str(folder), Reading(lenient=True))
    names = {row["name"] for row in document["tensors"]}
    assert names <= whole
    assert document["missing"]["files"][0]["rank"] == {"tp": 0, "pp": 0}
