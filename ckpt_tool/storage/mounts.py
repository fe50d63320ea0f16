"""Where something is mounted below a path: such a place can't be renamed away, and what is in it is somebody else's.

    run/checkpoint-100/eval        a file system of its own, or a folder of this one that is bound there

A bound folder (`mount --bind`, a volume of a container) has the device number of the file system around it, so it can't
be found by `st_dev`, only in the kernel's list. Cost: one read of that list. Systems without it have no such mounts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_LIST = "/proc/self/mountinfo"
_POINT = 4  # which field of a line is the mount point
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # a space, a tab, a newline or a backslash


def mounts_below(path: Path) -> list[str]:
    """The mount points at and below a path, as paths below it; [] where the system has no list of them. A link itself
    is not followed."""
    top = os.path.join(os.path.realpath(path.parent), path.name)
    try:
        with open(_LIST, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    points = [os.fsdecode(_ESCAPED.sub(_decode, line.split(b" ")[_POINT])) for line in lines]
    below = [point.removeprefix(top).lstrip("/") for point in points if f"{point}/".startswith(f"{top}/")]
    return [os.path.join(path, inner) if inner else os.fspath(path) for inner in below]


def _decode(escaped: re.Match[bytes]) -> bytes:
    return bytes([int(escaped[1], 8)])
