"""`--force` and `ckpt clean` under faults: the old checkpoint or the new one is whole, and nobody's file is gone.

At every file operation of the run the kernel refuses (EIO, ESTALE, EMFILE, ENOSPC) or the process is killed. Beside the
output lie a person's files, some under names like those of our staging folder. By two roads, as `test_kill`: in a
forked process by default (a share of the operations, most of them at the commit; `crash` takes all), and by strace on
real processes (`crash`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exchanging
import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
KILLED = -signal.SIGKILL
ERRORS = ("EIO", "ESTALE", "EMFILE", "ENOSPC")
SYSCALLS = (
    "openat",
    "getdents64",
    "newfstatat",
    "unlinkat",
    "unlink",
    "rmdir",
    "renameat2",
    "rename",
    "fsync",
    "setxattr",
)
STAGED = re.compile(r"\.out(\.safetensors)?\.ckpt-partial")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below with its bytes, None for a folder."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


class Replacing:
    """`convert --force` over an older output, with a person's files beside it. kind: `folder` or `file`."""

    def __init__(self, root: Path, server: Any, kind: str) -> None:
        self.server = server
        self.place = root / "place"
        self._kept = root / "kept"
        name = "out.safetensors" if kind == "file" else "out"
        old = FIXTURES / "safetensors" / "llama_one_file"
        self._kept.mkdir()
        if kind == "file":
            shutil.copy(old / "model.safetensors", self._kept / name)
        else:
            shutil.copytree(old, self._kept / name)
        for path in (
            ".thesis.ckpt-partial/chapter.tex",
            ".out.notes",
            "out-old/photo.jpg",
            ".ckpt-journal",
            "notes.txt",
        ):
            (self._kept / path).parent.mkdir(parents=True, exist_ok=True)
            (self._kept / path).write_bytes(path.encode())
        self.out = self.place / name
        source = str(FIXTURES / "dcp" / "tp2_dp2")
        to = ["--to", "safetensors"] if kind == "file" else ["--to", "sharded", "--tp", "2"]
        self.args = ["convert", source, str(self.out), *to, "--force", "--threads", "1", "--json", "-q"]
        self.beside = {path: data for path, data in contents(self._kept).items() if not self._is_output(path)}
        self.old = self._outputs_in(self._kept)
        self.reset()
        done = self.run()
        assert done.status == 0, done.err
        self.operations, self.new = done.ops, self._outputs_in(self.place)
        self.check()

    def _is_output(self, path: str) -> bool:
        return path.split("/")[0] == self.out.name

    def _outputs_in(self, place: Path) -> dict[str, bytes | None]:
        return {path: data for path, data in contents(place).items() if self._is_output(path)}

    def reset(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self._kept, self.place)

    def run(self, **fault: Any) -> Any:
        return self.server.run(self.args, under=self.place, **fault)

    def check(self) -> None:
        """Old or new, whole, and all that lies beside it."""
        there = contents(self.place)
        output = {path: data for path, data in there.items() if self._is_output(path)}
        hidden = {exchanging.restored(path): data for path, data in there.items() if exchanging.restored(path)}
        if hidden and not exchanging.HAS_RENAMEAT2:
            assert exchanging.is_left_of(hidden, self.old, replaced=output == self.new), sorted(hidden)
        if hidden and not output and not exchanging.HAS_RENAMEAT2 and self.out.suffix == "":
            print(exchanging.WEAKER)
        else:
            assert output in (self.old, self.new), sorted(output)
        others = {
            path: data
            for path, data in there.items()
            if not self._is_output(path)
            and not STAGED.fullmatch(path.split("/")[0])
            and (exchanging.HAS_RENAMEAT2 or not exchanging.restored(path))
        }
        assert others == self.beside, sorted(others.keys() ^ self.beside.keys())

    def recover(self) -> None:
        """The same command again replaces what is there; `clean` takes what a killed run left, and nothing else."""
        again = self.run()
        assert again.status == 0, again.err
        self.check()
        assert self._outputs_in(self.place) == self.new
        self.server.run(["clean", str(self.place), "--remove", "-q"], under=self.place)
        self.check()
        left = [name for name in os.listdir(self.place) if STAGED.fullmatch(name) or exchanging.set_aside_as(name)]
        assert not left


@pytest.fixture(scope="module", params=["folder", "file"])
def replacing(request: pytest.FixtureRequest, server: Any, tmp_path_factory: pytest.TempPathFactory) -> Replacing:
    return Replacing(tmp_path_factory.mktemp("replacing"), server, request.param)


def strike(ground: Replacing, at: int, name: str) -> None:
    ground.reset()
    fault = {"do": "kill"} if name == "kill" else {"do": "errno", "number": getattr(errno, name)}
    done = ground.run(at=at, **fault)
    where = f"{name} at operation {at} ({done.ops[-1] if done.ops else ''})"
    try:
        assert done.status in (KILLED, 0, 5, 7), done.err
        ground.check()
        ground.recover()
    except AssertionError as e:
        raise AssertionError(f"after {where}: {e}") from e


@pytest.mark.parametrize("name", [*ERRORS, "kill"])
def test_faults_at_the_commit_leave_old_or_new(replacing: Replacing, name: str) -> None:
    """A share: the operations around the rename and the removal of the old output, and a few before."""
    total = len(replacing.operations)
    renames = [i for i, line in enumerate(replacing.operations, 1) if line.startswith("renameat2")]
    first = max(1, renames[-1] - 4)
    for at in sorted({2, total // 2, *range(first, total + 1, 3)}):
        strike(replacing, at, name)


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*ERRORS, "kill"])
def test_faults_at_every_operation_leave_old_or_new(replacing: Replacing, name: str) -> None:
    for at in range(1, len(replacing.operations) + 1):
        strike(replacing, at, name)


def struck(args: list[str], place: Path, syscall: str, fault: str, at: int) -> bool | None:
    """Run a real process whose `at`-th `syscall` on the place's paths fails. False where it has no such call, None
    where strace can't be had."""
    found = shutil.which("strace")
    if found is None:
        return None
    paths = [place, *place.rglob("*")]
    options = [option for path in paths for option in ("-P", str(path))]
    log = place.parent / "strace.log"
    inject = f"inject={syscall}:{'signal=SIGKILL' if fault == 'kill' else f'error={fault}'}:when={at}"
    command = [found, "-f", "-o", str(log), *options, "-e", f"trace={syscall}", "-e", inject]
    done = subprocess.run(
        [*command, sys.executable, "-m", "ckpt_tool", *args], capture_output=True, text=True, cwd=ROOT
    )
    if "ptrace" in done.stderr.lower():
        return None
    text = log.read_text(errors="replace")
    assert done.returncode in (0, 1, 5, 7, KILLED, 128 + signal.SIGKILL), (syscall, at, done.stderr[-2000:])
    return "(INJECTED)" in text or "killed by SIGKILL" in text


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", [*ERRORS, "kill"])
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_system_calls_of_force_that_fail(replacing: Replacing, syscall: str, fault: str) -> None:
    for at in range(1, 200):
        replacing.reset()
        was_struck = struck(replacing.args, replacing.place, syscall, fault, at)
        if was_struck is None:
            pytest.skip("strace can't trace here")
        replacing.check()
        if not was_struck:
            return
        replacing.recover()


# -- clean --------------------------------------------------------------------------------------------------------


class Cleaning:
    """A folder with what killed runs left, and a person's files, in it and in what they left."""

    def __init__(self, root: Path, server: Any) -> None:
        self.server = server
        self.place = root / "place"
        self._kept = root / "kept"
        self.args = ["clean", str(self.place), "--remove", "--json", "-q"]
        self._kept.mkdir()
        source = str(FIXTURES / "dcp" / "tp2_dp2")
        line = ["convert", source, str(self._kept / "out"), "--to", "sharded", "--tp", "2", "--threads", "1", "-q"]
        killed = server.run(line, under=self._kept, at=30, do="kill")
        assert killed.status == KILLED
        self.mine = {}
        for path in (
            ".thesis.ckpt-partial/chapter.tex",
            ".photos.ckpt-removed/photo.jpg",
            ".photos.0123abcd.ckpt-removed/photo.jpg",
            ".out.ckpt-partial/notes.txt",
            "notes.txt",
            "out2/model.txt",
        ):
            (self._kept / path).parent.mkdir(parents=True, exist_ok=True)
            (self._kept / path).write_bytes(path.encode())
            self.mine[path] = path.encode()
        self.reset()
        done = self.run()
        assert done.status == 0, done.err
        self.operations = done.ops
        self.check()
        assert os.listdir(self.place / ".out.ckpt-partial") == ["notes.txt"]

    def reset(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self._kept, self.place)

    def run(self, **fault: Any) -> Any:
        return self.server.run(self.args, under=self.place, **fault)

    def check(self) -> None:
        there = contents(self.place)
        assert {path: there.get(path) for path in self.mine} == self.mine


@pytest.fixture(scope="module")
def cleaning(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cleaning]:
    yield Cleaning(tmp_path_factory.mktemp("cleaning"), server)


@pytest.mark.parametrize("name", [*ERRORS, "kill"])
def test_clean_under_faults_removes_nothing_of_a_persons(cleaning: Cleaning, name: str) -> None:
    for at in range(1, len(cleaning.operations) + 1):
        cleaning.reset()
        fault = {"do": "kill"} if name == "kill" else {"do": "errno", "number": getattr(errno, name)}
        done = cleaning.run(at=at, **fault)
        assert done.status in (KILLED, 0, 7), done.err
        cleaning.check()
        assert cleaning.run().status == 0
        cleaning.check()


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", [*ERRORS, "kill"])
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_system_calls_of_clean_that_fail(cleaning: Cleaning, syscall: str, fault: str) -> None:
    for at in range(1, 200):
        cleaning.reset()
        was_struck = struck(cleaning.args, cleaning.place, syscall, fault, at)
        if was_struck is None:
            pytest.skip("strace can't trace here")
        cleaning.check()
        if not was_struck:
            return
