"""The guide's pages of recipes as data: a heading, a command, what it prints.

A recipe is a section `## Heading` with one block of `sh` or `py`. A block of `console` after it shows lines of the
output; `CKPT_RECORD=1 python -m pytest -n0 tests/guide/test_recipes.py` writes them into the pages of both languages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ckpt_tool import guide

PAGES = ("recipes", "verify", "python")
_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.S | re.M)
_COMMAND = re.compile(r"^```(sh|py)\n(.*?)^```\n", re.S | re.M)
_OUTPUT = re.compile(r"\n```console\n(.*?)^```\n", re.S | re.M)


class Recipe(NamedTuple):
    page: str
    heading: str
    sentence: str
    kind: str  # sh or py
    command: str
    output: str  # "" where the page shows none


def read_recipes(page: str, language: str = "en") -> list[Recipe]:
    """The recipes of a page, in its order."""
    recipes = []
    for heading, body in _SECTION.findall(guide.text_of(page, language)):
        command = _COMMAND.search(body)
        if command is None:
            continue
        output = _OUTPUT.search(body)
        sentence = body[: command.start()].strip()
        recipes.append(Recipe(page, heading, sentence, command[1], command[2], output[1] if output else ""))
    return recipes


def slug_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def write_output(page: str, number: int, output: str) -> None:
    """Put what a recipe printed below its command, in every language. number: which of the page's recipes it is."""
    for language in guide.LANGUAGES:
        file = Path(guide.__file__).parent / language / f"{page}.md"
        text = file.read_text(encoding="utf-8")
        command = list(_COMMAND.finditer(text))[number]
        rest = text[command.end() :]
        shown = _OUTPUT.match(rest)
        if shown is not None:
            rest = rest[shown.end() :]
        block = f"\n```console\n{output}```\n" if output else ""
        file.write_text(text[: command.end()] + block + rest, encoding="utf-8")


def commands_of(text: str) -> list[str]:
    """The lines of a block without its comments; a line that ends with a backslash goes on in the next."""
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def shown_lines(output: str, patterns: Iterable[str]) -> str:
    """The lines of an output that fit any of the patterns, and `...` for what is left out. Times are of no machine."""
    output = re.sub(r" in \d[\d.]* (ms|s|min)\b( \([^)]*/s\))?", " in 0.1 s", output)

    lines: list[str] = []
    for line in output.splitlines():
        if any(re.search(pattern, line) for pattern in patterns):
            lines.append(line.rstrip())
        elif line.strip() and (not lines or lines[-1] != "..."):
            lines.append("...")
    if lines and lines[-1] == "...":
        lines.pop()
    return "".join(f"{line}\n" for line in lines).strip("\n") + "\n" if lines else ""
