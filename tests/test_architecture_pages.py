"""The architecture page and the decisions: short, and of files and symbols that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckpt_tool"
ARCHITECTURE = PACKAGE / "ARCHITECTURE.md"
DECISIONS = sorted((PACKAGE / "decisions").glob("*.md"))
MOST_LINES = 250  # of the architecture page
MOST_OF_A_DECISION = 12  # lines
LONGER = 17  # decisions that are longer; may only become fewer
# `storage/links.py`, `formats/hub_folder/`, `megatron/chains.py`: with a folder, so that a file of a checkpoint is none
NAMED = re.compile(r"`((?:[a-z_]+/)+(?:[A-Za-z_]+\.(?:py|toml|c|cu|h|md|sh))?)`")
PLACES = (
    ROOT,
    PACKAGE,
    PACKAGE / "systems",
    PACKAGE / "systems/paddle",
    PACKAGE / "systems/megatron",
    PACKAGE / "formats",
)


def missing_paths(text: str) -> Iterator[str]:
    """Paths in backticks that lie nowhere: below the repository, the package, or a package that a page is about."""
    for name in NAMED.findall(text):
        first = name.split("/")[0]
        is_ours = any((place / first).is_dir() for place in PLACES)
        if is_ours and not any((place / name).exists() for place in PLACES):
            yield name


def decisions_of(text: str) -> list[str]:
    """The decisions of a page, each from its bold sentence on."""
    return [each.strip() for each in re.split(r"(?m)^(?=\*\*)", text)[1:]]


def test_the_architecture_page_is_short() -> None:
    assert 50 < len(ARCHITECTURE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", [ARCHITECTURE, *DECISIONS], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert not list(missing_paths(page.read_text(encoding="utf-8")))


def test_a_file_that_is_not_there_is_seen() -> None:
    assert list(missing_paths("see `storage/links.py`, `storage/nowhere.py`, `step_7/model.py`")) == [
        "storage/nowhere.py"
    ]


def test_every_function_of_the_walk_exists() -> None:
    """`path.py` (`name`) on the architecture page: the file defines the name."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`\s+\(`(\w+)`\)", text)
    assert len(named) > 8
    for file, name in named:
        assert re.search(rf"(?m)^(?:def|class) {name}\b", (PACKAGE / file).read_text(encoding="utf-8")), (file, name)


def test_few_decisions_are_long() -> None:
    long = [
        f"{page.name}: {decision.splitlines()[0]}"
        for page in DECISIONS
        for decision in decisions_of(page.read_text(encoding="utf-8"))
        if len(decision.splitlines()) > MOST_OF_A_DECISION
    ]
    assert len(long) <= LONGER, "\n".join(long)


def test_the_index_lists_every_page_and_counts_its_decisions() -> None:
    index = (PACKAGE / "decisions/README.md").read_text(encoding="utf-8")
    listed = {name: int(count) for name, count in re.findall(r"\]\((\w+\.md)\) \|[^|]*\| (\d+) \|", index)}
    counted = {page.name: len(decisions_of(page.read_text(encoding="utf-8"))) for page in DECISIONS}
    counted.pop("README.md")
    assert listed == counted
