"""Tensors of GGUF's types of blocks in a conversion: as they are from GGUF to GGUF, as floats everywhere else.

    --to gguf                    kept, under their names           --to safetensors     E1706, --dequantize makes floats

What makes floats of blocks is in `quantised.codecs.gguf_blocks`; blocks of floats are `systems.llamacpp.passes.blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion

if TYPE_CHECKING:
    from ckpt_tool.run.computed import Recipe

LEFT = "E1706"
NO_WAY = "E1707"


def refuse_blocks(chosen: Chosen, job: Conversion) -> None:
    """Raise UsageError E1706 where tensors of blocks would travel to what has no such type, or under other names."""
    from ckpt_tool.weight_schemes.ggml_types import is_big

    coded = [row.tensor for row in chosen.stored if row.tensor.dtype.coded]
    big = any(is_big(tensor.dtype) for tensor in coded)
    if not coded or (job.fmt.holds.blocks and job.dialect in (chosen.home, "keep") and not big):
        return
    first = coded[0]
    what = "of big-endian numbers" if big else f"quantised, {first.key.name} as {first.dtype.name}"
    where = (
        f"{job.fmt.name} has no such type"
        if not job.fmt.holds.blocks
        else "names and structure change with floats alone"
    )
    if big and job.fmt.holds.blocks:
        where = "GGUF is written in little-endian numbers"
    raise UsageError(
        f"{len(coded)} tensors are {what}: {where}",
        code=LEFT,
        key=first.key.name,
        hint="convert them to floats on the way with --dequantize",
    )


def floats_of_blocks(rows: Iterable[Stored], chosen: Chosen) -> list[Recipe]:
    """Recipes for the tensors of blocks among `rows`. Raises UsageError E1707 for types that have no floats here, E1710
    without the gguf package."""
    from ckpt_tool.quantised.codecs.gguf_blocks import FloatsOfBlocks, has_floats, library

    coded = [row for row in rows if row.tensor.dtype.coded]
    unknown = [row.tensor for row in coded if not has_floats(row.tensor.dtype)]
    if unknown:
        first = unknown[0]
        raise UsageError(
            f"{len(unknown)} tensors are {first.dtype.name}, of which the gguf package makes no floats",
            code=NO_WAY,
            key=first.key.name,
            faults=[f"{tensor.key.name}: {tensor.dtype.name}" for tensor in unknown[1:50]],
            hint="requantise the model with llama.cpp, or leave these out with --remove-keys",
        )
    if any(row.tensor.dtype.block > 1 for row in coded):
        library()
    return [
        FloatsOfBlocks(
            row.tensor.key,
            row.tensor.dtype.elements(row.tensor.shape),
            (chosen.input(row),),
            f"dequantised GGUF {row.tensor.dtype.name}",
        )
        for row in coded
    ]
