"""`ckpt prune` and the deltas of a run: whatever an archive is made on stays, wherever the archive is kept."""

from __future__ import annotations

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
from ckpt_tool.deltas import dependents
from ckpt_tool.errors import StorageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
ONE = FIXTURES / "safetensors/llama_one_file"
INDEX = "model.safetensors.index.json"
STEPS = (100, 200, 300, 400)
# Where an archive of step 200 on step 100 is kept, by the path from the run's folder.
PLACES = {
    "in a folder below": "archive/200",
    "next to the steps": "step-200-archive",
    "hidden": ".archive/200",
    "deep below": "logs/a/b/c/d/e/f/200",
    "beside the run": "../run-archive",
    "beside the run, deeper": "../archives/200",
    "in a step": "checkpoint-400/archive",
}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A run of four steps, written long ago."""
    folder = tmp_path / "runs/run"
    for number in STEPS:
        shutil.copytree(ONE, folder / f"checkpoint-{number}")
        (folder / f"checkpoint-{number}/vocab.txt").write_text(str(number))
        for file in (folder / f"checkpoint-{number}").rglob("*"):
            os.utime(file, (time.time() - 10**6 + number,) * 2)
    return folder


def archive(folder: Path, place: str, base: int = 100, new: int = 200, **options: Any) -> Path:
    out = folder / place
    out.parent.mkdir(parents=True, exist_ok=True)
    options = {"dedup": True, **options}
    ckpt.delta(folder / f"checkpoint-{base}", folder / f"checkpoint-{new}", out, fsync=False, **options)
    return out


@pytest.mark.parametrize("place", ["../../other/9/archive/200", "../../../exp/other/9/archive/200", "../../a/200"])
def test_the_base_of_another_groups_archive_stays(place: str, tmp_path: Path, steps: Path) -> None:
    """It names its base by a path that leads to this run. What can't be read up there is somebody else's."""
    delta = archive(steps, place)
    damaged = steps.parents[1] / "damaged" / INDEX
    damaged.parent.mkdir()
    damaged.write_text('{"metadata": {"delta_encoding"')
    found = kept(ckpt.prune(steps, keep_last=1))
    assert set(found) == {"checkpoint-100", "checkpoint-400"}
    assert "is made on it" in found["checkpoint-100"]
    rebuilds(steps, delta, tmp_path)


def test_an_archive_of_another_groups_steps_keeps_none(tmp_path: Path, steps: Path) -> None:
    shutil.copytree(steps, tmp_path / "other/run")
    archive(tmp_path / "other/run", "../../third/archive/200")
    assert set(kept(ckpt.prune(steps, keep_last=1))) == {"checkpoint-400"}


def test_where_there_are_too_many_folders_to_look_into_it_is_said(
    tmp_path: Path, steps: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependents, "MOST", 0)
    assert run(["prune", str(steps), "--keep-last", "1", "--dry-run"]) == 0
    assert "too many folders" in "".join(capfd.readouterr())


def forget_base(delta: Path) -> None:
    """As versions before wrote it, and slime does."""
    index = json.loads((delta / INDEX).read_text())
    del index["base"]
    (delta / INDEX).write_text(json.dumps(index))


def kept(document: dict[str, Any]) -> dict[str, str]:
    return {Path(row["path"]).name: " ".join(row["reasons"]) for row in document["keep"]}


def rebuilds(folder: Path, delta: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    ckpt.patch(folder / "checkpoint-100", [delta], again, fsync=False)
    assert (again / "vocab.txt").read_text() == "200"


@pytest.mark.parametrize("named", [True, False], ids=["names its base", "names a number alone"])
@pytest.mark.parametrize("place", PLACES)
def test_the_base_of_an_archive_stays(place: str, named: bool, steps: Path, tmp_path: Path) -> None:
    delta = archive(steps, PLACES[place])
    if not named:
        forget_base(delta)
    found = kept(ckpt.prune(steps, keep_last=1))
    assert set(found) == {"checkpoint-100", "checkpoint-400"}
    assert "is made on it" in found["checkpoint-100"]
    rebuilds(steps, delta, tmp_path)


@pytest.mark.parametrize("relative", [True, False])
def test_however_the_base_was_written_on_the_command_line(
    relative: bool, steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(steps.parent)
    base = "run/checkpoint-100" if relative else str(steps / "checkpoint-100")
    (steps / "link").symlink_to("checkpoint-100")
    for number, given in enumerate((base, "run/link")):
        delta = Path("archives") / str(number)
        delta.parent.mkdir(exist_ok=True)
        assert run(["delta", given, "run/checkpoint-200", str(delta), "--dedup", "--no-fsync", "-q"]) == 0
        assert json.loads((delta / INDEX).read_text())["base"] == "../../run/checkpoint-100"
    (steps / "link").unlink()
    assert set(kept(ckpt.prune("run", keep_last=1))) == {"checkpoint-100", "checkpoint-400"}


def test_a_run_that_was_moved_or_linked_is_known(steps: Path, tmp_path: Path) -> None:
    archive(steps, "archive/200")
    other = tmp_path / "elsewhere"
    steps.rename(other)
    (other / "far").symlink_to("archive", target_is_directory=True)
    (tmp_path / "to_run").symlink_to(other)
    assert set(kept(ckpt.prune(tmp_path / "to_run", keep_last=1))) == {"checkpoint-100", "checkpoint-400"}


@pytest.mark.parametrize("dedup", [True, False], ids=["archive", "model alone"])
@pytest.mark.parametrize("place", ["checkpoint-200", "deep/er/archive", "../beside"])
def test_a_delta_that_was_moved_keeps_the_step_that_it_names(
    place: str, dedup: bool, steps: Path, tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    delta = archive(steps, "../../made/here", dedup=dedup)
    shutil.rmtree(steps / "checkpoint-200")
    (steps / place).parent.mkdir(parents=True, exist_ok=True)
    delta.rename(steps / place)

    found = kept(ckpt.prune(steps, keep_last=1))
    assert "checkpoint-100" in found and "checkpoint-300" not in found


@pytest.mark.parametrize("dedup", [True, False], ids=["archive", "model alone"])
def test_a_delta_whose_step_has_another_name_keeps_all(dedup: bool, steps: Path) -> None:
    archive(steps, "archive/200", dedup=dedup)
    (steps / "checkpoint-100").rename(steps / "checkpoint-111")

    found = kept(ckpt.prune(steps, keep_last=1))
    assert set(found) == {"checkpoint-111", "checkpoint-200", "checkpoint-300", "checkpoint-400"}
    assert (
        "archive/200 may be made on it: the base that it names is not there: checkpoint-100" in found["checkpoint-111"]
    )


def test_a_delta_whose_base_never_was_a_step_keeps_no_step(steps: Path) -> None:
    shutil.copytree(ONE, steps.parent / "released")
    ckpt.delta(steps.parent / "released", steps / "checkpoint-200", steps / "published", fsync=False)
    shutil.rmtree(steps.parent / "released")
    assert set(kept(ckpt.prune(steps, keep_last=1))) == {"checkpoint-400"}


def test_archives_behind_a_link_to_another_disk_are_found(steps: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (steps / "archive").symlink_to(tmp_path / "disk")
    delta = archive(steps, "archive/200")
    assert "checkpoint-100" in kept(ckpt.prune(steps, keep_last=1))
    rebuilds(steps, delta, tmp_path)


def test_a_chain_keeps_each_step_that_a_link_of_it_is_made_on(steps: Path) -> None:
    archive(steps, "archive/200")
    archive(steps, "archive/300", 200, 300)
    found = kept(ckpt.prune(steps, keep_last=1))
    assert set(found) == {"checkpoint-100", "checkpoint-200", "checkpoint-400"}
    assert "archive/300" in found["checkpoint-200"]


def test_an_archive_in_a_step_s_place_stays_and_so_does_its_base(steps: Path, tmp_path: Path) -> None:
    delta = archive(steps, "archive")
    shutil.rmtree(steps / "checkpoint-200")
    delta.rename(steps / "checkpoint-200")
    found = kept(ckpt.prune(steps, keep_last=1))
    assert set(found) == {"checkpoint-100", "checkpoint-200", "checkpoint-400"}
    assert "it is a delta" in found["checkpoint-200"]
    assert ckpt.latest(steps)["step"] == 400
    rebuilds(steps, steps / "checkpoint-200", tmp_path)


def test_a_step_that_holds_an_archive_stays(steps: Path) -> None:
    archive(steps, "checkpoint-300/inner/archive")
    found = kept(ckpt.prune(steps, keep_last=1))
    assert found["checkpoint-300"] == "a delta is in it: inner/archive" and "checkpoint-100" in found


def test_a_delta_of_the_model_alone_keeps_its_base_too(steps: Path) -> None:
    archive(steps, "published/weight_v000001", dedup=False)
    assert "checkpoint-100" in kept(ckpt.prune(steps, keep_last=1))


def test_steps_one_folder_down_and_archives_above_them(steps: Path) -> None:
    top = steps.parent / "top"
    top.mkdir()
    steps.rename(top / "checkpoints")
    archive(top / "checkpoints", "../archive")
    archive(top / "checkpoints", "../../far-archive", 300, 400)
    assert set(kept(ckpt.prune(top, keep_last=1))) == {"checkpoint-100", "checkpoint-300", "checkpoint-400"}


def test_archives_of_other_runs_keep_nothing_here(steps: Path) -> None:
    other = steps.parent / "other"
    shutil.copytree(steps, other)
    archive(other, "archive/200")
    forget_base(archive(other, "archive/deep/300", 200, 300))
    assert set(kept(ckpt.prune(steps, keep_last=1))) == {"checkpoint-400"}


def test_a_damaged_archive_is_unknown(steps: Path) -> None:
    delta = archive(steps, "archive/200")
    text = (delta / INDEX).read_text()
    (delta / INDEX).write_text(text[:-20])
    with pytest.raises(StorageError) as caught:
        ckpt.prune(steps, keep_last=1)
    assert caught.value.code == "E2851" and str(delta) in caught.value.message
    assert len(list(steps.glob("checkpoint-*"))) == 4
    assert set(kept(ckpt.prune(steps, keep_last=1, skip_unreadable=True))) == {"checkpoint-400"}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "the last bytes": lambda text: text[:-20],
    "all but the first": lambda text: text[:9],
    "all": lambda text: b"",
    "zeros": lambda text: bytes(len(text)),
    "the encoding's key": lambda text: text.replace(b"delta_encoding", b"delta_encodinf"),
    "the metadata": lambda text: text.replace(b'"metadata"', b'"metadatb"', 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", ["archive/200", "../run-archive", "../archives/200"])
def test_a_damaged_delta_is_unknown_wherever_it_is(place: str, damage: str, steps: Path) -> None:
    """Next to a run, where it could be another run's, too."""
    index = archive(steps, place) / INDEX
    index.write_bytes(DAMAGES[damage](index.read_bytes()))
    with pytest.raises(StorageError) as caught:
        ckpt.prune(steps, keep_last=1)
    assert caught.value.code == "E2851" and index.resolve().name in caught.value.message
    assert len(list(steps.glob("checkpoint-*"))) == 4
    assert set(kept(ckpt.prune(steps, keep_last=1, skip_unreadable=True))) == {"checkpoint-400"}


def test_a_damaged_index_of_a_model_is_no_delta(steps: Path) -> None:
    """A broken download next to the run, and a step that was not written to its end."""
    for folder in (steps.parent / "model", steps / "checkpoint-200"):
        folder.mkdir(exist_ok=True)
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
        (folder / INDEX).write_text('{"metadata": {"total_si')
    assert "checkpoint-400" in kept(ckpt.prune(steps, keep_last=1, dry_run=True))


def test_a_delta_far_from_the_run_is_found_where_it_is_named(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = tmp_path / "archives/of/many/runs/run"
    far.mkdir(parents=True)
    base, new = (str(steps / f"checkpoint-{number}") for number in (100, 200))
    assert run(["delta", base, new, str(far / "200"), "--dedup", "--no-fsync"]) == 0
    assert f"--deltas {far}" in " ".join(capsys.readouterr().out.split())
    assert run(["delta", base, new, str(steps.parent / "near"), "--dedup", "--no-fsync"]) == 0
    assert "--deltas" not in capsys.readouterr().out
    shutil.rmtree(steps.parent / "near")

    assert set(kept(ckpt.prune(steps, keep_last=1, dry_run=True))) == {"checkpoint-400"}
    for named in ([far], [tmp_path / "archives"], [str(far / "200"), tmp_path]):
        reasons = kept(ckpt.prune(steps, keep_last=1, deltas=list(map(str, named))))
        assert set(reasons) == {"checkpoint-100", "checkpoint-400"}
    with pytest.raises(StorageError) as caught:
        ckpt.prune(steps, keep_last=1, deltas=str(tmp_path / "gone"))
    assert caught.value.code == "E2851"


def test_an_index_that_names_a_hostile_base_is_no_danger(steps: Path) -> None:
    delta = archive(steps, "archive/200")
    index = json.loads((delta / INDEX).read_text())
    for base in (7, "\0", "../" * 50 + "etc", "", ["x"], "/dev/null/x"):
        (delta / INDEX).write_text(json.dumps({**index, "base": base}))
        document = ckpt.prune(steps, keep_last=1, dry_run=True)
        assert "checkpoint-400" in kept(document)


@pytest.mark.parametrize("place", ["runs/run", "runs", "runs/other", "logs"])
def test_a_circle_of_links_is_no_folder_in_which_deltas_could_be(place: str, steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    (folder / "x").symlink_to("y")
    (folder / "y").symlink_to("x")
    document = ckpt.prune(steps, keep_last=3)
    assert [Path(row["path"]).name for row in document["remove"]] == ["checkpoint-100"]
