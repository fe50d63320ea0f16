"""What only some systems offer, switched off: the same outputs, the same refusals, nothing lost.

    CKPT_TEST_WITHOUT=renameat2,xattr,fallocate,copy_file_range python -m pytest tests/faults

runs other tests so. What tests of marks expect of a file system without them is said where they are.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.storage import platform_calls
from ckpt_tool.storage.output import removal
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
def test_an_exchange_in_three_steps(tmp_path: Path) -> None:
    old = tmp_path / "old"
    new = tmp_path / "new"
    aside = tmp_path / "aside"
    old.write_text("a")
    new.write_text("b")
    platform_calls.exchange(old, new, aside)
    assert (old.read_text(), new.read_text(), aside.exists()) == ("b", "a", False)

    aside.write_text("somebody's")
    with pytest.raises(FileExistsError):
        platform_calls.exchange(old, new, aside)
    assert (old.read_text(), new.read_text(), aside.read_text()) == ("b", "a", "somebody's")


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
    hidden = removal.retire(step, removal.measure(step).identity)
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
    hidden = removal.retire(step, removal.measure(step).identity)
    assert hidden is not None and removal.was_taken(hidden)
