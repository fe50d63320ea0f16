"""A disk that fails while `ckpt prune`, `ckpt latest` or `ckpt delta --dedup` look: at every operation in turn.

What could not be read is unknown. So `prune` ends with 7 and has taken nothing away that another look would have kept;
`latest` ends with 7 or with the newest step, and never with an older one; `delta --dedup` ends with 7 and no output, or
with an archive that gives every file back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures/safetensors/llama_one_file"
ERRORS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM)
KILLED = -signal.SIGKILL
# Every kind of operation by which something is looked at, opened or read.
LOOKS = "stat,lstat,scandir,entry,listdir,readlink,open,pread,read"
KEPT = {
    "checkpoint-100": "a hidden link leads to it",
    "checkpoint-150": "an archive is made on it",
    "checkpoint-300": "the last complete step records it as the best",
    "checkpoint-400": "it is the last complete one",
}


def contents(path: Path) -> Any:
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return {inner.relative_to(path).as_posix(): inner.is_dir() or inner.read_bytes() for inner in path.rglob("*")}
    return path.read_bytes()


class Field:
    """A run of six steps, of which two may go, and what keeps the others."""

    def __init__(self, root: Path) -> None:
        self.run = root / "around/run"
        self._kept = root / "kept"
        for step in (100, 150, 200, 250, 300, 400):
            shutil.copytree(FIXTURE, self._kept / f"checkpoint-{step}")
        state = {"best_model_checkpoint": "out/checkpoint-300"}
        (self._kept / "checkpoint-400/trainer_state.json").write_text(json.dumps(state))
        (self._kept / ".best").symlink_to("checkpoint-100")
        archive = self._kept / "archive/201"
        archive.parent.mkdir()
        ckpt.delta(self._kept / "checkpoint-150", self._kept / "checkpoint-200", archive, dedup=True, fsync=False)
        for path in self._kept.rglob("*"):
            os.utime(path, (time.time() - 10**6,) * 2, follow_symlinks=False)
        self.whole = {path.name: contents(path) for path in self._kept.iterdir()}
        self.prune = ["prune", str(self.run), "--keep-last", "1", "--json", "-q"]
        self.reset()

    def reset(self) -> None:
        shutil.rmtree(self.run.parent, ignore_errors=True)
        shutil.copytree(self._kept, self.run, symlinks=True)

    def check(self) -> set[str]:
        """What is gone. Nothing that any rule keeps, and nothing by halves."""
        there = {path.name: path for path in self.run.iterdir() if not path.name.endswith(".ckpt-removed")}
        for name, path in there.items():
            assert contents(path) == self.whole[name], name
        gone = self.whole.keys() - there.keys()
        assert gone <= {"checkpoint-200", "checkpoint-250"}, gone
        return gone


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Field:
    return Field(tmp_path_factory.mktemp("unreadable"))


def numbers(total: int, most: int) -> list[int]:
    """Some of the operations 1 to `total`, spread over them."""
    return list(range(1, total + 1, max(1, total // most)))


def operations(server: Any, args: list[str], under: Path, op: str, code: int = 0) -> list[str]:
    done = server.run(args, under=under, at=0, do="none", op=op, looks=True, reads=True)
    assert done.status == code, done.err
    return done.ops


def strike(server: Any, field: Field, at: int, options: list[str] = [], *, on: bool = False) -> Any:  # noqa: B006
    number = ERRORS[at % len(ERRORS)]
    fault = {"at": at, "do": "errno", "number": number, "op": LOOKS, "looks": True, "reads": True, "on": on}
    done = server.run([*field.prune, *options], under=field.run.parent, **fault)
    where = f"{errno.errorcode[number]} at {at}: {done.ops[-1] if done.ops else '?'}\n{done.err}"
    assert done.status in (0, 7), where
    return done, where


def prunes(server: Any, field: Field, most: int) -> None:
    field.reset()
    total = len(operations(server, field.prune, field.run.parent, LOOKS))
    assert field.check() == {"checkpoint-200", "checkpoint-250"}
    for at in numbers(total, most):
        field.reset()
        done, where = strike(server, field, at)
        gone = field.check()
        if done.status == 0:
            assert gone == {"checkpoint-200", "checkpoint-250"}, where
        elif done.error["code"] == "E2851":
            assert not gone, where


def test_prune_takes_nothing_away_that_it_could_not_read(field: Field, server: Any) -> None:
    prunes(server, field, 14)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_prune_at_every_operation(field: Field, server: Any) -> None:
    prunes(server, field, 10**6)


def test_a_disk_that_goes_on_failing_ends_prune_and_no_step_goes(field: Field, server: Any) -> None:
    field.reset()
    total = len(operations(server, field.prune, field.run.parent, LOOKS))
    for at in numbers(total, 4):
        field.reset()
        done, where = strike(server, field, at, on=True)
        gone = field.check()
        assert done.status == 7 or gone == {"checkpoint-200", "checkpoint-250"}, where


def test_what_is_skipped_stays_and_is_named(field: Field, server: Any) -> None:
    """By its weights: a step that can't be read is not broken, and not one of the last N either."""
    for name in ("checkpoint-400", "checkpoint-300"):
        field.reset()
        fault = {"at": 1, "on": True, "do": "errno", "number": errno.EIO, "op": "pread,read", "reads": True}
        args = [*field.prune, "--skip-unreadable"]
        refused = server.run(field.prune, under=field.run, path=f"{name}/model.safetensors", **fault)
        if name == "checkpoint-400":
            assert (refused.status, refused.error["code"]) == (7, "E2851") and name in refused.err
            assert not field.check()
        done = server.run(args, under=field.run, path=f"{name}/model.safetensors", **fault)
        assert done.status == 0, done.err
        kept = {Path(row["path"]).name: row["reasons"] for row in json.loads(done.out)["keep"]}
        if name == "checkpoint-400":
            assert kept[name] == ["it could not be read", "newer than the last complete one"]
            assert kept["checkpoint-300"] == ["the last complete one"]
        assert {"checkpoint-400", "checkpoint-300"} <= {path.name for path in field.run.iterdir()}


# -- latest -----------------------------------------------------------------------------------------------------------


def latests(server: Any, field: Field, most: int) -> None:
    field.reset()
    args = ["latest", str(field.run), "--json", "-q"]
    total = len(operations(server, args, field.run.parent, LOOKS))
    newest = str(field.run / "checkpoint-400")
    for at in numbers(total, most):
        number = ERRORS[at % len(ERRORS)]
        fault = {"at": at, "do": "errno", "number": number, "op": LOOKS, "looks": True, "reads": True}
        done = server.run(args, under=field.run.parent, **fault)
        where = f"{errno.errorcode[number]} at {at}: {done.ops[-1]}\n{done.err}"
        assert done.status in (0, 7), where
        if done.status == 0:
            assert json.loads(done.out)["path"] == newest, where
        skipped = server.run([*args, "--skip-unreadable"], under=field.run.parent, **fault)
        assert skipped.status in (0, 7), where
        if skipped.status == 0:
            found = json.loads(skipped.out)
            assert found["path"] == newest or found["passed_over"][0]["path"] == newest, where


def test_latest_never_passes_over_what_it_could_not_read(field: Field, server: Any) -> None:
    latests(server, field, 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_latest_at_every_operation(field: Field, server: Any) -> None:
    latests(server, field, 10**6)


# -- delta --dedup ----------------------------------------------------------------------------------------------------

WRITES = f"{LOOKS},write,pwrite,posix_fallocate,ftruncate,mkdir,fsync,renameat2,unlink,chmod"


class Step:
    """Two steps of a run; the archive of the second is made in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = root / "place"
        self.steps = root / "run/checkpoint-1", root / "run/checkpoint-2"
        for step in self.steps:
            shutil.copytree(FIXTURE, step)
        deep = self.steps[1].joinpath(*"abcdefghi")
        deep.mkdir(parents=True)
        (deep / "notes.txt").write_text("kept")
        (self.steps[1] / "link").symlink_to(deep / "notes.txt")
        self.out = self.place / "archive"
        self.args = ["delta", *map(str, self.steps), str(self.out), "--dedup", "--json", "-q"]
        self.number = count()

    def reset(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()

    def check(self) -> None:
        """The archive gives every file back."""
        again = self.root / f"again{next(self.number)}"
        ckpt.patch(self.steps[0], [self.out], again, fsync=False)
        have = {path.relative_to(again).as_posix(): path.read_bytes() for path in again.rglob("*") if path.is_file()}
        step = self.steps[1]
        want = {path.relative_to(step).as_posix(): path.read_bytes() for path in step.rglob("*") if path.is_file()}
        assert have == want
        shutil.rmtree(again)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    return Step(tmp_path_factory.mktemp("dedup"))


def archives(server: Any, step: Step, most: int, last: int = 0) -> None:
    step.reset()
    total = len(operations(server, step.args, step.root, WRITES))
    for at in range(total - last + 1, total + 1) if last else numbers(total, most):
        step.reset()
        number = (*ERRORS, errno.ENOSPC)[at % 5]
        fault = {"at": at, "do": "errno", "number": number, "op": WRITES, "looks": True, "reads": True}
        done = server.run(step.args, under=step.root, **fault)
        where = f"{errno.errorcode[number]} at {at}: {done.ops[-1]}\n{done.err}"
        assert done.status in (0, 7), where
        if done.status == 0:
            step.check()
        else:
            assert not step.out.exists() or done.error["code"] == "E0707", where


def test_an_archive_is_whole_or_not_there(step: Step, server: Any) -> None:
    archives(server, step, 14)


def test_an_archive_in_its_place_is_said_to_be_there(step: Step, server: Any) -> None:
    """After the rename nothing is unfinished, whatever fails: E0707, and not the advice to run again."""
    archives(server, step, 0, last=12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_archive_at_every_operation(step: Step, server: Any) -> None:
    archives(server, step, 10**6)


def test_an_archive_that_is_killed_is_whole_or_not_there(step: Step, server: Any) -> None:
    step.reset()
    kinds = "write,pwrite,posix_fallocate,mkdir,fsync,renameat2,unlink,chmod"
    total = len(operations(server, step.args, step.place, kinds))
    for at in numbers(total, 6):
        step.reset()
        done = server.run(step.args, under=step.place, at=at, do="kill", op=kinds)
        assert done.status == KILLED, done.err
        if step.out.exists():
            step.check()
        again = server.run([*step.args, "--force"], under=step.place)
        assert again.status == 0, again.err
        step.check()
        assert os.listdir(step.place) == ["archive"]


# -- what is next to the model ----------------------------------------------------------------------------------------

# A checkpoint, and a file of it that a reader looks for and could go on without.
NEXT_TO = {
    "a Trainer's optimizer": ("safetensors/trainer_qwen3", "optimizer.pt", "dcp"),
    "a Trainer's schedule": ("safetensors/trainer_qwen3", "scheduler.pt", "dcp"),
}


@pytest.mark.parametrize("case", NEXT_TO)
def test_a_file_next_to_the_model_that_can_not_be_read_is_not_left_out(case: str, server: Any, tmp_path: Path) -> None:
    fixture, file, to = NEXT_TO[case]
    source = tmp_path / "source"
    shutil.copytree(ROOT / "fixtures" / fixture, source)
    args = ["convert", str(source), str(tmp_path / "out"), "--to", to, "--json", "-q"]
    fault = {"at": 1, "on": True, "do": "errno", "number": errno.EIO, "op": "pread,preadv,read", "reads": True}
    done = server.run(args, under=source, path=file, **fault)
    assert (done.status, done.error["code"]) == (7, "E0700") and file in done.error["path"], done.err
    assert not (tmp_path / "out").exists()
