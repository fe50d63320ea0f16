"""The journals of a staging folder: who is writing there, by which plan, and what is done.

    .ckpt-journal              of a run that carries out a whole plan
    .ckpt-journal-2-of-8       of part 2 of 8
    .ckpt-journal-by-vm-77-0a  of a worker that claims what it does (`output.claims`, whose folder begins so too)

One line is `seal JSON`; the first names the plan, and every line's seal is a hash of the plan and of its own words. The
seal is no secret: it finds damage, not forgers. A torn or edited line ends the journal.
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
Writer = tuple[int, int] | str | None  # a part (i, n), a worker by its name, or a run that does all
_WORKER = f"{JOURNAL}-by-"
_PART = re.compile(re.escape(JOURNAL) + r"-([1-9]\d{0,8})-of-([1-9]\d{0,8})", re.ASCII)


def name_of(writer: Writer) -> str:
    """The name of the writer's journal."""
    if isinstance(writer, str):
        return _WORKER + writer
    return JOURNAL if writer is None else f"{JOURNAL}-{writer[0]}-of-{writer[1]}"


def worker_of(name: str) -> str | None:
    """The worker whose journal bears the name, None for other files."""
    return name.removeprefix(_WORKER) if name.startswith(_WORKER) else None


def part_of(name: str) -> tuple[int, int] | None:
    """The part whose journal bears the name, None for a whole run's."""
    found = _PART.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


class PartStatus(NamedTuple):
    """How far a part (i, n) is, a worker, or a whole run (None)."""

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
    """What the journals of an open staging folder say, by part. Raises OSError."""
    found = []
    for name in sorted(names(folder), key=lambda name: (part_of(name) or (0, 0), name)):
        lines = read(folder, name)
        if not lines:  # it has no first line yet
            continue
        runs = [number for number, line in enumerate(lines) if isinstance(line.get("run"), dict)]
        run = lines[runs[-1]]["run"] if runs else {}
        units = {line["unit"]: int(line.get("bytes", 0)) for line in lines if type(line.get("unit")) is int}
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
    """(does a process hold the journal, when it was last written or touched); (False, 0) for one that is not there.
    Raises OSError."""
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
    """The lines of a journal as far as they are whole; [] where there is none, or something that is no journal. first:
    the first line alone. Raises OSError where the disk does not give it: what it calls done is not done again."""
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
    """The lines that are whole and sealed, up to the first that is not."""
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
