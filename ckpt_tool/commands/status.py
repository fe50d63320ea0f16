"""`ckpt status`: how far a run is, by the journals in the hidden folder in which its output grows, or by the records
beside it in a store.

Nothing is asked of the processes that write, which may be on other machines: each keeps a journal of its own, locked
while it lives, with a line for every unit of work that is done; in a store a record that it puts again and again.
"""

from __future__ import annotations

import time
from typing import Any

from ckpt_tool.conversion.output_state import output_state
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.storage.output.destination import Place, RemotePlace, place_of, staging_path
from ckpt_tool.storage.output.journal import PartStatus

_EVERY = 1.0  # seconds between two looks
_SHARE = 20  # of the time that a look takes, at least: journals of large plans are long
_WRITTEN = "written"
_GROWING = "growing"


def status(target: str, progress: Progress, *, watch: bool = False) -> dict[str, Any]:
    """target: the output, or the plan of which it comes. watch: look again until it is written, or nobody writes.

    Raises StorageError E0702 where neither the output nor anything of it is there, and SourceChanged E0610 for a file
    that is no plan.
    """
    destination, whole = _destination(target)
    document = _looked_at(destination, whole)
    if watch:
        shown = document["bytes"]
        took = 0.0
        progress.start(document["of_bytes"], str(destination))
        progress.advance(shown)
        while document["state"] == _GROWING and document["running"]:
            time.sleep(max(_EVERY, _SHARE * took))
            began = time.monotonic()
            document = _looked_at(destination, whole)
            took = time.monotonic() - began
            progress.advance(max(0, document["bytes"] - shown))
            shown = max(shown, document["bytes"])
        progress.finish()
    if document["state"] not in (_WRITTEN, _GROWING):
        raise StorageError(
            f"{destination} is not there, and no run has begun to write it",
            code="E0702",
            path=str(destination),
            hint="name the output of a run, or the plan that --plan saved",
        )
    return document


def _destination(target: str) -> tuple[Place, int]:
    """(the output, bytes of the whole plan, 0 where no plan says)."""
    place = place_of(target)
    if isinstance(place, RemotePlace) or staging_path(place).is_dir() or not place.is_file():
        return place, 0
    try:
        plan = load_plan(target)
    except CkptError:
        return place, 0  # an output of one file
    return place_of(plan.destination), sum(move.nbytes for move in plan.moves)


def _looked_at(destination: Place, whole: int) -> dict[str, Any]:
    stands = output_state(destination)
    parts = stands.parts
    whole = stands.of or whole
    of = max((part.part[1] for part in parts if part.part), default=1)
    begun = {part.part[0] for part in parts if part.part}
    missing = [number for number in range(1, of + 1) if number not in begun] if begun else []
    done = stands.moved
    total = sum(part.of_bytes for part in parts)
    if missing and begun and not whole:
        total = total * of // len(begun)  # parts are of about one size

    speed = sum(_speed(part) for part in parts if part.state == "running")
    state = _WRITTEN if stands.there else "absent"
    if parts or stands.of:
        state = _GROWING
    left = max(0, (whole or total) - done)
    return {
        "schema_version": 1,
        "path": str(destination),
        "state": state,
        "bytes": done,
        "of_bytes": whole or total,
        "bytes_per_s": round(speed),
        "seconds_left": round(left / speed) if speed and parts else None,
        "running": sum(part.state == "running" for part in parts),
        "missing": missing,
        "parts": [_shown(part) for part in parts],
    }


def _speed(part: PartStatus) -> float:
    """Bytes a second since the process began."""
    return max(0, part.nbytes - part.before) / max(part.last - part.began, 1.0) if part.began else 0.0


def _shown(part: PartStatus) -> dict[str, Any]:
    speed = _speed(part) if part.state == "running" else 0.0
    return {
        "part": list(part.part) if part.part else None,
        **({"worker": part.worker} if part.worker else {}),
        "state": part.state,
        "units": part.units,
        "of_units": part.of_units,
        "bytes": part.nbytes,
        "of_bytes": part.of_bytes,
        "bytes_per_s": round(speed),
        "seconds_left": round(max(0, part.of_bytes - part.nbytes) / speed) if speed else None,
        "process": part.process,
        "last_line": round(part.last, 3),
    }
