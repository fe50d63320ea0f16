"""One level of a nested state read as a file of its own, because the user names it (`--prefer LEVEL`).

    {"model": {"w": T0}, "teacher": {"w": T1}, "optimizer": ...}
    --prefer teacher   ->  w = T1; model.w and the optimizer's tensors are extras

What is not below the level is kept as extras, an optimizer and averages too: nothing in the file says whose they are.
Cost: the names of the file's tensors are sorted out a second time. What it does not do: levels inside dotted keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.tensor import EXTRAS, MODEL, Path, TensorKey
from ckpt_tool.formats.state_dict.roots import Roots
from ckpt_tool.formats.state_dict.tree import dotted, value_at

if TYPE_CHECKING:
    from ckpt_tool.formats.state_dict.paths import Leaf, Named

NameState = Callable[[Sequence["Leaf"], Mapping[str, Any], str], "Named"]


def name_one_level(
    leaves: Sequence[Leaf], extras: Mapping[str, Any], prefer: str, default: Named, path: str, name_state: NameState
) -> Named:
    """The tensors' names where the model is the one below the level that `prefer` names; `default` where no level is
    called so, or none that holds a model: `prefer` is about files then.

    Args:
        default: the names without the user's word.
        path: the file, for notes.
        name_state: names the tensors of a state, as `paths.name_leaves` does.
    """
    level = _find_level(leaves, prefer)
    if level is None:
        return default
    if level == default.roots.model:
        return default._replace(roots=replace(default.roots, chosen=True))

    inside = [number for number, leaf in enumerate(leaves) if _is_below(leaf.path, level)]
    below = value_at(extras, level)
    named = name_state(
        [leaves[number]._replace(path=leaves[number].path[len(level) :]) for number in inside],
        below if isinstance(below, Mapping) else {},
        path,
    )
    if not any(key.state == MODEL for key in named.keys):
        return default

    # Extras have the names of their whole paths, so that those of the level and those next to it do not meet.
    keys = _name_as_extras(leaves)
    faults = {}
    for number, key in zip(inside, named.keys, strict=True):
        given = keys[number] if key.state == EXTRAS else key
        keys[number] = given
        if key in named.faults:
            faults[given] = named.faults[key]

    note = Note("N-second-model", _describe(leaves, level), path or None)
    return default._replace(
        keys=keys, notes=[*named.notes, note], roots=_below_level(named.roots, level), faults=faults
    )


def _find_level(leaves: Sequence[Leaf], prefer: str) -> Path | None:
    """The path of the level that is called so, written with dots; None where none is."""
    for leaf in leaves:
        for depth in range(1, len(leaf.path)):
            if dotted(leaf.path[:depth]) == prefer:
                return leaf.path[:depth]
    return None


def _is_below(path: Path, level: Path) -> bool:
    return len(path) > len(level) and path[: len(level)] == level


def _name_as_extras(leaves: Sequence[Leaf]) -> list[TensorKey]:
    """A name of its own for each leaf: its path."""
    keys: list[TensorKey] = []
    used: set[str] = set()
    for leaf in leaves:
        path = leaf.path[1:] if leaf.path[0] == EXTRAS and len(leaf.path) > 1 else leaf.path
        name = dotted(path)
        while name in used:
            name += "'"
        used.add(name)
        keys.append(TensorKey(name, EXTRAS))
    return keys


def _describe(leaves: Sequence[Leaf], level: Path) -> str:
    """Which level was taken, and what stays extras because of that."""
    others: dict[str, int] = {}
    for leaf in leaves:
        if _is_below(leaf.path, level):
            continue
        shared = 0
        while shared < len(level) and leaf.path[shared] == level[shared]:
            shared += 1
        other = dotted(leaf.path[: shared + 1])
        others[other] = others.get(other, 0) + 1

    kept = ", ".join(f"{other} ({count} tensors)" for other, count in others.items())
    taken = f"the model is read from {dotted(level)}, as --prefer says"
    return f"{taken}; the others are kept as extras: {kept}" if kept else taken


def _below_level(roots: Roots, level: Path) -> Roots:
    """The places of a level's parts as places of the whole file."""
    return Roots(
        (*level, *roots.model),
        (*level, *roots.optimizer),
        (*level, *roots.ema),
        (*level, *roots.master),
        roots.flat,
        roots.dotted,
        {(*level, *path): names for path, names in roots.ids.items()},
        chosen=True,
    )
