"""`ckpt reshard` and `ckpt convert`: the same values for other degrees, or in another format."""

from __future__ import annotations

from typing import Any

from ckpt_tool.conversion.kept_names import check_kept_names
from ckpt_tool.conversion.passes import NAMES, SELECTION, selected
from ckpt_tool.conversion.unused_options import refuse_new_names, refuse_unused_reading, refuse_without_patterns
from ckpt_tool.conversion.writing import write
from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.chosen import Conversion
from ckpt_tool.sources.opening import open_source


def reshard(src: str, dst: str, reading: Reading, writing: Writing, progress: Progress) -> dict[str, Any]:
    """The same checkpoint, every state of it, for other parallel degrees. Degrees left out keep the source's value."""
    if writing.aoa or writing.dialect not in (None, "keep"):
        option = "--aoa" if writing.aoa else "--dialect"
        raise UsageError(
            f"reshard keeps names: {option} changes them",
            code="E2702",
            hint="ckpt convert takes the degrees too, so one hop is enough",
        )
    if writing.experts:
        from ckpt_tool.conversion.naming import refuse_experts

        refuse_experts(writing, "reshard keeps names")
    refuse_new_names("reshard", writing)
    refuse_without_patterns("reshard", writing)
    opened = open_source(src, reading)
    refuse_unused_reading(reading, opened)
    job = Conversion(reading, writing, registry.by_name(writing.to or opened.catalog.format), inherits=True)
    return write(check_kept_names(selected(opened, job), job, "reshard"), dst, job, progress)


def convert(src: str, dst: str, reading: Reading, writing: Writing, progress: Progress) -> dict[str, Any]:
    """Another format (and other degrees on the way). Degrees left out are 1."""
    if writing.to is None:
        raise UsageError("convert needs --to FORMAT", code="E0263", hint="such as --to safetensors")
    refuse_without_patterns("convert", writing)
    opened = open_source(src, reading)
    refuse_unused_reading(reading, opened)
    job = Conversion(reading, writing, registry.by_name(writing.to))
    return write(selected(opened, job, (*SELECTION, *NAMES)), dst, job, progress)
