"""Decides which steps of a run are valid, with the code that opens and checks checkpoints (`sources.sound`).

It checks headers, extents, cover, indexes, and that files were written to their end. A step may contain several
checkpoints: a Trainer's has the model and DeepSpeed's folder, veRL's one for the actor and one for the critic. All of
them must be valid. A step may also lack a part of the training state that most other steps have, because the job was
killed before writing it (transformers 5.23 `trainer.py` writes trainer_state.json last, RLinf data.pt, others a
marker).

Cost: the headers of the requested steps, and the file names of all. What it does not do: read values.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from ckpt_tool.errors import CkptError, InputError, StorageError, UnsafeInput, failures_met, wrap_os_error
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source
from ckpt_tool.sources.sound import JSON_LIMIT, cut_short, finding, findings_at, is_damage
from ckpt_tool.sources.steps import POINTERS, UNFINISHED, Run, RunStep, entries_of, pointed, pointer_text
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.source import Tree

_COMPONENT = re.compile("actor|critic|reward|ref")  # of a step of veRL, and of those that came of it
_STATE = re.compile(
    r"(optim|scheduler|lr_sched|rng_state|random_states|scaler|sampler|trainer_state|training_state|train_state"
    r"|recipe_state|extra_state|dataloader|data\.pt|(pytorch_|adapter_)?model[.-]).*|.*(complete|success).*"
    r"|actor|critic|reward",
    re.IGNORECASE,
)
_TRAINER = "trainer_state.json"
_BEST = ("best_model_checkpoint", "best_model_path")
_DEPTH = 2  # folders of a step in which its checkpoints are looked for: veRL's `actor/dist_ckpt`


class Judged(NamedTuple):
    """A step, and what was found."""

    step: RunStep
    sound: bool | None  # is it valid? None if it is no checkpoint, or could not be checked (see `is_damage`)
    why: str = ""
    codes: tuple[str, ...] = ()  # of the findings
    checkpoint: bool = True
    unread: bool = False  # a disk or a store failed while it was looked at, so that nothing is known of it


class Judge:
    """Judges the steps of one run, each once."""

    def __init__(self, run: Run, reading: Reading) -> None:
        self.run = run
        self._reading = reading
        self._judged: dict[str, Judged] = {}

    def of(self, step: RunStep) -> Judged:
        """The verdict on a step: valid, broken, no checkpoint, or undecided (it contains code, or the disk fails)."""
        if step.name not in self._judged:
            self._judged[step.name] = self._look(step)
        return self._judged[step.name]

    def newest(self) -> RunStep | None:
        """The newest valid step, None if there is none."""
        return next((step for step in reversed(self.run.steps) if self.of(step).sound), None)

    def known(self, step: RunStep) -> Judged | None:
        """The verdict on a step if it was checked already, else None."""
        return self._judged.get(step.name)

    @cached_property
    def _kinds(self) -> Mapping[str, Mapping[str, str]]:
        """Of every step that can be listed the parts of a training state; of the others it is not known."""
        kinds_of = ((step.name, _kinds(self.run.of(step))) for step in self.run.steps)
        return {name: kinds for name, kinds in kinds_of if kinds is not None}

    def _look(self, step: RunStep) -> Judged:
        """What a step is. Whatever readers made of a file that could not be read, the step is unknown then."""
        self._kinds  # noqa: B018  before the watch: of other steps nothing is asked here
        path = self.run.of(step)
        with failures_met() as failures:
            try:
                judged = self._judge(step, path)
            except OSError as e:
                failures.append(wrap_os_error(e, e.filename or path, "looking at it"))
            except ImportError as e:  # no descriptor was left to load a reader with
                failures.append(StorageError(f"a reader could not be loaded: {e}", code="E0700", path=path))
        if not failures and step.name not in self._kinds:
            failures.append(StorageError("it could not be listed", code="E0700", path=path))
        if failures:
            first = failures[0]
            place = f" ({first.where()})" if first.where() not in ("", path) else ""
            return Judged(step, None, f"{first.message}{place}", (first.code,), unread=True)
        return judged

    def _judge(self, step: RunStep, path: str) -> Judged:
        if {f"{name}{UNFINISHED}" for name in (step.name, os.path.splitext(step.name)[0])} & {*self.run.others}:
            return Judged(step, False, f"a marker {UNFINISHED} is next to it: it was not written to its end")

        try:
            parts = parts_of(path, self._reading)
            if not parts:
                return Judged(step, None, "it is no checkpoint", checkpoint=False)
            found = list[Mapping[str, Any]]()
            taken = set[str]()
            for at, fmt in parts:
                faults, files = findings_at(at, self._reading, fmt)
                found += faults
                taken |= files
            found += map(finding, cut_short(open_tree(path, follow_symlinks=self._reading.follow_symlinks), taken))
        except (InputError, UnsafeInput, StorageError) as e:
            sound = False if is_damage(e) else None
            place = f" ({e.where()})" if e.where() not in ("", path) else ""
            return Judged(step, sound, f"{e.message}{place}", (e.code,))

        if found:
            first = found[0]
            more = f"; {len(found) - 1} more" if len(found) > 1 else ""
            file = str(first["file"] or "").rpartition("/")[2]
            place = f" ({file})" if file and file not in first["message"] and file != step.name else ""
            return Judged(step, False, f"{first['message']}{place}{more}", tuple({f["code"]: None for f in found}))

        gone = self._lacking(step)
        return Judged(step, False, f"most other steps have {gone}, this one does not") if gone else Judged(step, True)

    def _lacking(self, step: RunStep) -> str:
        """A part of the training state that this step lacks, although most older steps and newer valid steps have it;
        "" for none."""
        sound = {name for name, each in self._judged.items() if each.sound}
        older = [each.name for each in self.run.steps[: self.run.steps.index(step)]]
        others = [kinds for name, kinds in self._kinds.items() if name in {*older, *sound} - {step.name}]
        have = Counter(kind for kinds in others for kind in kinds)
        own = self._kinds.get(step.name, {})
        most = [kind for kind, number in have.items() if 2 * number > len(others)]
        return min((kinds[kind] for kinds in others for kind in most if kind in kinds and kind not in own), default="")


def is_checkpoint(path: str, reading: Reading) -> bool:
    """Is there a checkpoint at `path`, whole or not, by names and the first bytes of files? Raises StorageError where
    they can't be read."""
    found = False
    with failures_met() as failures:
        try:
            found = bool(parts_of(path, reading))
        except OSError as e:
            failures.append(wrap_os_error(e, e.filename or path, "looking at it"))
        except CkptError:  # where it was a disk that failed, it is among the failures
            found = False
    if failures:
        raise failures[0]
    return found


def best_of(path: str, reading: Reading) -> set[str]:
    """The names of the steps that a step's own state calls the best so far: transformers' `best_model_checkpoint`
    (`trainer_callback.py`, TrainerState), Lightning's `best_model_path` (`callbacks/model_checkpoint.py`). Raises
    StorageError where that can't be read."""
    found: list[Any] = []
    with failures_met() as failures:
        try:
            tree = open_tree(path, follow_symlinks=reading.follow_symlinks)
            if tree.single is None and tree.exists(_TRAINER):
                found.append(json.loads(tree.read_whole(_TRAINER, limit=JSON_LIMIT)))
            elif tree.single is not None:
                found.append(open_source(path, reading).catalog.extras)
        except OSError as e:
            failures.append(wrap_os_error(e, e.filename or path, "looking at it"))
        except (CkptError, ValueError, RecursionError):  # nothing that can be read calls anything the best
            found.clear()
    if failures:
        raise failures[0]
    paths = (value for state in found for key, value in _plain(state) if key in _BEST and isinstance(value, str))
    return {re.split(r"[/\\]", value.rstrip("/\\"))[-1] for value in paths}


def _plain(value: Any, depth: int = 6) -> Iterator[tuple[Any, Any]]:
    """The keys and values of nested dicts."""
    for key, inner in value.items() if isinstance(value, Mapping) and depth else ():
        yield key, inner
        yield from _plain(inner, depth - 1)


def parts_of(path: str, reading: Reading, depth: int = 0) -> list[tuple[str, str | None]]:
    """The checkpoints of a step: (path, format, None where that is for detection)."""
    tree = open_tree(path, follow_symlinks=reading.follow_symlinks)
    if reading.from_format:
        return [(path, reading.from_format)]
    entries = entries_of(tree) if tree.single is None else {}
    folders = [name for name, folder in entries.items() if folder]
    components = sorted(filter(_COMPONENT.fullmatch, folders))
    if components:  # other files next to them are no checkpoint, such as a data loader's state
        return [part for name in components for part in parts_of(f"{path.rstrip('/')}/{name}", reading, depth + 1)]
    here = registry.settle(registry.claims(tree))
    if tree.single is not None or (here and not _inside(tree)):
        return [(path, claim.name if len(here) > 1 else None) for claim in here]
    inside = [f"{path.rstrip('/')}/{name}" for name in _inside(tree)]
    if inside:
        own = [claim for claim in here if any("/" not in file for file in claim.evidence.files)]
        return [*((path, claim.name) for claim in own), *((below, None) for below in inside)]
    if depth == _DEPTH:
        return []
    return [part for name in sorted(folders) for part in parts_of(f"{path.rstrip('/')}/{name}", reading, depth + 1)]


def _inside(tree: Tree) -> list[str]:
    """The step that a pointer file inside a step names: DeepSpeed's, in a Trainer's folder."""
    entries = entries_of(tree) if tree.single is None else {}
    texts = (pointer_text(tree, file) for file in POINTERS if entries.get(file) is False)
    return list(dict.fromkeys(pointed(text, entries.__contains__) for text in texts if text))


def _kinds(path: str) -> Mapping[str, str] | None:
    """Parts of a training state directly in a step: their names without numbers -> one of them. None where the step
    can't be listed."""
    names: Iterable[str] = ()
    with failures_met() as failures:
        try:
            names = entries_of(open_tree(path))
        except OSError as e:
            failures.append(wrap_os_error(e, path, "listing"))
        except CkptError:  # a link that is not followed: it has none
            names = ()
    if failures:
        return None
    return {re.sub(r"\d+", "#", name): name for name in names if _STATE.fullmatch(name)}
