"""The file in a run's folder that names its latest step, and the name of a step's folder.

    latest_checkpointed_iteration.txt: "2"        -> iter_0000002/       Megatron's
                                       "2"        -> global_step_2/      veRL's, which has no name of Megatron's
                                       "release"  -> release/            weights without an iteration

Source: NVIDIA/Megatron-LM `training/checkpointing.py` (`get_checkpoint_tracker_filename`, `get_checkpoint_name`).
"""

from __future__ import annotations

POINTER = "latest_checkpointed_iteration.txt"
RELEASE = "release/"


def step_name(iteration: int) -> str:
    """The name of a step's folder in Megatron's scheme, such as iter_0000002."""
    return f"iter_{iteration:07d}"
