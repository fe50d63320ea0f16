"""`ckpt status` for people: a row for every part, and in the last line what is to be waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.report.page import Block, Cell, Column, Page, PageTable, Style, Styled, Verdict
from ckpt_tool.report.text import duration, plural, ranges, size

_STYLES: Mapping[str, Style] = {"done": "good", "running": "strong", "dead": "bad"}


def status(document: Mapping[str, Any]) -> Page:
    blocks: list[Block] = []
    parts = document["parts"]
    if parts:
        columns = (
            Column("part"),
            Column("state"),
            Column("written", right=True),
            Column("of", right=True),
            Column("a second", right=True, drop=2),
            Column("left", right=True, drop=1),
            Column("process", drop=3),
        )
        blocks.append(PageTable("", columns, tuple(_row(part) for part in parts)))
    return Page("ckpt status", (*blocks, Verdict(*_verdict(document))))


def _row(part: Mapping[str, Any]) -> tuple[Cell, ...]:
    number = part["part"]
    speed = part["bytes_per_s"]
    seconds_left = part["seconds_left"]
    whose = "a worker" if part.get("worker") else "the whole"
    if number:
        whose = f"{number[0]}/{number[1]}"
    return (
        whose,
        Styled(part["state"], _STYLES.get(part["state"], "plain")),
        size(part["bytes"]),
        size(part["of_bytes"]),
        f"{size(speed)}/s" if speed else "",
        duration(seconds_left) if seconds_left is not None else "",
        part["process"],
    )


def _verdict(document: Mapping[str, Any]) -> tuple[bool | None, str]:
    if document["state"] == "written":
        return True, f"{document['path']} is written"
    dead = [part["part"][0] if part["part"] else 1 for part in document["parts"] if part["state"] == "dead"]
    text = f"{size(document['bytes'])} of {size(document['of_bytes'])} are written"
    if document["seconds_left"] is not None:
        text += f", {duration(document['seconds_left'])} left"
    if document["missing"]:
        text += f"; {plural(len(document['missing']), 'part')} not begun: {ranges(document['missing'])}"
    if dead:
        text += f"; {plural(len(dead), 'part')} ended too early and can be run again: {ranges(dead)}"
    return (False if dead or not document["running"] else None), text
