"""What somebody put where a run wants its own: journals and staged files that are FIFOs, links, hard links, folders,
sockets.

Nothing hangs, nothing that they lead to is opened, cut or written, every lock is let go.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.cli import run
from ckpt_tool.errors import OutputExists
from ckpt_tool.storage.output.destination import staging_path
from ckpt_tool.storage.output.journal import name_of
from ckpt_tool.storage.output.staging import FILES, Staging

KINDS = ["fifo", "link", "dangling link", "hard link", "folder", "socket"]
pytestmark = pytest.mark.timeout(60)


class Ground:
    def __init__(self, root: Path, to: str) -> None:
        self.root = root
        self.place = root / "place"
        self.out = root / "place" / "out"
        self.place.mkdir()
        self.precious = root / "precious"
        self.precious.write_bytes(b"precious" * 100)
        values = {f"layers.{i}.w.weight": np.arange(60, dtype=np.float32).reshape(6, 10) for i in range(3)}
        safetensors.numpy.save_file(values, root / "source.safetensors")
        self.plan = root / "plan.json"
        assert (
            run(
                ["convert", str(root / "source.safetensors"), str(self.out), "--to", to, "--plan", str(self.plan), "-q"]
            )
            == 0
        )
        self.files = [file["path"] for file in json.loads(self.plan.read_text())["outputs"]]

    @property
    def staged(self) -> Path:
        return staging_path(self.out)

    def apply(self, capfd: Any, *more: str) -> tuple[int, dict[str, Any]]:
        status = run(["apply", str(self.plan), "--json", "-q", *more])
        err = capfd.readouterr().err
        assert "Traceback" not in err
        assert self.precious.read_bytes() == b"precious" * 100 and not (self.root / "nowhere").exists()
        return status, json.loads(err.strip().splitlines()[-1])["error"] if status else {}

    def plant(self, path: Path, kind: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(self.precious)
        elif kind == "dangling link":
            path.symlink_to(self.root / "nowhere")
        elif kind == "hard link":
            os.link(self.precious, path)
        elif kind == "folder":
            path.mkdir()
        else:
            here = os.getcwd()
            os.chdir(path.parent)  # a socket's name has 108 bytes at most
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
            os.chdir(here)

    def check_unlocked(self) -> None:
        """Every lock on the staging folder has been let go."""
        if self.staged.is_dir():
            fd = os.open(self.staged, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)


@pytest.fixture(params=["sharded", "deepspeed-universal"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    yield Ground(tmp_path, request.param)


@pytest.mark.parametrize("part", [None, (1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_journal_is_never_opened(ground: Ground, capfd: Any, kind: str, part: tuple[int, int] | None) -> None:
    ground.plant(ground.staged / name_of(part), kind)
    share = ["--part", f"{part[0]}/{part[1]}"] if part else []
    status, error = ground.apply(capfd, *share)
    assert (status, error["code"]) == (5, "E0504"), error
    assert name_of(part) in error["message"] and error["hint"]
    ground.check_unlocked()
    shutil.rmtree(ground.staged)
    assert ground.apply(capfd)[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_journal_of_another_part_hangs_nobody(ground: Ground, capfd: Any, kind: str) -> None:
    """It says nothing, so that part has not begun; it itself is refused."""
    ground.plant(ground.staged / name_of((2, 2)), kind)
    assert ground.apply(capfd, "--part", "1/2")[0] == 0
    status, error = ground.apply(capfd, "--part", "2/2")
    assert (status, error["code"]) == (5, "E0504")
    assert not ground.out.exists()


@pytest.mark.parametrize("where", ["file", "first folder"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_file_is_never_opened(ground: Ground, capfd: Any, kind: str, where: str) -> None:
    """Under a name that the plan writes, and where it has a folder, in a folder that the same plan has begun."""
    name = ground.files[0]
    if where == "first folder" and "/" not in name:
        pytest.skip("the format has no folders")
    with Staging(ground.out, _identifier(ground), ground.files) as begun:
        begun.record({"unit": 0})
    path = ground.staged / (name if where == "file" else name.split("/")[0])
    ground.plant(path, kind)
    if where == "first folder" and kind == "folder":
        shutil.rmtree(path)
        path.symlink_to(ground.root)  # a link to a folder: what would be followed
    status, error = ground.apply(capfd)
    assert (status, error["code"]) == (5, "E0504"), error
    assert not (ground.root / "zero").exists() and not ground.out.exists()
    ground.check_unlocked()


def _identifier(ground: Ground) -> str:
    from ckpt_tool.conversion.plan_file import load_plan

    return load_plan(str(ground.plan)).identifier()


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_thing_at_the_staging_name_is_left_alone(ground: Ground, capfd: Any, kind: str) -> None:
    if kind == "folder":
        pytest.skip("an empty folder is taken")
    ground.plant(ground.staged, kind)
    status, error = ground.apply(capfd)
    assert (status, error["code"]) == (5, "E0504"), error
    assert os.path.lexists(ground.staged) and not ground.out.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_another_user_s_folder_is_left_alone(ground: Ground, capfd: Any) -> None:
    ground.staged.mkdir()
    (ground.staged / name_of(None)).write_bytes(b"")
    os.chown(ground.staged, 65534, 65534)
    status, error = ground.apply(capfd)
    assert (status, error["code"]) == (5, "E0504")
    assert os.listdir(ground.staged) == [name_of(None)]


def test_a_failed_claim_lets_every_lock_go(tmp_path: Path) -> None:
    """In one process: a second try must not meet the first one's locks."""
    out = tmp_path / "out"
    staged = staging_path(out)
    staged.mkdir()
    os.mkfifo(staged / name_of(None))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OutputExists) as caught:
            Staging(out, "a", ["f"])
        assert caught.value.code == "E0504"
    assert len(os.listdir("/proc/self/fd")) == before
    os.unlink(staged / name_of(None))
    with Staging(out, "a", ["f"]):
        pass


@pytest.mark.parametrize("path", ["../victim", "/victim", "a/../../victim", "x\0y", "a//b", ".ckpt-journal"])
def test_staging_opens_nothing_elsewhere(tmp_path: Path, path: str) -> None:
    """The gate itself: every file that staging opens, by whatever name it is asked for."""
    with Staging(tmp_path / "out", "a", ["f"]) as staging:
        os.close(staging.create("f", 3))
        for ask in (lambda: staging.create(path, 3), lambda: staging.open(path), lambda: staging.sync(path)):
            with pytest.raises(Exception) as caught:
                ask()
            assert getattr(caught.value, "code", "") == "E1600", caught.value
        assert sorted(os.listdir(tmp_path)) == [".out.ckpt-partial"]
        assert sorted(os.listdir(staging_path(tmp_path / "out"))) == sorted(["f", name_of(None), FILES])
