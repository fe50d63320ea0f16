"""The pointer of a Megatron run, `latest_checkpointed_iteration.txt`, and the folder of a step that it names.

    "2"        -> iter_0000002/
    "release"  -> release/         weights without an iteration

Source: NVIDIA/Megatron-LM `training/checkpointing.py` (`get_checkpoint_tracker_filename`, `get_checkpoint_name`).
"""

from __future__ import annotations

import re
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.target import TargetFile, whole_file
from ckpt_tool.formats.run_pointer import POINTER, RELEASE, step_name
from ckpt_tool.storage.source import Tree


def pointed(tree: Tree) -> list[str]:
    """Return the folder (with its slash) that a run's pointer file names; [] if there is no file or it names none."""
    if not tree.exists(POINTER):
        return []
    text = tree.head(POINTER, 64).decode("utf-8", "replace").strip()
    if numeral(text):
        return [f"{step_name(int(text))}/"]
    return [RELEASE] if text == RELEASE.rstrip("/") else []


def folder_of(iteration: Any) -> str:
    """Return the folder of a step, with its slash; `release/` if `iteration` is not a step's number."""
    if type(iteration) is int and 0 < iteration < 10**12:
        return f"{step_name(iteration)}/"
    return RELEASE


def pointer_to(folder: str) -> TargetFile:
    """Return the pointer file that names the folder."""
    name = folder.rstrip("/")
    text = name if folder == RELEASE else str(int(name.removeprefix("iter_")))
    return whole_file(POINTER, text.encode("ascii"))


def misnamed(tree: Tree, folder: str, stated: Any) -> Note | None:
    """Return a note if the folder's name states another iteration than its content, else None.

    Args:
        tree: the checkpoint.
        folder: inside the checkpoint, "" for its root.
        stated: the iteration in the common state.
    """
    name = (folder or tree.shown).rstrip("/").rpartition("/")[2]
    named = re.fullmatch(r"iter_(\d{1,12})", name)
    if named is None or type(stated) is not int or int(named[1]) == stated:
        return None
    what = f"the common state belongs to iteration {stated}, the folder is named {name}: renamed, or of two saves?"
    return Note("N-iteration", what)
