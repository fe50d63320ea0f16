"""`ckpt latest`: the newest complete step of a run, and which newer ones were passed over, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import StorageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Search
from ckpt_tool.sources.judging import Judge, Judged
from ckpt_tool.sources.steps import Run, RunStep, run_at

UNREAD = "E2851"


ANY = Search()


def latest(src: str, reading: Reading, wanted: Search = ANY, *, progress: Progress) -> dict[str, Any]:
    """`path` is None where no step is sound. Notes say what was passed over. Raises UsageError, StorageError: E2851 for
    a newer step that could not be read, for it may be the one that is wanted."""
    run = run_at(src, follow_symlinks=reading.follow_symlinks)
    judge = Judge(run, reading)
    passed = list[Judged]()
    newest = None

    for step in reversed(run.steps):
        found = judge.of(step)
        if found.sound:
            newest = step
            break
        passed.append(found)
        progress.note(f"passed over {step.name}: {found.why}")

    unread = [judged for judged in passed if judged.unread]
    if unread and not wanted.skip_unreadable:
        raise _refuse_unread(run, unread, newest)

    notes = pointer_notes(run, judge)
    for note in notes:
        progress.note(note)
    if newest is None:
        what = f"none of {len(run.steps)} steps is complete" if run.steps else "nothing in it has the name of a step"
        progress.note(f"{src} has no complete step: {what}")

    return {
        "schema_version": 1,
        "run": src,
        "path": newest and run.of(newest),
        "step": newest and newest.number,
        "passed_over": [
            {"path": run.of(each.step), "step": each.step.number, "why": each.why, "codes": list(each.codes)}
            for each in passed
        ],
        "pointers": [{"file": pointer.file, "names": pointer.name} for pointer in run.pointers],
        "notes": notes,
    }


def _refuse_unread(run: Run, unread: Sequence[Judged], newest: RunStep | None) -> StorageError:
    lines = [f"{judged.step.name} could not be read: {judged.why}" for judged in unread]
    older = f"then it is {newest.name}" if newest else "no other one is complete"
    return StorageError(
        f"it is not known which step is the newest complete one: {lines[0]}",
        code=UNREAD,
        path=run.of(unread[0].step),
        hint=f"check the disk and run again; --skip-unreadable passes over it: {older}",
        faults=lines[1:],
    )


def pointer_notes(run: Run, judge: Judge) -> list[str]:
    """What is wrong with the pointer files of a run: they name what is not there, what is damaged, or an old step."""
    notes = [f"{file} names no step: it is empty, or holds something else" for file in run.blank_pointers]
    steps = {step.name: step for step in run.steps}
    newest = judge.newest()
    for file, name in run.pointers:
        step = steps.get(name)
        found = judge.of(step) if step else None
        if found is None:
            notes.append(f"{file} names {name}, which is not there")
        elif found.unread:
            notes.append(f"{file} names {name}, which could not be read: {found.why}")
        elif not found.sound:
            notes.append(f"{file} names {name}, which is not complete")
        elif step and newest and step.number != newest.number:
            notes.append(f"{file} names {name}, and {newest.name} is newer")
    return notes
