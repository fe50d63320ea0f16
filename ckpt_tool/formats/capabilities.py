"""What each format can hold, as a table: the one in the guide (`ckpt help formats`), made from the registry.

    >>> "dcp" in [row[0] for row in rows()]
    True

`tests/test_readme.py` holds the guide to it, so a format that learns something changes the text or fails.
"""

from __future__ import annotations

from ckpt_tool.formats import registry

STATES = ("model", "optimizer", "master", "ema")
DEGREES = ("tp", "pp", "vpp", "ep", "etp", "dp")
COLUMNS = ("read", "write", "model", "optimizer", "master", "EMA", "experts", "TP", "PP", "VPP", "EP", "ETP", "DP")
YES, NO = "✓", "–"


def rows() -> list[tuple[str, ...]]:
    """(format, then a cell for each of `COLUMNS`), in the registry's order."""
    out = []
    for name in registry.NAMES:
        holds = registry.by_name(name).holds
        cells = [True, True, *(holds.has(state) for state in STATES), True, *(dim in holds.mesh for dim in DEGREES)]
        out.append((name, *(YES if cell else NO for cell in cells)))
    return out


def markdown() -> str:
    """The table as it stands in the guide, column names and all."""
    lines = [["format", *COLUMNS], ["---"] * (1 + len(COLUMNS)), *([f"`{row[0]}`", *row[1:]] for row in rows())]
    return "".join(f"| {' | '.join(line)} |\n" if line[0] != "---" else f"|{'|'.join(line)}|\n" for line in lines)
