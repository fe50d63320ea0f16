"""Describes the naming scheme of a source that was saved by a tool which its format does not reveal.

mlx-lm saves folders that equal the hub's except for names and layouts (`systems.hub.passes.mlx_source`). A system that
recognises such a tool registers a hook (`formats.entry.System.source_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ckpt_tool.families.base import Config, Shape
from ckpt_tool.families.registry import FamilyMatch
from ckpt_tool.formats.entry import offered
from ckpt_tool.sources.chosen import Chosen


class SourceNames(NamedTuple):
    """The names that a tool gave to the tensors of a source."""

    dialect: str
    kept: str  # why the names are kept unless others are requested, "" if they need not be
    # (shapes, config, --family) -> the family and the dialect; raises where no rules describe the layout
    find_family: Callable[[Mapping[str, Shape], Config | None, str | None], FamilyMatch]


def names_of_source(chosen: Chosen) -> SourceNames | None:
    """Whose names they are by what the source's tool says of itself, None where none does."""
    for names_of_tool in offered("source_names"):
        names: SourceNames | None = names_of_tool(chosen)
        if names is not None:
            return names
    return None
