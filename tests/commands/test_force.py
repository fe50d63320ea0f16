"""`--force` deletes what it replaces: a checkpoint, something empty, or what an interrupted run of ours had begun to
replace."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.formats import registry
from ckpt_tool.storage import staging

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCE = FIXTURES / "safetensors" / "llama_one_file"


def convert(out: Path, capfd: Any, *more: str, to: str = "sharded") -> tuple[int, dict[str, Any]]:
    status = run(["convert", str(SOURCE), str(out), "--to", to, "--force", "--json", "-q", *more])
    err = capfd.readouterr().err
    return status, json.loads(err.strip().splitlines()[-1])["error"] if status else {}


def everything(folder: Path) -> dict[str, Any]:
    return {
        str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def a_home(path: Path) -> None:
    (path / "thesis").mkdir(parents=True)
    (path / "thesis" / "chapter1.tex").write_text("It was")
    (path / "photo.jpg").write_bytes(b"\xff\xd8\xff")


def a_file(path: Path) -> None:
    path.write_text("a letter")


def a_pickle_of_something(path: Path) -> None:
    path.write_bytes(b"\x80\x02K\x01.")


def a_run(path: Path) -> None:
    """Three steps of training, and the pointer to the last."""
    for step in (1, 2, 3):
        shutil.copytree(SOURCE, path / f"checkpoint-{step}")


def a_run_with_a_pointer(path: Path) -> None:
    shutil.copytree(FIXTURES / "megatron-dist" / "llama_tp2", path)
    (step,) = (at for at in path.iterdir() if at.name.startswith("iter_"))
    shutil.copytree(step, path / "iter_0007000")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [a_home, a_file, a_pickle_of_something, a_run, a_run_with_a_pointer, a_fifo])
def test_what_is_no_checkpoint_stays(tmp_path: Path, capfd: Any, make: Any) -> None:
    make(tmp_path / "out")
    before = everything(tmp_path)
    for more in ((), ("--dry-run",)):
        status, error = convert(tmp_path / "out", capfd, *more)
        assert (status, error["code"]) == (5, "E1604"), error
        assert error["path"] == str(tmp_path / "out") and error["hint"]
        assert everything(tmp_path) == before and os.listdir(tmp_path) == ["out"]
    words = {a_home: "chapter1.tex", a_run: "3 checkpoints", a_run_with_a_pointer: "checkpoints"}.get(make)
    assert words is None or words in error["message"], error


def test_the_same_for_a_saved_plan(tmp_path: Path, capfd: Any) -> None:
    plan = tmp_path / "plan.json"
    (tmp_path / "place").mkdir()
    arguments = ["convert", str(SOURCE), str(tmp_path / "place" / "out"), "--to", "sharded", "--plan", str(plan), "-q"]
    assert run(arguments) == 0
    a_home(tmp_path / "place" / "out")
    before = everything(tmp_path / "place")
    capfd.readouterr()
    assert run(["apply", str(plan), "--force", "--json", "-q"]) == 5
    assert json.loads(capfd.readouterr().err.strip().splitlines()[-1])["error"]["code"] == "E1604"
    assert everything(tmp_path / "place") == before


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_checkpoint_of_any_format_is_replaced(tmp_path: Path, capfd: Any, name: str) -> None:
    found = sorted(path for path in (FIXTURES / name).iterdir() if ".truth." not in path.name and path.suffix != ".md")
    for path in found[:3]:
        out = tmp_path / ("out" + path.suffix)
        shutil.copytree(path, out) if path.is_dir() else shutil.copy(path, out)
        to = "safetensors" if path.suffix == ".safetensors" else "torch" if path.is_file() else "sharded"
        if path.suffix not in ("", ".safetensors", ".pt"):
            continue
        status, error = convert(out, capfd, to=to)
        assert status == 0, (path, error)
        shutil.rmtree(out) if out.is_dir() else out.unlink()


def test_what_is_empty_is_replaced(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.safetensors").touch()
    assert convert(tmp_path / "folder", capfd)[0] == 0
    assert convert(tmp_path / "file.safetensors", capfd, to="safetensors")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["file.safetensors", "folder"]


@pytest.mark.parametrize("to", ["a checkpoint", "a home", "nowhere"])
def test_a_link_is_not_replaced(tmp_path: Path, capfd: Any, to: str) -> None:
    """Neither the link nor what it leads to; the hint names what it leads to."""
    if to == "a checkpoint":
        shutil.copytree(SOURCE, tmp_path / "there")
    elif to == "a home":
        a_home(tmp_path / "there")
    (tmp_path / "out").symlink_to(tmp_path / "there")
    before = sorted(os.listdir(tmp_path))
    status, error = convert(tmp_path / "out", capfd)
    assert (status, error["code"]) == (5, "E1603"), error
    assert str(tmp_path / "there") in error["hint"]
    assert sorted(os.listdir(tmp_path)) == before and os.readlink(tmp_path / "out") == str(tmp_path / "there")


def test_what_changed_into_something_else_meanwhile_is_left_alone(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """What was looked at is what is replaced: another folder under its name is not."""
    out = tmp_path / "out"
    shutil.copytree(SOURCE, out)
    real = staging.Staging._check_whole

    def swap(self: Any) -> None:
        real(self)
        os.rename(out, tmp_path / "elsewhere")
        a_home(out)

    monkeypatch.setattr(staging.Staging, "_check_whole", swap)
    status, error = convert(out, capfd)
    assert (status, error["code"]) == (5, "E0505"), error
    assert (out / "thesis" / "chapter1.tex").read_text() == "It was"


def test_what_a_killed_run_had_marked_is_ours(tmp_path: Path, capfd: Any) -> None:
    a_home(tmp_path / "out")
    staging._mark_replaced(tmp_path / "out")
    if not staging.was_replaced(tmp_path / "out"):
        pytest.skip("this file system has no marks")
    assert convert(tmp_path / "out", capfd)[0] == 0
