"""Which steps of a run the deltas around it are made on: `ckpt prune` must not take these steps away.

    runs/7/checkpoint-100, checkpoint-200, ...
    runs/7/archive/200            below the run         {"base": "../../checkpoint-100", ...}
    runs/7-archive/step-200       next to the run       {"base": "../../7/checkpoint-100", ...}
    runs/7/checkpoint-200         in a step's place, or inside a step

A delta's index names its base by the path from the delta's folder, as it was when the delta was made. If it names none
(older ones, slime's), or the path leads nowhere now, the step with the number of its base version is kept: a delta
whose base is uncertain keeps a step too many rather than one too few. A delta that was moved keeps the step with the
name in that path; one below the run whose step has another name now keeps every step, and the report says why. Next to
a run, where other runs have steps of the same numbers, this holds for archives (`--dedup`) in the two nearest levels
only.

    runs/b/9/archive/200          of another run        {"base": "../../../a/7/checkpoint-100", ...}

Further up (`ABOVE` folders) some thousand folders are looked into as well: there a delta counts only if the path that
it names leads to a step of this run, and what can't be read there is skipped. A base does not know its deltas, so a
delta that is kept elsewhere is found only if it is named (`--deltas DIR`). A user who makes such a delta gets a note
about it (`is_found_by_prune`). An index that can't be read is unknown, next to a run too: the run's steps stay, unless
`--skip-unreadable`.

Cost: a listing of the run, of three levels next to it, and of up to `MOST_ABOVE` folders further up; the index of every
model in several files. What it does not do: find deltas that are far from the run and not named by the user, or ask
which step a chain could do without.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tool.core.inner_path import is_leaving
from ckpt_tool.deltas.folder import INDEX
from ckpt_tool.errors import CkptError, CorruptFile, wrap_os_error
from ckpt_tool.formats.hub_folder.index import DELTA
from ckpt_tool.sources.steps import Run, RunStep, step_of
from ckpt_tool.storage.links import is_folder, real_path

NEAR = 3  # levels of folders next to a run that are looked into
BY_NUMBER = 2  # levels in which a number alone counts
MOST = 50_000  # folders next to a run that are looked into
ABOVE = 2  # folders above the one that holds a run, below which deltas are looked for too
LEVELS_ABOVE = 5  # levels below these: `ABOVE/group/run/archive/step`
MOST_ABOVE = 5_000  # folders there that are looked into
_INSIDE = 3  # folders up to which a step's checkpoint is inside the step (`iter_5/weights`)
_LIMIT = 1 << 30  # bytes of an index
# What only a delta's index says of itself.
_KEYS = frozenset((DELTA, "base_version", "compression_format", "checksum_format"))
_SIGNS = tuple(f'"{key}"'.encode() for key in sorted(_KEYS))
# Files of a model in several: they are numbered from 1, those of a delta from 0.
_OF_A_MODEL = re.compile(r"(?!model-0+-of-).+-\d{1,7}-of-\d{1,7}\.safetensors|model\.safetensors")


class FoundDelta(NamedTuple):
    """A delta somewhere around a run."""

    path: str  # its folder, resolved
    base: str  # the folder that it names as its base, resolved, "" where it names none or that is not there
    base_version: int | None  # the number of the step that it is made on, None for none
    is_archive: bool  # made with `--dedup`, of a step's files
    gone_base: str  # the path that it names as its base where nothing is there, "" otherwise
    is_near: bool = False  # next to the run, where other runs may have steps of the same names


class Around(NamedTuple):
    """What was found around a run."""

    deltas: tuple[FoundDelta, ...]
    faults: tuple[CkptError, ...]  # what could not be read there, and why
    too_large: tuple[str, ...] = ()  # folders next to the run in which not all was looked at


def deltas_around(src: str, run: Run, more: Iterable[str] = ()) -> Around:
    """The deltas below the given folder, in the steps too, next to it and to the folder that holds the steps, and below
    the folders `more`; and those further up that are made on a step of the run."""
    faults: list[CkptError] = []
    try:
        top = real_path(src)
        steps = real_path(run.path)
    except OSError as e:
        return Around((), (wrap_os_error(e, src, "looking for deltas"),))

    visited: set[str] = set()
    deltas = [*_deltas_below(top, visited, faults)]
    for folder in more:
        deltas += _deltas_below(real_path(folder), visited, faults)
    too_large: list[str] = []
    for folder in dict.fromkeys((os.path.dirname(top), os.path.dirname(steps))):
        if folder != "/":
            deltas += _deltas_near(folder, visited, faults, too_large)
    deltas += [delta for delta in _deltas_above(top, visited) if _is_below(delta.base, steps)]
    return Around(tuple(deltas), tuple(faults), tuple(too_large))


def is_found_by_prune(folder: str, base: str) -> bool:
    """Is a delta in this folder found when the run of its base is pruned? True for a base that is no step of a run."""
    step = real_path(base)
    for _ in range(_INSIDE):
        if step_of(os.path.basename(step)) is not None:
            break
        step = os.path.dirname(step)
    else:
        return True

    place = os.path.join(real_path(os.path.dirname(os.path.abspath(folder))), os.path.basename(folder))
    run = os.path.dirname(step)
    near = os.path.relpath(place, os.path.dirname(run)).split(os.sep)
    return _is_below(place, run) or (near[0] != os.pardir and len(near) <= NEAR)


def dependents(run: Run, deltas: Iterable[FoundDelta]) -> dict[str, list[str]]:
    """The name of a step -> why a delta needs it."""
    root = real_path(run.path)
    places = {step.name: real_path(run.of(step)) for step in run.steps}
    reasons: dict[str, list[str]] = {}
    for delta in deltas:
        relative_path = os.path.relpath(delta.path, root)
        for step in run.steps:
            place = places[step.name]
            if delta.path == place:
                reasons.setdefault(step.name, []).append("it is a delta, which only ckpt patch can read")
            elif _is_below(delta.path, place):
                reasons.setdefault(step.name, []).append(f"a delta is in it: {os.path.relpath(delta.path, place)}")
            elif _is_base(delta, step, place):
                reasons.setdefault(step.name, []).append(f"the delta {relative_path} is made on it")
            elif _may_be_base(delta, step, run, root):
                gone = os.path.relpath(delta.gone_base, root)
                reasons.setdefault(step.name, []).append(
                    f"the delta {relative_path} may be made on it: the base that it names is not there: {gone}"
                )
    return reasons


def _is_base(delta: FoundDelta, step: RunStep, place: str) -> bool:
    if delta.base:
        return delta.base == place or _is_below(delta.base, place)
    return delta.base_version is not None and delta.base_version == step.number


def _may_be_base(delta: FoundDelta, step: RunStep, run: Run, root: str) -> bool:
    """May a delta be made on this step, where nothing is at the path that it names? root: of the run, resolved."""
    if not delta.gone_base:
        return False
    parts = delta.gone_base.split(os.sep)
    ending = parts[-_INSIDE:]
    if delta.is_near:  # the delta was moved: the names of run and step still identify the base
        return [os.path.basename(root), step.name] in [parts[at : at + 2] for at in range(len(parts) - 1)]

    # The delta was moved: its step has the name that it had.
    names = {each.name for each in run.steps}
    named = names.intersection(ending)
    if named:
        return step.name in named

    # The step has another name now: an archive's number may still identify it; a model's is the number of a version.
    if delta.is_archive and any(each.number == delta.base_version for each in run.steps):
        return False
    was_a_step = any(step_of(part) is not None for part in ending)
    return was_a_step or _is_below(delta.gone_base, root)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


# -- finding ----------------------------------------------------------------------------------------------------------


def _deltas_below(top: str, seen: set[str], faults: list[CkptError]) -> Iterator[FoundDelta]:
    """Those in a folder and in all below it; links to folders are followed. seen: resolved folders that were looked
    into."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        if folder in seen:
            continue
        seen.add(folder)
        try:
            names, folders = _entries(folder)
            waiting += folders
            if INDEX in names:
                yield from _delta_in(folder, names)
        except OSError as e:
            faults.append(wrap_os_error(e, e.filename or folder, "looking for deltas"))
        except CkptError as e:
            faults.append(e)


def _deltas_near(parent: str, seen: set[str], faults: list[CkptError], too_large: list[str]) -> Iterator[FoundDelta]:
    """The deltas up to `NEAR` levels below the folder that holds a run, on its file system. Folders that can't be read
    are skipped: they belong to somebody else. too_large: receives the folder if it has too many to look at all."""
    waiting = [(parent, 0)]
    looked = 0
    while waiting and looked < MOST:
        folder, level = waiting.pop(0)
        if folder in seen:
            continue
        seen.add(folder)
        looked += 1
        try:
            names, folders = _entries(folder, same_device=True)
            if INDEX in names:
                for delta in _delta_in(folder, names):
                    counts = delta.is_archive and level <= BY_NUMBER
                    number = delta.base_version if counts else None
                    yield delta._replace(base_version=number, is_near=True)
        except (PermissionError, FileNotFoundError):
            continue
        except OSError as e:
            faults.append(wrap_os_error(e, e.filename or folder, "looking for deltas"))
            continue
        except CkptError as e:  # damaged: it may be made on a step of this run
            faults.append(e)
        if level < NEAR:
            waiting += [(subfolder, level + 1) for subfolder in folders]
    if waiting:
        too_large.append(parent)


def _deltas_above(top: str, seen: set[str]) -> Iterator[FoundDelta]:
    """Those below the folders above the one that holds a run, on its file system, as far as the paths that they name
    are there. Nothing below a step of a run is looked into, and no index of a model. seen: as `_deltas_below`."""
    looked = 0
    for above in [str(parent) for parent in Path(top).parents[1:-1]][:ABOVE]:
        waiting = deque([(above, 0)])
        while waiting and looked < MOST_ABOVE:
            folder, level = waiting.popleft()
            looked += 1
            folders: list[str] = []
            with suppress(OSError, CkptError):
                names, folders = _entries(folder, same_device=True)
                is_model = any(map(_OF_A_MODEL.fullmatch, names))
                if INDEX in names and folder not in seen and not is_model:
                    seen.add(folder)
                    yield from (delta for delta in _delta_in(folder, names) if delta.base)
            if level < LEVELS_ABOVE and (level == 0 or step_of(os.path.basename(folder)) is None):
                waiting += [(subfolder, level + 1) for subfolder in folders]


def _entries(folder: str, *, same_device: bool = False) -> tuple[set[str], list[str]]:
    """(the names in a folder that are no folders, the resolved folders in it). Raises OSError."""
    names: set[str] = set()
    folders: list[str] = []
    device = os.stat(folder).st_dev
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_leaving(entry.name):
                continue
            if not is_folder(entry):
                names.add(entry.name)
            elif not same_device or entry.stat().st_dev == device:
                folders.append(real_path(entry.path) if entry.is_symlink() else entry.path)
    return names, folders


def _delta_in(folder: str, names: Iterable[str]) -> Iterator[FoundDelta]:
    """The delta in a folder with an index, none where that is a model's. names: of the folder's files. Raises OSError,
    CorruptFile for an index that is a delta's, or may be one's, and is damaged."""
    path = os.path.join(folder, INDEX)
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT)
    except FileNotFoundError:  # a link that leads nowhere
        return

    is_cut = not data.rstrip().endswith(b"}")
    may_be_cut_delta = is_cut and not any(map(_OF_A_MODEL.fullmatch, names))
    if not may_be_cut_delta and not any(sign in data for sign in _SIGNS):
        return

    try:
        value = json.loads(data)
        metadata = value["metadata"]
        if not metadata.keys() & _KEYS:
            return
        if DELTA not in metadata:
            raise KeyError(DELTA)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptFile(
            f"the index of a delta is damaged, so that it is not known what it is made on: {e}",
            code="E2608",
            path=path,
            hint="copy the delta again, or remove it if nothing needs it",
        ) from e

    base, gone_base = _base_of(folder, value)
    yield FoundDelta(folder, base, _number_of(metadata), "archive" in value, gone_base)


def _base_of(folder: str, value: Mapping[str, Any]) -> tuple[str, str]:
    """(the folder that a delta names as its base, resolved, or ""; the path that it names where nothing is there, or
    "")."""
    named = value.get("base")
    if not isinstance(named, str) or not named or "\0" in named:
        return "", ""
    path = os.path.join(folder, named)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "", os.path.normpath(path)
    return real_path(path), ""


def _number_of(metadata: Mapping[str, Any]) -> int | None:
    text = metadata.get("base_version")
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 18 else None
