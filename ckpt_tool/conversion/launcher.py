"""Which share of a plan this process is to run, by what launched it.

Every launcher says which of its processes one is, in words of its own. The first of these that is there counts, the
most particular one first: torchrun's processes on a Slurm node have Slurm's variables too.

    SLURM_ARRAY_TASK_ID=5 SLURM_ARRAY_TASK_MIN=1 SLURM_ARRAY_TASK_COUNT=8     ->  part 5 of 8

Sources: torchrun (`torch.distributed.run`, "Environment Variables"), Open MPI (FAQ "running", environment variables of
MPI processes), Slurm (sbatch "Output environment variables", `--array`), Kubernetes ("Indexed Job": a pod knows its
index alone, so the job's `completions` have to be handed on as `JOB_COMPLETIONS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpt_tool.errors import UsageError

_RANKS = (  # (number of the process from 0, how many there are)
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)
_ARRAY = "SLURM_ARRAY_TASK_ID"
_FIRST = "SLURM_ARRAY_TASK_MIN"
_STEP = "SLURM_ARRAY_TASK_STEP"
_TASKS = ("SLURM_PROCID", "SLURM_NTASKS")
_MOST = 10**9  # shares


class LauncherPart(NamedTuple):
    """The part (i, n), from 1, and the variables that it is by, for the report."""

    part: tuple[int, int]
    by: str


def part_of_environment(environment: Mapping[str, str]) -> LauncherPart:
    """The share that the launcher's variables name. Raises UsageError E0267 where there are none, or they make no
    sense."""
    for index, count in _RANKS:
        if index in environment:
            return _found(environment, [(index, count)])
    pairs = []
    if _ARRAY in environment:
        pairs.append((_ARRAY, "SLURM_ARRAY_TASK_COUNT"))
    if _TASKS[0] in environment and environment.get(_TASKS[1], "1") != "1":  # tasks of each of the array's jobs
        pairs.append(_TASKS)
    if pairs:
        return _found(environment, pairs)
    raise UsageError(
        "--part auto: no launcher's variables are set",
        code="E0267",
        hint=f"want {_ARRAY}, {', '.join(index for index, _ in (_TASKS, *_RANKS))} with its count; or give --part I/N",
    )


def _found(environment: Mapping[str, str], pairs: list[tuple[str, str]]) -> LauncherPart:
    """Pairs of (number, count), the outer one first."""
    at = 0
    of = 1
    words = []
    for index, count in pairs:
        number = _number(environment, index)
        size = _number(environment, count)
        if index == _ARRAY:
            step = _number(environment, _STEP) if _STEP in environment else 1
            number = (number - (_number(environment, _FIRST) if _FIRST in environment else 0)) // max(step, 1)
        if not 0 <= number < size <= _MOST:
            raise UsageError(
                f"--part auto: {index}={environment[index]} is no number below {count}={environment[count]}",
                code="E0267",
                hint="give --part I/N",
            )
        at = at * size + number
        of = of * size
        words.append(f"{index}={environment[index]} and {count}={environment[count]}")
    return LauncherPart((at + 1, of), ", ".join(words))


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise UsageError(
        f"--part auto: {name} is {text[:40]!r}" if text else f"--part auto: {name} is not set",
        code="E0267",
        hint="set it to a whole number, or give --part I/N",
    )
