"""The tiers of the tests: cases are picked by their names, and the quick tier covers every room without torch."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

import tiers

NAMES = [f"tests/formats/test_x.py::test_{test}[{case}-{case % 7}]" for test in "ab" for case in range(40)]


@pytest.mark.parametrize("one_of", [1, 2, 3, 7, 100])
def test_of_each_test_as_many_cases_as_wanted(one_of: int) -> None:
    taken = tiers.chosen(((name, name) for name in NAMES), one_of)
    for test in "ab":
        assert sum(f"test_{test}[" in name for name in taken) == -(-40 // one_of)


def test_neither_order_nor_file_nor_folder_decides() -> None:
    taken = set(tiers.chosen(((name, name) for name in NAMES), 4))
    shuffled = random.Random(1).sample(NAMES, len(NAMES))
    assert set(tiers.chosen(((name, name) for name in shuffled), 4)) == taken
    moved = {name: name.replace("formats/test_x", "containers/test_y") for name in NAMES}
    assert set(tiers.chosen(((moved[name], name) for name in NAMES), 4)) == taken


def test_of_each_file_as_many_tests_as_wanted() -> None:
    files = [f"tests/test_{file}.py::test_{test}" for file in "ab" for test in range(10)]
    taken = tiers.chosen(((name, name) for name in files), 3, like="::")
    assert [sum(f"test_{file}.py" in name for name in taken) for file in "ab"] == [4, 4]


def test_each_test_has_its_own_choice() -> None:
    taken = tiers.chosen(((name, name) for name in NAMES), 4)
    a, b = ({name.partition("[")[2] for name in taken if f"test_{test}[" in name} for test in "ab")
    assert a != b


def test_a_test_without_cases_is_taken() -> None:
    assert tiers.chosen([("tests/test_x.py::test_a", 1), ("tests/test_x.py::TestB::test_a", 2)], 5) == [1, 2]


MODULES = {
    "import os\nimport numpy as np\nfrom ckpt_tool.core import box\n": (),
    "import torch\n": ("",),
    "from safetensors.torch import load_file\n": ("",),
    "from ckpt_tool.harness import roundtrip\n": ("",),
    "import pytest\ntransformers = pytest.importorskip('transformers')\n": ("",),
    "import peer_reads\n": ("",),  # a helper that imports torch
    "def test_a():\n    import torch\ndef test_b():\n    pass\n": ("test_a",),
    "def test_a():\n    torch = pytest.importorskip('torch')\n": (),  # skipped without
    "def made():\n    import torch\ndef use():\n    return made()\ndef test_a(use):\n    pass\n": (
        "made",
        "test_a",
        "use",
    ),
}


@pytest.mark.parametrize("source", MODULES)
def test_what_needs_more_is_seen(source: str, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(source)
    assert sorted(tiers.needing_more(tmp_path / "test_x.py")) == sorted(MODULES[source])


def test_the_quick_tier_covers_every_room() -> None:
    files = [
        path for path in tiers.TESTS.rglob("test_*.py") if all(map(tiers.is_quick_module, (path, *path.parents[:1])))
    ]
    folders = {path.relative_to(tiers.TESTS).parts[0] for path in files}
    there = {path.name for path in tiers.TESTS.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    extras = {"signing"}  # every module of it needs a package that is an extra
    assert (
        folders >= there - tiers.SLOW_PLACES - extras and {"test_cli.py", "test_house.py", "test_hostile.py"} <= folders
    )
    assert {"core", "algebra", "storage", "plan", "formats", "families", "commands", "run", "report"} <= folders


NIGHTLY = tiers.TESTS.parent / ".github" / "workflows" / "nightly.yml"


@pytest.mark.skipif(not NIGHTLY.is_file(), reason="the workflows are in the repository alone (.github)")
def test_every_night_runs_the_commands_of_the_readme() -> None:
    readme = (tiers.TESTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `(python -m pytest[^`]*)` \|", readme, re.MULTILINE)
    commands = dict(rows)
    assert list(commands) == ["quick", "default", "slow", "crash", "peers"]

    nightly = NIGHTLY.read_text(encoding="utf-8")
    run = re.findall(r"^ +(?:- run: )?(python -m pytest.*)$", nightly, re.MULTILINE)
    assert run == [commands[tier] for tier in ("slow", "crash", "peers")]
