"""`ckpt prune` killed at every file operation: each step is whole or gone, and the last complete one is there.

By two roads, as `test_kill`: every operation in a forked process, and by strace on real ones, where `signal` strikes
before the system call is carried out.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt

ROOT = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL
FIXTURE = ROOT / "fixtures/safetensors/llama_one_file"
BY_PATH = ("openat", "close")  # calls of which there are others: those on the run's folders count
STEPS = (100, 200, 300, 400)
HIDDEN = re.compile(r"\.checkpoint-\d+\.[0-9a-f]{8}\.ckpt-removed")


class Pruned:
    """A run of four steps, of which the last is broken and the one before it is the last complete one."""

    def __init__(self, root: Path) -> None:
        self.run = root / "run"
        self._kept = root / "kept"
        for step in STEPS:
            shutil.copytree(FIXTURE, self._kept / f"checkpoint-{step}")
            (self._kept / f"checkpoint-{step}/additional_chat_templates").mkdir()
            (self._kept / f"checkpoint-{step}/additional_chat_templates/tools.jinja").write_text(str(step))
        os.truncate(self._kept / "checkpoint-400/model.safetensors", 1000)
        (self._kept / "latest").write_text("checkpoint-300")
        for path in self._kept.rglob("*"):
            os.utime(path, (time.time() - 10**6,) * 2)
        self.whole = {path.name: _contents(path) for path in self._kept.iterdir()}
        self.args = ["prune", str(self.run), "--keep-last", "1", "--json", "-q"]

    def reset(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self._kept, self.run, symlinks=True)

    def check(self) -> int:
        """Of whatever a fault has left; the number of steps that are gone."""
        there = {path.name: path for path in self.run.iterdir()}
        steps = {name: path for name, path in there.items() if not HIDDEN.fullmatch(name)}
        for name, path in steps.items():
            assert _contents(path) == self.whole[name], f"{name} is neither whole nor gone"
        assert {"checkpoint-300", "checkpoint-400", "latest"} <= steps.keys()
        assert ckpt.latest(self.run)["path"] == str(self.run / "checkpoint-300")
        return len(self.whole) - len(steps)

    def recover(self) -> None:
        """The same command again ends as an undisturbed run does, and `ckpt clean` takes the rest."""
        from ckpt_tool.commands.clean import clean

        ckpt.prune(self.run, keep_last=1)
        left = clean(str(self.run), remove=True)["leavings"]
        assert all(each["removed"] and not each["locked"] for each in left)
        assert sorted(os.listdir(self.run)) == ["checkpoint-300", "checkpoint-400", "latest"]


def _contents(path: Path) -> Any:
    if path.is_dir():
        return {inner.relative_to(path).as_posix(): inner.is_dir() or inner.read_bytes() for inner in path.rglob("*")}
    return path.read_bytes()


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    return Pruned(tmp_path_factory.mktemp("prune"))


def test_a_kill_at_every_operation_leaves_each_step_whole_or_gone(pruned: Pruned, server: Any) -> None:
    gone = []
    for at in count(1):
        pruned.reset()
        done = server.run(pruned.args, under=pruned.run, at=at, do="kill", op="rename,fsync,unlink,rmdir")
        if done.status != KILLED:
            assert done.status == 0, done.err
            break
        gone.append(pruned.check())
        pruned.recover()
    assert len(gone) == 2 * (2 + len(list(FIXTURE.iterdir())) + 3), "a rename, an fsync, and every name, of two steps"
    assert gone == sorted(gone) and (gone[0], gone[-1]) == (0, 2)


@pytest.mark.share(2)
@pytest.mark.parametrize("op", ["rename", "fsync", "unlink", "rmdir"])
def test_an_operation_that_fails_is_told_and_the_other_steps_go(op: str, pruned: Pruned, server: Any) -> None:
    pruned.reset()
    done = server.run(pruned.args, under=pruned.run, at=1, do="errno", number=errno.EIO, op=op)
    assert (done.status, done.error["code"]) == (7, "E1674"), done.err
    assert pruned.check() == (1 if op == "rename" else 2)
    pruned.recover()


def test_the_step_is_away_for_good_before_a_file_of_it_is_deleted(pruned: Pruned, server: Any) -> None:
    pruned.reset()
    done = server.run(pruned.args, under=pruned.run, at=0, do="none", op="rename,fsync,unlink,rmdir")
    kinds = [line.split()[0] for line in done.ops]
    first, second = (i for i, kind in enumerate(kinds) if kind == "rename")
    assert kinds[first + 1] == kinds[second + 1] == "fsync"
    assert set(kinds[first + 2 : second]) == {"unlink", "rmdir"}


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("syscall", ["rename", "fsync", "unlinkat", "rmdir", "flock", "openat", "close"])
def test_kills_by_strace(syscall: str, pruned: Pruned) -> None:
    found = shutil.which("strace")
    if found is None or subprocess.run([found, "-f", "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("strace can't trace here")
    kills = 0
    for at in count(1, 7 if syscall in BY_PATH else 1):
        pruned.reset()
        below = [path for path in [pruned.run, *pruned.run.rglob("*")] if path.is_dir() and syscall in BY_PATH]
        paths = [word for path in below for word in ("-P", str(path))]
        inject = f"inject={syscall}:signal=SIGKILL:when={at}"
        line = [found, "-f", "-o", os.devnull, *paths, "-e", inject, sys.executable, "-m", "ckpt_tool", *pruned.args]
        quiet = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(line, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            break
        assert done.returncode in (KILLED, 137), done.stderr
        kills += 1
        pruned.check()
        pruned.recover()
    print(f"{syscall}: {kills} kills")
    assert kills
