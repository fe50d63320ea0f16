"""Writing a torch_dist checkpoint (in the making)."""

from __future__ import annotations

from ckpt_tool.core.target import Target, Wanted
from ckpt_tool.errors import UsageError


def dist_target(wanted: Wanted) -> Target:
    raise UsageError("megatron-dist is not written yet", code="E0258", hint="choose another format")
