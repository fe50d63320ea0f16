"""`ckpt prune`: removes the steps of a run that no rule keeps. At every moment a step is either complete or gone.

A step is kept, with a reason in the document, if it

    is one of the last N complete steps; the last complete one is always kept
    is a multiple of K
    is named by a pointer file, is the target of a symbolic link, or is recorded by the run as its best
    may still be being written: it is locked, newer than the last complete step, incomplete and changed within the last
      hour, or written later than steps with higher numbers (the run was restarted from an earlier step)
    is no checkpoint, can't be judged, or contains a mount point
    is the base of a delta (`deltas.dependents`), is a delta, or contains one
    contains files that belong neither to its checkpoints nor to a trainer (`conversion.accounted`): a user's files

A read error makes a step unknown, not incomplete: the step is kept, it does not count as one of the N, and nothing is
removed at all unless `--skip-unreadable` permits removing the others.

Before each removal the last complete step is checked to be still there. Cost: the headers of the steps that are judged
(from the newest down to the last that is kept) and of those that are removed, and the file names of all steps. Steps in
object stores are not pruned, because a store can't rename a folder in one step.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tool.conversion.accounted import find_other_files
from ckpt_tool.core.inner_path import is_leaving
from ckpt_tool.core.progress import Progress
from ckpt_tool.deltas.dependents import Around, FoundDelta, deltas_around, dependents
from ckpt_tool.errors import CkptError, SourceChanged, StorageError, UsageError, wrap_os_error
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Retention
from ckpt_tool.sources.judging import Judge, best_of, is_checkpoint
from ckpt_tool.sources.steps import Run, RunStep, run_at
from ckpt_tool.storage.links import real_path
from ckpt_tool.storage.opening import scheme_of
from ckpt_tool.storage.output.destination import local_path, staging_path
from ckpt_tool.storage.output.removal import PathContents, erase, freed, is_locked, measure, retire
from ckpt_tool.storage.output.replaced import some_of

RECENT = 3600  # seconds: an incomplete step that was changed within this time may still be being written
APART = 60  # seconds: the order in which two steps were written is only certain if their files differ by more
NO_STORE = "E1672"
NO_RULE = "E1673"
FAILED = "E1674"
UNREAD = "E2851"


class Fate(NamedTuple):
    """The decision about one step."""

    step: RunStep
    keep: tuple[str, ...]  # the reasons to keep it; () if it is removed
    held: PathContents | None  # its files; None if they can't be listed


def prune(src: str, reading: Reading, wanted: Retention, *, progress: Progress) -> dict[str, Any]:
    """Remove the steps that no rule keeps, and return the document of `prune --json`.

    In the document `removed` of a step is True once the step is gone.

    Raises:
        UsageError: E1672 for a URL, E1673 without a rule.
        StorageError: E2851 if something could not be read (nothing was removed), E1674 if some steps could not be
            removed (the others are gone).
    """
    if scheme_of(src) is not None:
        raise UsageError(
            "prune works on disks alone: in a store a folder can't be removed in one step",
            code=NO_STORE,
            path=src,
            hint="use the store's own lifecycle rules; ckpt latest works there",
        )

    if wanted.keep_last is None and wanted.keep_every is None:
        raise UsageError(
            "prune needs --keep-last N or --keep-every K",
            code=NO_RULE,
            place="ckpt prune",
            hint="--keep-last 3 keeps the last three complete steps; --dry-run shows what would go",
        )

    run = run_at(src, follow_symlinks=reading.follow_symlinks)
    judge = Judge(run, reading)
    last = judge.newest()
    around = deltas_around(src, run, wanted.deltas)
    unread = {fault.path or src: fault.message for fault in around.faults}
    _note_too_large(around, progress)
    fates = list(_fates(run, judge, reading, wanted, last, around.deltas, unread))
    if unread and not wanted.skip_unreadable:
        raise _refuse_unread(src, unread)

    for place, why in unread.items():
        progress.note(f"{place} could not be read: {why}")
    going = [fate for fate in fates if not fate.keep]
    gone = frozenset[str]()
    failed = list[CkptError]()
    if not wanted.dry_run and last is not None and going:
        gone, failed = _remove(run, last, going, progress)

    if failed:
        first = failed[0]
        raise StorageError(
            f"{len(failed)} of {len(going)} steps could not be removed; the first: {first.message}",
            code=FAILED,
            path=first.path,
            hint="what was taken away is under hidden names: ckpt clean deletes it",
            faults=[f"{each.message} ({each.where()})" for each in failed[1:]],
        )

    return {
        "schema_version": 1,
        "run": src,
        "dry_run": wanted.dry_run,
        "last_sound": last and run.of(last),
        "keep": [_row(run, fate, judge) for fate in fates if fate.keep],
        "remove": [{**_row(run, fate, judge), "removed": fate.step.name in gone} for fate in going],
        "freed_bytes": freed(fate.held for fate in going if fate.held),
    }


def _note_too_large(around: Around, progress: Progress) -> None:
    for folder in around.too_large:
        progress.note(
            f"{folder} has too many folders to look into all of them for deltas: name with --deltas where some are kept"
        )


def _row(run: Run, fate: Fate, judge: Judge) -> dict[str, Any]:
    known = judge.known(fate.step)
    return {
        "path": run.of(fate.step),
        "step": fate.step.number,
        "sound": known.sound if known else None,
        "bytes": fate.held.nbytes if fate.held else None,
        **({"reasons": list(fate.keep)} if fate.keep else {}),
        **({"why": known.why} if known and known.why else {}),
    }


# -- what stays --------------------------------------------------------------------------------------------------------


def _refuse_unread(src: str, unread: Mapping[str, str]) -> StorageError:
    """The error for paths that could not be read. unread: path -> reason."""
    lines = [f"{place}: {why}" for place, why in unread.items()]
    return StorageError(
        f"nothing was removed: {len(lines)} of the things to look at could not be read; the first: {lines[0]}"
        if lines[1:]
        else f"nothing was removed: {lines[0]}",
        code=UNREAD,
        path=src,
        hint="check the disk and run again; --skip-unreadable leaves these alone and removes others",
        faults=lines[1:],
    )


def _fates(
    run: Run,
    judge: Judge,
    reading: Reading,
    wanted: Retention,
    last: RunStep | None,
    deltas: Iterable[FoundDelta],
    unread: dict[str, str],
) -> Iterator[Fate]:
    """Yield the decision about each step, the oldest first. Read errors are added to `unread`: path -> reason."""
    held = dict[str, PathContents | None]()
    for step in run.steps:
        try:
            held[step.name] = measure(Path(run.of(step)))
        except CkptError as e:
            held[step.name] = None
            unread[run.of(step)] = e.message

    keep: dict[str, list[str]] = {step.name: [] for step in run.steps}
    if last is None:
        for reasons in keep.values():
            reasons.append("no step is complete")
    else:
        _by_number(run, judge, wanted, last, keep)
        _named(run, reading, last, keep)
        for name, reasons in dependents(run, deltas).items():
            keep[name] += reasons
        for step in run.steps:
            if not keep[step.name]:
                keep[step.name] += _untouchable(run, step, judge, reading, last, held, unread)
            if not keep[step.name] and not wanted.with_other_files:
                keep[step.name] += _not_its_own(run.of(step), reading, unread)
        _linked(run, keep, held, unread)

    for step in run.steps:
        known = judge.known(step)
        if known is not None and known.unread:
            unread.setdefault(run.of(step), known.why)
        yield Fate(step, tuple(keep[step.name]), held[step.name])


def _by_number(run: Run, judge: Judge, wanted: Retention, last: RunStep, keep: Mapping[str, list[str]]) -> None:
    """Add the reasons that depend on step numbers to `keep`.

    These are: one of the last N complete steps, a multiple of K, newer than the last complete step, and the universal
    form (a twin, in DeepSpeed's sense) of a step that is kept.
    """
    sound = set[tuple[int, int]]()
    for step in reversed(run.steps):
        number = (step.number or 0, step.epoch)
        if number not in sound and len(sound) == max(wanted.keep_last or 0, 1):
            break
        judged = judge.of(step)
        if judged.unread:
            keep[step.name].append("it could not be read")
        elif judged.sound is None and judged.checkpoint:
            keep[step.name].append("it can't be judged")
        if not judged.sound:
            if not sound:
                keep[step.name].append("newer than the last complete one")
            continue
        sound.add(number)
        if step.name == last.name:
            keep[step.name].append("the last complete one")
        elif wanted.keep_last:
            keep[step.name].append(f"one of the last {wanted.keep_last} complete ones")

    for step in run.steps:
        if wanted.keep_every and step.number is not None and step.number % wanted.keep_every == 0:
            keep[step.name].append(f"a multiple of {wanted.keep_every}")

    kept = {(step.number, step.epoch): step.name for step in run.steps if keep[step.name] and not step.twin}
    for step in run.steps:
        if step.twin and not keep[step.name] and (step.number, step.epoch) in kept:
            keep[step.name].append(f"the universal form of {kept[step.number, step.epoch]}")


def _named(run: Run, reading: Reading, last: RunStep, keep: Mapping[str, list[str]]) -> None:
    """Add a reason to `keep` for steps that a pointer file names or that the run records as its best."""
    for file, name in run.pointers:
        if name in keep:
            keep[name].append(f"{file} names it")
    for name in best_of(run.of(last), reading):
        if name in keep:
            keep[name].append(f"{last.name} records it as the best")


def _untouchable(
    run: Run,
    step: RunStep,
    judge: Judge,
    reading: Reading,
    last: RunStep,
    held: Mapping[str, PathContents | None],
    unread: dict[str, str],
) -> list[str]:
    """Safety reasons to keep a step that no rule keeps, [] if there are none. Read errors are added to `unread`."""
    path = Path(run.of(step))
    mine = held[step.name]
    newest = held[last.name]
    if mine is None:
        return ["it could not be read"]
    if mine.mounted:
        return [f"a mount point: {os.path.relpath(mine.mounted, run.path)}"]
    if mine.closed:
        return [f"no permission to delete in {os.path.relpath(mine.closed, run.path)}"]

    try:
        if not is_checkpoint(str(path), reading):
            return ["no checkpoint"]
        if _is_being_written(path):
            return ["a run of ckpt is writing it"]
    except StorageError as e:
        unread[str(path)] = e.message
        return ["it could not be read"]

    is_recent = time.time() - mine.changed < RECENT
    if is_recent and judge.of(step).unread:
        return ["it could not be read"]
    if is_recent and judge.of(step).sound is False:
        return ["not complete, and changed within the last hour"]

    judged = judge.of(step)
    if judged.sound is None and not judged.unread:
        return ["it can't be judged"]
    if newest is not None and mine.changed > newest.changed + APART:
        return [f"written after {last.name}"]
    return []


def _not_its_own(path: str, reading: Reading, unread: dict[str, str]) -> list[str]:
    """The reason to keep a step that contains a user's own files, [] if there are none. Read errors go to `unread`."""
    try:
        others = find_other_files(path, reading)
    except CkptError as e:
        unread[path] = e.message
        return ["it could not be read"]
    if not others:
        return []
    number = "1 file that is" if len(others) == 1 else f"{len(others)} files that are"
    return [f"{number} no part of a checkpoint: {some_of(others)} (--with-other-files removes the step with them)"]


def _is_being_written(path: Path) -> bool:
    """Is a run of ckpt writing this output now, that is, does it lock the staging folder? Raises StorageError."""
    staging = staging_path(path)
    try:
        return is_locked(staging)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # no staging folder, or something else of that name
            return False
        raise wrap_os_error(e, staging, "looking whether a run is writing it") from e


def _linked(
    run: Run, keep: Mapping[str, list[str]], held: Mapping[str, PathContents | None], unread: dict[str, str]
) -> None:
    """Add a reason to `keep` for steps that a remaining symbolic link leads into.

    Links in the run's folder outside the steps remain, and so do links in steps that are kept; a step kept for this
    reason may contain links to further steps, so the search continues with its links. Paths that can't be read are
    added to `unread`, since the links in them are unknown.
    """
    root = real_path(run.path)
    real = {os.path.join(root, name): name for name in keep}
    links = {name: each.links for name, each in held.items() if each is not None}
    queue: list[tuple[str, str]] = []
    for name in _names_beside(run, keep):
        try:
            queue += measure(Path(run.of(name))).links
        except CkptError as e:
            unread[run.of(name)] = e.message
    queue += [*(link for name, reasons in keep.items() if reasons for link in links.get(name, ()))]
    while queue:
        place, target = queue.pop()
        needed = next((name for path, name in real.items() if f"{target}/".startswith(f"{path}/")), None)
        if needed is None or f"{real_path(os.path.dirname(place))}/".startswith(f"{os.path.join(root, needed)}/"):
            continue
        if not keep[needed]:
            queue += links.get(needed, ())
            keep[needed].append(f"{os.path.relpath(place, run.path)} links to it")


def _names_beside(run: Run, steps: Container[str]) -> list[str]:
    """The names in a run's folder that are no steps, including hidden ones but not the remains of an interrupted ckpt.

    Raises:
        StorageError: the folder can't be listed.
    """
    try:
        names = os.listdir(run.path)
    except OSError as e:
        raise wrap_os_error(e, run.path, "listing") from e
    return sorted(name for name in names if name not in steps and not is_leaving(name))


# -- what goes ---------------------------------------------------------------------------------------------------------


def _remove(run: Run, last: RunStep, going: list[Fate], progress: Progress) -> tuple[frozenset[str], list[CkptError]]:
    """Remove the steps in `going`, the oldest first.

    Returns:
        The names of the steps that are gone, and the errors of those that could not be removed.

    Raises:
        StorageError: the folder is not writable, or the last complete step has disappeared in the meantime.
    """
    folder = local_path(run.path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"no permission to rename in {folder}", code="E0705", path=folder)

    gone = set[str]()
    failed = list[CkptError]()
    progress.start(sum(fate.held.nbytes for fate in going if fate.held), "pruning")

    for fate in going:
        if not _is_there(Path(run.of(last))):
            raise StorageError(
                f"{run.of(last)}, the last complete step, is gone: something else removes steps too",
                code=FAILED,
                path=run.of(last),
                hint="nothing more was removed; look at what is there: ckpt latest",
            )
        path = Path(run.of(fate.step))
        held = fate.held
        try:
            # A step is only removed if it is unchanged since it was judged. It is first renamed to a hidden name in
            # one step, so that an interruption never leaves half a step under its name.
            if held is not None and (not _is_there(path) or measure(path).digest == held.digest):
                hidden = retire(path, held)
                gone.add(fate.step.name)
                if hidden is not None:
                    erase(hidden)
                progress.advance(held.nbytes)
            else:
                progress.note(f"{fate.step.name} stays: it changed while prune looked at the run")
        except (StorageError, SourceChanged) as e:
            failed.append(e)

    progress.finish()
    return frozenset(gone), failed


def _is_there(path: Path) -> bool:
    """Does the path exist, be it as a dangling link? Raises StorageError if that can't be determined."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as e:
        raise wrap_os_error(e, path, "looking whether it is there") from e
    return True
