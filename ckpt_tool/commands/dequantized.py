"""`--dequantize`: quantised states as the floats that they stand for, made while they are read (`run.dequantize`)."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.options import Writing
from ckpt_tool.commands.source import Opened
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored


def dequantized(chosen: Chosen, writing: Writing) -> Chosen:
    """`chosen` with its quantised optimizer states dequantised. Raises UsageError E0264 where there are none, or where the
    plan is to be run elsewhere: the floats are computed from a source that only this process has."""
    if not writing.dequantize:
        return chosen
    if writing.plan_file or writing.ray:
        raise UsageError(
            "--dequantize computes values while it reads, which a saved plan can't do yet", code="E0264",
            hint="run the conversion itself, without --plan and --ray",
        )  # fmt: skip
    from ckpt_tool.run.dequantize import view

    opened = chosen.sources[0]
    made = view([row.tensor for row in chosen.stored], opened.tree)
    if not made.tensors:
        raise UsageError(
            "--dequantize: this build undoes the quantisation of Paddle's optimizer states, and there are none here",
            code="E0264", hint="leave it off: other quantised tensors are moved as they are",
        )  # fmt: skip
    number = len(chosen.sources)
    stored = [row for row in chosen.stored if row.tensor.key not in made.used]
    stored += [Stored(number, tensor) for tensor in made.tensors]
    floats = Opened(made.tree, opened.format, Catalog(opened.catalog.format, {}))
    return replace(
        chosen,
        sources=(*chosen.sources, floats),
        stored=tuple(stored),
        renewed=chosen.renewed | {tensor.key for tensor in made.tensors},
        notes=(
            *chosen.notes,
            f"{len(made.used)} quantised tensors are read as {len(made.tensors)} of F32 (--dequantize)",
        ),
    )
