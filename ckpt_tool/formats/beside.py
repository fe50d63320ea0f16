"""Recognises optimizer files next to a model, and notes those that cannot be read because they number parameters.

    accelerator.save_state:  model.safetensors, optimizer.bin, scheduler.bin, random_states_0.pkl
    transformers' Trainer:   model.safetensors, optimizer.pt, scheduler.pt, rng_state.pth
    PaddleFormers' Trainer:  model-00001-of-00002.safetensors, optimizer.pdopt

    torchtune's recipes:     epoch_0/model-00001-of-00002.safetensors, recipe_state/recipe_state.pt above (the newest's)

`optimizer.state_dict()` identifies parameters by number, in the order in which they were passed to the optimizer.
Groups, frozen weights and tied weights change that order, and weights of one shape can be mistaken for each other. If
exactly one order fits (`formats.state_dict.beside_model`), the states are read; else nothing is guessed.

torchtune's file has torchtune's names, or numbers, and is stored in a folder next to the model's:
`systems.trainers.torchtune_recipe` joins it.

Sources: torchtune 0.6.1 `training/checkpointing/` (RECIPE_STATE_DIRNAME); accelerate 1.15.0 `checkpointing.py`
(OPTIMIZER_NAME), transformers 5.23.0 `trainer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpt_tool.core.catalog import Note

if TYPE_CHECKING:
    from ckpt_tool.errors import CkptError
    from ckpt_tool.storage.source import Tree

UNREAD = "N-optimizer-unread"  # the note on such a file
SCHEDULER = re.compile(r"scheduler\.(?:bin|pt)")
RECIPE = "recipe_state.pt"
RECIPE_OF_RUN = f"recipe_state/{RECIPE}"  # in the folder of a run, next to its steps
_OPTIMIZER = re.compile(r"optimizer(_\d{1,6})?\.(pt|pth|bin)|optimizer[\w.\-]*\.pdopt|recipe_state\.pt")


def optimizer_files(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """The files of `names` that hold an optimizer's state and are not in `taken`, sorted.

    names: files directly in the checkpoint's folder.
    """
    return sorted({name for name in names if _OPTIMIZER.fullmatch(name)}.difference(taken))


def of_a_trainer(names: Iterable[str]) -> bool:
    """Does one of the files `names` hold the state of an optimizer or of a learning rate schedule?"""
    return any(_OPTIMIZER.fullmatch(name) or SCHEDULER.fullmatch(name) for name in names)


def lost_optimizer(names: Iterable[str]) -> tuple[Note, ...]:
    """A note if `names` include a schedule's state but no optimizer's, since every trainer writes both."""
    names = list(names)
    left = next(filter(SCHEDULER.fullmatch, names), None)
    if left is None or optimizer_files(names, ()):
        return ()
    return (Note("N-no-optimizer", f"{left} is next to the model, and no optimizer: the model alone is read", left),)


def has_recipe(run: Tree) -> bool:
    """Does the folder of a run contain torchtune's recipe state, next to its steps?"""
    return run.single is None and run.exists(RECIPE_OF_RUN)


def recipe_note(path: str, why: str, fault: CkptError | None = None) -> Note:
    """The note on a torchtune recipe state that is not joined to the model.

    Args:
        path: its file.
        why: the reason, in words.
        fault: the error that prevented reading it, None if it merely belongs to another model.
    """
    return Note(UNREAD, f"{path} is not read: it holds torchtune's optimizer: {why}", path, fault=fault)
