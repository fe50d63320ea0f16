"""Findings of an audit: a code each, how bad it is, which tensor, and what to do.

    FoundFault("A0101", "model.layers.3.mlp.up_proj.weight is not there", "model.layers.3.mlp.up_proj.weight")

Codes that begin with A are the audit's own, rows of `error_codes.toml` as all others; what readers and `ckpt verify`
find keeps the code that it has there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from ckpt_tool.core.plurals import agree
from ckpt_tool.errors import catalogue

Severity = Literal["error", "warning", "suspicion"]
MISSING = "A0101"
SURPLUS = "A0102"
SHAPE = "A0103"
EXPERTS = "A0104"
AHEAD = "A0105"
NUMBERS = "A0106"
NOTHING = "A0107"
CONFIG = "A0108"
WRAPPED = "A0109"
OUTSIDE = "A0110"
COPIES = "A0201"
ZEROS = "A0202"
CONSTANT = "A0203"
NOT_FINITE = "A0204"
ORDER = "A0205"
HEAD = "A0301"
DTYPE = "A0302"
WORDS = "A0401"
QUANTISED = "A0501"
EXPORTER = "A0901"
# Codes that are less than an error.
_SEVERITIES: Mapping[str, Severity] = {
    SURPLUS: "warning",
    OUTSIDE: "warning",
    NUMBERS: "warning",
    COPIES: "warning",
    CONSTANT: "warning",
    ORDER: "suspicion",
    HEAD: "warning",
    DTYPE: "warning",
}


class FoundFault(NamedTuple):
    """A finding of an audit."""

    code: str
    message: str
    tensor: str | None = None  # the tensor at fault; None if the finding is about the model
    file: str | None = None  # the file at fault; None if the finding is about the model
    do: str = ""  # what to do; "": what the catalogue says for the code
    seen: tuple[tuple[str, str], ...] = ()  # (name, URL) of reports on exporters with this fault


def rows_of(findings: Iterable[FoundFault]) -> list[dict[str, Any]]:
    """The findings as the document lists them: known faults of exporters first, then by severity."""
    rows = []
    for finding in findings:
        entry = catalogue().get(finding.code)
        rows.append(
            {
                "code": finding.code,
                "severity": severity_of(finding.code),
                "title": entry.title if entry else finding.code,
                "message": agree(finding.message),
                "file": finding.file,
                "tensor": finding.tensor,
                "do": finding.do or (entry.do if entry else ""),
                "seen": [{"name": name, "url": url} for name, url in finding.seen],
            }
        )
    order = ("error", "warning", "suspicion")
    return sorted(rows, key=lambda row: (row["code"] != EXPORTER, order.index(row["severity"])))


def severity_of(code: str) -> Severity:
    """How grave a finding of this code is; `error` unless it is listed as less."""
    return _SEVERITIES.get(code, "error")
