"""What Meta's params.json says of a source's model, and of an output's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.hints import Hint
from ckpt_tool.sources.config import ModelConfig
from ckpt_tool.sources.opening import Opened
from ckpt_tool.systems.meta.config import hub_config, params_of
from ckpt_tool.systems.meta.consolidated.params import MetaHints


def read_params(opened: Opened) -> ModelConfig | None:
    """The config in the hub's words, None where the source has no params.json."""
    hints = opened.catalog.hints.get(MetaHints)
    if hints is None or hints.params is None:
        return None
    shapes = {row.name: row.shape for row in opened.catalog.rows()}
    return ModelConfig(hub_config(hints.params, shapes), origin="params.json")


def hints_of_config(config: Mapping[str, Any], *, renamed: bool) -> tuple[list[Hint], list[str]]:
    """(the params.json of a model with this config, in the hub's words; what it can't say). None where the names are
    Meta's already, and so is the file."""
    if not renamed:
        return [], []
    params, lost = params_of(config)
    return [MetaHints(params, None, False)], lost
