"""Whatever a person keeps beside or in a checkpoint is there after any verb that writes, with any of its options.

A folder is made of a checkpoint of each format and of one thing that a person keeps there. Every writing verb is given
it as its output, or what is around it; afterwards each file that no reader of the checkpoint accounts for must be there
with the bytes that it had. What is an output's own may be gone only where the new output is whole in its place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from odd_folders import add_files

from ckpt_tool.cli import run
from ckpt_tool.formats import registry
from ckpt_tool.storage import mounts
from ckpt_tool.storage.output import removal

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCE = FIXTURES / "safetensors" / "llama_one_file"
JOB = FIXTURES / "dcp" / "tp2_dp2"
MODEL = FIXTURES / "convert" / "llama" / "hf"


def _write(path: Path, data: bytes = b"mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def keep_git(folder: Path) -> None:
    _write(folder / ".git" / "config")
    _write(folder / ".git" / "objects" / "0a" / "1f", b"\x00\x01")


def keep_sources(folder: Path) -> None:
    _write(folder / "src" / "main.py")
    _write(folder / "train.py")
    _write(folder / "modeling_mine.py")


def keep_notes(folder: Path) -> None:
    _write(folder / "notes.txt")


def keep_data(folder: Path) -> None:
    _write(folder / "data" / "train.jsonl", b"{}\n")
    _write(folder / "results.csv", b"1,2\n")


def keep_a_checkpoint(folder: Path) -> None:
    shutil.copytree(SOURCE, folder / "another")


def keep_weights_beside(folder: Path) -> None:
    shutil.copy(SOURCE / "model.safetensors", folder / "best-so-far.safetensors")


def keep_a_link(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "elsewhere")


def keep_a_link_to_a_folder(folder: Path) -> None:
    (folder / "linked").symlink_to(folder.parent / "beside", target_is_directory=True)


def keep_an_empty_folder(folder: Path) -> None:
    (folder / "empty").mkdir()


def keep_hidden(folder: Path) -> None:
    _write(folder / ".env", b"KEY=1")


def keep_names_like_ours(folder: Path) -> None:
    _write(folder / ".notes.ckpt-partial" / "chapter.tex")
    _write(folder / ".ckpt-journal-mine")
    _write(folder / ".out.0123abcd.ckpt-removed" / "photo.jpg")


def keep_deep(folder: Path) -> None:
    _write(folder.joinpath(*"abcdefghij") / "deep.txt")


def keep_odd_folders(folder: Path) -> None:
    add_files(folder, 7)


def keep_an_odd_name(folder: Path) -> None:
    _write(folder / os.fsdecode(b"caf\xe9 \n.txt"))


KEPT: list[Callable[[Path], None]] = [
    keep_git,
    keep_sources,
    keep_notes,
    keep_data,
    keep_a_checkpoint,
    keep_weights_beside,
    keep_a_link,
    keep_a_link_to_a_folder,
    keep_an_empty_folder,
    keep_hidden,
    keep_names_like_ours,
    keep_deep,
    keep_odd_folders,
    keep_an_odd_name,
]


def contents(folder: Path) -> dict[str, Any]:
    """Every path with its bytes, or where it links to; folders too."""
    found: dict[str, Any] = {}
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(above, name)
            key = os.path.relpath(path, folder)
            if path.is_symlink():
                found[key] = ("link", os.readlink(path))
            else:
                found[key] = ("folder",) if path.is_dir() else ("file", path.read_bytes())
    return found


def checkpoints(name: str) -> list[Path]:
    """The folders of a format's fixtures, the smallest first; the files of a format that has no others."""
    all_of = [path for path in (FIXTURES / name).iterdir() if ".truth." not in path.name and path.suffix != ".md"]
    found = [path for path in all_of if path.is_dir()] or all_of
    return sorted(found, key=lambda path: (sum(each.stat().st_size for each in (path, *path.rglob("*"))), path.name))


def lay(checkpoint: Path, folder: Path) -> None:
    """Put the checkpoint into a folder of its own."""
    if checkpoint.is_dir():
        shutil.copytree(checkpoint, folder)
    else:
        folder.mkdir(parents=True)
        shutil.copy(checkpoint, folder)


def surround(place: Path) -> None:
    """What is beside the output: staging-like names of others, another checkpoint, notes."""
    _write(place / "beside" / "thesis.tex")
    _write(place / "notes.txt")
    _write(place / ".thesis.ckpt-partial" / "chapter.tex")
    _write(place / ".photos.ckpt-removed" / "photo.jpg")
    _write(place / ".photos.0123abcd.ckpt-removed" / "photo.jpg")
    _write(place / "out-old" / "thesis.tex")
    _write(place / "out.partial")


def verbs(place: Path) -> list[list[str]]:
    """The lines of every writing verb, with `out` as what they write or work in."""
    out, source, job, plan = (str(path) for path in (place / "out", SOURCE, JOB, place.parent / "plan.json"))
    delta = str(place.parent / "delta")
    archive = str(place.parent / "archive")
    other = str(MODEL)
    adapter = str(FIXTURES / "peft" / "on_llama")
    lines = [
        ["convert", source, out, "--to", "sharded"],
        ["convert", source, out, "--to", "torch", "--resume"],
        ["convert", source, out, "--to", "dcp", "--no-resume", "--attest", str(place.parent / "attest.json")],
        ["reshard", job, out, "--tp", "1"],
        ["merge", other, str(place.parent / "second"), out, "--method", "linear"],
        ["merge", other, adapter, out, "--method", "lora"],
        ["merge", other, out, "--remove-keys", "lm_head.weight"],
        ["delta", source, source, out],
        ["delta", source, source, out, "--dedup"],
        ["patch", source, delta, out],
        ["patch", source, archive, out],
        ["apply", plan],
        ["apply", plan, "--part", "1/2"],
    ]
    forced = [[*line, "--force"] for line in lines]
    dry = [[*line, "--force", "--dry-run"] for line in lines]
    inside = [["prune", str(place), "--keep-last", "1"], ["prune", out, "--keep-last", "1"]]
    cleaned = [["clean", str(place), "--remove"], ["clean", out, "--remove"]]
    return [*lines, *forced, *dry, *inside, *cleaned]


def run_all(place: Path, before: dict[str, Any], capfd: Any) -> None:
    for line in verbs(place):
        run([*line, "-q"])
        capfd.readouterr()
        after = contents(place)
        assert after == before, (line, sorted(before.keys() ^ after.keys()))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    at = tmp_path / "place"
    at.mkdir()
    return at


def plan_and_deltas(place: Path) -> None:
    """A plan that writes to the output, deltas that are applied into it, and a second model to merge."""
    shutil.copytree(MODEL, place.parent / "second", dirs_exist_ok=True)
    plan = str(place.parent / "plan.json")
    assert run(["convert", str(SOURCE), str(place / "out"), "--to", "sharded", "--plan", plan, "-q"]) == 0
    assert run(["delta", str(SOURCE), str(SOURCE), str(place.parent / "delta"), "-q"]) == 0
    assert run(["delta", str(SOURCE), str(SOURCE), str(place.parent / "archive"), "--dedup", "-q"]) == 0


def prepare(place: Path, checkpoint: Path, keep: Callable[[Path], None]) -> dict[str, Any]:
    """The folder and what is around it."""
    plan_and_deltas(place)
    surround(place)
    lay(checkpoint, place / "out")
    keep(place / "out")
    return contents(place)


@pytest.mark.parametrize("keep", KEPT, ids=[keep.__name__ for keep in KEPT])
def test_what_a_person_keeps_in_a_checkpoint_stays(place: Path, capfd: Any, keep: Callable[[Path], None]) -> None:
    run_all(place, prepare(place, SOURCE, keep), capfd)


def test_each_line_does_its_work_where_nothing_is_kept(place: Path, capfd: Any) -> None:
    """Else the others would prove nothing: a line that ends before it writes leaves everything alone."""
    plan_and_deltas(place)
    surround(place)
    around = contents(place)
    for line in verbs(place):
        if line[0] in ("clean", "prune"):
            continue
        assert run([*line, "-q"]) == 0, line
        capfd.readouterr()
        is_part = "--part" in line
        written = (place / "out").exists()
        assert written or is_part or "--dry-run" in line, line
        if "--dry-run" in line:
            assert contents(place) == around, line
        shutil.rmtree(place / (".out.ckpt-partial" if is_part else "out"), ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("keep", KEPT, ids=[keep.__name__ for keep in KEPT])
@pytest.mark.parametrize("name", registry.NAMES)
def test_the_same_in_every_format(place: Path, capfd: Any, name: str, keep: Callable[[Path], None]) -> None:
    run_all(place, prepare(place, checkpoints(name)[0], keep), capfd)


@pytest.mark.parametrize("name", registry.NAMES)
def test_one_line_in_every_format(place: Path, capfd: Any, name: str) -> None:
    """The default tier's share: all that a person keeps, one by one, and the verb with the largest reach."""
    for keep in KEPT:
        shutil.rmtree(place)
        place.mkdir()
        lay(checkpoints(name)[0], place / "out")
        keep(place / "out")
        before = contents(place)
        assert run(["convert", str(SOURCE), str(place / "out"), "--to", "sharded", "--force", "-q"]) == 5, keep
        assert contents(place) == before and "E1604" in capfd.readouterr().err


@pytest.mark.parametrize("level", ["in a sub-folder of the checkpoint", "at its top"])
@pytest.mark.parametrize("name", registry.NAMES)
def test_names_that_a_format_might_take_for_its_own(place: Path, capfd: Any, name: str, level: str) -> None:
    """A file is not accounted for because it is in a folder of the checkpoint's, or has a suffix of the format's."""
    for checkpoint in checkpoints(name)[:2]:
        shutil.rmtree(place)
        lay(checkpoint, place / "out")
        inner = sorted(path for path in (place / "out").rglob("*") if path.is_dir())
        folder = inner[-1] if inner and level != "at its top" else place / "out"
        for kept in ("notes.txt", "0_9.csv", "9_extra.json", "my_model.bak", ".hidden", "mp_rank_99.log"):
            _write(folder / kept)
            before = contents(place)
            assert run(["convert", str(SOURCE), str(place / "out"), "--to", "sharded", "--force", "-q"]) == 5, kept
            assert contents(place) == before and "E1604" in capfd.readouterr().err
            (folder / kept).unlink()


def test_clean_removes_what_a_run_listed_and_nothing_else(place: Path, capfd: Any) -> None:
    """A staging folder of ours into which somebody has put a file: what the run staged goes, the file stays."""
    from ckpt_tool.storage.output.staging import Staging

    with Staging(place / "out", "plan", ["f", "sub/g"]) as staging:
        os.close(staging.create("f", 3))
        os.close(staging.create("sub/g", 3))
    staged = place / ".out.ckpt-partial"
    _write(staged / "sub" / "chapter.tex")
    assert run(["clean", str(place), "--remove", "-q"]) == 0
    assert contents(staged) == {"sub": ("folder",), "sub/chapter.tex": ("file", b"mine")}
    assert run(["convert", str(SOURCE), str(place / "out"), "--to", "sharded", "-q"]) == 5
    assert "E0504" in capfd.readouterr().err
    assert contents(staged) == {"sub": ("folder",), "sub/chapter.tex": ("file", b"mine")}
    (staged / "sub" / "chapter.tex").unlink()
    (staged / "sub").rmdir()
    assert run(["clean", str(place), "--remove", "-q"]) == 0 and os.listdir(place) == []


@pytest.mark.parametrize("again", [["clean"], ["convert"], ["clean", "clean"], ["clean", "convert"]])
def test_a_file_in_a_replaced_output_stays_however_often_one_cleans(
    place: Path, monkeypatch: pytest.MonkeyPatch, again: list[str]
) -> None:
    """Somebody puts a file into the old output at the moment in which `--force` exchanges it for the new one: it is
    found in our hidden folder, which nothing takes for ours alone, however often it is looked at."""
    from ckpt_tool.storage import platform_calls

    exchange = platform_calls.exchange

    def exchange_and_meddle(old: Path, new: Path, aside: Path) -> Path:
        replaced = exchange(old, new, aside)
        _write(replaced / "late" / "chapter.tex")
        return replaced

    shutil.copytree(SOURCE, place / "out")
    line = ["convert", str(JOB), str(place / "out"), "--to", "sharded", "--force", "-q"]
    monkeypatch.setattr(platform_calls, "exchange", exchange_and_meddle)
    assert run(line) == 0
    monkeypatch.setattr(platform_calls, "exchange", exchange)
    for verb in again:
        run(["clean", str(place), "--remove", "-q"] if verb == "clean" else line)
        assert (place / ".out.ckpt-partial" / "late" / "chapter.tex").read_bytes() == b"mine", verb


@pytest.mark.parametrize("again", ["clean", "convert"])
@pytest.mark.parametrize("kept", ["photo.jpg", "empty/", ""])
def test_a_file_that_comes_after_a_kill_at_the_exchange_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, again: str, kept: str
) -> None:
    """The old output is in our hidden folder then, marked and without a list: it goes if it is as the mark says."""
    from ckpt_tool.storage import platform_calls

    exchange = platform_calls.exchange

    def exchange_and_end(old: Path, new: Path, aside: Path) -> Path:
        exchange(old, new, aside)
        raise KeyboardInterrupt

    shutil.copytree(SOURCE, place / "out")
    line = ["convert", str(JOB), str(place / "out"), "--to", "sharded", "--force", "-q"]
    monkeypatch.setattr(platform_calls, "exchange", exchange_and_end)
    run(line)
    monkeypatch.setattr(platform_calls, "exchange", exchange)
    staged = place / ".out.ckpt-partial"
    if kept.endswith("/"):
        (staged / kept).mkdir()
    elif kept:
        _write(staged / kept)
    before = contents(staged)
    status = run(["clean", str(place), "--remove", "-q"] if again == "clean" else line)
    error = capfd.readouterr().err
    if kept:
        assert kept.strip("/") in contents(staged)
        assert contents(staged).items() >= {key: before[key] for key in contents(staged)}.items()
        assert again == "clean" or (status == 5 and "E0504" in error)
    else:
        assert status == 0 and not staged.exists(), error


def test_an_old_output_that_was_set_aside_and_put_to_use_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names can't be exchanged: `clean` takes a whole one if a checkpoint accounts for all that is in it."""
    from ckpt_tool.storage.output.set_aside import hidden_path

    for kept in ("photo.jpg", ""):
        shutil.copytree(SOURCE, place / "out")
        hidden = hidden_path(place / "out")
        os.rename(place / "out", hidden)
        shutil.copytree(SOURCE, place / "out")
        if kept:
            _write(hidden / kept)
        assert run(["clean", str(place), "--remove", "-q"]) == 0
        assert hidden.exists() == bool(kept)
        if kept:
            assert sorted(os.listdir(hidden)) == sorted([kept, *os.listdir(SOURCE)])
            shutil.rmtree(hidden)
            shutil.rmtree(place / "out")


@pytest.mark.parametrize("folder", ["itself", "inside"])
@pytest.mark.parametrize("verb", ["convert", "delta", "apply", "clean"])
def test_what_is_mounted_is_neither_replaced_nor_removed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, verb: str, folder: str
) -> None:
    """A disk, a container's volume, or a folder of the same file system that is bound there."""
    plan_and_deltas(place)
    shutil.copytree(SOURCE, place / "out")
    out = place / "out"
    lines = {
        "convert": ["convert", str(JOB), str(out), "--to", "sharded", "--force"],
        "delta": ["delta", str(SOURCE), str(SOURCE), str(out), "--force"],
        "apply": ["apply", str(place.parent / "plan.json"), "--force"],
        "clean": ["clean", str(place), "--remove"],
    }
    if verb == "clean":
        out = removal.retire(out, removal.measure(out)) or out
    point = out if folder == "itself" else out / "0_Pooling"
    point.mkdir(exist_ok=True)
    listed = place.parent / "mountinfo"
    listed.write_text(f"2 1 8:1 /data {point} rw - ext4 /dev/x rw\n")
    monkeypatch.setattr(mounts, "_LIST", str(listed))
    before = contents(place)
    assert run([*lines[verb], "-q"]) == (0 if verb == "clean" else 5)
    assert contents(place) == before
    assert verb == "clean" or "E3022" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["convert", "merge", "apply", "delta", "patch"])
def test_a_file_that_a_source_has_through_a_link_is_not_replaced(place: Path, capfd: Any, verb: str) -> None:
    """The source is a folder of links into the output: its files would be gone with the old output."""
    plan_and_deltas(place)
    shutil.copytree(SOURCE, place / "out")
    links = place / "links"
    links.mkdir()
    for file in (place / "out").iterdir():
        (links / file.name).symlink_to(file)
    source, out, plan = str(links), str(place / "out"), str(place / "own.json")
    more = ["--follow-symlinks"]
    assert run(["convert", source, out, "--to", "sharded", "--plan", plan, *more, "-q"]) == 0
    line = {
        "convert": ["convert", source, out, "--to", "sharded", *more],
        "merge": ["merge", source, out, "--remove-keys", "lm_head.weight", *more],
        "apply": ["apply", plan],
        "delta": ["delta", source, source, out, *more],
        "patch": ["patch", source, str(place.parent / "delta"), out, *more],
    }[verb]
    before = contents(place)
    assert run([*line, "--force", "-q"]) == 5
    assert "E0502" in capfd.readouterr().err and contents(place) == before
