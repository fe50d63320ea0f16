"""The options that Paddle's formats alone have."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.option_kinds.statement import LAYOUT

SHARDINGS = ("v1", "v2")  # what Paddle calls its stages of sharding: whole tensors by owner, slices of fused buffers


@dataclass(frozen=True, slots=True)
class PaddleOptions:
    """How a Paddle job shares its optimizer. None: not given."""

    sharding: str | None = LAYOUT.choice(
        "Shard optimizer states by owner (v1) or in slices (v2). Default: as in the source.",
        SHARDINGS,
        system="Paddle",
        by_format=True,
    )
