"""Whose names the tensors of a source have, where a tool saved it that its format does not tell.

mlx-lm saves folders that are the hub's in all but names and layouts (`systems.hub.passes.mlx_source`). A system that
knows such a tool says so in its row (`formats.entry.System.source_names`).
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
    kept: str  # why the names stay where nobody asks for others, "" where they need not
    # (shapes, config, --family) -> the family and the dialect; raises where no rules describe the layout
    find_family: Callable[[Mapping[str, Shape], Config | None, str | None], FamilyMatch]


def names_of_source(chosen: Chosen) -> SourceNames | None:
    """Whose names they are by what the source's tool says of itself, None where none does."""
    for names_of_tool in offered("source_names"):
        names: SourceNames | None = names_of_tool(chosen)
        if names is not None:
            return names
    return None
