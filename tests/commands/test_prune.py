"""`ckpt prune`: what stays and why, what goes, and that nothing else is touched."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.commands import prune
from ckpt_tool.errors import StorageError, UnknownFormat, UsageError
from ckpt_tool.storage import mounts
from ckpt_tool.storage.output import removal

FIXTURES = Path(__file__).parents[2] / "fixtures"
ONE = FIXTURES / "safetensors/llama_one_file"


def laid(folder: Path, steps: tuple[int, ...], name: str = "checkpoint-{}", source: Path = ONE) -> dict[int, Path]:
    """Sound steps, written long ago, an hour apart."""
    found = {}
    for step in steps:
        found[step] = folder / name.format(step)
        shutil.copytree(source, found[step])
        age(found[step], 10**8 - 3600 * step)
    return found


def age(path: Path, seconds: float) -> None:
    """Let all files of a step be as old as that."""
    for file in (path, *path.rglob("*")):
        os.utime(file, (time.time() - seconds,) * 2)


def cut(step: Path) -> None:
    """Cut a step's weights short, and leave its time as it was."""
    file = next(step.rglob("*.safetensors"))
    info = file.stat()
    os.truncate(file, info.st_size - 1)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def kept(document: dict[str, Any]) -> dict[str, list[str]]:
    return {Path(row["path"]).name: row["reasons"] for row in document["keep"]}


def test_the_last_n_and_every_k_stay(tmp_path: Path, capfd: Any) -> None:
    laid(tmp_path, tuple(range(100, 1100, 100)))
    before = names(tmp_path)
    assert run(["prune", str(tmp_path), "--keep-last", "2", "--keep-every", "500", "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert names(tmp_path) == before and "keep 3 steps" in out and "remove 7 steps" in out and "would be free" in out
    document = ckpt.prune(tmp_path, keep_last=2, keep_every=500)
    assert kept(document) == {
        "checkpoint-500": ["a multiple of 500"],
        "checkpoint-900": ["one of the last 2 complete ones"],
        "checkpoint-1000": ["the last complete one", "a multiple of 500"],
    }
    assert names(tmp_path) == ["checkpoint-1000", "checkpoint-500", "checkpoint-900"]
    assert all(row["removed"] for row in document["remove"])
    assert document["freed_bytes"] == 7 * sum(file.stat().st_size for file in ONE.iterdir())
    assert ckpt.latest(tmp_path)["path"] == document["last_sound"] == str(tmp_path / "checkpoint-1000")
    assert ckpt.prune(tmp_path, keep_last=2, keep_every=500)["remove"] == []


def test_steps_one_folder_down_are_the_run_s(tmp_path: Path) -> None:
    """As `ckpt latest` has it; beside another folder that holds steps nobody can tell which are meant."""
    (tmp_path / "config.json").write_text("{}")
    laid(tmp_path / "checkpoints", (100, 200, 300))
    found = ckpt.prune(tmp_path, keep_last=1)
    assert found["last_sound"] == str(tmp_path / "checkpoints/checkpoint-300")
    assert names(tmp_path) == ["checkpoints", "config.json"] and names(tmp_path / "checkpoints") == ["checkpoint-300"]
    laid(tmp_path / "checkpoint", (400, 500))
    with pytest.raises(UnknownFormat, match="in 2 folders"):
        ckpt.prune(tmp_path, keep_last=1)
    assert names(tmp_path / "checkpoint") == ["checkpoint-400", "checkpoint-500"]


def test_the_last_sound_one_stays_and_what_is_broken_is_not_counted(tmp_path: Path) -> None:
    steps = laid(tmp_path, (1, 2, 3, 4, 5, 6))
    for step in (2, 5, 6):
        cut(steps[step])
    document = ckpt.prune(tmp_path, keep_last=1)
    assert kept(document) == {
        "checkpoint-4": ["the last complete one"],
        "checkpoint-5": ["newer than the last complete one"],
        "checkpoint-6": ["newer than the last complete one"],
    }
    cut(steps[4])
    laid(tmp_path, (7,))
    shutil.rmtree(steps[6])
    assert kept(ckpt.prune(tmp_path, keep_last=3)).keys() == {"checkpoint-7"}


def test_without_a_sound_step_nothing_goes(tmp_path: Path, capfd: Any) -> None:
    steps = laid(tmp_path, (1, 2))
    for step in steps.values():
        cut(step)
    before = names(tmp_path)
    assert run(["prune", str(tmp_path), "--keep-last", "1"]) == 1
    assert "no step of the run is complete: nothing is removed" in capfd.readouterr().out
    assert names(tmp_path) == before


def test_what_may_be_being_written_stays(tmp_path: Path) -> None:
    steps = laid(tmp_path, (1, 2, 3, 4, 5))
    cut(steps[1])
    cut(steps[2])
    age(steps[2], 60)
    staged = tmp_path / ".checkpoint-3.ckpt-partial"
    staged.mkdir()
    fd = os.open(staged, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        document = ckpt.prune(tmp_path, keep_last=1)
    finally:
        os.close(fd)
    assert kept(document) == {
        "checkpoint-2": ["not complete, and changed within the last hour"],
        "checkpoint-3": ["a run of ckpt is writing it"],
        "checkpoint-5": ["the last complete one"],
    }
    assert staged.is_dir()


def test_a_run_that_went_back_keeps_what_it_wrote_since(tmp_path: Path) -> None:
    """It was started again from 500: 600 is newer than 1000, whatever its number."""
    steps = laid(tmp_path, (500, 600, 1000))
    age(steps[600], 3700)
    assert kept(ckpt.prune(tmp_path, keep_last=1)) == {
        "checkpoint-600": ["written after checkpoint-1000"],
        "checkpoint-1000": ["the last complete one"],
    }


def test_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    laid(tmp_path, (8, 9))
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "thesis.tex").write_text("x")
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    for name in ("best-checkpoint-1", "checkpoint-1.bak", "tmp-checkpoint-1"):
        shutil.copytree(ONE, tmp_path / name)
    before = set(names(tmp_path))
    document = ckpt.prune(tmp_path, keep_last=1)
    assert before - set(names(tmp_path)) == {"checkpoint-8"}
    assert kept(document)["checkpoint-1"] == kept(document)["checkpoint-2"] == ["no checkpoint"]


@pytest.mark.parametrize(
    ("pointer", "text"), [("latest", "global_step2"), ("latest_checkpointed_iteration.txt", "2"), ("latest", "gone")]
)
def test_what_a_pointer_names_stays(pointer: str, text: str, tmp_path: Path) -> None:
    laid(tmp_path, (1, 2, 3, 4), "global_step{}" if pointer == "latest" else "global_step_{}")
    (tmp_path / pointer).write_text(text)
    found = kept(ckpt.prune(tmp_path, keep_last=1))
    assert len(found) == (1 if text == "gone" else 2)
    assert (tmp_path / pointer).read_text() == text
    if text != "gone":
        assert found[f"global_step{'' if pointer == 'latest' else '_'}2"] == [f"{pointer} names it"]


def test_what_the_run_calls_its_best_stays(tmp_path: Path) -> None:
    steps = laid(tmp_path, (1, 2, 3, 4))
    for step in steps.values():
        (step / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "/elsewhere/out/checkpoint-2"}))
    assert kept(ckpt.prune(tmp_path, keep_last=1)) == {
        "checkpoint-2": ["checkpoint-4 records it as the best"],
        "checkpoint-4": ["the last complete one"],
    }


def test_a_universal_twin_goes_and_stays_with_its_step(tmp_path: Path) -> None:
    universal = FIXTURES / "deepspeed-universal/z1_bf16"
    universal = universal if universal.is_dir() else next(path for path in universal.parent.glob("*") if path.is_dir())
    laid(tmp_path, (1, 2, 3), "global_step{}", FIXTURES / "deepspeed/z1_fp16_dp2")
    laid(tmp_path, (1, 2), "global_step{}_universal", universal)
    found = kept(ckpt.prune(tmp_path, keep_last=2))
    assert found["global_step2_universal"]
    assert set(names(tmp_path)) == {"global_step2", "global_step2_universal", "global_step3"}


def test_links_are_neither_followed_nor_broken(tmp_path: Path) -> None:
    run_ = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    run_.mkdir()
    steps = laid(run_, (1, 2, 3, 4, 5, 6, 9))
    shutil.copytree(ONE, elsewhere)
    (run_ / "checkpoint-7").symlink_to(elsewhere)  # a step on another disk: the link goes, what it leads to stays
    (run_ / "best").symlink_to("checkpoint-1")
    weights = "model.safetensors"
    (steps[9] / weights).unlink()  # shares the weights of an older step, which shares its config with another
    (steps[9] / weights).symlink_to(f"../checkpoint-3/{weights}")
    (steps[3] / "config.json").unlink()
    (steps[3] / "config.json").symlink_to("../checkpoint-4/config.json")
    (steps[5] / "other").symlink_to(elsewhere)
    (steps[5] / "config2.json").symlink_to("config.json")
    document = ckpt.prune(run_, keep_last=1, follow_symlinks=True, with_other_files=True)
    assert kept(document) == {
        "checkpoint-1": ["best links to it"],
        "checkpoint-3": [f"checkpoint-9/{weights} links to it"],
        "checkpoint-4": ["checkpoint-3/config.json links to it"],
        "checkpoint-9": ["the last complete one"],
    }
    assert names(run_) == ["best", "checkpoint-1", "checkpoint-3", "checkpoint-4", "checkpoint-9"]
    assert names(elsewhere) == names(ONE)


def test_files_with_other_names_free_nothing(tmp_path: Path) -> None:
    steps = laid(tmp_path, (1, 2, 3))
    size = (steps[1] / "model.safetensors").stat().st_size
    for step in (1, 2):
        (steps[step] / "model.safetensors").unlink()
        os.link(steps[3] / "model.safetensors", steps[step] / "model.safetensors")
    document = ckpt.prune(tmp_path, keep_last=1)
    others = sum(file.stat().st_size for file in ONE.iterdir()) - size
    assert document["freed_bytes"] == 2 * others and document["remove"][0]["bytes"] == others + size
    assert ckpt.latest(tmp_path)["step"] == 3


def test_steps_of_one_file(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        shutil.copy2(FIXTURES / "torch/training.pt", tmp_path / f"epoch=0-step={step}.ckpt")
    (tmp_path / "last.ckpt").symlink_to("epoch=0-step=30.ckpt")
    ckpt.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["epoch=0-step=30.ckpt", "last.ckpt"]


def test_usage(tmp_path: Path, capfd: Any) -> None:
    laid(tmp_path, (1,))
    with pytest.raises(UsageError) as caught:
        ckpt.prune(tmp_path)
    assert caught.value.code == "E1673"
    with pytest.raises(UsageError) as caught:
        ckpt.prune("s3://bucket/run", keep_last=1)
    assert caught.value.code == "E1672"
    assert run(["prune", str(tmp_path), "--keep-last", "0"]) == 2
    assert "--keep-last" in capfd.readouterr().err


def replace_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(ONE, step)


def put_a_note(step: Path) -> None:
    (step / "notes.txt").write_text("mine")
    age(step, 10**8)


def put_an_older_file(step: Path) -> None:
    """In a file's place: there are as many as before, and none is newer."""
    (step.parent / "other").write_text("mine")
    os.replace(step.parent / "other", step / "config.json")
    age(step, 10**8)


@pytest.mark.parametrize(("module", "moment"), [(prune, "retire"), (removal, "_mark_taken")])
@pytest.mark.parametrize("meddle", [replace_step, put_a_note, put_an_older_file])
def test_a_step_that_changes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meddle: Callable[[Path], None], module: Any, moment: str
) -> None:
    """Before it is taken away, and in the moment between the last look and the rename."""
    steps = laid(tmp_path, (1, 2, 3))
    real = getattr(module, moment)
    seen = dict[str, bytes]()

    def meddle_first(path: Path, *more: Any) -> Any:
        if path.name == "checkpoint-2":
            meddle(path)
            seen.update({file.name: file.read_bytes() for file in path.iterdir()})
        return real(path, *more)

    monkeypatch.setattr(module, moment, meddle_first)
    with pytest.raises(StorageError) as caught:
        ckpt.prune(tmp_path, keep_last=1)
    assert caught.value.code == "E1674"
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert {file.name: file.read_bytes() for file in steps[2].iterdir()} == seen


@pytest.mark.parametrize("option", [{}, {"with_other_files": True}])
def test_what_is_mounted_in_a_step_is_not_removed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, bool]
) -> None:
    """A folder of the same file system that is bound there (`mount --bind`, a container's volume) has the device of all
    around it: the kernel's list alone tells."""
    run_folder = tmp_path / "a run"
    steps = laid(run_folder, (1, 2, 3))
    (steps[1] / "eval").mkdir()
    (steps[1] / "eval/results.csv").write_text("mine")
    age(steps[1], 10**8 - 3600)
    listed = tmp_path / "mountinfo"
    point = str(steps[1] / "eval").replace(" ", "\\040")
    listed.write_text(f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 8:1 /data {point} rw - ext4 /dev/x rw\n")
    monkeypatch.setattr(mounts, "_LIST", str(listed))
    document = ckpt.prune(run_folder, keep_last=1, **option)
    assert kept(document)["checkpoint-1"] == ["a mount point: checkpoint-1/eval"]
    assert names(run_folder) == ["checkpoint-1", "checkpoint-3"]


def test_when_the_last_sound_step_vanishes_nothing_more_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = laid(tmp_path, (1, 2, 3))
    real = removal.erase
    monkeypatch.setattr("ckpt_tool.commands.prune.erase", lambda path: (real(path), shutil.rmtree(steps[3])))
    with pytest.raises(StorageError) as caught:
        ckpt.prune(tmp_path, keep_last=1)
    assert caught.value.code == "E1674" and names(tmp_path) == ["checkpoint-2"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may delete anything")
def test_a_step_that_can_not_be_deleted_stays(tmp_path: Path) -> None:
    steps = laid(tmp_path, (1, 2))
    (steps[1] / "inner").mkdir(mode=0o500)
    assert kept(ckpt.prune(tmp_path, keep_last=1))["checkpoint-1"] == ["no permission to delete in checkpoint-1/inner"]


def test_what_a_killed_prune_left_is_cleaned(tmp_path: Path, capfd: Any) -> None:
    steps = laid(tmp_path, (1, 2))
    hidden = removal.retire(steps[1], removal.measure(steps[1]))
    assert hidden is not None and hidden.name.startswith(".checkpoint-1.") and names(tmp_path)[1:] == ["checkpoint-2"]
    assert ckpt.latest(tmp_path)["passed_over"] == [] and ckpt.verify(tmp_path)["ok"]
    assert run(["clean", str(tmp_path), "--json"]) == 0
    (left,) = json.loads(capfd.readouterr().out)["leavings"]
    assert left["path"] == str(hidden) and left["bytes"] and not left["locked"] and not left["removed"]
    assert run(["clean", str(tmp_path), "--remove"]) == 0
    assert names(tmp_path) == ["checkpoint-2"]


# What says how the parts of a save fit, and what another version or system never wrote: (fixture, file, code).
UNEXPLAINED = [
    ("orbax/plain_ocdbt", "_METADATA", "E3031"),
    ("paddle/llama_bf16_io_ema_sd2v1", "model_meta.json", "E1313"),
    ("paddle-flex/ema", "ema_state/0.metadata", "E1338"),
    ("paddle-unified/llama_tied_hf", "config.json", "E1353"),
    ("verl/moe_ep2", "transformer_config.json", "E3030"),
]


@pytest.mark.parametrize(("fixture", "lost", "code"), UNEXPLAINED, ids=[code for _, _, code in UNEXPLAINED])
def test_steps_that_another_version_may_have_completed_stay(
    fixture: str, lost: str, code: str, tmp_path: Path, capfd: Any
) -> None:
    """Three older steps lack the file: they are neither counted nor removed, whatever number is to be kept."""
    steps = laid(tmp_path, (100, 200, 300, 400, 500), source=FIXTURES / fixture)
    for step in (100, 200, 300):
        next(steps[step].rglob(lost)).unlink()
        age(steps[step], 10**8 - 3600 * step)
    before = names(tmp_path)
    assert run(["prune", str(tmp_path), "--keep-last", "3", "--dry-run"]) == 0
    assert capfd.readouterr().out.count("can't be judged") == 3 and names(tmp_path) == before
    document = ckpt.prune(tmp_path, keep_last=3, dry_run=True)
    assert document["remove"] == [] and document["last_sound"] == str(steps[500])
    assert [row["sound"] for row in document["keep"]] == [None, None, None, True, True]
    newer = ckpt.prune(tmp_path, keep_last=1, dry_run=True)
    assert [Path(row["path"]).name for row in newer["remove"]] == ["checkpoint-400"]
    shutil.rmtree(steps[500])
    shutil.rmtree(steps[400])
    assert [row["codes"] for row in ckpt.latest(tmp_path)["passed_over"]] == [[code]] * 3


def test_a_dcp_step_without_its_metadata_is_not_complete(tmp_path: Path) -> None:
    """Every version of DCP writes `.metadata`, last of all: such a save was killed."""
    steps = laid(tmp_path, (100, 200, 300), source=FIXTURES / "dcp/fsdp1_dp2")
    (steps[100] / ".metadata").unlink()
    age(steps[100], 10**8)
    document = ckpt.prune(tmp_path, keep_last=3, dry_run=True)
    assert [Path(row["path"]).name for row in document["remove"]] == ["checkpoint-100"]


def test_a_step_of_a_newer_version_stays(tmp_path: Path) -> None:
    """What this build can't read says nothing of what it is worth."""
    steps = laid(tmp_path, (100, 200), source=FIXTURES / "orbax/files_zarr2")
    header = next(steps[100].rglob(".zarray"))
    header.write_text(json.dumps({**json.loads(header.read_text()), "filters": [{"id": "delta"}]}))
    age(steps[100], 10**8)
    assert kept(ckpt.prune(tmp_path, keep_last=2, dry_run=True))["checkpoint-100"] == ["it can't be judged"]
