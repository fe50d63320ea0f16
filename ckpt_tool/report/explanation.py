"""`ckpt explain` as a page: one code with its reasons, or all codes under their exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.report.page import Block, Facts, Lines, Page, Styled

# What each exit code stands for, in the order of the list.
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


def explanation(document: Mapping[str, Any]) -> Page:
    """The page of `commands.explain`."""
    if "codes" in document:
        return Page("ckpt explain", tuple(_listed(document)))
    number = document["exit_code"]
    rows = (
        (document["code"], Styled(document["title"], "strong")),
        ("exit code", f"{number}, {EXITS[number]}" if number is not None else EXITS[None]),
        ("why", document["why"]),
        ("what to do", document["what_to_do"]),
    )
    return Page(f"ckpt explain {document['code']}", (Facts(rows),))


def _listed(document: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for number, what in EXITS.items():
        lines = tuple(f"{row['code']}  {row['title']}" for row in document["codes"] if row["exit_code"] == number)
        if lines:
            blocks.append(Lines(f"exit code {number}: {what}" if number is not None else f"exit code: {what}", lines))
    return blocks
