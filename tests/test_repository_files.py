"""The files for people who use and change the repository: they parse, their commands exist, and what is stated twice
agrees."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_tool import __version__
from ckpt_tool.cli import run

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
TEXTS = [*GITHUB.glob("*.md"), *FORMS]
PLACEHOLDER = "https://repository.invalid/ckpt"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_a_form_needs(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    identifiers = [field["id"] for field in fields]
    assert fields and len(set(identifiers)) == len(identifiers)
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"].get("label") or field["attributes"].get("value")
    assert any("ckpt inspect SRC --json --anonymous" == field["attributes"]["label"] for field in fields)


def test_the_form_of_faults_asks_for_the_machine() -> None:
    labels = [field["attributes"].get("label") for field in read(GITHUB / "ISSUE_TEMPLATE/fault.yml")["body"]]
    assert "ckpt doctor --json" in labels


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_that_a_text_names_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"(?:`|label: )(ckpt [a-z][^`\n]*)", path.read_text())
    for command in commands:
        verb, *words = shlex.split(command)[1:]
        assert run([verb, "--help"]) == 0, command
        known = capsys.readouterr().out
        options = [word for word in words if word.startswith("--")]
        assert not [option for option in options if option not in known], command


def test_the_texts_name_commands_at_all() -> None:
    assert sum(path.read_text().count("ckpt doctor --json") for path in TEXTS) >= 3


def test_the_citation() -> None:
    citation = read(GITHUB / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert citation["cff-version"] == "1.2.0" and citation["authors"]
    assert citation["version"] == __version__


def test_the_changelog_has_the_version_and_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", __version__]
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_and_pins_its_actions(path: Path) -> None:
    workflow = read(path)
    assert workflow["jobs"] and workflow["permissions"] is not None
    for line in path.read_text().splitlines():
        action = re.search(r"uses: (\S+)", line)
        if action is not None and not action[1].startswith("./"):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action[1]) and re.search(r"# v\d", line), line


def test_a_release_needs_its_wheels_and_holds_no_token() -> None:
    text = (GITHUB / "workflows/release.yml").read_text()
    jobs = read(GITHUB / "workflows/release.yml")["jobs"]
    assert jobs["publish"]["needs"] == ["wheels", "sdist"]
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert "secrets." not in text and "password" not in text


def test_a_release_fills_in_the_address(tmp_path: Path) -> None:
    script = GITHUB / "workflows/project_urls.py"
    copy = tmp_path / ".github/workflows/project_urls.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(script.read_text())
    for name in ("pyproject.toml", "CHANGELOG.md", ".github/CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text())
        assert PLACEHOLDER in (ROOT / name).read_text()

    address = "https://code.example/team/ckpt"
    subprocess.run([sys.executable, str(copy), address], check=True, capture_output=True)
    for name in ("pyproject.toml", "CHANGELOG.md", ".github/CITATION.cff"):
        text = (tmp_path / name).read_text()
        assert "repository.invalid" not in text and address in text
    assert subprocess.run([sys.executable, str(copy), "team/ckpt"], capture_output=True).returncode != 0


def test_every_folder_of_tests_is_explained() -> None:
    text = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    table = text.partition("# Where a test is")[2].partition("# Tests that ask")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)/`", row)}
    assert explained == {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
