"""`--force` removes the files that the reader of the replaced checkpoint accounts for, and no other file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.formats import registry
from ckpt_tool.storage import platform_calls
from ckpt_tool.storage.output import staging
from ckpt_tool.storage.output.replaced import entries_below

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


# Checkpoints with files beside them that are none of theirs: a job's own records, another save, shards of another kind.
MORE = {
    "accelerate": ["random_states_0.pkl"],
    "dcp_consolidated": ["sharded/shard-00001-model-00001-of-00002.safetensors"],
    "stale_files": ["__2_0.distcp"],
    "trainer_deepseek_v3": ["optimizer.pt", "trainer_state.json"],
    "trainer_mixtral": ["optimizer.pt", "trainer_state.json"],
    "trainer_qwen3": ["trainer_state.json"],
    "trainer_qwen3_moe": ["optimizer.pt", "trainer_state.json"],
}


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_checkpoint_of_any_format_is_replaced(tmp_path: Path, capfd: Any, name: str) -> None:
    found = sorted(path for path in (FIXTURES / name).iterdir() if ".truth." not in path.name and path.suffix != ".md")
    for path in found[:3]:
        if path.suffix not in ("", ".safetensors", ".pt"):
            continue
        out = tmp_path / ("out" + path.suffix)
        shutil.copytree(path, out) if path.is_dir() else shutil.copy(path, out)
        to = "safetensors" if path.suffix == ".safetensors" else "torch" if path.is_file() else "sharded"
        before = everything(tmp_path)
        status, error = convert(out, capfd, to=to)
        if path.name in MORE:
            assert (status, error["code"]) == (5, "E1604") and MORE[path.name][0] in error["message"], error
            assert everything(tmp_path) == before
        else:
            assert status == 0, (path, error)
        shutil.rmtree(out) if out.is_dir() else out.unlink()


# Names that only resemble those of side files, so that they are a person's.
PERSONS = (
    *("tokenizer_notes.txt", "vocab.old", "my.model", "chat_template_mine.jinja", "LICENSE-notes", "README.md.bak"),
    *("my_preprocessor_config.json", "config.json.orig", "modeling_mine.py", "lora_config.json.txt", "params.json~"),
)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", registry.NAMES)
def test_files_that_are_called_nearly_like_side_files_stay(tmp_path: Path, capfd: Any, name: str) -> None:
    folders = [path for path in sorted((FIXTURES / name).iterdir()) if path.is_dir() and path.name not in MORE]
    if not folders:
        pytest.skip("its fixtures are single files")
    out = tmp_path / "out"
    shutil.copytree(folders[0], out)
    for person in PERSONS:
        (out / person).write_text("mine")
        before = everything(tmp_path)
        status, error = convert(out, capfd)
        assert (status, error["code"]) == (5, "E1604") and person in error["message"], (person, error)
        assert everything(tmp_path) == before
        (out / person).unlink()


def test_notes_in_the_folder_of_a_module_stay(tmp_path: Path, capfd: Any) -> None:
    """sentence-transformers' modules are carried along with whatever text is in their folders."""
    out = tmp_path / "out"
    shutil.copytree(SOURCE, out)
    (out / "1_Pooling").mkdir()
    (out / "modules.json").write_text('[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]')
    (out / "1_Pooling/config.json").write_text("{}")
    assert convert(out, capfd, "--dry-run")[0] == 0
    (out / "1_Pooling/notes.txt").write_text("mine")
    status, error = convert(out, capfd)
    assert (status, error["code"]) == (5, "E1604") and "1_Pooling/notes.txt" in error["message"]


SOURCES = ("dcp/tp2_dp2", "convert/llama/hf", "paddle-unified/llama_tied_hf", "orbax/manager", "peft/on_llama")


@pytest.mark.parametrize("most", [2, pytest.param(len(SOURCES), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("to", registry.NAMES)
def test_what_was_written_is_replaced_by_the_same_command(tmp_path: Path, capfd: Any, to: str, most: int) -> None:
    """Every file that a writer makes, of each format, is one that its reader accounts for, side files included. most:
    how many sources are written; each takes two conversions."""
    written = 0
    for number, source in enumerate(SOURCES):
        if written == most:
            break
        line = ["convert", str(FIXTURES / source), str(tmp_path / f"out{number}"), "--to", to, "--json", "-q"]
        if run(line) != 0:  # a format for other models
            continue
        written += 1
        capfd.readouterr()
        assert run([*line, "--force"]) == 0, capfd.readouterr().err
    assert written and sorted(os.listdir(tmp_path)) == sorted(
        f"out{n}" for n in range(5) if (tmp_path / f"out{n}").exists()
    )


def test_what_goes_is_said_before(tmp_path: Path, capfd: Any) -> None:
    """A dry run, a saved plan and the run itself name the files that are replaced, in JSON and as text."""
    out = tmp_path / "out"
    names = ["config.json", "generation_config.json", "model.safetensors"]
    shutil.copytree(SOURCE, out)
    line = ["convert", str(SOURCE), str(out), "--to", "dcp", "--force"]
    plan = str(tmp_path / "plan.json")
    assert run([*line, "--plan", plan, "-q", "--json"]) == 0
    for more in (["--dry-run"], []):
        assert run([*line, *more, "-q", "--json"]) == 0
        document = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
        assert document["replaces"]["names"] == names and document["replaces"]["files"] == 3
        shutil.rmtree(out) if not more else None
    shutil.copytree(SOURCE, out)
    assert run(["apply", plan, "--force", "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert "--force replaces 3 files" in said and all(name in said for name in names)


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


def test_a_mark_on_a_folder_makes_its_files_nobodys(tmp_path: Path, capfd: Any) -> None:
    """A run that was killed just before the exchange leaves its mark on the old output; somebody goes on using it."""
    a_home(tmp_path / "out")
    staging._mark_replaced(tmp_path / "out", entries_below(tmp_path / "out"))
    before = everything(tmp_path)
    status, error = convert(tmp_path / "out", capfd)
    assert (status, error["code"]) == (5, "E1604") and everything(tmp_path) == before


def test_a_file_that_comes_while_the_run_writes_stays(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    shutil.copytree(SOURCE, out)
    real = staging.Staging._check_whole

    def add(self: Any) -> None:
        real(self)
        (out / "notes.txt").write_text("just now")

    monkeypatch.setattr(staging.Staging, "_check_whole", add)
    status, error = convert(out, capfd)
    assert (status, error["code"]) == (5, "E2830") and "notes.txt" in error["message"]
    assert (out / "notes.txt").read_text() == "just now" and (out / "model.safetensors").exists()


def test_code_goes_where_the_config_names_it(tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out"
    shutil.copytree(SOURCE, out)
    (out / "modeling_x.py").write_text("from .configuration_x import XConfig\n")
    (out / "configuration_x.py").write_text("class XConfig: ...\n")
    status, error = convert(out, capfd)
    assert (status, error["code"]) == (5, "E1604") and "modeling_x.py" in error["message"]
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_x.XModel"}}))
    assert convert(out, capfd)[0] == 0


def test_a_signed_output_with_its_attestation_is_replaced(tmp_path: Path, capfd: Any) -> None:
    attest = ["--attest", str(tmp_path / "out" / "provenance.json")]
    for _ in range(2):
        assert convert(tmp_path / "out", capfd, *attest)[0] == 0
    (tmp_path / "out" / "other.json").write_text('{"_type": "mine"}')
    assert convert(tmp_path / "out", capfd, *attest)[1]["code"] == "E1604"


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_where_names_can_not_be_exchanged(tmp_path: Path, capfd: Any, monkeypatch: Any, name: str) -> None:
    """A file is linked and renamed, a folder takes two renames; nothing is left under a hidden name. What comes of a
    kill between them is in `faults/test_replacing`."""

    class Old:
        """A C library without renameat2."""

    monkeypatch.setattr(platform_calls.ctypes, "CDLL", lambda *args, **more: Old())
    out = tmp_path / name
    to = "sharded" if name == "out" else "safetensors"
    for _ in range(2):
        assert convert(out, capfd, to=to)[0] == 0
        assert os.listdir(tmp_path) == [name]


def test_a_list_of_modules_accounts_for_modules_alone(tmp_path: Path, capfd: Any) -> None:
    """`modules.json` is a file of the checkpoint's: it names no folder of a person's as its own."""
    out = tmp_path / "out"
    shutil.copytree(SOURCE, out)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "x"}, {"idx": 1, "name": "1", "path": "data", "type": "x"}]
    (out / "modules.json").write_text(json.dumps(modules))
    (out / "data").mkdir()
    (out / "data" / "answers.json").write_text("{}")
    before = everything(tmp_path)
    status, error = convert(out, capfd)
    assert (status, error["code"]) == (5, "E1604") and everything(tmp_path) == before


def test_a_named_file_is_replaced_where_it_can_be_read_as_a_checkpoint(tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "x.safetensors"
    shutil.copy(FIXTURES / "safetensors" / "llama_one_file" / "model.safetensors", out)
    status, _ = convert(out, capfd, to="safetensors")
    assert status == 0


@pytest.mark.parametrize(
    "content",
    [
        b"notes of a person",
        b"\x80\x02]q\x00K\x01a.",
        (8).to_bytes(8, "little") + b"{}      and more",
        b"GGUF too short",
    ],
    ids=["text", "a pickle of a list", "a header without tensors", "a cut file"],
)
def test_a_named_file_that_is_no_checkpoint_stays(tmp_path: Path, capfd: Any, content: bytes) -> None:
    """Its suffix alone says nothing of what a person keeps in it."""
    out = tmp_path / "x.safetensors"
    out.write_bytes(content)
    status, error = convert(out, capfd, to="safetensors")
    assert status and error["code"] == "E1604"
    assert out.read_bytes() == content and [*tmp_path.iterdir()] == [out]
