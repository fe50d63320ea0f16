"""`ckpt patch BASE DELTA... DST`: a base with a chain of deltas applied (`deltas.patching`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_tool.core.progress import Progress
from ckpt_tool.deltas import patching
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing


def patch(
    base: str, deltas: Sequence[str], dst: str, reading: Reading, writing: Writing, progress: Progress
) -> dict[str, Any]:
    """The document of `patch --json`: the writers', with `chain`."""
    return patching.patch(base, deltas, dst, reading, writing, progress)
