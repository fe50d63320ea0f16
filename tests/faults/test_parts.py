"""Parts of plans: mixed, altered between, begun and given up. What is committed is the plan's output, byte for byte, or
nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.cli import run
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.errors import OutputExists, SourceChanged
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor
from ckpt_tool.storage.output.destination import staging_path
from ckpt_tool.storage.output.journal import name_of
from ckpt_tool.storage.output.staging import Staging

# what the outputs are: cut along columns, transposed, cast with padding, records with checksums in a folder of folders
OPTIONS = {
    "strided": ["--to", "sharded", "--tp", "2"],
    "padded": ["--to", "sharded", "--dp", "3", "--on-indivisible", "pad", "--dtype", "bf16"],
    "zip": ["--to", "deepspeed-universal"],
    "records": ["--to", "dcp", "--dp", "2"],
}


class Ground:
    """One source, a plan A and a plan B to the same output, and A's output."""

    def __init__(self, root: Path, options: list[str]) -> None:
        self.place = root / "place"
        self.out = root / "place" / "out"
        self.place.mkdir()
        tensors = {
            f"layers.{i}.mlp.{kind}_proj.weight": np.arange(n * 40, dtype=np.float32).reshape(n, 40) + i
            for i, n in enumerate((50, 33, 64, 7))
            for kind in ("up", "down")
        }
        safetensors.numpy.save_file(tensors, root / "a.safetensors")
        safetensors.numpy.save_file({name: -value for name, value in tensors.items()}, root / "b.safetensors")
        self.plans = {name: root / f"{name}.json" for name in "ab"}
        for name, plan in self.plans.items():
            arguments = [
                "convert",
                str(root / f"{name}.safetensors"),
                str(self.out),
                *options,
                "--plan",
                str(plan),
                "-q",
            ]
            assert run(arguments) == 0
        assert run(["apply", str(self.plans["a"]), "-q"]) == 0
        self.good = self.bytes()
        shutil.rmtree(self.out)

    def bytes(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.out)): path.read_bytes() for path in self.out.rglob("*") if path.is_file()}

    @property
    def staged(self) -> Path:
        return staging_path(self.out)

    def part(self, share: str, capfd: Any, plan: str = "a", *more: str) -> tuple[int, str]:
        status = run(["apply", str(self.plans[plan]), "--part", share, "--json", "-q", *more])
        err = capfd.readouterr().err
        return status, json.loads(err.strip().splitlines()[-1])["error"]["code"] if status else ""


@pytest.fixture(scope="module", params=list(OPTIONS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("parts"), OPTIONS[request.param])


@pytest.fixture
def ground(made: Ground, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    """Units of 4 KiB, so that parts share files."""
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 12))
    yield made
    shutil.rmtree(made.place)
    made.place.mkdir()


def test_parts_of_two_plans_are_never_committed(ground: Ground, capfd: Any) -> None:
    assert ground.part("1/2", capfd, "a") == (0, "")
    assert ground.part("2/2", capfd, "b") == (6, "E0611")
    assert ground.part("1/2", capfd, "b") == (6, "E0611")
    assert not ground.out.exists() and os.listdir(ground.place) == [ground.staged.name]
    assert ground.part("2/2", capfd, "a") == (0, ""), "the first plan's own part is as welcome as before"
    assert ground.bytes() == ground.good and os.listdir(ground.place) == ["out"]


def test_parts_of_another_number_are_never_committed(ground: Ground, capfd: Any) -> None:
    assert ground.part("1/3", capfd) == (0, "")
    assert ground.part("2/4", capfd) == (6, "E1602")
    assert ground.part("1/2", capfd) == (6, "E1602")
    assert ground.part("2/3", capfd) == ground.part("3/3", capfd) == (0, "")
    assert ground.bytes() == ground.good


def test_a_part_after_what_another_plan_s_whole_run_left(ground: Ground, capfd: Any) -> None:
    """Its bytes would show in the gaps."""
    with Staging(ground.out, "another plan", []):
        pass
    assert ground.part("1/2", capfd) == (6, "E0611")
    assert run(["clean", str(ground.place), "--remove"]) == 0
    assert ground.part("1/2", capfd) == ground.part("2/2", capfd) == (0, "")
    assert ground.bytes() == ground.good


def test_a_part_may_start_anew(ground: Ground, capfd: Any) -> None:
    assert (
        ground.part("1/2", capfd)
        == ground.part("1/2", capfd, "a", "--no-resume")
        == ground.part("2/2", capfd)
        == (0, "")
    )
    assert ground.bytes() == ground.good


def test_parts_that_begin_at_once_are_compared_by_the_one_who_commits(tmp_path: Path) -> None:
    """Neither has seen the other's first line; the last one to end looks again."""
    out = tmp_path / "out"
    with Staging(out, "a", ["f"], part=(1, 2)) as first:
        journal = staging_path(out) / name_of((2, 2))
        with Staging(out, "a", ["f"], part=(2, 2)):
            pass
        text = journal.read_bytes()
        journal.unlink()
        first.record({"part": True})
    with Staging(tmp_path / "other", "b", ["f"], part=(2, 2)) as other:
        other.record({"part": True})
    journal.write_bytes((staging_path(tmp_path / "other") / name_of((2, 2))).read_bytes())
    assert text
    with pytest.raises(SourceChanged) as caught:
        Staging(out, "a", ["f"], part=(1, 2))
    assert caught.value.code == "E0611"
    journal.unlink()
    with Staging(out, "a", ["f"], part=(1, 2)) as again:
        journal.write_bytes((staging_path(tmp_path / "other") / name_of((2, 2))).read_bytes())
        with pytest.raises(SourceChanged) as caught:
            again.close_part()
        assert caught.value.code == "E0611"


ALTER: dict[str, Callable[[bytearray, random.Random], None]] = {
    "a bit": lambda data, rng: data.__setitem__(at := rng.randrange(len(data)), data[at] ^ 1 << rng.randrange(8)),
    "a page less": lambda data, rng: data.__setitem__(slice(at := rng.randrange(len(data)), at + 4096), b""),
    "all of it": lambda data, rng: data.__setitem__(slice(None), rng.randbytes(len(data))),
    "longer": lambda data, rng: data.extend(rng.randbytes(100)),
    "empty": lambda data, rng: data.clear(),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("how", list(ALTER))
def test_a_file_altered_between_the_parts_is_never_committed(ground: Ground, capfd: Any, how: str) -> None:
    """Any byte of any file, those that no tensor has among them."""
    for seed in range(4):
        rng = random.Random(f"{how} {seed}")
        assert ground.part("1/3", capfd) == ground.part("2/3", capfd) == (0, "")
        files = sorted(path for path in ground.staged.rglob("*") if path.is_file() and not path.name.startswith("."))
        for path in rng.sample(files, min(3, len(files))):
            data = bytearray(path.read_bytes())
            if data:
                ALTER[how](data, rng)
            path.write_bytes(data)
        assert ground.part("3/3", capfd) == (0, "")
        assert ground.bytes() == ground.good, (how, seed)
        shutil.rmtree(ground.out)


def test_a_file_that_was_removed_between_the_parts_is_written_again(ground: Ground, capfd: Any) -> None:
    assert ground.part("1/2", capfd) == (0, "")
    for path in [path for path in ground.staged.rglob("*") if path.is_file() and not path.name.startswith(".")]:
        path.unlink()
    assert ground.part("2/2", capfd) == (0, "")
    assert ground.bytes() == ground.good


@pytest.mark.parametrize("what", ["file", "link", "folder of files"])
def test_what_somebody_added_is_not_committed(ground: Ground, capfd: Any, tmp_path: Path, what: str) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    assert ground.part("1/2", capfd) == (0, "")
    if what == "file":
        (ground.staged / "mine").write_bytes(b"mine")
    elif what == "link":
        (ground.staged / "mine").symlink_to(tmp_path)
    else:
        (ground.staged / "mine").mkdir()
        (ground.staged / "mine" / "too").write_bytes(b"mine")
    assert ground.part("2/2", capfd) == (5, "E0504")
    assert not ground.out.exists() and (tmp_path / "precious").read_bytes() == b"precious"
    mine = ground.staged / "mine"
    shutil.rmtree(mine) if mine.is_dir() and not mine.is_symlink() else mine.unlink()
    assert ground.part("2/2", capfd) == (0, "")
    assert ground.bytes() == ground.good


def test_parts_without_hashes_and_parts_with(ground: Ground, capfd: Any) -> None:
    """A part that was run with --verify off has no hashes to be held against: the one that commits does its work
    again."""
    assert ground.part("1/2", capfd, "a", "--verify", "off") == ground.part("2/2", capfd) == (0, "")
    assert ground.bytes() == ground.good


def test_a_resumed_run_clears_what_lies_where_nobody_writes(ground: Ground, capfd: Any, monkeypatch: Any) -> None:
    """The same of a whole run that was interrupted: every byte is looked at, those between the arrays too."""

    def stop(*_: Any) -> None:
        raise OutputExists("stop")

    monkeypatch.setattr(executor.Executor, "_finish", stop)
    assert run(["apply", str(ground.plans["a"]), "-q"]) == 5
    monkeypatch.undo()
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 12))
    rng = random.Random(1)
    for path in [path for path in ground.staged.rglob("*") if path.is_file() and not path.name.startswith(".")]:
        data = bytearray(path.read_bytes())
        for _ in range(20):
            data[rng.randrange(len(data))] ^= 0xFF
        path.write_bytes(data)
    assert run(["apply", str(ground.plans["a"]), "-q"]) == 0
    assert ground.bytes() == ground.good


def test_a_part_that_is_done_waits_for_nobody(ground: Ground, capfd: Any) -> None:
    """The second of three is frozen: it holds its locks and does nothing."""
    plan = load_plan(str(ground.plans["a"])).identifier()
    with Staging(ground.out, plan, [], part=(2, 3)):
        assert run(["apply", str(ground.plans["a"]), "--part", "1/3", "--json"]) == 0
        document = json.loads(capfd.readouterr().out)
        assert document["committed"] is False
        assert document["parts"] == {"done": [1], "running": [2], "missing": [3]}
        assert run(["apply", str(ground.plans["a"]), "--part", "3/3"]) == 0
        assert "part 3 of 3 is done; the output appears when the last part is (running: 2)" in capfd.readouterr().out
    assert not ground.out.exists()
    assert ground.part("2/3", capfd) == (0, "")
    assert ground.bytes() == ground.good


def test_a_part_after_the_commit_is_done(ground: Ground, capfd: Any) -> None:
    assert ground.part("1/2", capfd) == ground.part("2/2", capfd) == (0, "")
    for share in ("1/2", "2/2", "1/7"):
        assert run(["apply", str(ground.plans["a"]), "--part", share, "--json"]) == 0
        document = json.loads(capfd.readouterr().out)
        assert document["committed"] is True and document["already_committed"] is True
    assert ground.bytes() == ground.good and os.listdir(ground.place) == ["out"]
    assert ground.part("1/2", capfd, "b") == (5, "E0501"), "another plan's output"
    shutil.rmtree(ground.out)
    assert run(["apply", str(ground.plans["a"]), "-q"]) == 0
    capfd.readouterr()
    assert ground.part("1/2", capfd) == (5, "E0501"), "nothing says that a whole run's output is the plan's"


@pytest.mark.share(2)
def test_parts_that_end_at_once_are_committed_once(ground: Ground) -> None:
    """All parts begin at once and end as they may: whoever is last commits, nobody hangs."""
    command = [sys.executable, "-m", "ckpt_tool", "apply", str(ground.plans["a"]), "--json", "-q", "--no-fsync"]
    for _ in range(3):
        shares = [subprocess.Popen([*command, "--part", f"{i}/3"], stdout=subprocess.PIPE) for i in (1, 2, 3)]
        found = [json.loads(share.communicate(timeout=60)[0])["committed"] for share in shares]
        assert any(found) and [share.returncode for share in shares] == [0, 0, 0]
        assert ground.bytes() == ground.good and os.listdir(ground.place) == ["out"]
        shutil.rmtree(ground.out)


@pytest.mark.parametrize("share", [(), ("--part", "1/2"), ("--claim",)])
def test_a_dry_run_of_a_plan_writes_nothing(ground: Ground, capfd: Any, share: tuple[str, ...]) -> None:
    assert run(["apply", str(ground.plans["a"]), "--dry-run", *share]) == 0
    assert "nothing was written" in capfd.readouterr().out
    assert os.listdir(ground.place) == []
