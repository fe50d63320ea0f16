"""`ckpt audit` as a page: the findings, the worst first, each with its tensor and with what to do.

Reads the document: `ok`, `path`, `format`, `family`, `tensors`, `values`, `findings` ({code, severity, title, message,
file, tensor, do, seen}), `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.report.inspection import note_text
from ckpt_tool.report.page import Block, Cell, Facts, Lines, Page, Style, Styled, Verdict
from ckpt_tool.report.text import count, more, plural

Document = Mapping[str, Any]
LISTED = 10  # findings of one code that are listed without -v
_STYLES: Mapping[str, Style] = {"error": "bad", "warning": "warn", "suspicion": "warn"}


def audit(document: Document, *, everything: bool = False) -> Page:
    findings = document["findings"]
    facts: list[tuple[str, Cell]] = [(key, str(document[key])) for key in ("path", "format", "family") if document[key]]
    blocks: list[Block] = [Facts(tuple(facts))]
    for code in dict.fromkeys(finding["code"] for finding in findings):
        blocks.append(_write_code_findings([each for each in findings if each["code"] == code], everything))
    if document["notes"]:
        blocks.append(Lines("notes", tuple(map(note_text, document["notes"]))))
    suffix = "" if document["values"] else "; --values reads the values too"
    if document["ok"]:
        blocks.append(
            Verdict(True, f"complete and plausible: no findings, {plural(document['tensors'], 'tensor')}{suffix}")
        )
    else:
        kinds = ", ".join(_kinds(findings))
        blocks.append(Verdict(False, f"{plural(len(findings), 'finding')}: {kinds}{suffix}"))
    return Page(f"ckpt audit {document['path']}", tuple(blocks))


def _write_code_findings(found: Sequence[Document], everything: bool) -> Lines:
    """Those of one code: what they are, each of them, and what to do once for all that agree."""
    listed = found if everything else found[:LISTED]
    lines: list[Cell] = [Styled(found[0]["title"], "strong")]
    for finding in listed:
        file = f" ({finding['file']})" if finding["file"] and finding["file"] not in finding["message"] else ""
        lines.append(Styled(f"{finding['message']}{file}", _STYLES[finding["severity"]]))
        lines += [
            Styled(f"{'see' if position == 0 else 'of the same cause:'} {report['url']}", "dim")
            for position, report in enumerate(finding["seen"])
        ]
    lines.append(Styled(more(len(found) - len(listed), "finding"), "dim"))
    advice = dict.fromkeys(finding["do"] for finding in listed)
    lines += [Styled(f"to do: {do}", "plain") for do in advice if do]
    return Lines(f"{found[0]['code']} {found[0]['severity']}", tuple(lines), drawn=True)


def _kinds(findings: Sequence[Document]) -> list[str]:
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding["severity"]] = counts.get(finding["severity"], 0) + 1
    return [f"{count(number)} {kind}" + ("s" if number > 1 else "") for kind, number in counts.items()]
