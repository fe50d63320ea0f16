"""`ckpt explain [CODE]`: what the code of an error, a finding or a note means, its exit code, why it comes and what to
do; without a code, the list."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckpt_tool.errors import UsageError, catalogue, near_misses

# `E0301`, `301`, `error[E0301]:`, and `N-tied` or `W-header` of notes, whose words are in lower case.
_NUMBERED = re.compile(r"(?:error\s*\[)?\s*([AENW]?)(\d{1,4})\s*\]?:?", re.IGNORECASE)
_WORDED = re.compile(r"([NW])-([a-z0-9-]{1,40})", re.IGNORECASE)


def explain(code: str = "") -> dict[str, Any]:
    """The row of `code`, or of all codes their titles. code: `E0301`, `A0101`, `N-tied`, in any case; also `301` and
    `error[E0301]`.

    Raises UsageError E2703 for a code that does not exist.
    """
    known = catalogue()
    if not code:
        listed = [
            {"code": row.code, "exit_code": row.exit_code, "class": row.kind, "title": row.title}
            for row in known.values()
        ]
        return {"schema_version": 1, "codes": listed}

    name = _canonical_spelling(code.strip())
    if name not in known:
        raise UsageError(
            f"there is no code {code!r}",
            code="E2703",
            place="ckpt explain",
            hint=_find_near(name, known) or "ckpt explain lists all codes",
        )

    row = known[name]
    return {
        "schema_version": 1,
        "code": row.code,
        "exit_code": row.exit_code,
        "class": row.kind,
        "title": row.title,
        "why": row.why,
        "what_to_do": row.do,
    }


def _canonical_spelling(code: str) -> str:
    """The code as the catalogue spells it, whether it is there or not; "" for what is no code at all."""
    numbered = _NUMBERED.fullmatch(code)
    if numbered:
        return f"{numbered[1].upper() or 'E'}{numbered[2]:0>4}"
    worded = _WORDED.fullmatch(code)
    return f"{worded[1].upper()}-{worded[2].lower()}" if worded else ""


def _find_near(name: str, known: Iterable[str]) -> str:
    """A "did you mean" for a code that does not exist: words by their letters, numbers by digits, then by value."""
    if "-" in name:
        return near_misses(name, (code for code in known if "-" in code))
    if not name:
        return ""
    numbered = [code for code in known if "-" not in code]
    numbered.sort(
        key=lambda code: (sum(a != b for a, b in zip(code, name, strict=True)), abs(int(code[1:]) - int(name[1:])))
    )
    return f"did you mean {', '.join(numbered[:3])}?"
