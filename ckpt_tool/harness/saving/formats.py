"""Which formats the harness writes, which layouts each can hold, and how the same layout is requested of the tool.

    write("megatron-dist", assemble(states), folder)
    words("dcp", Layout.parse("tp2,dp2"))       # ["--tp", "2", "--pp", "1", ...]: for `ckpt reshard` and `ckpt convert`

The one idea: a layout that a system's files can't express is refused before anything is written, with the nearest that
they can. Cost: none. What it does not do: write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.harness.saving import (
    dcp,
    deepspeed,
    megatron,
    megatron_dist,
    megatron_fsdp,
    paddle_flex,
    paddle_unified,
    sharded,
)
from ckpt_tool.harness.saving.whole import WholeState

UNKNOWN = "E1534"
LAYOUT = "E1535"


@dataclass(frozen=True, slots=True)
class FormatWriter:
    """What the training harness can save in one format."""

    write: Callable[[WholeState, Path], None]  # into an empty folder
    takes: tuple[str, ...] = ("tp", "pp", "ep", "dp", "vpp")  # degrees above 1 that a job of the system can have
    dims: tuple[str, ...] = ("tp", "pp", "ep", "dp")  # degrees that the tool is given as options
    zero: tuple[int, ...] = (0, 1, 2, 3)  # the ZeRO stages of such a job
    says_zero: bool = False  # is the tool given --zero?
    # does the system cut every matrix but the router's over its tensor ranks, so that it has no weight which they all
    # hold?
    cuts: bool = False
    unkept: frozenset[str] = frozenset()  # states that it does not store, since another one is their twin
    # the ZeRO stages of a job whose matrices Muon steps; none where the system has no such job
    muon: tuple[int, ...] = ()
    muon_ep: bool = True  # can the experts of such a job be parallel?


_MEGATRON = ("tp", "pp", "ep", "dp", "vpp")
WRITERS: Mapping[str, FormatWriter] = {
    "sharded": FormatWriter(sharded.write, says_zero=True, muon=(0, 1, 2)),
    "dcp": FormatWriter(dcp.write, says_zero=True, muon=(0, 1, 2)),
    "deepspeed": FormatWriter(deepspeed.write, ("dp",), ("dp",), (1, 2, 3), says_zero=True),
    "paddle-flex": FormatWriter(paddle_flex.write, cuts=True),
    "paddle-unified": FormatWriter(paddle_unified.write, dims=()),
    "megatron": FormatWriter(megatron.write, dims=_MEGATRON, zero=(0, 1), cuts=True, muon=(0,), muon_ep=False),
    "megatron-dist": FormatWriter(megatron_dist.write, dims=_MEGATRON, zero=(0, 1), cuts=True, muon=(0, 1)),
    "megatron-fsdp": FormatWriter(
        megatron_fsdp.write, ("tp", "ep", "dp"), ("tp", "ep", "dp"), cuts=True, unkept=frozenset({"master"})
    ),
}


def check_name(fmt: str) -> None:
    """Raise UsageError E1534 for a format that is not written here."""
    if fmt not in WRITERS:
        raise UsageError(
            f"the harness does not write {fmt!r}",
            code=UNKNOWN,
            hint=near_misses(fmt, WRITERS) or f"want one of {', '.join(WRITERS)}",
        )


def check(fmt: str, layout: Any, shape: Any = None, *, muon: bool = False) -> None:
    """Raise UsageError E1534 as `check_name`, E1535 for a layout that the format's files can't express, of a model of
    `shape`. muon: of a job where it steps the matrices."""
    check_name(fmt)
    writer = WRITERS[fmt]
    if muon and not writer.muon:
        raise UsageError(
            f"{fmt} has no place for Muon's momentum",
            code=LAYOUT,
            hint=f"the formats that have: {', '.join(name for name, writer in WRITERS.items() if writer.muon)}",
        )

    stages = writer.muon if muon else writer.zero
    takes = [dim for dim in writer.takes if dim != "ep" or writer.muon_ep or not muon]
    wrong = [dim for dim in ("tp", "pp", "ep", "vpp") if getattr(layout, dim) > 1 and dim not in takes]
    stage = layout.zero if layout.dp > 1 else stages[-1]  # ZeRO over one rank is none
    if wrong or stage not in stages:
        unfit = [f"{dim}{getattr(layout, dim)}" for dim in wrong]
        unfit += [] if stage in stages else [f"zero{layout.zero}"]
        keeps = [f"{dim}{getattr(layout, dim)}" for dim in takes if getattr(layout, dim) > 1]
        zero = min(stages, key=lambda stage: abs(stage - layout.zero))
        raise UsageError(
            f"{fmt} has no place for {', '.join(unfit)}",
            code=LAYOUT,
            hint=f"the nearest that it has is {','.join([*keeps, f'zero{zero}'])}",
        )

    if shape is not None and writer.cuts and layout.tp > 1:
        matrices = [
            param for param in shape.parameters() if len(param.shape) > 1 and not param.name.endswith("mlp.gate.weight")
        ]
        uncut = next((param.name for param in matrices if param.cut is None), None)
        if uncut is not None:
            raise UsageError(
                f"{fmt} has no place for {uncut}, which tensor ranks do not share",
                code=LAYOUT,
                key=uncut,
                hint="the nearest that it has is tp1; or sharded, dcp and paddle-unified, which hold any box",
            )


def write(fmt: str, whole: WholeState, folder: Path) -> None:
    """The checkpoint into `folder`, which is there and empty. Raises what `check` raises."""
    check(fmt, whole.layout, muon=whole.muon is not None)
    WRITERS[fmt].write(whole, folder)


def words(fmt: str, layout: Any, counts: Sequence[int] = ()) -> list[str]:
    """The options that ask `ckpt reshard` and `ckpt convert` for a layout, as far as the format has a place for it.

    counts: layers of each virtual stage, `[len(layers) for layers in layout.stage_layers(shape)]`; requested where
        uneven.
    """
    writer = WRITERS[fmt]
    options = [word for dim in writer.dims for word in (f"--{dim}", str(getattr(layout, dim)))]
    if writer.says_zero:
        stages = [stage for stage in writer.zero if stage]
        options += ["--zero", str(layout.zero if layout.zero in writer.zero else min(stages))]
    split = layout.split or (counts if len(set(counts)) > 1 else ())
    if split and "pp" in writer.dims:
        options += ["--pp-split", ",".join(map(str, split))]
    return options
