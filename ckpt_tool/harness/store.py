"""Checkpoints of a run: saved while training continues, complete or absent, with old ones removed and the last found.

    runs/7/step_0000010/                           a checkpoint in its format, and `harness.complete.json`, written last
    runs/7/.step_0000015.4711.partial/ranks/rank_0003.safetensors, rank_0003.done, ...        a save on its way
    runs/7/.step_0000015.4711.partial/checkpoint/...

    store = RankStore(root, "dcp", rank=3, world=8, run="4711")
    store.save(trainer.state())      # in the step: one copy; the files are written while the next steps run
    store.close()                    # at the end: wait for what is still being written
    good = latest(root)              # Good(path, step, notes); the notes say which saves were passed over, and why

The one idea: three moments, each one rename or one marker. A rank is done when its marker exists; the checkpoint is
complete when `harness.complete.json` lists all files with sizes and digests; it exists when the hidden folder gets its
name. A process that dies in between leaves something that can't be mistaken for a checkpoint. Rank 0's thread waits for
all ranks' markers and assembles the format's files: without a collective, so that no step waits for a disk.

Rotation removes only checkpoints older than `keep` whole ones, after the new one has its name; a folder that is removed
is hidden by a rename first. Cost in the step: the copy; and waiting, if the previous save is not on the disk yet
(counted in `waited`). What it does not do: several machines (the ranks share a file system), retries.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ckpt_tool.errors import Incomplete, StorageError
from ckpt_tool.harness import spool
from ckpt_tool.harness.pieces import RankState
from ckpt_tool.harness.saving import formats
from ckpt_tool.harness.saving.fault_point import fault_point, saving
from ckpt_tool.harness.saving.whole import assemble

COMPLETE = "harness.complete.json"
NONE_GOOD = "E1538"
FAILED = "E1539"
_STEP = re.compile(r"step_(\d{7,})")
_HIDDEN = re.compile(r"\.step_(\d{7,})\.\S+\.(partial|trash)")
_POLL = 0.005  # seconds between looks for the other ranks' markers


class Good(NamedTuple):
    """A whole checkpoint."""

    path: Path
    step: int
    notes: tuple[str, ...]  # a line for each newer save that was passed over


class RankStore:
    """One rank's end of the saving."""

    def __init__(
        self, root: Path, fmt: str, *, rank: int, world: int, run: str = "0", keep: int = 2, durable: bool = True
    ) -> None:
        """run: the same text on all ranks, another one for each start of the job. keep: whole checkpoints that stay, at
        least 1.
        durable: fsync before the rename. Raises UsageError E1534 for a format that is not written here."""
        formats.check_name(fmt)
        self.root = root
        self.fmt = fmt
        self.rank = rank
        self.world = world
        self.run = run
        self.keep = max(keep, 1)
        self.durable = durable
        self.waited = 0.0  # seconds that steps spent waiting for the disk
        self.copied = 0.0  # seconds that steps spent copying
        self._snapshot = spool.Snapshot()
        self._writer = ThreadPoolExecutor(1, f"save-{rank}")
        self._saving: Future[None] | None = None
        root.mkdir(parents=True, exist_ok=True)

    def save(self, state: RankState) -> None:
        """Copy the state, then write it in the background during the next steps. Raises the previous save's error."""
        started = time.perf_counter()
        self.wait()
        copying = time.perf_counter()
        copy = self._snapshot.take(state)
        self.waited += copying - started
        self.copied += time.perf_counter() - copying
        self._saving = self._writer.submit(self._write, copy)

    def wait(self) -> None:
        """Until the last save's files are there: the rank's own, and on rank 0 the whole checkpoint. Raises what it
        failed with; StorageError E1539 for what the disk refused."""
        last_saving = self._saving
        self._saving = None
        if last_saving is None:
            return
        try:
            last_saving.result()
        except OSError as e:
            raise StorageError(
                f"saving failed: {e.strerror}", code=FAILED, path=str(self.root), hint="make room, or save elsewhere"
            ) from e

    def close(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        self._writer.shutdown()

    # -- in the background --------------------------------------------------------------------------------------------

    def _write(self, state: RankState) -> None:
        saving(self.rank, int(state.scalars["step"]))
        fault_point("snapshot")
        partial = self.root / f".{name_of(int(state.scalars['step']))}.{self.run}.partial"
        ranks = partial / "ranks"
        ranks.mkdir(parents=True, exist_ok=True)
        spool.write(state, ranks)
        if self.rank == 0:
            self._finish(state, partial, ranks)

    def _finish(self, state: RankState, partial: Path, ranks: Path) -> None:
        while len(spool.done(ranks)) < self.world:
            time.sleep(_POLL)
        state_of_all = assemble(spool.read(ranks, self.world, state))
        folder = partial / "checkpoint"
        folder.mkdir()
        formats.write(self.fmt, state_of_all, folder)
        fault_point("complete")
        step = int(state.scalars["step"])
        facts = {"step": step, "format": self.fmt, "layout": str(state.layout), "files": _files(folder)}
        spool.put(folder / COMPLETE, json.dumps(facts, indent=1))
        if self.durable:
            _flush(folder)
        fault_point("rename")
        target = self.root / name_of(step)
        if target.exists():
            if fault_of(target) is None:  # the same step of a deterministic run: it stays
                shutil.rmtree(partial)
                return
            self._remove(target)
        folder.rename(target)
        shutil.rmtree(partial)
        self._rotate()

    def _rotate(self) -> None:
        good = [path for path in sorted(steps(self.root), reverse=True) if (path / COMPLETE).is_file()]
        for path in good[self.keep :]:
            fault_point("rotate")
            self._remove(path)

    def _remove(self, path: Path) -> None:
        hidden = path.with_name(f".{path.name}.{self.run}.trash")
        path.rename(hidden)
        shutil.rmtree(hidden)


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step_{step:07d}"


def steps(root: Path) -> Iterator[Path]:
    """The folders that are called as checkpoints, whole or not."""
    return (path for path in root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())


def latest(root: Path) -> Good:
    """The newest whole checkpoint. Raises Incomplete E1538 when there is none, with a line for each that was looked
    at."""
    notes = []
    good: Good | None = None
    for path in sorted(steps(root), reverse=True) if root.is_dir() else ():
        fault = fault_of(path)
        if fault is None:
            good = Good(path, int(path.name.removeprefix("step_")), ())
            break
        notes.append(f"{path.name} is torn: {fault}")
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = _HIDDEN.fullmatch(path.name)
        if match and match[2] == "partial" and (good is None or int(match[1]) > good.step):
            ranks = len(spool.done(path / "ranks"))
            notes.append(f"the save of step {int(match[1])} was cut off: {ranks} ranks had written their share")
    if good is None:
        raise Incomplete(
            "no whole checkpoint", code=NONE_GOOD, path=str(root), faults=notes, hint="start the run from its beginning"
        )
    taken_text = f"{good.path.name} is the last good one, and is taken"
    return good._replace(notes=tuple(f"{note}; {taken_text}" for note in notes))


def fault_of(path: Path) -> str | None:
    """Why a checkpoint's folder is not whole; None when it is. Reads every file."""
    if not (path / COMPLETE).is_file():
        return f"{COMPLETE} is missing"
    try:
        files = json.loads((path / COMPLETE).read_text())["files"]
    except (ValueError, KeyError, TypeError):
        return f"{COMPLETE} does not say its files"
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        if _digest(file) != digest:
            return f"{name} is not as it was written"
    return None


def clean(root: Path) -> list[str]:
    """Remove what earlier starts of the job left half done; their names. Before any rank starts."""
    hidden_files = [path for path in root.iterdir() if _HIDDEN.fullmatch(path.name)] if root.is_dir() else []
    for path in hidden_files:
        shutil.rmtree(path)
    return sorted(path.name for path in hidden_files)


def _files(folder: Path) -> dict[str, tuple[int, str]]:
    """Path below the folder -> size in bytes, digest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, _digest(path)) for path in paths}


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _flush(folder: Path) -> None:
    """Files and folders onto the disk, so that the rename can't come before them."""
    for path in [*(path for path in folder.rglob("*")), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
