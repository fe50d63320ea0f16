"""The options of the command line that only Paddle's formats have."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.option_kinds.statement import LAYOUT

SHARDINGS = ("v1", "v2")  # Paddle's names: unsharded tensors by owner, or slices of fused buffers


@dataclass(frozen=True, slots=True)
class PaddleOptions:
    """How the optimizer states are sharded in a Paddle output. None means that the option is not given."""

    sharding: str | None = LAYOUT.choice(
        "Shard optimizer states by owner (v1) or in slices (v2). Default: as in the source.",
        SHARDINGS,
        system="Paddle",
        by_format=True,
    )
