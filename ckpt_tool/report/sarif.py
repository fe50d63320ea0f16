"""Findings as SARIF 2.1.0, which GitHub and other forges show next to the files concerned.

The document has a rule for each code that occurs, and a result for each finding: its location is the file (the
checkpoint itself if the finding names none), its logical location the tensor. Source: OASIS sarif-spec,
`sarif-schema-2.1.0.json`. GitHub only shows results with a file and a line, so each result has line 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "suspicion": "note"}
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/:@")


def is_ours(head: bytes) -> bool:
    """Does a file begin like a SARIF document of `ckpt audit`? Those of other programs must not be replaced."""
    return head.lstrip().startswith(b"{") and b"sarif" in head and b'"ckpt audit"' in head


def sarif(document: Document) -> bytes:
    """The document of `ckpt audit` as a SARIF file."""
    findings = document["findings"]
    first_of: dict[str, Any] = {}
    for finding in findings:
        first_of.setdefault(finding["code"], finding)
    codes = list(first_of)
    rules = list(map(_rule, first_of.values()))
    results = [_result(finding, codes.index(finding["code"]), str(document["path"])) for finding in findings]
    driver = {"name": "ckpt audit", "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "utf16CodeUnits"}
    value = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return (json.dumps(value, indent=2) + "\n").encode("ascii")


def _rule(finding: Document) -> dict[str, Any]:
    return {
        "id": finding["code"],
        "shortDescription": {"text": finding["title"]},
        "help": {"text": finding["do"] or f"ckpt explain {finding['code']}"},
        "defaultConfiguration": {"level": _LEVELS[finding["severity"]]},
    }


def _result(finding: Document, rule: int, path: str) -> dict[str, Any]:
    region = {"artifactLocation": {"uri": _uri(finding["file"] or path)}, "region": {"startLine": 1}}
    place: dict[str, Any] = {"physicalLocation": region}
    if finding["tensor"]:
        place["logicalLocations"] = [{"fullyQualifiedName": finding["tensor"], "kind": "tensor"}]
    reports = [f"{report['name']}: {report['url']}" for report in finding["seen"]]
    return {
        "ruleId": finding["code"],
        "ruleIndex": rule,
        "level": _LEVELS[finding["severity"]],
        "message": {"text": "; ".join([finding["message"], *reports])},
        "locations": [place],
        "partialFingerprints": {"ckptFinding/v1": f"{finding['code']} {finding['tensor'] or ''} {finding['message']}"},
    }


def _uri(path: str) -> str:
    """A path as a relative or absolute URI reference; a URL as it is.

    >>> _uri("out/a b.safetensors"), _uri("s3://bucket/a")
    ('out/a%20b.safetensors', 's3://bucket/a')
    """
    raw = os.fsencode(path)
    head = ""
    if path.startswith("/"):
        head = "file://"
    elif ":" in path.split("/")[0] and "://" not in path:  # else the first part would be read as a scheme
        head = "./"
    return head + "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
