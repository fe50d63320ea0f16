"""`ckpt explain` as a page: one code with its reasons, or all codes under their exit codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tool.report.page import Block, Facts, Lines, Page, Styled

# What each exit code means, in the order of the list.
EXITS: dict[int | None, str] = {
    1: "findings",
    2: "usage",
    3: "the input is malformed, incomplete or of an unknown format",
    4: "refused for safety",
    5: "the output exists or is locked",
    6: "source or plan changed",
    7: "I/O, space, permissions",
    70: "a bug of ours",
    130: "interrupted",
    143: "interrupted",
    None: "that of the command that failed",
}
NOTE = "Note"  # the class of codes that never change an exit code
NOTES = "notes: no error, the exit code stays what it is"


def explanation(document: Mapping[str, Any]) -> Page:
    """The page of `commands.explain`."""
    if "codes" in document:
        return Page("ckpt explain", tuple(_list_blocks(document)))
    number = document["exit_code"]
    exit_code = f"{number}, {EXITS[number]}" if number is not None else EXITS[None]
    if document["class"] == NOTE:
        exit_code = "unchanged: a note is no error"
    rows = (
        (document["code"], Styled(document["title"], "strong")),
        ("exit code", exit_code),
        ("why", document["why"]),
        ("what to do", document["what_to_do"]),
    )
    return Page(f"ckpt explain {document['code']}", (Facts(rows),))


def _list_blocks(document: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    errors = [row for row in document["codes"] if row["class"] != NOTE]
    for number, meaning in EXITS.items():
        lines = _lines_of(row for row in errors if row["exit_code"] == number)
        if lines:
            blocks.append(
                Lines(f"exit code {number}: {meaning}" if number is not None else f"exit code: {meaning}", lines)
            )
    notes = _lines_of(row for row in document["codes"] if row["class"] == NOTE)
    if notes:
        blocks.append(Lines(NOTES, notes))
    return blocks


def _lines_of(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each code: the code and its title."""
    return tuple(f"{row['code']}  {row['title']}" for row in rows)
