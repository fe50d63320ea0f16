"""`ckpt delta BASE NEW DST`: what changed between two checkpoints (`deltas.making`)."""

from __future__ import annotations

from typing import Any

from ckpt_tool.core.progress import Progress
from ckpt_tool.deltas.making import make
from ckpt_tool.deltas.options import Making
from ckpt_tool.options.reading import Reading


def delta(base: str, new: str, dst: str, reading: Reading, wanted: Making, progress: Progress) -> dict[str, Any]:
    """The document of `delta --json`."""
    return make(base, new, dst, reading, wanted, progress)
