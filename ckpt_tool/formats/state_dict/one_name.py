"""Two tensors of one name: nested keys are joined with dots, and two places of a state may then be called the same.

    {"enc": {"w": T}, "enc.w": U}         both are enc.w
    {"layers": {0: T, "0": U}}            both are layers.0
    {"_orig_mod.w": T, "w": U}            both are w without the wrapper

One of them would be left out of the model, so the name is an error that shows both places. Cost: nothing without one.
"""

from __future__ import annotations

from ckpt_tool.core.tensor import EXTRAS, MODEL, Path, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.formats.state_dict.tree import dotted


def loses_one(key: TensorKey, first: Path, second: Path) -> bool:
    """Would one of two tensors be lost that claim `key`?

    A model has one tensor of a name. Of other states only places that join to the same name count: two optimizers, or
    two averages, may each number or name their own.
    """
    if key.state == EXTRAS:
        return False
    return key.state == MODEL or dotted(first) == dotted(second)


def refuse_one_name(key: TensorKey, first: Path, second: Path) -> InconsistentCheckpoint:
    """The error (E3018) for a name that two places of a state have."""
    return InconsistentCheckpoint(
        f"two tensors are called {str(key)[:200]}: the one at {show_place(first)} and the one at {show_place(second)}",
        code="E3018",
        key=str(key)[:200],
        hint=f"save them under two names with the code that wrote the file; --remove-keys '{key.name[:200]}' leaves "
        "both out",
    )


def show_place(path: Path) -> str:
    """A place as Python would reach it, so that a dot in a key differs from a level.

    >>> show_place(("enc", 0, "w.b"))
    "['enc'][0]['w.b']"
    """
    return "".join(f"[{step!r}]" for step in path)[:200]
