"""Findings as JUnit XML, which CI systems list as tests: one that failed for each finding, or one that passed.

Text goes through `report.text.escape`: XML 1.0 has no place for control characters, whatever a tensor is called.
Source: the dialect of Jenkins' JUnit plugin (`testsuites`, `testsuite`, `testcase`, `failure`), which GitLab and others
read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape as quoted
from xml.sax.saxutils import quoteattr

from ckpt_tool.report.text import escape

Document = Mapping[str, Any]


def is_ours(head: bytes) -> bool:
    """Does a file begin as such a document of `ckpt audit`? Those of other programs are theirs."""
    return b"<testsuite" in head and b"ckpt audit" in head


def junit(document: Document) -> bytes:
    findings = document["findings"]
    count = f'tests="{max(len(findings), 1)}" failures="{len(findings)}"'
    path = _attribute(f"ckpt audit {document['path']}")
    cases = [_case(finding) for finding in findings] or [
        '    <testcase classname="ckpt audit" name="complete and plausible"/>'
    ]
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites {count}>",
        f"  <testsuite name={path} {count}>",
        *cases,
        "  </testsuite>",
        "</testsuites>",
    ]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _case(finding: Document) -> str:
    place = finding["tensor"] or finding["file"] or "the checkpoint"
    body = [finding["message"], f"to do: {finding['do']}" if finding["do"] else ""]
    body += [f"{report['name']}: {report['url']}" for report in finding["seen"]]
    text = quoted("\n".join(escape(line) for line in body if line))
    kind = f"{finding['code']} {finding['severity']}"
    return (
        f"    <testcase classname={_attribute(finding['code'])} name={_attribute(place)}>\n"
        f"      <failure type={_attribute(kind)} message={_attribute(finding['title'])}>{text}</failure>\n"
        "    </testcase>"
    )


def _attribute(text: str) -> str:
    return quoteattr(escape(text))
