"""`ckpt merge`: join shards and checkpoints into one, strip keys. Arithmetic merges belong to a later build."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.convert import choose
from ckpt_tool.commands.groups import without_removed
from ckpt_tool.commands.options import Reading, Writing
from ckpt_tool.commands.select import split_keys
from ckpt_tool.commands.source import Opened, open_source
from ckpt_tool.commands.write import write
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.plan.moves import Stored

BUILT = ("union",)


def merge(
    sources: list[str],
    dst: str,
    reading: Reading,
    writing: Writing,
    progress: Progress,
    *,
    method: str | None = None,
    weights: tuple[float, ...] = (),
    base: str | None = None,
    density: float | None = None,
    t: float | None = None,
    seed: int | None = None,
    config: str | None = None,
    on_conflict: str = "error",
) -> dict[str, Any]:
    """Join `sources` (one: its shards) into `dst`; keys that several hold are one conflict each (`--on-conflict`)."""
    if (method or "union") not in BUILT or config or weights or base or density is not None or t is not None:
        raise UsageError(
            f"this build merges by {', '.join(BUILT)} only, not {method or 'a config'}", code="E0266",
            hint="leave the arithmetic options off to join and strip",
        )  # fmt: skip
    opened = [open_source(src, reading) for src in sources]
    to = writing.to or opened[0].catalog.format
    if len(opened) == 1:
        inherits = to == opened[0].catalog.format and bool(registry.by_name(to).holds.mesh)
        return write(choose(opened[0], reading, writing, inherits=inherits), dst, writing, progress, to=to)
    return write(_union(opened, reading, writing, on_conflict), dst, writing, progress, to=to)


def _union(opened: list[Opened], reading: Reading, writing: Writing, on_conflict: str) -> Chosen:
    """All tensors of all sources, in order; the key patterns see the union."""
    bare = replace(writing, remove_keys=(), keep_keys=())
    parts = [choose(one, reading, bare) for one in opened]
    found: dict[TensorKey, Stored] = {}
    conflicts = []
    for number, part in enumerate(parts):
        for row in part.stored:
            key = row.tensor.key
            if key in found:
                conflicts.append(f"{key}: in {opened[found[key].source].path} and {opened[number].path}")
                if on_conflict != "last":
                    continue
            found[key] = Stored(number, row.tensor)
    extras: dict[str, Any] = {}
    for number, part in enumerate(parts):
        for name, value in part.extras.items():
            if name in extras and extras[name] != value:
                conflicts.append(f"extras {name}: differs in {opened[number].path}")
                if on_conflict != "last":
                    continue
            extras[name] = value
    if conflicts and on_conflict == "error":
        raise InconsistentCheckpoint(
            f"{len(conflicts)} keys are in more than one source; the first: {conflicts[0]}", code="E0353",
            hint="say which one wins with --on-conflict first or --on-conflict last", faults=conflicts[1:],
        )  # fmt: skip
    kept, removed = split_keys(found, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only)
    gone: tuple[LogicalTensor, ...] = tuple(found[key].tensor for key in removed)
    return Chosen(
        tuple(opened),
        tuple(found[key] for key in kept),
        without_removed(extras, {key.name for key in removed} - {key.name for key in kept}),
        gone,
        tuple(entry for part in parts for entry in part.dropped),
        notes=tuple(f"{conflict}: the {on_conflict} one was taken" for conflict in conflicts),
        first_replica=reading.replica_policy == "first",
    )
