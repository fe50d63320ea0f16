"""The config of a source's model from Meta's params.json, and the params.json of an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.hints import Hint
from ckpt_tool.sources.config import ModelConfig
from ckpt_tool.sources.opening import Opened
from ckpt_tool.systems.meta.config import hub_config, params_of
from ckpt_tool.systems.meta.consolidated.params import MetaHints


def read_params(opened: Opened) -> ModelConfig | None:
    """The model's config under the hub's keys, None if the source has no params.json."""
    hints = opened.catalog.hints.get(MetaHints)
    if hints is None or hints.params is None:
        return None
    shapes = {row.name: row.shape for row in opened.catalog.rows()}
    return ModelConfig(hub_config(hints.params, shapes), origin="params.json")


def hints_of_config(config: Mapping[str, Any], *, renamed: bool) -> tuple[list[Hint], list[str]]:
    """The params.json of an output: (hints that hold it, lines about settings that it can't express).

    Args:
        config: The model's config under the hub's keys.
        renamed: The names were converted to Meta's. If they were Meta's already, the source's params.json is used and
            both lists are empty.
    """
    if not renamed:
        return [], []
    params, lost = params_of(config)
    return [MetaHints(params, None, False)], lost
