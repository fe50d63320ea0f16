"""The guide: Markdown pages, one a topic and language, shipped with the package and shown by `ckpt help TOPIC`.

A page is `guide/LANGUAGE/TOPIC.md` and begins with its title. Each file there is a page: `topics()` lists them,
and the tests hold both languages to the same topics, blocks and tables, and run every command. What it does not do:
draw (`report.guide`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
LANGUAGES = ("en", "zh")


class Topic(NamedTuple):
    name: str
    title: str


def topics(language: str = "en") -> list[Topic]:
    """Every topic with its title, in the order of names."""
    return [Topic(path.stem, _title(path)) for path in sorted((FOLDER / language).glob("*.md"))]


def text_of(topic: str, language: str = "en") -> str:
    """The page's Markdown. Raises KeyError for a topic that there is not."""
    path = FOLDER / language / f"{topic}.md"
    if topic not in {each.name for each in topics(language)}:
        raise KeyError(topic)
    return path.read_text(encoding="utf-8")


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()
