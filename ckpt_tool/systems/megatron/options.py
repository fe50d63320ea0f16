"""The options of the command line that only Megatron has."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.option_kinds.statement import LAYOUT
from ckpt_tool.option_kinds.values import text

SPECS = ("local", "te")  # layers of Megatron's own modules, of Transformer Engine's


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """How Megatron shall build the layers of the new checkpoint. None: the option was not given."""

    spec: str | None = LAYOUT.choice(
        "Write layers of Megatron's own modules (local) or of Transformer Engine (te). Default: as "
        "in the source, or local.",
        SPECS,
        system="Megatron",
        by_format=True,
    )
    hybrid_layer_pattern: str | None = LAYOUT.option(
        "Write a GPTModel as a HybridModel of these layers: '*-*-'; none converts back.",
        text,
        "PATTERN|none",
        system="Megatron",
        renames=True,
    )
