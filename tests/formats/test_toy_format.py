"""A system is one folder: `template_system`, put as `systems/toy` into a copy of the tool, and nothing else changed.

There its format is detected, read, written and listed, its dialects, its option and its pass are found, it keeps the
laws of the house and passes what every format must. Its fixture is a checkpoint of PyTorch's, written as `toy`, with
that checkpoint's truth from the live run beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_house

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "tests/formats/template_system"
SOURCE = ROOT / "fixtures/dcp/fsdp2_dp4"
READMES = ["README.md", "README_zh.md"]  # they have other tables that are derived
TABLES = ["ckpt_tool/guide/en/formats.md", "ckpt_tool/guide/zh/formats.md"]
TESTS = [
    "conftest.py",
    "syntax.py",
    "tiers.py",
    "derive_tables.py",
    "families/bridge_open.py",
    "formats/test_conformance.py",
]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """The tool with the format in it, the tests of every format, and all fixtures."""
    house = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "ckpt_tool", house / "ckpt_tool", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TEMPLATE, house / "ckpt_tool/systems/toy", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["pyproject.toml", *READMES, *(f"tests/{name}" for name in TESTS)]:
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, house / name)
    (house / "fixtures/toy").mkdir(parents=True)
    for folder in (ROOT / "fixtures").iterdir():
        (house / "fixtures" / folder.name).symlink_to(folder)
    shutil.copy2(f"{SOURCE}.truth.safetensors", house / "fixtures/toy/fsdp2.truth.safetensors")
    ckpt(house, "convert", SOURCE, "fixtures/toy/fsdp2", "--to", "toy")
    return house


def python(house, *words, **variables):
    """A run of Python in the house: (exit code, what it printed)."""
    environment = {**os.environ, "PYTHONPATH": str(house), **variables}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def ckpt(house, *words):
    code, text = python(house, "-m", "ckpt_tool", *words)
    assert code == 0, text
    return text


def test_it_is_written_detected_and_read(house):
    toy = house / "fixtures/toy/fsdp2"
    assert sorted(path.name for path in toy.iterdir()) == ["rank-0.toy", "rank-1.toy"]
    found = json.loads(ckpt(house, "inspect", toy, "--json"))
    assert found["format"] == "toy" and found["mesh"] == {"tp": 2}
    assert json.loads(ckpt(house, "verify", toy, "--json"))["ok"]
    assert json.loads(ckpt(house, "diff", SOURCE, toy, "--json"))["equal"]
    for source, name in ((SOURCE, "direct"), (toy, "back")):
        ckpt(house, "convert", source, f"{name}.safetensors", "--to", "safetensors", "--state", "model")
    assert (house / "direct.safetensors").read_bytes() == (house / "back.safetensors").read_bytes()


def test_it_is_listed_wherever_formats_are(house):
    assert "orbax, toy" in " ".join(ckpt(house, "convert", "--help").replace("│", " ").split())
    line = {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": "ckpt convert --to to", "COMP_CWORD": "3"}
    assert python(house, "-m", "ckpt_tool", **line)[1].split() == ["torch", "toy"]
    code, diff = python(house, "tests/derive_tables.py", "--check")
    assert code == 1 and diff.count("+| `toy` |") == 4
    stub = "ckpt_tool/__init__.pyi"  # the options' help lists the formats
    assert sorted(python(house, "tests/derive_tables.py")[1].split()[1::2]) == sorted([*TABLES, stub])
    assert python(house, "tests/derive_tables.py", "--check") == (0, "")
    assert all("| `toy` |" in (house / name).read_text(encoding="utf-8") for name in TABLES)


def test_its_option_and_its_pass_are_found(house):
    for verb in ("convert", "reshard"):
        assert "--toy-comment" in ckpt(house, verb, "--help")
    line = {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": "ckpt convert --toy", "COMP_CWORD": "2"}
    assert python(house, "-m", "ckpt_tool", **line)[1].split() == ["--toy-comment"]
    ckpt(house, "convert", SOURCE, "noted", "--to", "toy", "--toy-comment", "a run of May")
    assert json.loads(ckpt(house, "inspect", "noted", "--json"))["extras"]["comment"] == "a run of May"
    code, text = python(house, "-m", "ckpt_tool", "convert", SOURCE, "x", "--to", "dcp", "--toy-comment", "no")
    assert code == 2 and "it belongs to toy" in text


def test_its_dialects_are_listed(house):
    for verb in ("convert", "diff"):
        text = " ".join(ckpt(house, verb, "--help").replace("│", " ").split())
        assert "gemma, megatron-swift, maxtext-unscanned, torchtune-0.6, toy, toy-short, keep" in text
    code, text = python(house, "-m", "ckpt_tool", "convert", SOURCE, "x", "--to", "safetensors", "--dialect", "toy")
    assert code != 0 and "Traceback" not in text


def test_it_keeps_the_laws_of_the_house():
    files = {
        f"systems/toy/{path.relative_to(TEMPLATE).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(TEMPLATE.rglob("*.py"))
    }
    assert not test_house.misplaced(files)
    for file, source in files.items():
        assert not test_house.faults_of(file, source, {**test_house.MODULES, **files})
        assert not test_house.formats_named(file, source, {**test_house.formats_by_folder(), "toy": "systems/toy"})


@pytest.mark.first
def test_it_passes_what_every_format_must(house):
    tests = ("tests/formats/test_conformance.py", "-k", "toy")
    code, text = python(house, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests)
    assert code == 0 and int(text.rpartition(" passed")[0].split()[-1]) > 5, text[-5000:]
