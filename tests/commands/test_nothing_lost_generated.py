"""Whatever a person keeps in a checkpoint of any format, next to its steps or beside it, is there after any verb.

Each seed makes a place: a checkpoint of some format as an output, as the steps of a run, or none, and a thing or two
that a person keeps there (`kept_things`). Verbs that write or remove run on it, and what they may not touch must be as
it was. CKPT_TEST_SEEDS=A-B runs those seeds.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kept_things import EMPTY, keep_something
from test_nothing_lost import SOURCE, checkpoints, lay, plan_and_deltas, verbs

from ckpt_tool.cli import run
from ckpt_tool.formats import registry

STEP_NAMES = ("checkpoint-{}", "global_step{}", "iter_{:07d}", "step_{}", "{}")


def look(folder: Path) -> dict[str, Any]:
    """Every path below with its kind, its mode, and its bytes or where it links to."""
    found: dict[str, Any] = {}
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(above, name)
            info = os.lstat(path)
            what: Any = ""
            if stat.S_ISLNK(info.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                what = Path(path).read_bytes()
            found[os.path.relpath(path, folder)] = (stat.filemode(info.st_mode), what)
    return found


class Game:
    """A place on which seeds are played, one after the other."""

    def __init__(self, root: Path, capfd: Any) -> None:
        self.place = root / "place"
        self.place.mkdir()
        self._elsewhere = root / "elsewhere"
        self._capfd = capfd
        plan_and_deltas(self.place)
        self.counts = Counter[str]()

    def play(self, seed: int) -> None:
        rng = Random(seed)
        shutil.rmtree(self.place)
        shutil.rmtree(self._elsewhere, ignore_errors=True)
        self.place.mkdir()
        self._elsewhere.mkdir()
        name = rng.choice(registry.NAMES)
        checkpoint = rng.choice(checkpoints(name)[:4])
        kind: Callable[[Random, Path, str], None] = rng.choice((self._in_output, self._in_run, self._beside))
        kind(rng, checkpoint, f"seed {seed}, {name}, {checkpoint.name}")

    def _run(self, line: list[str]) -> tuple[int, str]:
        status = run([*line, "-q"])
        shown = self._capfd.readouterr()
        self.counts[f"{line[0]} ends with {status}"] += 1
        assert status in range(8), (line, shown)
        return status, shown.err

    def _keep(self, folder: Path, rng: Random) -> str:
        own = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        return keep_something(folder, rng, own or ["model.safetensors"], SOURCE, self._elsewhere)

    def _in_output(self, rng: Random, checkpoint: Path, what: str) -> None:
        """Something in a checkpoint: no verb writes over it, whatever it is asked."""
        out = self.place / "out"
        lay(checkpoint, out)
        what = f"{what}, {self._keep(out, rng)}"
        before = look(self.place), look(self._elsewhere)
        for line in rng.sample(verbs(self.place), 4):
            status, error = self._run(line)
            assert (look(self.place), look(self._elsewhere)) == before, (what, line, status, error)

    def _in_run(self, rng: Random, checkpoint: Path, what: str) -> None:
        """Something in steps and next to them: these steps stay, and others are whole or gone."""
        folder = self.place / "out"
        names = [rng.choice(STEP_NAMES).format(number) for number in (100, 200, 300, 400, 500)]
        for name in names:
            lay(checkpoint, folder / name)
        if rng.random() < 0.5:  # a broken step is known by the names in it alone
            name = rng.choice(names[:-1])
            files = [path for path in sorted((folder / name).rglob("*")) if path.is_file()]
            file = rng.choice(files)
            os.truncate(file, file.stat().st_size // 2)
            what = f"{what}, {name}/{file.name} is cut"
        held = set[str]()
        for _ in range(rng.choice((1, 1, 2))):
            name = rng.choice(names)
            thing = self._keep(folder / name, rng)
            what = f"{what}, {name}/{thing}"
            if not thing.startswith(EMPTY):  # jobs make such folders too, and nothing is in it
                held.add(name)
        if rng.random() < 0.5:
            what = f"{what}, {self._keep(folder, rng)}"
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (time.time() - 10**6,) * 2, follow_symlinks=False)

        before = look(folder)
        last = str(rng.choice((1, 2)))
        lines = [["prune", str(folder), "--keep-last", last], ["clean", str(folder), "--remove"]]
        lines += [["prune", str(folder), "--keep-last", last, "--keep-every", "200", "--skip-unreadable"]]
        for line in rng.sample(lines, 3):
            status, error = self._run(line)
            after = look(folder)
            gone = {path for path in before if path not in after}
            steps_gone = {path for path in gone if path in names}
            self.counts["steps gone"] += len(steps_gone)
            assert after.items() <= before.items(), (what, line, status, error)
            assert not steps_gone & held, (what, line, status, error)
            assert {path.partition("/")[0] for path in gone} == steps_gone, (what, line, status, error)

    def _beside(self, rng: Random, checkpoint: Path, what: str) -> None:
        """Something beside an output that is made, and beside a source that is read."""
        lay(checkpoint, self.place / "another")
        for _ in range(3):
            what = f"{what}, {self._keep(self.place, rng)}"
        writing = [line for line in verbs(self.place) if line[0] not in ("prune", "clean")]
        writing += [["convert", str(self.place / "another"), str(self.place / "out"), "--to", "sharded"]]
        before = look(self.place)
        for line in rng.sample(writing, 3):
            status, error = self._run(line)
            after = {path: row for path, row in look(self.place).items() if not f"{path}/".startswith("out/")}
            after = {path: row for path, row in after.items() if not path.startswith(".out.ckpt-partial")}
            kept = {path: row for path, row in before.items() if not path.startswith(".out.ckpt-partial")}
            assert after == kept, (what, line, status, error)
            self._run(["clean", str(self.place), "--remove"])
            shutil.rmtree(self.place / "out", ignore_errors=True)
            there = look(self.place)
            assert all(there.get(path) == row for path, row in before.items()), (what, "clean after", line)


@pytest.fixture
def game(tmp_path: Path, capfd: Any) -> Game:
    return Game(tmp_path, capfd)


def play_all(game: Game, seeds: range) -> None:
    failures = []
    for seed in seeds:
        try:
            game.play(seed)
        except AssertionError as e:
            failures.append(str(e)[:2000])
    print(dict(sorted(game.counts.items())))
    assert not failures, f"{len(failures)} of {len(seeds)}:\n" + "\n".join(failures[:20])


def test_some_seeds(game: Game) -> None:
    play_all(game, range(3))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_seeds(game: Game) -> None:
    first, _, last = os.environ.get("CKPT_TEST_SEEDS", "0-200").partition("-")
    play_all(game, range(int(first), int(last)))
