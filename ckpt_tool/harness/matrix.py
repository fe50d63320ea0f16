"""Which pairs of layouts are proved: the quick ones by default, all of them by `ckpt validate --matrix full`.

Formats take turns, so that each is met in several pairs; a pair that a format's files can't express goes to the next
one. Pairs that only certain systems make (interleaved and uneven pipelines, ZeRO stages) name their format.
"""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

from ckpt_tool.errors import UsageError
from ckpt_tool.harness.evidence import Case
from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.runs import RunMachine
from ckpt_tool.harness.saving import formats
from ckpt_tool.harness.shape import ModelShape


class Pair(NamedTuple):
    """From one layout to another."""

    source: str
    target: str
    model: str = ""  # "" for the matrix's own
    fmt: str | None = None  # None to take turns
    trains: bool = True  # False where the target can only hold the state
    muon: bool = False  # does it step the matrices?


MODELS = {
    "quick": ModelShape.quick(),
    "full": ModelShape(),
    "tied": ModelShape(tied=True, rows=104),  # one embedding in two stages, seven rows of padding
    "indivisible": ModelShape.indivisible().with_(layers=4, batch=8),  # dims that TP can't cut
    "dense": ModelShape.quick().with_(experts=0),
}
# What a change of one or of all degrees can get wrong, in a few short runs: TP and EP merged, ZeRO 3 taken apart,
# pipelines cut.
QUICK = (
    Pair("tp2,pp2,dp2,ep2", "dp4,ep2"),
    Pair("dp4,ep4", "tp2,pp2"),
    Pair("tp4", "pp2,dp2,zero2"),
    Pair("dp2,zero3", "tp2,dp2,ep2"),
)
# One layout against one rank, in both directions.
ALONE = (
    "tp2",
    "tp4",
    "pp2",
    "pp4",
    "dp2",
    "dp4",
    "dp2,ep2",
    "dp4,ep4",
    "tp2,pp2,dp2,ep2",
    "tp2,dp4,ep2",
    "pp2,dp4,ep4",
    "tp4,pp2",
    "tp2,pp4",
)
# Layouts against each other: all degrees at once, experts merged, uneven and interleaved pipelines, ZeRO stages, odd
# models.
CROSS = (
    Pair("tp2,pp2,dp2,ep2", "dp4,ep2"),
    Pair("dp4,ep4", "tp2,pp2,dp2"),
    Pair("tp2,pp2,dp2,ep2", "pp3,split=2-1-1", fmt="megatron"),
    Pair("tp2,pp2,dp2,ep2", "pp3,split=2-1-1", fmt="megatron-dist"),
    Pair("pp3,split=1-2-1", "dp2,ep2", fmt="dcp"),
    Pair("pp2,vpp2", "pp2", fmt="megatron"),
    Pair("pp2", "pp2,vpp2", fmt="megatron-dist"),
    Pair("tp2,pp2,vpp2,dp2,ep2", "tp4,dp2", fmt="megatron-dist"),
    Pair("dp4,zero3", "tp2,dp2,zero1"),
    Pair("tp2,dp2,zero2", "dp4,zero0"),
    Pair("dp2,zero1", "dp2,zero3", fmt="deepspeed"),
    Pair("dp4,zero3", "dp2,zero2", fmt="deepspeed"),
    Pair("dp4,ep4,zero2", "dp2,zero1", fmt="sharded"),
    Pair("tp2,pp2,dp2", "dp2,ep2,zero3", "tied", "dcp"),
    Pair("dp4,zero3", "dp2,zero1", "tied", "deepspeed"),
    Pair("pp4,dp2", "tp4,pp2", "tied", "megatron-dist"),
    Pair("tp2,pp2", "dp4,ep2", "tied", "paddle-unified"),
    Pair("tp4,dp2,ep2", "pp2,dp4,ep4", "indivisible", "sharded"),
    Pair("pp2,dp2", "tp2,pp2,dp2,ep2", "indivisible", "dcp"),
    Pair("dp2,ep2,zero3", "tp4,pp2", "indivisible", "paddle-unified"),
    Pair("tp2,pp2,dp2", "tp4", "dense", "megatron"),
    Pair("tp2,pp2,dp2,ep2", "dp3", fmt="sharded", trains=False),  # another padding of ZeRO's line
    Pair("tp2,dp4,ep2", "tp2,dp3,zero3", fmt="dcp", trains=False),
    Pair("dp4,zero2", "dp3,zero3", fmt="deepspeed", trains=False),
)
# Muon's whole matrices on single data ranks (layer-wise), on all of them, cut by tensor ranks, of parallel experts.
MUON = (
    Pair("tp2,pp2,dp2,ep2", "dp4,ep2", fmt="megatron-dist", muon=True),
    Pair("dp4,zero0", "tp4,pp2", fmt="megatron-dist", muon=True),
    Pair("tp2,dp2,zero0", "pp2", fmt="megatron", muon=True),
    Pair("tp2,pp2,dp2", "dp4,ep4,zero2", "indivisible", "dcp", muon=True),
    Pair("dp4,ep4", "tp2,pp2,dp2", "tied", "sharded", muon=True),
)


def cases(
    which: str,
    *,
    fmt: str | None = None,
    canonical: bool = True,
    steps: int = 3,
    seed: int = 1234,
    machine: RunMachine | None = None,
    planted: tuple[str, ...] = (),
    muon: bool = False,
) -> list[Case]:
    """The cases of a matrix, "quick" or "full". fmt: for all pairs, else they take turns. planted: in the first case.
    muon: in all pairs; else in those of its own in the full one.

    Raises UsageError E1541 for another name, E1535 where `fmt` has no place for a layout.
    """
    if which == "quick":
        pairs: tuple[Pair, ...] = QUICK
    elif which == "full":
        edge_pairs = [pair for text in ALONE for pair in (Pair("tp1", text), Pair(text, "tp1"))]
        pairs = (*edge_pairs, *CROSS, *MUON)
    else:
        raise UsageError(f"no matrix is called {which!r}", code="E1541", place="--matrix", hint="want quick or full")

    turns = cycle(formats.WRITERS)
    listed_cases = []
    for number, pair in enumerate(pairs):
        shape = MODELS[pair.model or which]
        source_layout = HarnessLayout.parse(pair.source)
        right = HarnessLayout.parse(pair.target)
        by_muon = muon or pair.muon
        listed_cases.append(
            Case(
                source_layout,
                right,
                fmt or pair.fmt or _fitting(source_layout, right, shape, turns, muon=by_muon),
                shape,
                canonical,
                before=steps,
                after=steps if pair.trains else 0,
                seed=seed,
                machine=machine or RunMachine(),
                planted=planted if number == 0 else (),
                muon=by_muon,
            )
        )

    return listed_cases


def _fitting(source: HarnessLayout, target: HarnessLayout, shape: ModelShape, turns: cycle[str], *, muon: bool) -> str:
    """The next format that has a place for both."""
    for _ in formats.WRITERS:
        fmt = next(turns)
        try:
            formats.check(fmt, source, shape, muon=muon)
            formats.check(fmt, target, shape, muon=muon)
        except UsageError:
            continue
        return fmt
    raise UsageError(f"no format has a place for {source} and {target}", code="E1535")
