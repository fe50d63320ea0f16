"""A folder whose names say two things: a single file and an index, a stale index, an index with a name too many; null
metadata; Git LFS pointers among the side files. Named, with a way to go on; `--prefer` decides."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run

SHARDS = ({"a.weight": np.ones((2, 2), "f4")}, {"b.weight": np.full((3,), 2, "f4")})
ALL = SHARDS[0] | SHARDS[1]
OTHER = {name: value + 1 for name, value in ALL.items()}
INDEXES = {"safetensors": "model.safetensors.index.json", "torch": "pytorch_model.bin.index.json"}
SINGLE = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin"}


def save(tensors, path: Path) -> None:
    if path.suffix == ".bin":
        torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, path)
    else:
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(params=["safetensors", "torch"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    """Two shards and their index."""
    made = tmp_path / "model"
    made.mkdir()
    stem, dot, suffix = SINGLE[kind].partition(".")
    weight_map = {}
    for number, tensors in enumerate(SHARDS, 1):
        name = f"{stem}-{number:05d}-of-00002{dot}{suffix}"
        save(tensors, made / name)
        weight_map |= dict.fromkeys(tensors, name)
    (made / INDEXES[kind]).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return made


def convert(source: Path, *options: str) -> tuple[int, dict]:
    out = source.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    code = run(["convert", str(source), str(out), "--to", "safetensors", "--json", *options])
    return code, load_file(out / "model.safetensors") if code == 0 else {}


def is_equal(have, want) -> bool:
    return have.keys() == want.keys() and all((have[name] == want[name]).all() for name in want)


def error_of(capfd) -> dict:
    return json.loads(capfd.readouterr().err.splitlines()[-1])["error"]


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_a_single_file_next_to_numbered_files_without_an_index(variant: str, kind: str, folder: Path, capfd) -> None:
    stem, dot, suffix = SINGLE[kind].partition(".")
    index = folder / INDEXES[kind]
    if variant:  # diffusers and transformers call a variant's index so: it is no index that is read
        index.rename(folder / f"{stem}{dot}{suffix}.index{variant}.json")
    else:
        index.unlink()
    for file in folder.glob(f"{stem}-*{dot}{suffix}"):
        file.rename(folder / file.name.replace(stem, stem + variant))
    assert is_equal(convert(folder)[1], ALL), "numbered files alone are read"

    single = f"{stem}{variant}{dot}{suffix}"
    save(OTHER, folder / single)
    capfd.readouterr()
    assert run(["verify", str(folder), "--json"]) == 3
    error = error_of(capfd)
    assert error["code"] == "E2874" and single in error["message"]
    assert convert(folder)[0] == 3
    assert is_equal(convert(folder, "--prefer", single)[1], OTHER)
    assert is_equal(convert(folder, "--prefer", "files")[1], ALL)


def test_a_single_file_next_to_an_index_is_an_error_that_names_both(kind: str, folder: Path, capfd) -> None:
    assert is_equal(convert(folder)[1], ALL)
    save(OTHER, folder / SINGLE[kind])
    capfd.readouterr()

    for verb in ("inspect", "verify"):
        assert run([verb, str(folder), "--json"]) == 3
        error = error_of(capfd)
        assert error["code"] == "E2874" and SINGLE[kind] in error["message"] and INDEXES[kind] in error["message"]
    assert run(["audit", str(folder), "--json"]) == 1
    assert [row["code"] for row in json.loads(capfd.readouterr().out)["findings"]] == ["E2874"]
    assert convert(folder)[0] == 3
    assert convert(folder, "--prefer", kind)[0] == 3, "the format does not say which of the two"

    assert is_equal(convert(folder, "--prefer", SINGLE[kind])[1], OTHER)
    assert is_equal(convert(folder, "--prefer", INDEXES[kind])[1], ALL)


def test_an_index_that_names_the_single_file_is_one_model(kind: str, folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    save(ALL, folder / SINGLE[kind])
    (folder / INDEXES[kind]).write_text(json.dumps({"weight_map": dict.fromkeys(ALL, SINGLE[kind])}))
    assert is_equal(convert(folder)[1], ALL)


def change_index(folder: Path, kind: str, change) -> None:
    path = folder / INDEXES[kind]
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_stale_index_can_be_left_out(kind: str, folder: Path, capfd) -> None:
    def rename(weight_map) -> None:
        weight_map.update({name: file.replace("of-00002", "of-00004") for name, file in weight_map.items()})

    change_index(folder, kind, rename)
    assert convert(folder)[0] == 3
    error = error_of(capfd)
    assert error["code"] == "E0380" and "the 2 files here" in error["hint"] and "--prefer files" in error["hint"]
    assert is_equal(convert(folder, "--prefer", "files")[1], ALL)


def test_files_that_do_not_hold_all_are_not_offered(folder: Path, kind: str, capfd) -> None:
    change_index(folder, kind, lambda weight_map: weight_map.update({"b.weight": "gone.bin", "c.weight": "gone.bin"}))
    next(folder.glob("*-00002-of-00002*")).unlink()
    assert convert(folder)[0] == 3
    assert "--prefer" not in error_of(capfd)["hint"]


def test_a_name_that_no_file_has_can_be_left_out(folder: Path, kind: str, capfd) -> None:
    change_index(folder, kind, lambda weight_map: weight_map.update({"mtp.fc.weight": sorted(weight_map.values())[-1]}))
    assert convert(folder)[0] == 3
    error = error_of(capfd)
    assert error["code"] == "E0381" and "--prefer files" in error["hint"]
    assert is_equal(convert(folder, "--prefer", "files")[1], ALL)


def test_null_metadata_is_read_with_a_note(tmp_path: Path, capfd) -> None:
    """As mlx writes it, and the safetensors library reads it."""
    path = tmp_path / "model.safetensors"
    save(ALL, path)
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length]) | {"__metadata__": None}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert is_equal(load_file(path), ALL)

    for verb in ("inspect", "verify", "audit"):
        assert run([verb, str(path), "--json"]) == 0
        document = json.loads(capfd.readouterr().out)
        assert "__metadata__ is null" in document["notes"] and not document.get("findings")
    assert is_equal(convert(path)[1], ALL)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "vocab.json", "tokenizer_config.json"])
def test_a_pointer_among_the_side_files_is_named(name: str, folder: Path, capfd) -> None:
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4\n")
    for verb in ("verify", "audit"):
        assert run([verb, str(folder), "--json"]) == 1
        (row,) = [row for row in json.loads(capfd.readouterr().out)["findings"] if row["code"] == "W-lfs-pointer"]
        assert row["message"].startswith(f"{name} is a Git LFS pointer")
    convert(folder)
    streams = capfd.readouterr()
    assert "Git LFS pointer" in streams.out + streams.err

    (folder / "config.json").write_bytes((folder / name).read_bytes())
    assert run(["convert", str(folder), str(folder.parent / "m"), "--to", "megatron", "--json"]) == 2
    error = error_of(capfd)
    assert "Git LFS pointer" in error["message"], error
