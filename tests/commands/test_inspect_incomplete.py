"""`ckpt inspect` of a checkpoint that lacks a file: what is there, and what is not. Of every format's fixtures."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.commands.incomplete import fault_of
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.missing import is_collecting
from ckpt_tool.errors import InputError
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
# Folders whose checkpoints are looked into as well: containers of the same formats, and adapters.
MORE = ("gguf-made", "megatron-lora", "nemo2", "peft", "verl")
# Other faults than that something is missing: two checkpoints in one folder, without the file that says which counts.
OTHER_FAULTS = {"E0391"}
# Nothing is recognised without the file, and so nothing says what it is called.
UNRECOGNISED = "E0390"


def _fixtures() -> list[Any]:
    folders = [path for name in (*FOLDERS, *MORE) for path in sorted(FIXTURES.joinpath(name).iterdir())]
    return [pytest.param(path, id=f"{path.parent.name}/{path.name}") for path in folders if path.is_dir()]


def _may_hold_tensors(file: Path) -> bool:
    return file.name.endswith((*WEIGHT_SUFFIXES, ".distcp", ".zarray", "zarr.json", "manifest.ocdbt"))


def _is_named(file: Path, document: dict[str, Any]) -> bool:
    """Does the document say that this file is missing? By its name, its folder's, or the tensors that are gone."""
    missing = document["missing"]
    said = json.dumps([missing, document["notes"]])
    words = {file.name, file.name.partition(".")[0], file.parent.name, "_".join(file.stem.split("_")[-2:])}
    if "layer" in file.name and "no layer file" in said:  # of a tied layer, which of several files is not known
        return True
    return bool(missing["tensors"]) or any(word and word in said for word in words)


def _first_and_last_of_each_kind(folder: Path, files: list[Path]) -> list[Path]:
    """Of files below one folder whose names differ in digits alone, the first and the last."""
    kinds = defaultdict[tuple[str, str], list[Path]](list)
    for file in files:
        kinds[file.relative_to(folder).parts[0], re.sub(r"\d+", "#", file.name)].append(file)
    return [file for like in kinds.values() for file in dict.fromkeys((like[0], like[-1]))]


# A file a parameter and state, as DeepSpeed's universal form has them: the hundredth tells what the first told
@pytest.mark.parametrize("which", ["ends", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fixture", _fixtures())
def test_without_each_file_the_rest_is_listed(fixture: Path, which: str, tmp_path: Path) -> None:
    """Each file of a checkpoint is taken away in turn. Where a strict reader calls the rest incomplete, the tensors of
    all other files are listed and what is missing is named."""
    folder = tmp_path / fixture.name
    shutil.copytree(fixture, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files if which == "all" else _first_and_last_of_each_kind(folder, files):
        aside = tmp_path / "aside"
        file.rename(aside)
        _check_rest(folder, file.relative_to(folder))
        aside.rename(file)


def _check_rest(folder: Path, file: Path) -> None:
    """The rest of a checkpoint without a file: complete by itself, or listed as far as its headers say."""
    place = f"{folder.parent.name}/{folder.name} without {file}"
    try:
        open_source(str(folder), Reading())
    except InputError as fault:
        code = fault.code
    else:
        return
    if code in OTHER_FAULTS:
        return

    holders = [path for path in folder.rglob("*") if path.is_file() and _may_hold_tensors(path)]
    try:
        document = inspect(str(folder), Reading(), incomplete=True)
    except InputError as fault:
        assert not holders, f"{place}: {fault.code} {fault.message}"
        return
    assert document["tensors"] or not holders, f"{place}: nothing is listed"
    assert document["missing"]["error"]["code"] == code, place
    assert code == UNRECOGNISED or _is_named(file, document), f"{place}: {document['missing']}"
    fault = fault_of(document)
    assert fault is not None and fault.exit_code == 3, place

    # Whoever writes goes on refusing.
    assert not is_collecting()
    with pytest.raises(InputError):
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


def test_items_without_metadata_are_numbered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are in `.metadata` alone; dtypes and shapes are in the items."""
    folder = tmp_path / "fsdp2_dp4"
    shutil.copytree(FIXTURES / "dcp" / "fsdp2_dp4", folder)
    (folder / ".metadata").unlink()
    assert run(["inspect", str(folder), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    row = document["tensors"][0]
    assert row == {
        "name": "__0_0.item 0",
        "state": "unknown",
        "dtype": "F32",
        "shape": [3],
        "bytes": 12,
        "file": "__0_0.distcp",
    }
    assert any("names are lost" in note for note in document["notes"])
    assert run(["inspect", str(folder), "--lenient"]) == 0
    assert "names are lost" in capsys.readouterr().out


@pytest.mark.parametrize("left", [0, 20, 700, 1500, 1577, 2000])
def test_a_save_that_was_killed_shows_its_complete_items(left: int, tmp_path: Path) -> None:
    """Without `.metadata` and with a file that was cut short: items are followed from the beginning."""
    folder = tmp_path / "fsdp2_dp4"
    shutil.copytree(FIXTURES / "dcp" / "fsdp2_dp4", folder)
    (folder / ".metadata").unlink()
    whole = [row for row in inspect(str(folder), Reading(lenient=True))["tensors"] if row["file"] == "__0_0.distcp"]
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.truncate(left)

    document = inspect(str(folder), Reading(lenient=True))
    rows = [row for row in document["tensors"] if row["file"] == "__0_0.distcp"]
    assert rows == whole[: left // 1577]  # bytes of the first item
    if left not in (0, 1577):
        assert any("__0_0.distcp was cut short" in note for note in document["notes"])


def test_a_parameter_without_its_folder_is_named(tmp_path: Path) -> None:
    """Groups of the optimizer list it all the same."""
    folder = tmp_path / "universal"
    shutil.copytree(FIXTURES / "deepspeed-universal" / "z1_bf16_dp2", folder)
    shutil.rmtree(folder / "zero" / "layers.0.norm.weight")
    document = inspect(str(folder), Reading(lenient=True))
    assert len(document["tensors"]) > 10
    assert all(file["path"].startswith("zero/layers.0.norm.weight/") for file in document["missing"]["files"])


def test_an_index_alone_names_what_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "safetensors" / "dcp_consolidated", folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    shutil.rmtree(folder / "sharded")
    assert run(["inspect", str(folder), "--json"]) == 3
    missing = json.loads(capsys.readouterr().out)["missing"]
    assert [file["tensors"] for file in missing["files"]] == [5, 4]
    assert len(missing["tensors"]) == 9


def test_the_last_shard_of_a_release_is_known_to_be_missing(tmp_path: Path) -> None:
    """Names count shards from 00, so the last one leaves no gap: its rows do, by params.json."""
    folder = tmp_path / "llama"
    shutil.copytree(FIXTURES / "meta" / "llama3_tp4", folder)
    (folder / "consolidated.03.pth").unlink()
    (folder / "consolidated.02.pth").unlink()
    missing = inspect(str(folder), Reading(lenient=True))["missing"]
    assert missing["error"]["code"] == "E1400"
    assert [file["path"] for file in missing["files"]] == ["consolidated.02.pth", "consolidated.03.pth"]
