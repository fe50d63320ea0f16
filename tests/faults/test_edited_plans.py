"""Plan files that somebody edited: with the old seal they are refused as edited; with a new one they are refused for
what is wrong with them, or do something that a plan may do, inside their output. Never a crash, never a byte beside it.

The seal is no secret. What an edit with a new seal may do is read other bytes of the sources and write other heads:
that is another plan, and a good one as far as anybody can tell. Everything else is found (`tests/plan/test_checking.py`
says what, kind by kind).
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.plan.saved import sealed

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLANS = {
    "strided": ("safetensors/llama_one_file", ["--to", "sharded", "--tp", "2", "--pp", "2"]),
    "padded": ("dcp/fsdp2_dp4", ["--to", "sharded", "--dp", "3", "--on-indivisible", "pad"]),
    "cast": ("sharded/llama_tp4_pp2", ["--to", "safetensors", "--dtype", "bf16", "--dialect", "keep"]),
    "checksums": ("torch/training.pt", ["--to", "dcp", "--dp", "2"]),
    "side files": ("convert/llama/hf", ["--to", "paddle-unified"]),
    "replicas": ("dcp/hsdp_2x2", ["--to", "torch"]),
}
EDITS = 100  # a plan
SHARES = 5
Places = list[tuple[Any, Any]]


class Ground:
    """One plan with its output, and a place where edited ones are carried out, with victims around it."""

    def __init__(self, root: Path, source: Path, options: list[str]) -> None:
        self.root = root
        self.place = root / "a" / "place"
        self.place.mkdir(parents=True)
        self.source = root / "source"
        if source.is_dir():
            shutil.copytree(source, self.source)
        else:
            shutil.copy(source, self.source)
        self.out = self.place / "out"
        plan = root / "plan.json"
        assert run(["convert", str(self.source), str(self.out), *options, "--plan", str(plan), "-q"]) == 0
        self.document = json.loads(plan.read_text())
        assert run(["apply", str(plan), "-q"]) == 0
        self.good = self._bytes()
        shutil.rmtree(self.out)
        for folder in (root, root / "a", self.place):
            (folder / "victim").write_bytes(b"precious")
        self.before = self._around()

    def _bytes(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.out)): path.read_bytes() for path in self.out.rglob("*") if path.is_file()}

    def _around(self) -> dict[str, Any]:
        found = {}
        for path in [*self.root.rglob("*")]:
            if path != self.root / "edited.json" and self.out not in (path, *path.parents):
                found[str(path)] = (path.lstat().st_mode, path.read_bytes() if path.is_file() else None)
        return found

    def apply(self, document: Any) -> tuple[int, str]:
        """(exit code, what stderr says), with "" for an output as the untouched plan makes it."""
        file = self.root / "edited.json"
        file.write_text(json.dumps(document))
        status = run(["apply", str(file), "-q", "--json"])
        assert self._around() == self.before, "something beside the output was touched, or left"
        assert self.out.exists() == (status == 0), (status, os.listdir(self.place))
        if status:
            return status, "refused"
        same = self._bytes() == self.good
        shutil.rmtree(self.out)
        return status, "" if same else "another output"


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ground]:
    return {}


@pytest.fixture(params=list(PLANS))
def ground(request: pytest.FixtureRequest, grounds: dict[str, Ground], tmp_path_factory: Any) -> Iterator[Ground]:
    name = request.param
    if name not in grounds:
        source, options = PLANS[name]
        grounds[name] = Ground(tmp_path_factory.mktemp("plan"), FIXTURES / source, options)
    yield grounds[name]


def places(value: Any) -> Places:
    """Every (container, key) of a document, but for its seal and version."""
    found: Places = []
    todo = [value]
    while todo:
        at = todo.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at))
        for key in keys:
            if at is value and key in ("seal", "plan_version"):
                continue
            found.append((at, key))
            if isinstance(at[key], dict | list):
                todo.append(at[key])
    return found


def edited(document: Any, rng: random.Random, root: Path) -> tuple[Any, str]:
    """The document with one edit, and what it is."""
    made = copy.deepcopy(document)
    section = rng.choice(
        ["moves", "moves", "moves", "outputs", "outputs", "sources", "records", "options", "report", ""]
    )
    at, key = rng.choice(places(made[section]) or places(made)) if section else rng.choice(places(made))
    old = at[key]
    if isinstance(old, bool) or old is None:
        new = rng.choice([0, "x", [], {}])
    elif isinstance(old, int):
        new = rng.choice(
            [old + 1, old - 1, old * 2, 0, 1, -1, old + 4096, 1 << 40, 1 << 63, 10**30, str(old), float(old), None]
        )
    elif isinstance(old, str):
        new = rng.choice(["", "../victim", "../../victim", str(root / "victim"), "x\0y", 5, None, "\ud800"])
        if key != "destination":  # which is where the plan says that it writes
            new = rng.choice([new, old + "x", old[:-1]])
    elif isinstance(old, list) and old:
        how = rng.randrange(5)
        i = rng.randrange(len(old))
        j = rng.randrange(len(old))
        new = list(old)
        if how == 0:
            del new[i]
        elif how == 1:
            new.append(copy.deepcopy(new[i]))
        elif how == 2:
            new[i], new[j] = new[j], new[i]
        elif how == 3:
            new[i] = copy.deepcopy(new[j])
        else:
            new = rng.choice([[], None, {}, "x"])
    else:
        new = rng.choice([None, [1], {"x": 1}, "x", 7])
    at[key] = new
    return made, f"{section}: {key!r}: {old!r:.60} -> {new!r:.60}"


@pytest.mark.share(SHARES)
@pytest.mark.parametrize("share", range(SHARES))
def test_an_edited_plan_is_refused(ground: Ground, share: int) -> None:
    for seed in range(share, EDITS, SHARES):
        document, what = edited(ground.document, random.Random(seed), ground.root)
        status, found = ground.apply(document)
        same = json.dumps(document, sort_keys=True) == json.dumps(ground.document, sort_keys=True)
        assert (status, found) == ((0, "") if same else (6, "refused")), (seed, what, status)


@pytest.mark.share(3)
@pytest.mark.share(SHARES)
@pytest.mark.parametrize("share", range(SHARES))
def test_an_edited_plan_with_a_new_seal_stays_inside(ground: Ground, share: int, capfd: Any) -> None:
    for seed in range(share, EDITS, SHARES):
        document, what = edited(ground.document, random.Random(seed + 1000), ground.root)
        document.pop("seal")
        status, _ = ground.apply(sealed(document))
        said = capfd.readouterr().err
        assert status in (0, 3, 4, 5, 6, 7) and "Traceback" not in said, (seed, what, status, said[-500:])
        if status:
            error = json.loads(said.strip().splitlines()[-1])["error"]
            assert error["hint"], (what, error)
