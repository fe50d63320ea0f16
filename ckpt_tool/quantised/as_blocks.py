"""Tensors of GGUF's types of blocks in a conversion: as they are from GGUF to GGUF, as floats everywhere else.

    --to gguf                    kept, under their names           --to safetensors     E1706, --dequantize makes floats
    --to gguf --gguf-type q8_0   floats become blocks: the last thing that is done to them

What makes floats of blocks, and them of floats, is in `quantised.blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion, with_computed

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
    from ckpt_tool.quantised.blocks import FloatsOfBlocks, known, library

    coded = [row for row in rows if row.tensor.dtype.coded]
    unknown = [row.tensor for row in coded if not known(row.tensor.dtype)]
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


def as_blocks(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` whose tensors are the blocks that the format wants them to be (`Fitted.casts`). Raises UsageError E1710,
    E0264 with --plan and --ray."""
    if job.writing.gguf_type is None:
        return chosen
    from ckpt_tool.weight_schemes.ggml_types import of_name

    kind = of_name(job.writing.gguf_type.upper())
    wanted = {key: dtype for key, dtype in chosen.casts.items() if dtype.coded}
    if kind.coded:
        chosen = chosen.noted(*_left_out(chosen, kind.name, some=bool(wanted)))
    if not wanted:
        return chosen
    from ckpt_tool.quantised.blocks import BlocksOfFloats, library

    library()
    rows = [row for row in chosen.stored if row.tensor.key in wanted and not row.tensor.dtype.coded]
    recipes = []
    for row in rows:
        key = row.tensor.key
        shape = row.tensor.shape
        dtype = wanted[key]
        items = (*shape[:-1], shape[-1] // dtype.block)
        recipes.append(BlocksOfFloats(key, items, (chosen.input(row),), f"GGUF {dtype.name}", dtype))
    casts = {key: dtype for key, dtype in chosen.casts.items() if key not in wanted}
    note = f"{len(rows)} tensors are quantised as {kind.name} (--gguf-type)"
    shown = f"{chosen.sources[0].path} (quantised)"
    out = replace(chosen, casts=casts)
    return with_computed(out, recipes, shown, job.writing, option="--gguf-type", dtypes={}, notes=(note,))


def _left_out(chosen: Chosen, asked: str, *, some: bool) -> Iterator[str]:
    """Lines on matrices that are F16 in place of the type that was asked for, and on one that no tensor gets."""
    halves = [key.name for key, dtype in chosen.casts.items() if dtype.name == "F16"]
    if halves:
        yield f"{len(halves)} tensors are F16, as their rows are no whole blocks of {asked}: {', '.join(halves[:3])}"
    if not some and not any(row.tensor.dtype.name == asked for row in chosen.stored):
        yield f"--gguf-type {asked.lower()}: no matrix here can have that type"
