"""What users read is in plain words: messages, help, the error catalogue and the guide.

    WORDS                       expressions that this project once had of its own, and what to write in their place
    sentences_of(source)        what a user may see of a module: its strings of several words, no docstrings

At most 0.5 of these words per 1,000 lines are allowed, in each kind of text by itself. Comments and docstrings are for
developers and are not looked at. That the search sees anything at all is shown on planted texts below.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from syntax import nodes_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckpt_tool"
GUIDE = PACKAGE / "guide"
ALLOWED = 0.5  # of these words in 1,000 lines

# Expression -> what to write in its place.
WORDS: Mapping[str, str] = {
    r"lies?|lying|lay": "is, is stored in, is located at",
    r"told|tells?": "given, states, shows, reports",
    r"hangs?|hung": "depends on, belongs to",
    r"stands?|stood": "is, appears",
    r"nobody|somebody": "no one; the rank, the user, the process that is meant",
    r"beside": "next to, in addition to",
    r"anew": "again",
    r"sound": "complete, valid; audio",
    r"parted": "split, cut",
    r"road": "implementation, fallback",
    r"house": "package",
    r"held against": "compared with",
    r"comes to": "equals, amounts to",
    r"(?:is|are) of": "has, belongs to",
    r"whose are": "that belong to",
    r"one behind the other": "end to end, in a row",
    r"by (?:its|the|their) owner's word": "as requested",
    r"left behind|stays? behind|leaves? (?:[\w']+ ){0,4}behind": "left out, leave out",
    r"not asked for": "as requested",
}
CHINESE = {"完好": "完整、有效"}
PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(WORDS)})(?![\w-])", re.IGNORECASE)
HOLE = "{}"  # in place of a value in an f-string


def sentences_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string of a module that has several words and is no docstring."""
    nodes = nodes_of(source)
    bodies = [body for node in nodes if isinstance(body := getattr(node, "body", None), list)]
    statements = [statement for body in bodies for statement in body]
    skipped = {id(statement.value) for statement in statements if isinstance(statement, ast.Expr)}

    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(value) for value in node.values)
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", text)) > 1 and " " in text:
            yield node.lineno, text


def messages() -> Iterator[tuple[str, str]]:
    """(place, line of text) of all messages, notes, hints, headings and helps of options."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in sentences_of(path.read_text()):
            for row in text.splitlines():
                yield f"{path.relative_to(ROOT)}:{line}", row


def lines_of(*paths: Path) -> Iterator[tuple[str, str]]:
    """(place, line) of text files."""
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def find_words(lines: Iterable[tuple[str, str]]) -> tuple[list[str], int]:
    """Where a word of the list is, and how many lines there are."""
    places = []
    count = 0
    for place, line in lines:
        count += 1
        places += [f"{place}: {match[0]!r} in {line.strip()[:120]!r}" for match in PATTERN.finditer(line)]
    return places, count


TEXTS = {
    "messages and help": messages,
    "error catalogue": lambda: (row for row in lines_of(PACKAGE / "error_codes.toml") if not row[1].startswith("#")),
    "guide and README": lambda: lines_of(*sorted((GUIDE / "en").glob("*.md")), ROOT / "README.md"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_in_plain_words(kind: str) -> None:
    places, lines = find_words(TEXTS[kind]())
    assert lines > 1000, "the texts were not found"
    assert 1000 * len(places) / lines <= ALLOWED, "\n".join(places)


def test_chinese_pages_use_the_agreed_words() -> None:
    pages = lines_of(*sorted((GUIDE / "zh").glob("*.md")), ROOT / "README_zh.md")
    assert [place for place, line in pages for word in CHINESE if word in line] == []


PLANTED = '''"""The file lies in a docstring."""
def read(path, names):
    """And beside it."""
    # nobody reads this
    raise ValueError(f"{names.beside} of {path} lie here", "lies", hint="write it " "anew")
'''


def test_the_search_sees_messages_and_no_docstrings() -> None:
    rows = [(str(line), text) for line, text in sentences_of(PLANTED)]
    assert rows == [("5", "{} of {} lie here"), ("5", "write it anew")]
    places, count = find_words(rows)
    assert count == 2 and [place.split(": ")[1].split(" in ")[0] for place in places] == ["'lie'", "'anew'"]


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("--drop optimizer leaves the optimizer's states behind", False),
        ("the values are laid out in another order", True),
        ("a link whose target is outside", True),
        ("what the trainer wrote beside", False),
        ("a re-sound-ing name", True),
    ],
)
def test_which_texts_are_plain(text: str, is_plain: bool) -> None:
    assert (find_words([("here", text)])[0] == []) == is_plain
