"""Which pairs of layouts are proved: the quick ones by default, all of them by `ckpt validate --matrix full`.

Formats take turns, so that each is met in several pairs; a pair that a format's files can't express goes to the next one.
"""

from __future__ import annotations

from itertools import cycle

from ckpt_tool.errors import UsageError
from ckpt_tool.harness.evidence import Case
from ckpt_tool.harness.layout import Layout
from ckpt_tool.harness.runs import Machine
from ckpt_tool.harness.saving import formats
from ckpt_tool.harness.shape import ModelShape

# What a change of one or of all degrees can get wrong, in a few short runs: TP and EP merged, ZeRO 3 taken apart, pipelines cut.
QUICK: tuple[tuple[str, str], ...] = (
    ("tp2,pp2,dp2,ep2", "dp4,ep2"),
    ("dp4,ep4", "tp2,pp2"),
    ("tp4", "pp2,dp2,zero2"),
    ("dp2,zero3", "tp2,dp2,ep2"),
)
# One layout against one rank, in both directions.
ALONE = (
    "tp2", "tp4", "pp2", "pp4", "dp2", "dp4", "dp2,ep2", "dp4,ep4", "tp2,pp2,dp2,ep2", "tp2,dp4,ep2", "pp2,dp4,ep4",
    "tp4,pp2", "tp2,pp4",
)  # fmt: skip
# Layouts against each other: all degrees at once, experts merged, uneven and interleaved pipelines, ZeRO stages.
CROSS = (
    ("tp2,pp2,dp2,ep2", "dp4,ep2"),
    ("dp4,ep4", "tp2,pp2,dp2"),
    ("tp2,pp2,dp2,ep2", "pp3,split=2-1-1"),
    ("pp2,vpp2", "pp2"),
    ("pp2", "pp2,vpp2"),
    ("dp4,zero3", "tp2,dp2,zero1"),
    ("tp2,dp2,zero2", "dp4,zero0"),
    ("dp2,zero1", "dp2,zero3"),
)


def cases(
    which: str,
    *,
    fmt: str | None = None,
    canonical: bool = True,
    steps: int = 3,
    seed: int = 1234,
    machine: Machine | None = None,
    planted: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a matrix, "quick" or "full". fmt: for all pairs, else they take turns. planted: in the first case.

    Raises UsageError E1541 for another name, E1535 where `fmt` has no place for a layout.
    """
    if which == "quick":
        pairs, shape = QUICK, ModelShape.quick()
    elif which == "full":
        both = [pair for text in ALONE for pair in (("tp1", text), (text, "tp1"))]
        pairs, shape = (*both, *CROSS), ModelShape()
    else:
        raise UsageError(f"no matrix is called {which!r}", code="E1541", place="--matrix", hint="want quick or full")
    turns = cycle(formats.WRITERS)
    found = []
    for number, (source, target) in enumerate(pairs):
        left, right = Layout.parse(source), Layout.parse(target)
        found.append(
            Case(
                left,
                right,
                fmt or _fitting(left, right, turns),
                shape,
                canonical,
                steps,
                steps,
                seed,
                machine or Machine(),
                planted if number == 0 else (),
            )
        )
    return found


def _fitting(source: Layout, target: Layout, turns: cycle[str]) -> str:
    """The next format that has a place for both."""
    for _ in formats.WRITERS:
        fmt = next(turns)
        try:
            formats.check(fmt, source)
            formats.check(fmt, target)
        except UsageError:
            continue
        return fmt
    raise UsageError(f"no format has a place for {source} and {target}", code="E1535")
