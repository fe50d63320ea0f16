"""Every command of the guide's recipes runs as it is shown, and prints what is shown.

It is typed in a folder in which the words in capitals (`SRC`, `BASE`, ...) are copies of what `sources.RECIPES` says
for the heading. What a page shows of an output is chosen by `sources.SHOWN` and compared with the real one; to write it
into the pages:

    CKPT_RECORD=1 python -m pytest -n0 tests/guide/test_recipes.py
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from recipe_pages import PAGES, Recipe, commands_of, read_recipes, shown_lines, write_output
from sources import DEFAULT, RECIPES, ROOT, SHOWN, Sources

from ckpt_tool import guide
from ckpt_tool.cli import run

ALL = [(page, number, recipe) for page in PAGES for number, recipe in enumerate(read_recipes(page))]
IN_STORES = [case for case in ALL if "s3://" in case[2].command]
LOCAL = [case for case in ALL if case not in IN_STORES]
BUCKET = "bucket"
FINDINGS = ("ckpt diff", "ckpt verify")  # exit code 1 is what these are shown for


def slug(case: tuple[str, int, Recipe]) -> str:
    return re.sub(r"\W+", "-", case[2].heading.lower()).strip("-")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name always has the same, small length: outputs are wrapped at the same places everywhere."""
    folder = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("case", LOCAL, ids=slug)
def test_a_recipe_prints_what_it_shows(case, sources, short_folder, monkeypatch):
    _follow(case, sources, short_folder, monkeypatch)


@pytest.mark.parametrize("case", IN_STORES, ids=slug)
def test_a_recipe_of_a_store_prints_what_it_shows(case, sources, short_folder, monkeypatch, bucket):
    if "s3://BUCKET/SRC" in case[2].command:
        for file in sources.hub.iterdir():
            bucket.upload_file(str(file), BUCKET, f"SRC/{file.name}")
    _follow(case, sources, short_folder, monkeypatch)


def test_every_recipe_has_its_sources():
    headings = [recipe.heading for _, _, recipe in ALL]
    assert sorted(headings) == sorted(RECIPES)
    assert len(headings) == len(set(headings))


def test_the_pages_answer_at_least_thirty_questions():
    assert sum(recipe.heading.startswith("How do I ") for recipe in read_recipes("recipes")) >= 30


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_recipes(page):
    """Comments are translated; commands and outputs are the same."""
    english, chinese = (read_recipes(page, language) for language in guide.LANGUAGES)
    for one, other in zip(english, chinese, strict=True):
        assert (one.kind, one.output) == (other.kind, other.output), one.heading
        assert commands_of(one.command) == commands_of(other.command), one.heading
        assert one.command.count("#") == other.command.count("#"), one.heading


@pytest.mark.parametrize("page", PAGES)
def test_a_recipe_is_short_and_has_no_path_of_a_fixture(page):
    for recipe in read_recipes(page):
        assert "fixtures" not in recipe.command and "--force" not in recipe.command, recipe.heading
        assert 0 < len(recipe.sentence.splitlines()) <= 3, recipe.heading
        assert recipe.output.count("\n") <= 20, recipe.heading


def _follow(case: tuple[str, int, Recipe], sources: Sources, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the recipe, and compare or record what it prints."""
    page, number, recipe = case
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "110")
    sources.put(RECIPES[recipe.heading], folder)
    printed = _run(recipe).replace(f"{folder}/", "")

    patterns = SHOWN.get(recipe.heading, ("",) if recipe.kind == "py" else DEFAULT)
    shown = shown_lines(printed, patterns)
    if os.environ.get("CKPT_RECORD"):
        write_output(page, number, shown)
    else:
        assert recipe.output == shown, "CKPT_RECORD=1 writes what is printed"


def _run(recipe: Recipe) -> str:
    if recipe.kind == "py":
        command = [sys.executable, "-c", recipe.command]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = io.StringIO()
    errors = io.StringIO()
    for line in commands_of(recipe.command):
        program, *arguments = shlex.split(line.replace("s3://BUCKET", f"s3://{BUCKET}"), comments=True)
        assert program == "ckpt", line
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = run(arguments)
        assert code == 0 or (code == 1 and line.startswith(FINDINGS)), f"{line}\n{errors.getvalue()}"
    return printed.getvalue().replace(f"s3://{BUCKET}", "s3://BUCKET")
