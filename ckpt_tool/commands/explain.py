"""`ckpt explain [CODE]`: what an error code means, its exit code, why it comes and what to do; without a code, the
list."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckpt_tool.errors import UsageError, catalogue

_SPELLINGS = re.compile(r"(?:error\s*\[)?\s*([AE]?)(\d{1,4})\s*\]?:?", re.IGNORECASE)


def explain(code: str = "") -> dict[str, Any]:
    """The row of `code`, or of all codes their titles. code: `E0301`, `A0101`, in any case; also `error[E0301]`, `301`.

    Raises UsageError E2703 for a code that does not exist.
    """
    known = catalogue()
    if not code:
        listed = [
            {"code": row.code, "exit_code": row.exit_code, "class": row.kind, "title": row.title}
            for row in known.values()
        ]
        return {"schema_version": 1, "codes": listed}
    spelled = _SPELLINGS.fullmatch(code.strip())
    name = f"{spelled[1].upper() or 'E'}{spelled[2]:0>4}" if spelled else code
    if name not in known:
        raise UsageError(
            f"there is no error code {code!r}",
            code="E2703",
            place="ckpt explain",
            hint=f"did you mean {', '.join(_near(name, known))}?" if spelled else "ckpt explain lists all codes",
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


def _near(name: str, known: Iterable[str]) -> list[str]:
    """The codes that differ in the fewest digits, and then by the least."""
    return sorted(
        known,
        key=lambda code: (sum(a != b for a, b in zip(code, name, strict=True)), abs(int(code[1:]) - int(name[1:]))),
    )[:3]
