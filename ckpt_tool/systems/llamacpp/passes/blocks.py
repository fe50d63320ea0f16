"""`--gguf-type`: quantise floats to blocks of a ggml type, as the last step of a conversion.

    --to gguf --gguf-type q8_0    blk.0.attn_q.weight BF16 (64, 256)    ->  Q8_0 (64, 8): blocks of 34 bytes

Which tensors: `systems.llamacpp.gguf.fit`. The arithmetic: `quantised.codecs.gguf_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpt_tool.quantised.codecs.gguf_blocks import BlocksOfFloats, library
from ckpt_tool.sources.chosen import Chosen, Conversion, with_computed
from ckpt_tool.systems.llamacpp.options import GgufOptions
from ckpt_tool.weight_schemes.ggml_types import of_name


def as_blocks(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with its tensors quantised to the block types that the format asked for (`Fitted.casts`).

    Raises UsageError E1710, and E0264 with --plan and --ray.
    """
    asked = job.writing.of(GgufOptions).gguf_type
    if asked is None:
        return chosen
    kind = of_name(asked.upper())
    wanted = {key: dtype for key, dtype in chosen.casts.items() if dtype.coded}
    if kind.coded:
        chosen = chosen.noted(*_left_out(chosen, kind.name, some=bool(wanted)))
    if not wanted:
        return chosen
    library()  # raises E1710 before any work if it can't be loaded
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
    """Lines about matrices that are F16 instead of the requested type, and about a type that no tensor gets."""
    halves = [key.name for key, dtype in chosen.casts.items() if dtype.name == "F16"]
    if halves:
        yield f"{len(halves)} tensors are F16, as their rows are no whole blocks of {asked}: {', '.join(halves[:3])}"
    if not some and not any(row.tensor.dtype.name == asked for row in chosen.stored):
        yield f"--gguf-type {asked.lower()}: no matrix here can have that type"
