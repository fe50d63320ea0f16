"""A checkpoint of any format and layout as the model that the hub has: what a delta is over."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.conversion.passes import NAMES, SELECTION, selected
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.chosen import AS_REQUESTED, Chosen, Conversion
from ckpt_tool.sources.opening import Opened


def hub_names(opened: Opened, reading: Reading) -> Chosen:
    """The model's tensors as `convert --to safetensors` would name and shape them; names of no family stay."""
    job = Conversion(reading, Writing(states=(MODEL,)), registry.of_dialect("hf"))
    chosen = selected(opened, job, (*SELECTION, *NAMES))
    behind = "a delta holds the model alone; --dedup keeps whole steps"
    dropped = tuple(
        {**entry, "reason": behind} if entry.get("reason") == AS_REQUESTED else entry for entry in chosen.dropped
    )
    return replace(chosen, dropped=dropped)
