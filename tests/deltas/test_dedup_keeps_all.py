"""`ckpt delta --dedup`: whatever a person keeps in a step comes back out of the archive, or the archive is not made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from odd_folders import OURS, add_files

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "safetensors/llama_one_file"
SEEDS = range(6)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, those behind links too."""
    found = {}
    for above, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = Path(above, name)
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


@pytest.fixture
def steps(tmp_path: Path) -> tuple[Path, Path]:
    """Two steps of a run."""
    one = tmp_path / "run/checkpoint-100"
    two = tmp_path / "run/checkpoint-200"
    shutil.copytree(LLAMA, one)
    shutil.copytree(LLAMA, two)
    return one, two


def archive(steps: tuple[Path, Path], **options: Any) -> dict[str, Any]:
    """Make an archive of the second step, and rebuild the step of it."""
    one, two = steps
    out = two.parents[1] / "archive"
    again = two.parents[1] / "again"
    document = ckpt.delta(one, two, out, dedup=True, fsync=False, **options)
    ckpt.patch(one, [out], again, fsync=False)
    assert contents(again) == contents(two)
    return document


@pytest.mark.parametrize("seed", SEEDS)
def test_deep_hidden_and_oddly_named_files_come_back(seed: int, steps: tuple[Path, Path]) -> None:
    made = add_files(steps[1], seed)
    archive(steps)
    assert set(made) <= contents(steps[1]).keys()


def test_links_come_back_as_what_they_lead_to_and_what_is_not_kept_is_named(steps: tuple[Path, Path]) -> None:
    deep = steps[1].joinpath(*"abcdefghij")
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"deep")
    (steps[1] / "to_file").symlink_to(deep / "file")
    (steps[1] / "to_folder").symlink_to("a/b", target_is_directory=True)
    (steps[1] / "empty/inner").mkdir(parents=True)
    (steps[1] / "run.sh").write_bytes(b"#!/bin/sh")
    (steps[1] / "run.sh").chmod(0o755)
    document = archive(steps)
    assert "empty folders are not kept: empty/inner" in document["notes"]
    assert "links are kept as the files that they lead to: to_file, to_folder" in document["notes"]
    assert "the right to be executed is not kept: run.sh" in document["notes"]


def refused(steps: tuple[Path, Path]) -> CkptError:
    out = steps[1].parents[1] / "archive"
    with pytest.raises(CkptError) as caught:
        ckpt.delta(*steps, out, dedup=True, fsync=False)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("name", [*OURS, "ends in a dot.", "back\\slash", "two\nlines"])
@pytest.mark.parametrize("above", ["", "logs/deep"])
def test_a_name_that_can_not_be_written_again_is_an_error(name: str, above: str, steps: tuple[Path, Path]) -> None:
    folder = steps[1] / above / name
    folder.mkdir(parents=True)
    (folder / "results.json").write_text("{}")
    fault = refused(steps)
    assert fault.code == "E2850" and name.split("\n")[0].split("\\")[0] in fault.message


def test_a_folder_that_is_too_deep_and_a_socket_are_errors(steps: tuple[Path, Path]) -> None:
    deep = steps[1].joinpath(*["d"] * 33)
    deep.mkdir(parents=True)
    (deep / "file").touch()
    assert refused(steps).code == "E2850"
    shutil.rmtree(steps[1] / "d")
    os.mkfifo(steps[1] / "pipe")
    fault = refused(steps)
    assert fault.code == "E2850" and "pipe: no regular file" in fault.message


def test_a_trainer_s_step_is_kept_with_what_lies_around_deepspeed_s_folder(tmp_path: Path) -> None:
    steps = tmp_path / "run/checkpoint-1", tmp_path / "run/checkpoint-2"
    for number, step in enumerate(steps):
        shutil.copytree(FIXTURES / "deepspeed/z1_fp16_dp2", step / "global_step2")
        (step / "latest").write_text("global_step2")
        (step / "trainer_state.json").write_text(f'{{"global_step": {number}}}')
        (step / "rng_state_0.pth").write_bytes(bytes(number + 1))
    archive(steps)


def test_force_replaces_the_output_of_patch_and_leaves_a_person_s_files(steps: tuple[Path, Path]) -> None:
    """A step that is rebuilt from its archive replaces what its reader accounts for, as a conversion does."""
    one, two = steps
    (two / "README.md").write_text("of the second step")
    out = two.parents[1] / "archive"
    again = two.parents[1] / "again"
    ckpt.delta(one, two, out, dedup=True, fsync=False)
    shutil.copytree(one, again)
    planned = ckpt.patch(one, [out], again, force=True, dry_run=True)
    assert planned["replaces"]["names"] == sorted(contents(one))
    assert contents(again) == contents(one)
    ckpt.patch(one, [out], again, force=True, fsync=False)
    assert contents(again) == contents(two)

    (again / "notes.txt").write_text("mine")
    with pytest.raises(CkptError) as caught:
        ckpt.patch(one, [out], again, force=True, fsync=False)
    assert caught.value.code == "E1604"
    assert contents(again) == contents(two) | {"notes.txt": b"mine"}
