"""A page of the guide for a terminal: Markdown as blocks, so that it is wrapped and its tables are aligned as all
results are.

What the guide uses is known here: headings, paragraphs, lists, tables, fenced blocks, **strong** words. Nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tool.report.page import Block, Column, Facts, Lines, Page, PageTable, Styled

_FENCE = "```"
_STRONG = re.compile(r"\*\*(.+?)\*\*")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def page_of(document: Mapping[str, Any]) -> Page:
    """The page of `commands.help.help_on`'s document."""
    if "topics" in document:
        rows = tuple((topic["topic"], Styled(topic["title"], "plain")) for topic in document["topics"])
        return Page(
            "ckpt help", (Facts(rows), Lines("", ("ckpt help TOPIC shows a page; ckpt VERB --help the options",)))
        )
    return Page(f"ckpt help {document['topic']}", tuple(_blocks(str(document["text"]).splitlines())))


def _blocks(lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        line = lines[number]
        if not line.strip():
            number += 1
        elif line.startswith("#"):
            yield Lines(line.lstrip("# "), ())
            number += 1
        elif line.startswith(_FENCE):
            end = lines.index(_FENCE, number + 1)
            yield Lines("", tuple(Styled(each, "name") for each in lines[number + 1 : end]))
            number = end + 1
        elif line.startswith("|"):
            end = next((i for i in range(number, len(lines)) if not lines[i].startswith("|")), len(lines))
            head, _, *rows = [_cells(each) for each in lines[number:end]]
            if len(head) == 2:
                yield Facts(((head[0], Styled(head[1], "dim")), *((name, text) for name, text in rows)))
            else:
                yield PageTable("", tuple(map(Column, head)), tuple(tuple(row) for row in rows))
            number = end
        else:
            paragraph, number = _paragraph(lines, number)
            yield Lines("", tuple(paragraph))


def _paragraph(lines: list[str], number: int) -> tuple[list[str], int]:
    """Sentences that follow one another, joined; each item of a list is a line of its own. And where it ends."""
    parts: list[str] = []
    while number < len(lines) and lines[number].strip() and not lines[number].startswith(("#", "|", _FENCE)):
        text = _plain(lines[number].strip())
        if not parts or text.startswith("- "):
            parts.append(text)
        else:
            parts[-1] += f" {text}" if parts[-1][-1].isascii() or text[0].isascii() else text
        number += 1
    return parts, number


def _cells(row: str) -> list[str]:
    return [_plain(cell.strip().replace(r"\|", "|")) for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def _plain(text: str) -> str:
    return _LINK.sub(r"\1", _STRONG.sub(r"\1", text))
