"""`ckpt prune` as a page: the steps that are kept, with every reason, those that are removed, and the freed bytes.

Reads the document: `keep` ({path, bytes, reasons, why}), `remove` ({path, bytes, removed, why}), `dry_run`,
`freed_bytes`, `last_sound`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.report.page import Block, Cell, Column, Lines, Page, PageTable, Styled, Verdict
from ckpt_tool.report.text import plural, size

_NO_RULE = "no rule keeps it"
Document = Mapping[str, Any]


def pruning(document: Document) -> Page:
    """The page of `ckpt prune`."""
    keep = document["keep"]
    remove = document["remove"]
    blocks: list[Block] = []
    blocks += [_table(f"keep {plural(len(keep), 'step')}", keep)] if keep else []
    blocks += [_table(f"remove {plural(len(remove), 'step')}", remove)] if remove else []
    broken = tuple(f"{_name(row)}: {row['why']}" for row in (*keep, *remove) if row.get("why"))
    blocks += [Lines("not complete", broken)] if broken else []
    return Page(f"ckpt prune {document['run']}", (*blocks, _verdict(document)))


def _name(row: Document) -> str:
    return str(row["path"]).rpartition("/")[2]


def _table(title: str, rows: Sequence[Document]) -> PageTable:
    columns = (Column("step"), Column("size", right=True, drop=1), Column("reason"))
    return PageTable(title, columns, tuple(cells for row in rows for cells in _rows(row)))


def _rows(row: Document) -> list[tuple[Cell, ...]]:
    """A row for each reason, the step in the first."""
    first_reason, *others = row.get("reasons") or (_NO_RULE,)
    nbytes = size(row["bytes"]) if row["bytes"] is not None else ""
    reason = Styled(first_reason, "warn") if row["sound"] is False else first_reason
    return [(_name(row), nbytes, reason), *(("", "", reason_text) for reason_text in others)]


def _verdict(document: Document) -> Verdict:
    if document["last_sound"] is None:
        return Verdict(False, "no step of the run is complete: nothing is removed")
    if not document["remove"]:
        return Verdict(True, "nothing to remove")
    number = plural(sum(1 for row in document["remove"] if row["removed"] or document["dry_run"]), "step")
    bytes_ = size(document["freed_bytes"])
    if document["dry_run"]:
        return Verdict(None, f"dry run: {number} would go, {bytes_} would be free")
    return Verdict(True, f"removed {number}, {bytes_} are free")
