"""Runs of a job: so many steps, saved here and there, begun from nothing or from a checkpoint, and killed where a test
wants it.

    steps = run(job, 6, start=None, saving=Saving(root, "dcp", at=(3,)))  # [TrainingStep(1, ...), ...], the same on
    every rank
    killed(job, 4, saving=Saving(root, "dcp", at=(3,)))             # rank N-1 gets SIGKILL in step 5: its last words

The one idea: a run is a function of the job, the checkpoint it begins from and the number of steps; everything else
(which rank saves, which is killed) is given by further arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tool.errors import InconsistentCheckpoint, InternalError, UsageError
from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.launch import How, run_ranks
from ckpt_tool.harness.loading import Loader
from ckpt_tool.harness.store import RankStore
from ckpt_tool.harness.train import Trainer, TrainingJob, TrainingStep


@dataclass(frozen=True, slots=True)
class Saving:
    """Where and after which steps a job saves."""

    root: Path
    fmt: str
    at: tuple[int, ...]
    keep: int = 2  # whole checkpoints that stay
    run: str = "0"  # names this start of the job


@dataclass(frozen=True, slots=True)
class RunMachine:
    """What the ranks run on: how they talk, and on which device."""

    backend: How = "gloo"
    device: str = "cpu"
    limit: float = 600.0  # seconds for a run

    @property
    def words(self) -> tuple[str, ...]:
        """The options that have `ckpt` reshard and hash by kernels: on the GPU, or on their host shim where
        CKPT_KERNELS says so."""
        return ("--device", "cuda") if self.device == "cuda" or os.environ.get("CKPT_KERNELS") == "host" else ()

    def check(self, world: int) -> None:
        """Raise UsageError E1543 where nccl has no GPU for each of `world` ranks: two of its ranks can't share one."""
        if self.backend != "nccl":
            return
        gpus = _gpus() if self.device == "cuda" else 0
        if gpus < world:
            raise UsageError(
                f"nccl wants a GPU for each of {world} ranks, and there are {gpus}"
                + (" on the device cpu" if self.device == "cpu" else ""),
                code="E1543",
                place="--backend nccl",
                hint="--backend gloo: its ranks share one GPU, or need none",
            )


def run(
    job: TrainingJob,
    steps: int,
    *,
    start: Path | None = None,
    saving: Saving | None = None,
    machine: RunMachine | None = None,
    watch: Callable[[TrainingStep], None] | None = None,
    last: bool = False,
) -> list[TrainingStep]:
    """Train `steps` steps on all ranks; what each step did. With 0 steps the state is taken up and, with `saving`,
    saved.

    start: a checkpoint with hub names (`loading.prepare_checkpoint`); None begins at step 0.
    watch: called on rank 0 after each step, in that rank's own process.
    last: the last rank kills itself in the step after the last.

    Raises what a rank raised; InternalError E1505 for one that was killed.
    """
    machine = machine or RunMachine()

    def entry(comm: Comm) -> Any:
        return _entry(comm, job, steps, start, saving, watch, last)

    groups = job.layout.groups(job.shape)
    backend: How = "sim" if job.layout.world == 1 and machine.device == "cpu" and not last else machine.backend
    results = run_ranks(
        job.layout.world, entry, groups=groups, backend=backend, device=machine.device, timeout=machine.limit
    )
    return [TrainingStep(*row) for row in results[0]]


def run_and_kill(job: TrainingJob, steps: int, *, saving: Saving, machine: RunMachine | None = None) -> str:
    """Train `steps` steps, then kill the last rank with SIGKILL inside the next one. Returns what the job ended with.

    Raises InternalError E1507 if the job came to an end all the same.
    """
    try:
        run(job, steps, saving=saving, machine=machine, last=True)
    except InternalError as e:
        if e.code != "E1505" or "SIGKILL" not in e.message:
            raise
        return e.message
    raise InternalError("a rank was to be killed, and the job ended as if nothing had happened", code="E1507")


def _entry(
    comm: Comm,
    job: TrainingJob,
    steps: int,
    start: Path | None,
    saving: Saving | None,
    watch: Callable[[TrainingStep], None] | None,
    last: bool,
) -> list[list[float]]:
    trainer = Trainer(job, comm, steps=steps > 0)
    if start is not None:
        source = Loader(start)
        _refuse_another_model(source, job, start)
        trainer.load(source.read, source.scalars)

    store = None
    if saving is not None:
        store = RankStore(
            saving.root, saving.fmt, rank=comm.rank, world=job.layout.world, run=saving.run, keep=saving.keep
        )
        if steps == 0:
            store.save(trainer.state())

    done = []
    for step in trainer.train(steps):
        done.append(list(step))
        if store is not None and saving is not None and step.step in saving.at:
            store.save(trainer.state())
        if watch is not None and comm.rank == 0:
            watch(step)

    if store is not None:
        store.close()
    if last:
        comm.barrier()
        _die_in_step(trainer, comm)

    return done


def _refuse_another_model(source: Loader, job: TrainingJob, start: Path) -> None:
    """Raise InconsistentCheckpoint E1509 where the checkpoint has parameters that the model does not have: they would
    be lost in silence. (What it lacks, reading says.) A head that is tied or not is the case that no shape gives
    away."""
    if source.tied and not job.shape.tied:
        raise InconsistentCheckpoint(
            "the checkpoint's head is its embedding, and the model has one of its own",
            code="E1509",
            path=start,
            key="lm_head.weight",
            hint="train on as a tied model: where the two part, no optimizer state says how",
        )
    expected = {param.name for param in job.shape.parameters()} | (
        {"lm_head.weight"} if job.shape.tied and source.tied else set()
    )
    if extra := sorted(source.names() - expected):
        raise InconsistentCheckpoint(
            f"the checkpoint has {len(extra)} parameters that the model does not have, {extra[0]} first",
            code="E1509",
            path=start,
            key=extra[0],
            faults=extra[1:],
            hint="it belongs to another model"
            + (": its head is not tied to the embedding" if extra == ["lm_head.weight"] else ""),
        )


def _die_in_step(trainer: Trainer, comm: Comm) -> None:
    """One more step, in whose middle the last rank is gone: after its forwards, before gradients are joined."""
    if comm.rank == trainer.job.layout.world - 1:
        join_gradients = trainer._join_gradients

        def die() -> Any:
            """Kill this process in the middle of a step, before the gradients are joined."""
            os.kill(os.getpid(), signal.SIGKILL)
            return join_gradients()

        trainer._join_gradients = die  # type: ignore[method-assign]
    for _ in trainer.train(1):
        pass


def refuse_without_cuda() -> None:
    """Raise UsageError E1542 where torch sees no GPU. Asked in a process of its own: a fork can't use CUDA that is
    already begun."""
    if not _gpus():
        raise UsageError(
            "torch sees no GPU here",
            code="E1542",
            place="--device cuda",
            hint="leave --device out: everything is proved on the CPU too",
        )


def _gpus() -> int:
    query = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    count = subprocess.run([sys.executable, "-c", query], check=False, capture_output=True, text=True).stdout.strip()
    return int(count) if count.isdigit() else 0
