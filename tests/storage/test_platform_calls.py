"""What only some systems offer, switched off: the same outputs, the same refusals, nothing lost.

    CKPT_TEST_WITHOUT=renameat2,xattr,fallocate,copy_file_range python -m pytest tests/faults

runs other tests so. What tests of marks expect of a file system without them is said where they are.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.commands.clean import clean
from ckpt_tool.storage import platform_calls
from ckpt_tool.storage.output import removal, staging
from ckpt_tool.storage.output.marks import mark_plan, was_committed
from ckpt_tool.storage.output.replaced import ReplacedOutput
from ckpt_tool.storage.platform_calls import VARIABLE

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ALL = "renameat2,xattr,fallocate,copy_file_range"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_calls, "_WITHOUT", frozenset(ALL.split(",")))


def ckpt(*words: object, without: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ckpt_tool", *map(str, words)]
    return subprocess.run(line, env={**os.environ, VARIABLE: without}, capture_output=True, text=True)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else [folder]
    return {path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("off", [*ALL.split(","), ALL])
@pytest.mark.parametrize(
    "words",
    [
        ("reshard", "dcp/fsdp2_dp4", "--dp", 2),
        ("convert", "convert/llama/hf", "--to", "torch", "--verify", "off"),
        ("convert", "convert/llama/hf", "--to", "megatron-dist", "--tp", 2),
    ],
)
def test_the_same_bytes(words: tuple[Any, ...], off: str, tmp_path: Path) -> None:
    verb, source, *options = words
    for name, without in (("with", ""), ("less", off)):
        (tmp_path / name).mkdir()
        done = ckpt(verb, FIXTURES / source, tmp_path / name / "out", *options, "-q", without=without)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in (tmp_path / name).iterdir()] == ["out"]
    assert files_of(tmp_path / "with" / "out") == files_of(tmp_path / "less" / "out")


def test_what_is_there_is_refused_and_replaced_with_force(tmp_path: Path) -> None:
    source = FIXTURES / "convert/llama/hf"
    out = tmp_path / "out"
    line = ("convert", source, out, "--to", "sharded", "-q")
    assert ckpt(*line, without=ALL).returncode == 0
    before = files_of(out)

    refused = ckpt(*line, "--tp", 2, without=ALL)
    assert refused.returncode == 5 and files_of(out) == before

    replaced = ckpt(*line, "--tp", 2, "--force", without=ALL)
    assert replaced.returncode == 0, replaced.stderr
    assert files_of(out) != before and [path.name for path in tmp_path.iterdir()] == ["out"]

    (out / "thesis.tex").write_text("mine")
    kept = ckpt(*line, "--force", without=ALL)
    assert kept.returncode == 5 and (out / "thesis.tex").read_text() == "mine"


def test_a_run_is_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        done = ckpt("reshard", FIXTURES / "dcp/fsdp2_dp4", tmp_path / f"checkpoint-{step}", "--dp", 2, "-q")
        assert done.returncode == 0
        os.utime(tmp_path / f"checkpoint-{step}", (step, step))
    done = ckpt("prune", tmp_path, "--keep-last", 1, "-q", without=ALL)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


@pytest.mark.usefixtures("without")
def test_a_name_that_is_taken_stays(tmp_path: Path) -> None:
    old = tmp_path / "old"
    new = tmp_path / "new"
    old.mkdir()
    new.mkdir()
    with pytest.raises(FileExistsError):
        platform_calls.rename_new(old, new)
    assert old.is_dir() and new.is_dir()

    new.rmdir()
    platform_calls.rename_new(old, new)
    assert not old.exists() and new.is_dir()


@pytest.mark.usefixtures("without")
def test_an_exchange_in_two_steps(tmp_path: Path) -> None:
    old = tmp_path / "old"
    new = tmp_path / "new"
    aside = tmp_path / "aside"
    old.write_text("a")
    new.write_text("b")
    assert platform_calls.exchange(old, new, aside) == aside
    assert (old.exists(), new.read_text(), aside.read_text()) == (False, "a", "b")

    old.write_text("c")
    with pytest.raises(FileExistsError):
        platform_calls.exchange(old, new, aside)
    assert (old.read_text(), new.read_text(), aside.read_text()) == ("c", "a", "b")


@pytest.mark.usefixtures("without")
def test_an_exchange_that_fails_leaves_both_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old"
    new = tmp_path / "new"
    aside = tmp_path / "aside"
    old.write_text("a")
    new.write_text("b")
    real = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source == old:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError):
        platform_calls.exchange(old, new, aside)
    assert (old.read_text(), new.read_text(), aside.exists()) == ("a", "b", False)


@pytest.mark.usefixtures("without")
def test_what_is_missing_is_told_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        platform_calls.get_mark(path, "user.x")

    with path.open("wb") as file:
        platform_calls.allocate(file.fileno(), 1000)
        assert path.stat().st_size == 1000
        with pytest.raises(OSError) as copying:
            platform_calls.copy_file_range(file.fileno(), file.fileno(), 1, 0, 10)
    with pytest.raises(OSError) as marking:
        platform_calls.set_mark(path, "user.x", b"1")
    assert (copying.value.errno, marking.value.errno) == (errno.ENOSYS, errno.EOPNOTSUPP)


class Killed(BaseException):
    """A kill, as far as what is on the disk goes."""


def kill_at_rename(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """From now on this process ends at its `at`-th rename or link, which is not carried out."""
    count = 0

    def dying(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise Killed
            real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "rename", dying(os.rename))
    monkeypatch.setattr(os, "link", dying(os.link))


def replace_killed(source: str, out: Path, options: list[str], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        kill_at_rename(context, at)
        with pytest.raises(Killed):
            run(["convert", str(FIXTURES / source), str(out), *options, "--force", "-q"])


FOLDER = ["--to", "sharded", "--tp", "2"]
ONE_FILE = ["--to", "safetensors"]


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("mended_by", ["clean", "the same command", "a run that replaces nothing"])
def test_a_folder_comes_back_after_a_kill_between_its_renames(
    mended_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weaker promise where names can't be exchanged: neither has the name for a moment, and nothing is lost."""
    out = tmp_path / "out"
    assert run(["convert", str(FIXTURES / "convert/llama/hf"), str(out), "--to", "sharded", "-q"]) == 0
    old = files_of(out)
    replace_killed("convert/llama/hf", out, FOLDER, 2, monkeypatch)
    (hidden,) = tmp_path.glob(".out.*.ckpt-replaced")
    assert not out.exists() and {path.partition("/")[2] for path in files_of(hidden)} == {
        path.partition("/")[2] for path in old
    }

    again = ["convert", str(FIXTURES / "convert/llama/hf"), str(out), *FOLDER, "-q"]
    if mended_by == "clean":
        (shown,) = (row for row in clean(str(tmp_path))["leavings"] if row["path"] == str(hidden))
        assert not shown["removed"] and hidden.is_dir(), "without --remove it only looks"
        rows = clean(str(tmp_path), remove=True)["leavings"]
        assert {row["path"]: row.get("put_back") for row in rows}[str(hidden)] == str(out)
        assert files_of(out) == old
    elif mended_by == "the same command":
        assert run([*again, "--force"]) == 0
        assert files_of(out) != old and os.listdir(tmp_path) == ["out"]
    else:
        assert run(again) == 5 and files_of(out) == old


@pytest.mark.usefixtures("without")
def test_what_somebody_made_in_the_meantime_stays_and_so_does_the_old_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert run(["convert", str(FIXTURES / "convert/llama/hf"), str(out), "--to", "sharded", "-q"]) == 0
    replace_killed("convert/llama/hf", out, FOLDER, 2, monkeypatch)
    (hidden,) = tmp_path.glob(".out.*.ckpt-replaced")
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    clean(str(tmp_path), remove=True)
    assert (out / "thesis.tex").read_text() == "mine" and hidden.is_dir()


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("listed", [False, True])
def test_an_old_output_under_its_hidden_name_is_cleaned_once_the_new_one_is_there(
    listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert run(["convert", str(FIXTURES / "convert/llama/hf"), str(out), "--to", "sharded", "-q"]) == 0
    old = files_of(out)

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as context:
        where = (ReplacedOutput, "remove") if listed else (staging, "_list_replaced")
        context.setattr(*where, die)
        with pytest.raises(Killed):
            run(["convert", str(FIXTURES / "convert/llama/hf"), str(out), *FOLDER, "--force", "-q"])
    (hidden,) = tmp_path.glob(".out.*.ckpt-replaced")
    of_a_person = tmp_path / ".out.0123abcd.ckpt-replaced"
    of_a_person.mkdir()
    new = files_of(out)
    assert new != old
    if listed:
        (hidden / "thesis.tex").write_text("mine")
        out.rename(tmp_path / "moved")
        clean(str(tmp_path), remove=True)
        assert os.listdir(hidden) == ["thesis.tex"] and not out.exists(), "what goes by halves does not come back"
    else:
        clean(str(tmp_path), remove=True)
        assert files_of(out) == new and sorted(os.listdir(tmp_path)) == [of_a_person.name, "out"]


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("at", [1, 2])
def test_a_file_has_its_name_at_every_moment(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.safetensors"
    source = str(FIXTURES / "convert/llama/hf")
    assert run(["convert", source, str(out), *ONE_FILE, "-q"]) == 0
    old = out.read_bytes()
    replace_killed("convert/llama/hf", out, [*ONE_FILE, "--dtype", "fp16"], at, monkeypatch)
    assert out.read_bytes() == old
    assert run(["convert", source, str(out), *ONE_FILE, "--dtype", "fp16", "--force", "-q"]) == 0
    clean(str(tmp_path), remove=True)
    assert out.read_bytes() != old and os.listdir(tmp_path) == [out.name]


@pytest.mark.usefixtures("without")
def test_a_file_that_appears_at_the_last_moment_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look and a rename there is time for a file, between nothing and a link there is none."""
    old = tmp_path / "old"
    new = tmp_path / "new"
    old.write_text("ours")
    link = os.link

    def link_late(*args: Any, **kwargs: Any) -> None:
        new.write_text("somebody's")
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", link_late)
    monkeypatch.setattr(os.path, "lexists", lambda path: new.write_text("somebody's") == 0)
    with pytest.raises(FileExistsError):
        platform_calls.rename_new(old, new)
    assert (old.read_text(), new.read_text()) == ("ours", "somebody's")


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_output_written_in_parts_says_which_plan_wrote_it(kind: str, tmp_path: Path) -> None:
    """By times, as there are no marks; a copy has others."""
    out = tmp_path / "out"
    if kind == "folder":
        (out / "sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c", "z") if kind == "folder" else ("",):
        (out / name if name else out).write_text(name)
    before = out.stat().st_mtime
    assert not was_committed(out, "plan")
    mark_plan(out, "plan")
    assert was_committed(out, "plan") and not was_committed(out, "another")
    assert before - 1 <= out.stat().st_mtime <= before
    copy = tmp_path / "copy"
    shutil.copytree(out, copy) if kind == "folder" else shutil.copy2(out, copy)
    assert not was_committed(copy, "plan")
    assert not was_committed(tmp_path / "nothing", "plan")
    if kind == "folder":
        os.utime(out / "a")  # by a worker that was overtaken
        assert was_committed(out, "plan")
        mark_plan(out, "plan")
        os.utime(out)  # by one that came at the last moment
        assert was_committed(out, "plan")


class Mac:
    """A C library that has what macOS has, and carries it out on this system."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, bytes, int]] = []

    def renamex_np(self, old: bytes, new: bytes, flags: Any) -> int:
        self.calls.append((old, new, flags.value))
        return 0


def test_macos_has_a_call_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac()
    monkeypatch.setattr(platform_calls.ctypes, "CDLL", lambda *args, **kwargs: mac)
    monkeypatch.setattr(platform_calls, "_WITHOUT", frozenset())
    old = tmp_path / "old"
    new = tmp_path / "new"
    platform_calls.rename_new(old, new)
    platform_calls.exchange(old, new, tmp_path / "aside")
    names = (os.fsencode(old), os.fsencode(new))
    assert mac.calls == [(*names, 4), (*names, 2)]


class MacMarks:
    """macOS' calls on extended attributes, by one path and name."""

    def __init__(self) -> None:
        self.marks: dict[tuple[bytes, bytes], bytes] = {}

        def setxattr(path: bytes, name: bytes, value: bytes, size: Any, position: int, options: int) -> int:
            assert (position, options, size.value) == (0, 1, len(value))
            self.marks[path, name] = value
            return 0

        def getxattr(path: bytes, name: bytes, buffer: Any, size: Any, position: int, options: int) -> int:
            assert (position, options) == (0, 1)
            if (path, name) not in self.marks:
                return self.fail(93)
            value = self.marks[path, name]
            buffer[: len(value)] = value
            return len(value)

        def removexattr(path: bytes, name: bytes, options: int) -> int:
            assert options == 1
            return 0 if self.marks.pop((path, name), None) is not None else self.fail(45)

        self.setxattr = setxattr
        self.getxattr = getxattr
        self.removexattr = removexattr

    @staticmethod
    def fail(number: int) -> int:
        platform_calls.ctypes.set_errno(number)
        return -1


def test_macos_has_marks_though_its_python_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = MacMarks()
    monkeypatch.setattr(platform_calls.ctypes, "CDLL", lambda *args, **kwargs: mac)
    monkeypatch.setattr(platform_calls, "_WITHOUT", frozenset())
    monkeypatch.setattr(platform_calls.sys, "platform", "darwin")
    for name in ("setxattr", "getxattr", "removexattr"):
        monkeypatch.delattr(os, name)

    with pytest.raises(OSError) as unset:
        platform_calls.get_mark(tmp_path, "user.x")
    platform_calls.set_mark(tmp_path, "user.x", b"1")
    assert platform_calls.get_mark(tmp_path, "user.x") == b"1"

    platform_calls.remove_mark(tmp_path, "user.x")
    with pytest.raises(OSError) as refused:
        platform_calls.remove_mark(tmp_path, "user.x")
    assert (unset.value.errno, refused.value.errno) == (errno.ENODATA, errno.EOPNOTSUPP)


@pytest.mark.parametrize(("refusal", "synced"), [(None, False), (errno.ENOTSUP, True)])
def test_macos_flushes_the_disk_itself(
    refusal: int | None, synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def control(fd: int, what: int) -> int:
        seen.append(f"fcntl {what}")
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    monkeypatch.setattr(platform_calls.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(platform_calls.fcntl, "fcntl", control)
    monkeypatch.setattr(platform_calls.os, "fsync", lambda fd: seen.append("fsync"))
    platform_calls.flush(0)
    assert seen == ["fcntl 51", "fsync"][: 1 + synced]


def test_a_persons_folder_of_such_a_name_was_not_taken(without: None, tmp_path: Path) -> None:
    """By its name alone, as there are no marks: `ckpt clean` would delete it."""
    step = tmp_path / "step-100"
    step.mkdir()
    hidden = removal.retire(step, removal.measure(step))
    assert hidden is not None and hidden.is_dir() and not step.exists()
    assert removal.was_taken(hidden)

    of_a_person = tmp_path / ".photos.0123abcd.ckpt-removed"
    of_a_person.mkdir()
    assert not removal.was_taken(of_a_person)

    moved = tmp_path / hidden.name.replace("step-100", "step-101")
    hidden.rename(moved)
    assert not removal.was_taken(moved)


@pytest.mark.parametrize("length", [1, 200, 255])
def test_a_long_name_is_cut_and_still_known(length: int, without: None, tmp_path: Path) -> None:
    step = tmp_path / ("a" * length)
    step.mkdir()
    hidden = removal.retire(step, removal.measure(step))
    assert hidden is not None and removal.was_taken(hidden)
