"""Sets an old output aside while the new one takes its name, on systems that can't exchange two names.

    out  ->  .out.3f9c21aa.ckpt-replaced     then  .out.ckpt-partial  ->  out     then the old one is listed and removed

A process that is killed in between leaves the old output under that hidden name. `put_back` gives it its own name again
if that is free; if the new output has it, the hidden one is removed by `ckpt clean`. An output that is a file always
has its name, old or new: the hidden name is an additional one of the old file. Nothing here removes anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_tool.core.inner_path import FILES, REPLACED, is_set_aside
from ckpt_tool.storage import platform_calls
from ckpt_tool.storage.output.proven_names import is_proven, name_in, proven_name


def hidden_path(destination: Path) -> Path:
    """The hidden name under which the existing output would be set aside. Raises OSError."""
    inode = os.lstat(destination).st_ino
    return destination.parent / proven_name(destination.name, inode, REPLACED)


def was_set_aside(hidden: Path) -> bool:
    """Did a run of ours give it its hidden name? Raises OSError."""
    return is_set_aside(hidden.name) and is_proven(hidden, REPLACED)


def destination_of(hidden: Path) -> Path:
    """The path that an output had before it was set aside under the name `hidden`."""
    return hidden.parent / name_in(hidden.name, REPLACED)


def _is_going(hidden: Path) -> bool:
    """May a run have begun to remove it? Before that it writes the list of removable files."""
    return os.path.lexists(hidden / FILES)


def comes_back(destination: Path) -> Path | None:
    """The hidden path of the output that `put_back` would rename, None if it would do nothing. Raises OSError."""
    if os.path.lexists(destination):
        return None
    with os.scandir(destination.parent) as entries:
        beside = [Path(entry.path) for entry in entries if is_set_aside(entry.name)]
    ours = [hidden for hidden in beside if destination_of(hidden) == destination and was_set_aside(hidden)]
    ours = [hidden for hidden in ours if not _is_going(hidden)]
    return max(ours, key=lambda hidden: os.lstat(hidden).st_ctime_ns, default=None)


def put_back(destination: Path) -> Path | None:
    """Give the output that was set aside last its name back, if that is free. Returns the hidden name that it had, None
    if nothing was done. Raises OSError."""
    newest = comes_back(destination)
    if newest is None:
        return None
    try:
        platform_calls.rename_new(newest, destination)
    except FileExistsError:  # another has just taken the name
        return None
    return newest
