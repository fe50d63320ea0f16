"""Suggests what would make the names of two checkpoints match: a `--rename` rule, or a dialect common to both.

    ["module.layers.0.w", ...] and ["layers.0.w", ...]          --rename 'module.*=*'
    Megatron's names and the hub's                              --dialect hf

It is only a suggestion for a message: it is derived from a few names, and its matches are counted on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.config import config_of
from ckpt_tool.sources.opening import Opened

SAMPLE = 64  # names that a rule is made of
_TAIL = 3  # parts between dots at the end of a name that two names must share to be compared


def suggest_names(
    left: Collection[str], right: Collection[str], opened: tuple[Opened, Opened], reading: Reading
) -> str | None:
    """The option that makes most names of `left` those of `right`, in a sentence; None where there is none.

    opened: the two checkpoints that have the names.
    """
    rule = _prefix_rule(list(left), frozenset(right))
    if rule is not None:
        return f"few names are the same on both sides: --rename '{rule}' makes them match"

    dialects = [_dialect_of(one, reading) for one in opened]
    if None not in dialects and dialects[0] != dialects[1]:
        return (
            f"few names are the same on both sides, which are in the dialects {dialects[0]} and {dialects[1]}: "
            "--dialect hf compares both under the names of Hugging Face"
        )
    return None


def _prefix_rule(left: Sequence[str], right: frozenset[str]) -> str | None:
    """The rule that puts one prefix in the place of another, where that makes at least half of the names match."""
    by_tail: dict[tuple[str, ...], list[str]] = {}
    for name in right:
        by_tail.setdefault(tuple(name.split(".")[-_TAIL:]), []).append(name)

    votes: Counter[tuple[str, str]] = Counter()
    step = max(1, len(left) // SAMPLE)
    for name in left[::step]:
        for twin in by_tail.get(tuple(name.split(".")[-_TAIL:]), ())[:SAMPLE]:
            votes.update(_prefixes(name, twin))

    best = None
    most = 0
    for (old, new), _ in votes.most_common(6):
        renamed = [new + name.removeprefix(old) if name.startswith(old) else name for name in left]
        matching = sum(name in right for name in renamed)
        if old != new and matching > most:
            best = f"{old}*={new}*"
            most = matching
    return best if 2 * most >= min(len(left), len(right)) else None


def _prefixes(one: str, other: str) -> list[tuple[str, str]]:
    """What precedes the parts that two names end with alike; and the same with the first of these parts, which spares
    names that begin otherwise."""
    ones = one.split(".")
    others = other.split(".")
    shared = 0
    while shared < min(len(ones), len(others)) and ones[-shared - 1] == others[-shared - 1]:
        shared += 1

    found = [(_dotted(ones[: len(ones) - shared]), _dotted(others[: len(others) - shared]))]
    if shared > 1:
        found.append((_dotted(ones[: len(ones) - shared + 1]), _dotted(others[: len(others) - shared + 1])))
    return found


def _dotted(parts: Sequence[str]) -> str:
    return "".join(f"{part}." for part in parts)


def _dialect_of(opened: Opened, reading: Reading) -> str | None:
    """Whose names a checkpoint has, None where no family knows."""
    from ckpt_tool.families.registry import find
    from ckpt_tool.families.table import one_of_each

    shapes: Mapping[str, tuple[int, ...]] = {row.name: row.shape for row in opened.catalog.rows() if row.state == MODEL}
    stated = opened.catalog.hints.dialect
    try:
        few = {name: shapes[name] for name in one_of_each(shapes)}
        found = find(config_of(opened, reading).config, few, stated=stated if isinstance(stated, str) else None)
    except CkptError:
        return None
    return found.dialect
