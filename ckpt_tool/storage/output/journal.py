"""The journals of a staging folder: which processes write there, which plan they execute, and what is done.

    .ckpt-journal              of a run that executes a whole plan
    .ckpt-journal-2-of-8       of part 2 of 8
    .ckpt-journal-by-vm-77-0a  of a worker that claims shares (`output.claims`, whose folder has the same prefix)

A line is `seal JSON`. The first line names the plan; the seal of each line is a hash of the plan's identifier and of
the line. It is no secret: it detects damage, not forgery. Reading ends at the first torn or edited line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from typing import Any, NamedTuple

from ckpt_tool.core.inner_path import JOURNAL, is_journal
from ckpt_tool.errors import is_failure
from ckpt_tool.storage.descriptors import close_read
from ckpt_tool.storage.output.open_below import UnexpectedEntry, open_own

Line = dict[str, Any]
Writer = tuple[int, int] | str | None  # a part (i, n), the name of a worker, or None for a run of the whole plan
_WORKER = f"{JOURNAL}-by-"
_PART = re.compile(re.escape(JOURNAL) + r"-([1-9]\d{0,8})-of-([1-9]\d{0,8})", re.ASCII)


def name_of(writer: Writer) -> str:
    """The name of the writer's journal."""
    if isinstance(writer, str):
        return _WORKER + writer
    return JOURNAL if writer is None else f"{JOURNAL}-{writer[0]}-of-{writer[1]}"


def worker_of(name: str) -> str | None:
    """The worker whose journal has that name, None for other files."""
    return name.removeprefix(_WORKER) if name.startswith(_WORKER) else None


def part_of(name: str) -> tuple[int, int] | None:
    """The part whose journal has that name, None for other files."""
    found = _PART.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


class PartStatus(NamedTuple):
    """The progress of a part (i, n), a worker, or a run of the whole plan (`part` and `worker` are None)."""

    part: tuple[int, int] | None
    state: str  # `done`, `running`, `dead` (it ended too early)
    # units, nbytes: done, out of `of_units` and `of_bytes`, which are 0 if not known; `before`: bytes of `nbytes` that
    # an earlier process had done
    units: int
    of_units: int
    nbytes: int
    of_bytes: int
    before: int
    # began, last: when the process began and last wrote a line, in seconds since 1970
    began: float
    last: float
    process: str  # whose it is, `PID on HOST`
    worker: str | None


def statuses(folder: int) -> list[PartStatus]:
    """The progress of each writer of an open staging folder, from its journal. Raises OSError."""
    found = []
    for name in sorted(names(folder), key=lambda name: (part_of(name) or (0, 0), name)):
        lines = read(folder, name)
        if not lines:  # it has no first line yet
            continue
        runs = [number for number, line in enumerate(lines) if isinstance(line.get("run"), dict)]
        run = lines[runs[-1]]["run"] if runs else {}
        units = {line["unit"]: int(line.get("bytes", 0)) for line in lines if type(line.get("unit")) is int}
        # Units before the last `run` line were done by earlier processes.
        earlier = {line["unit"] for line in lines[: runs[-1]] if type(line.get("unit")) is int} if runs else set()
        running, last = held(folder, name)
        state = "running" if running else "dead"
        if lines and lines[-1].get("part"):
            state = "done"
        found.append(
            PartStatus(
                part_of(name),
                state,
                len(units),
                int(run.get("units", 0)),
                sum(units.values()),
                int(run.get("bytes", 0)),
                sum(units[unit] for unit in earlier),
                float(run.get("began", 0)),
                last,
                f"{run.get('pid')} on {run.get('host')}" if run else "",
                worker_of(name),
            )
        )

    return found


def held(folder: int, name: str) -> tuple[bool, float]:
    """Returns (does a process hold the lock of the journal, when it was last written or touched); (False, 0) if there
    is no such journal. Raises OSError."""
    try:
        fd = open_own(folder, name, os.O_RDONLY)
    except OSError as e:
        if is_failure(e):
            raise
        return False, 0.0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False, os.fstat(fd).st_mtime
    except BlockingIOError:
        return True, os.fstat(fd).st_mtime
    finally:
        close_read(fd)


def names(folder: int) -> list[str]:
    """The journals in the open staging folder."""
    return sorted(filter(is_writer, os.listdir(folder)))


def is_writer(name: str) -> bool:
    """Is it the name of a journal?"""
    return is_journal(name) and (name == JOURNAL or name.startswith(_WORKER) or part_of(name) is not None)


def sealed(plan_id: str, line: Line) -> bytes:
    """The bytes of one line."""
    body = json.dumps(line, separators=(",", ":")).encode()
    return _seal(plan_id, body) + b" " + body + b"\n"


def _seal(plan_id: str, body: bytes) -> bytes:
    return hashlib.blake2b(plan_id.encode() + b"\0" + body, digest_size=8).hexdigest().encode()


def read(folder: int, name: str, *, first: bool = False) -> list[Line]:
    """The complete lines of a journal; [] if there is none, or the entry is no regular file. first: the first line
    alone. Raises OSError if the disk fails: an empty result would let finished work be done again."""
    try:
        fd = open_own(folder, name, os.O_RDONLY)
    except UnexpectedEntry:
        return []
    except OSError as e:
        if is_failure(e):
            raise
        return []
    with open(fd, "rb") as file:
        text = file.readline() if first else file.read()
    return parsed(text)


def parsed(text: bytes) -> list[Line]:
    """The lines with a valid seal, up to the first torn or edited one."""
    lines: list[Line] = []
    for raw in text.split(b"\n")[:-1]:
        seal, _, body = raw.partition(b" ")
        try:
            line = json.loads(body)
            plan = (lines or [line])[0]["plan"]
        except (ValueError, TypeError, KeyError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(plan, str) or seal != _seal(plan, body):
            break
        lines.append(line)
    return lines
