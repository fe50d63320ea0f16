"""What Meta's params.json says of a source's model."""

from __future__ import annotations

from ckpt_tool.sources.config import ModelConfig
from ckpt_tool.sources.opening import Opened
from ckpt_tool.systems.meta.config import hub_config
from ckpt_tool.systems.meta.consolidated.params import MetaHints


def read_params(opened: Opened) -> ModelConfig | None:
    """The config in the hub's words, None where the source has no params.json."""
    hints = opened.catalog.hints.get(MetaHints)
    if hints is None or hints.params is None:
        return None
    shapes = {row.name: row.shape for row in opened.catalog.rows()}
    return ModelConfig(hub_config(hints.params, shapes), origin="params.json")
