"""Checkpoints whose files and folders are links, in every format: followed inside what the user gave and in a Hugging
Face cache, and named as links that leave the folder everywhere else. The trees are made of the fixtures, a folder of
each format."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.core.progress import SILENT
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.scan import digests_of
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLLOW = Reading(follow_symlinks=True)
# the folder of each format that has the most ranks and folders, else the first; GGUF's fixtures are files
FIRST = {
    p.parent.name: p.name for name in registry.NAMES for p in sorted((FIXTURES / name).iterdir())[::-1] if p.is_dir()
}
FOLDERS = FIRST | {
    "safetensors": "hf_llama_sharded",
    "torch": "ranks_tp2_dp2",
    "dcp": "titan",
    "sharded": "llama_tp4_pp2",
    "megatron": "moe_tp2ep2etp1",
    "megatron-dist": "llama_tp2",
    "deepspeed": "z1_bf16_dp4",
    "deepspeed-universal": "z1_bf16_dp2",
    "paddle": "llama_bf16_legacy_tp2",
    "paddle-unified": "ernie_nm_tp2",
    "paddle-flex": "llama_tied_pp2",
    "meta": "llama2_tp2",
    "peft": "given",
}
each_format = pytest.mark.parametrize("name", FOLDERS)


def original(name: str) -> Path:
    return FIXTURES / name / FOLDERS[name]


def seen(path: Path, reading: Reading | None = None) -> dict[str, str]:
    """Every tensor's digest."""
    opened = open_source(str(path), reading or Reading())
    opened.catalog.check()
    return {str(key): digest for key, digest in digests_of(opened.catalog, opened.tree).items()}


@pytest.mark.share(3)
@each_format
def test_a_cache_of_links_reads_as_the_folder_does(name: str, tmp_path: Path) -> None:
    """Every file a link into `blobs/`, as huggingface_hub lays a repository out."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0a1b"
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in original(name).rglob("*") if path.is_file())):
        shutil.copyfile(file, blobs / f"{number:040x}")
        link = snapshot / file.relative_to(original(name))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../" * (len(link.relative_to(snapshot).parts) + 1) + f"blobs/{number:040x}")
    assert seen(snapshot) == seen(original(name))
    written = reshard(str(snapshot), str(tmp_path / "out"), Reading(), Writing(fsync=False), SILENT)
    assert written["digest_checked"] and seen(tmp_path / "out") == seen(original(name))


def linked(name: str, tmp_path: Path, *, folders: bool) -> tuple[Path, Path]:
    """(the folder with a pointer file, where the links lead): the checkpoint is `c`, its folders or files links to
    `parts` beside it."""
    run = tmp_path / "run"
    shutil.copytree(original(name), run / "c")
    (run / "parts").mkdir()
    (run / "latest").write_text("c")
    for path in sorted((run / "c").iterdir()):
        if path.is_dir() == folders:
            path.rename(run / "parts" / path.name)
            path.symlink_to(f"../parts/{path.name}")
    return run, run / "parts"


@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
@each_format
def test_links_inside_what_was_given_are_followed(name: str, folders: bool, tmp_path: Path) -> None:
    run, _ = linked(name, tmp_path, folders=folders)
    assert seen(run, Reading(from_format=name)) == seen(original(name))


@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
@each_format
def test_links_that_leave_it_are_named_and_followed_when_asked_for(name: str, folders: bool, tmp_path: Path) -> None:
    run, parts = linked(name, tmp_path, folders=folders)
    checkpoint = run / "c"
    some = sorted(path.name for path in parts.iterdir())
    if not some:
        pytest.skip("the format has no folders")
    reading = Reading(from_format=name)
    with pytest.raises(CkptError) as caught:  # `c` alone was given: `parts` lies beside it
        open_source(str(checkpoint), reading).catalog.check()
    error = caught.value
    said = "\n".join((error.message, *error.faults))
    assert (
        error.exit_code in (3, 4) and "a link that leaves the folder" in said and "--follow-symlinks" in str(error.hint)
    )
    assert any(path in said for path in some)
    assert seen(checkpoint, Reading(from_format=name, follow_symlinks=True)) == seen(original(name))


@each_format
def test_one_rank_or_shard_that_is_such_a_link_is_no_missing_one(name: str, tmp_path: Path) -> None:
    """Each file of the checkpoint in turn."""
    shutil.copytree(original(name), tmp_path / "c")
    whole = open_source(str(tmp_path / "c"), Reading())
    for path in whole.catalog.files:
        file = whole.tree.root / path
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        opened = None
        try:
            opened = open_source(str(tmp_path / "c"), Reading())
            opened.catalog.check()
        except CkptError as error:
            said = "\n".join((error.message, *error.faults, error.hint or ""))
            assert "link that leaves the folder" in said and path.rpartition("/")[2] in said, (path, said)
        else:
            assert any("link that leaves the folder" in note.message for note in opened.catalog.notes), path
        file.unlink()
        (tmp_path / "elsewhere").rename(file)


# -- side files --------------------------------------------------------------------------------------------------------

SIDES = {"tokenizer.json": "{}", "config.json": '{"model_type": "llama"}', "README.md": "# a model"}


@pytest.mark.share(3)
@each_format
def test_side_files_that_are_links(name: str, tmp_path: Path) -> None:
    """Those inside travel with the model; those that leave it are named, never called "not part of the model"."""
    folder = tmp_path / "c"
    shutil.copytree(original(name), folder)
    for side, text in SIDES.items():
        (folder / side).unlink(missing_ok=True)
        (folder / f"real-{side}").write_text(text)
        (folder / side).symlink_to(f"real-{side}")
    inside = convert(str(folder), str(tmp_path / "a"), Reading(), Writing(to=name, dialect="keep", fsync=False), SILENT)
    for side in ("tokenizer.json", "README.md"):
        copied = [file["path"] for file in inside["target"]["files"] if file["path"].endswith(side)]
        assert copied and (tmp_path / "a" / copied[0]).read_text() == SIDES[side], side
    (folder / "config.json").unlink()  # it says what the tensors mean: the next test
    for side in ("tokenizer.json", "README.md"):
        (folder / f"real-{side}").rename(tmp_path / side)
        (folder / side).unlink()
        (folder / side).symlink_to(f"../{side}")
    outside = convert(
        str(folder), str(tmp_path / "b"), Reading(), Writing(to=name, dialect="keep", fsync=False), SILENT
    )
    notes = "\n".join(str(note) for note in outside["notes"])
    for side in ("tokenizer.json", "README.md"):
        assert f"{side} is a link that leaves the folder" in notes, notes
        assert not (tmp_path / "b" / side).exists()
    assert not any("not part of" in line and "tokenizer.json" in line for line in notes.splitlines())
    convert(str(folder), str(tmp_path / "d"), FOLLOW, Writing(to=name, dialect="keep", fsync=False), SILENT)
    assert any(path.name == "tokenizer.json" for path in (tmp_path / "d").rglob("*"))


@each_format
def test_a_config_that_is_such_a_link_is_refused_or_named(name: str, tmp_path: Path) -> None:
    """Where names and shapes depend on it there is no going on without."""
    shutil.copytree(original(name), tmp_path / "c")
    (tmp_path / "c" / "config.json").unlink(missing_ok=True)
    (tmp_path / "config.json").write_text(SIDES["config.json"])
    (tmp_path / "c" / "config.json").symlink_to("../config.json")
    try:
        notes = open_source(str(tmp_path / "c"), Reading()).catalog.notes
        said = "\n".join(note.message for note in notes)
        hint = "--follow-symlinks"
    except CkptError as error:
        said = error.message
        hint = str(error.hint)
    assert "config.json is" in said and "link that leaves the folder" in said and "--follow-symlinks" in hint
