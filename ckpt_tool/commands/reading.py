"""How a source is read: what `commands.options` makes of the options, apart so that `ckpt inspect` loads no more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is read.

    from_format: overrides detection. lenient: accept what a strict reader refuses but no value depends on.
    prefer: which of two sets of files in one folder, by format or by the name of its index. replica_policy: what to do
    when replicas differ: "error" (as None), or take the "first" without comparing. family, config: what the files don't
    tell, a family's name and the path of a config.json.
    """

    from_format: str | None = None
    follow_symlinks: bool = False
    lenient: bool = False
    allow_compressed: bool = False
    require_checksums: bool = False
    prefer: str | None = None
    replica_policy: str | None = None
    family: str | None = None
    config: str | None = None
