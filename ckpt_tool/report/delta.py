"""The result of `ckpt delta` as a page. Its document has `delta` in addition to the fields of every writing verb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.report.inspection import delta_text
from ckpt_tool.report.page import Block, Cell, Facts, Page, Verdict
from ckpt_tool.report.text import count, duration, plural, size
from ckpt_tool.report.writing import warnings_of


def make_delta_page(document: Mapping[str, Any], *, everything: bool = False) -> Page:
    """The page of `ckpt delta`. A document without `elapsed_s` is that of a dry run."""
    plan = document["plan"]
    delta = document["delta"]
    rows: list[tuple[str, Cell]] = [
        ("from", " to ".join(document["source"]["paths"])),
        ("to", str(document["target"]["path"])),
        ("delta", delta_text(delta)),
        ("reads", size(plan["bytes_read"])),
    ]
    if "elapsed_s" not in document:
        blocks: list[Block] = [Facts(tuple(rows)), *warnings_of(document, everything=everything)]
        what = f"dry run: {plural(delta['tensors'], 'tensor')} of {size(delta['bytes'])} would be compared"
        return Page("ckpt delta", (*blocks, Verdict(None, what)))
    rows.append(
        (
            "changed",
            f"{count(delta['changed'])} of {plural(delta['tensors'], 'tensor')}, {size(delta['changed_bytes'])}",
        )
    )
    share = f" ({100 * plan['bytes_written'] / delta['bytes']:.2f} % of NEW)" if delta["bytes"] else ""
    done = (
        f"wrote {size(plan['bytes_written'])}{share} in {plural(plan['files'], 'file')} to {document['target']['path']}"
    )
    verdict = Verdict(True, f"{done} in {duration(document['elapsed_s'])}")
    return Page("ckpt delta", (Facts(tuple(rows)), *warnings_of(document, everything=everything), verdict))
