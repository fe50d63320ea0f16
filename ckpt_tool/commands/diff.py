"""`ckpt diff A B`: are two checkpoints equal in value, in whatever formats and layouts they lie?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_tool.commands.options import Reading
from ckpt_tool.commands.select import state_filter
from ckpt_tool.commands.source import open_source
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import LogicalTensor, TensorKey, first_replica
from ckpt_tool.errors import UsageError, wrap_os_error


def diff(
    a: str,
    b: str,
    reading: Reading,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    map_file: str | None = None,
    states: tuple[str, ...] = (),
    progress: Progress,
) -> dict[str, Any]:
    """The document of `diff --json`. map_file: a JSON object or lines `LEFT RIGHT`: names of A as B calls them.

    Without tolerances values are equal when their bits are (NaN payloads included); with them |a - b| <= atol + rtol |b|.
    """
    from ckpt_tool.run.compare import compare

    left, right = open_source(a, reading).refuse_unsafe(), open_source(b, reading).refuse_unsafe()
    left.catalog.check()
    right.catalog.check()
    names = _names(map_file) if map_file else {}
    wanted = state_filter(states, (*left.catalog.states(), *right.catalog.states()))
    here = {
        TensorKey(names.get(key.name, key.name), key.state): key for key in left.catalog.tensors if wanted(key.state)
    }
    there = {key: key for key in right.catalog.tensors if wanted(key.state)}
    found: list[dict[str, Any]] = []
    pairs: list[tuple[LogicalTensor, LogicalTensor]] = []
    for key in {**here, **there}:
        base = {"name": key.name, "state": key.state}
        if key not in here or key not in there:
            found.append({**base, "kind": "missing_left" if key not in here else "missing_right"})
            continue
        mine, theirs = left.catalog.tensors[here[key]], right.catalog.tensors[there[key]]
        if mine.shape != theirs.shape:
            found.append({**base, "kind": "shape", "left": list(mine.shape), "right": list(theirs.shape)})
        elif mine.dtype != theirs.dtype and not (rtol or atol):
            found.append({**base, "kind": "dtype", "left": mine.dtype.name, "right": theirs.dtype.name})
        else:
            first = reading.replica_policy == "first"
            pairs.append((first_replica(mine), first_replica(theirs)) if first else (mine, theirs))
    progress.start(sum(mine.nbytes + theirs.nbytes for mine, theirs in pairs), "comparing")
    for (_, theirs), difference in zip(
        pairs, compare(pairs, left.tree, right.tree, rtol=rtol, atol=atol, advance=progress.advance), strict=True
    ):
        if difference is not None:
            found.append({"name": theirs.key.name, "state": theirs.key.state, "kind": "value", **difference})
    progress.finish()
    extras = _extras_differ(left.catalog.extras, right.catalog.extras) if not states else []
    return {
        "schema_version": 1, "equal": not found, "compared": len(pairs), "differences": found,
        "left": left.path, "right": right.path, "extras_differ": extras,
    }  # fmt: skip


def _extras_differ(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Names of extras that only one side has or that differ: shown, not counted (a format may have no place for them)."""
    return sorted(str(name) for name in {**left, **right} if left.get(name) != right.get(name))


def _names(map_file: str) -> dict[str, str]:
    import json

    path = Path(map_file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise wrap_os_error(e, path, "reading the map") from e
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError as e:
            raise UsageError(f"the map is not JSON: {e}", code="E0268", path=path) from e
        return {str(left): str(right) for left, right in document.items()}
    out = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise UsageError("want two names a line", code="E0268", path=path, place=f"line {number}")
        out[words[0]] = words[1]
    return out
