"""Any plain document as a page: what `ckpt doctor` and `ckpt clean` show.

Scalars become facts, nested objects a titled group of facts, lists of objects a table with their keys as columns.

    {"python": "3.11", "disk": {"free": 5}, "found": [{"path": "a", "bytes": 3}], "ok": true}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.report.page import Block, Cell, Column, Facts, Lines, Page, PageTable, Styled, Verdict
from ckpt_tool.report.text import size

_HIDDEN = ("schema_version", "ok", "verdict")


def listing(document: Mapping[str, Any], title: str) -> Page:
    """The page. `verdict` (text) and `ok` make the last line."""
    facts: list[tuple[str, Cell]] = []
    blocks: list[Block] = []
    for key, value in document.items():
        if key in _HIDDEN:
            continue
        if isinstance(value, Mapping):
            if value:
                blocks.append(Facts(tuple((_label(k), _value(k, v)) for k, v in value.items()), title=_label(key)))
        elif _rows(value):
            blocks.append(_table(_label(key), value))
        elif isinstance(value, list | tuple) and len(value) > 3:
            blocks.append(Lines(_label(key), tuple(str(item) for item in value)))
        else:
            facts.append((_label(key), _value(key, value)))
    if facts:
        blocks.insert(0, Facts(tuple(facts)))
    if document.get("verdict") or "ok" in document:
        text = str(document.get("verdict") or ("all is well" if document["ok"] else "something is wrong: see above"))
        blocks.append(Verdict(document.get("ok"), text))
    return Page(title, tuple(blocks))


def _rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _table(title: str, items: Sequence[Mapping[str, Any]]) -> PageTable:
    keys = list(dict.fromkeys(key for item in items for key in item))
    columns = tuple(Column(_label(key), right=_is_bytes(key)) for key in keys)
    rows: list[tuple[Cell, ...]] = []
    for item in items:
        rows.append(tuple(_value(key, item.get(key)) for key in keys))
    return PageTable(title, columns, tuple(rows))


def _label(key: str) -> str:
    return str(key).replace("_", " ")


def _is_bytes(key: str) -> bool:
    return key in ("bytes", "free", "size", "memory") or key.endswith("_bytes")


def _value(key: str, value: Any) -> Cell:
    if value is None:
        return Styled("none", "dim")
    if isinstance(value, bool):
        return Styled("yes", "good") if value else Styled("no", "warn")
    if isinstance(value, int) and _is_bytes(str(key)):
        return size(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or Styled("none", "dim")
    return str(value)
