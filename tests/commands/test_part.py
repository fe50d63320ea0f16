"""`--part auto`: the share that a launcher's variables name."""

from __future__ import annotations

import pytest

from ckpt_tool.conversion.launcher import part_of_environment
from ckpt_tool.errors import UsageError


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ("RANK=0 WORLD_SIZE=4", (1, 4)),
        ("RANK=3 WORLD_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=2", (4, 4)),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", (2, 2)),
        ("SLURM_PROCID=7 SLURM_NTASKS=8", (8, 8)),
        ("SLURM_ARRAY_TASK_ID=0 SLURM_ARRAY_TASK_COUNT=3", (1, 3)),
        ("SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_TASK_COUNT=3 SLURM_ARRAY_TASK_MIN=1", (3, 3)),
        ("SLURM_ARRAY_TASK_ID=8 SLURM_ARRAY_TASK_COUNT=3 SLURM_ARRAY_TASK_MIN=4 SLURM_ARRAY_TASK_STEP=2", (3, 3)),
        ("SLURM_ARRAY_TASK_ID=2 SLURM_ARRAY_TASK_COUNT=3 SLURM_PROCID=0 SLURM_NTASKS=1", (3, 3)),
        ("SLURM_ARRAY_TASK_ID=1 SLURM_ARRAY_TASK_COUNT=3 SLURM_PROCID=1 SLURM_NTASKS=2", (4, 6)),
        ("JOB_COMPLETION_INDEX=5 JOB_COMPLETIONS=6", (6, 6)),
    ],
)
def test_the_part_of_a_launcher(environment: str, part: tuple[int, int]) -> None:
    assert part_of_environment(dict(pair.split("=") for pair in environment.split())).part == part


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ("HOME=/", "SLURM_ARRAY_TASK_ID"),
        ("RANK=1", "WORLD_SIZE is not set"),
        ("RANK=4 WORLD_SIZE=4", "RANK=4 is no number below WORLD_SIZE=4"),
        ("RANK=-1 WORLD_SIZE=4", "'-1'"),
        ("JOB_COMPLETION_INDEX=5", "JOB_COMPLETIONS"),
        ("SLURM_ARRAY_TASK_ID=9 SLURM_ARRAY_TASK_COUNT=3", "SLURM_ARRAY_TASK_ID=9"),
    ],
)
def test_what_makes_no_sense(environment: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        part_of_environment(dict(pair.split("=") for pair in environment.split()))
    assert caught.value.code == "E0267" and word in f"{caught.value.message} {caught.value.hint}"
