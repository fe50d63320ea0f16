"""Chosen tensors ready for a mapping: values that it changes are computed, and what it joins lies in one source.

A mapping moves elements (`plan.mapping`). Two things it asks for are not moves: a number added on the way (`* add(1)` of a
table: zero-centred norms), and one tensor made of several that lie in different sources (q_proj that an adapter changed
beside k_proj as it was, for a fused QKV). Both become computed tensors first, and the mapping moves those.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tool.algebra.element_map import ElementMap
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import PAD
from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.computed import with_computed
from ckpt_tool.commands.options import Writing
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored

_VALUES = (MODEL, MASTER, EMA)  # states that hold the parameter itself; gradients' moments don't change with it


def ready(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    """(`chosen` with what has to be computed, the mapping as moves alone). by: what the mapping is called in messages.

    Raises UsageError: E1280 where one source goes into tensors with another change each, E0264 with --plan and --ray."""
    chosen, mapped = _changed(chosen, mapped, writing, by)
    return _joined(chosen, mapped, writing), mapped


def _changed(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    if not any(piece.maps for made in mapped.made for piece in made.pieces):
        return chosen, mapped
    wanted: dict[str, set[tuple[ElementMap, ...]]] = {}
    for made in mapped.made:
        for piece in made.pieces:
            wanted.setdefault(piece.src.name, set()).add(piece.maps)
    changes = {name: maps for name, maps in wanted.items() if maps != {()} and name != PAD}
    for name, maps in changes.items():
        if len(maps) > 1 or any(each.kind != "add" for each in next(iter(maps))):
            raise UsageError(
                f"{by} changes the values of {name} in more than one way", code="E1280", key=name,
                hint="keep the source's names with --dialect keep",
            )  # fmt: skip
    from ckpt_tool.run.computed import Input
    from ckpt_tool.run.recipes import Plus

    recipes, dtypes = [], dict[TensorKey, DType]()
    for row in chosen.stored:
        key, tensor = row.tensor.key, row.tensor
        if key.name in changes and key.state in _VALUES and tensor.dtype.is_float:
            (steps,) = changes[key.name]
            number = float(sum(step.by for step in steps))
            source = Input(tensor, chosen.sources[row.source].tree)
            recipes.append(Plus(key, tensor.shape, (source,), f"add {number}", number))
            dtypes[key] = chosen.casts.get(key, tensor.dtype)
    said = f"{by}: a number is added to {len(changes)} tensors, rounded once: {', '.join(list(changes)[:3])}"
    shown = f"{chosen.sources[0].path} (values changed)"
    chosen = with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes, notes=(said,))
    plain = tuple(made._replace(pieces=tuple(piece._replace(maps=()) for piece in made.pieces)) for made in mapped.made)
    return chosen, mapped._replace(made=plain)


def _joined(chosen: Chosen, mapped: Mapped, writing: Writing) -> Chosen:
    """What one tensor is made of, where it lies in several sources, as computed tensors of one."""
    sources = {row.source for row in chosen.stored}
    if len(sources) == 1:
        return chosen
    rows = {row.tensor.key: row for row in chosen.stored}
    states: dict[str, list[str]] = {}
    for name, state in rows:
        states.setdefault(name, []).append(state)
    apart: dict[TensorKey, Stored] = {}
    for group in _groups(mapped.made):
        for state in dict.fromkeys(state for name in group for state in states.get(name, ())):
            held = [rows[key] for name in group if (key := TensorKey(name, state)) in rows]
            if len({row.source for row in held}) > 1 and all(row.tensor.dtype.is_float for row in held):
                apart.update((row.tensor.key, row) for row in held)
    if not apart:
        return chosen
    from ckpt_tool.run.computed import Input
    from ckpt_tool.run.recipes import Unchanged

    recipes = [
        Unchanged(key, row.tensor.shape, (Input(row.tensor, chosen.sources[row.source].tree),), "")
        for key, row in apart.items()
    ]
    dtypes = {key: chosen.casts.get(key, row.tensor.dtype) for key, row in apart.items()}
    shown = f"{chosen.sources[0].path} (joined)"
    return with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes)


def _groups(made: Iterable[Made]) -> list[list[str]]:
    """The sources of each made tensor that has several."""
    groups = (list(dict.fromkeys(piece.src.name for piece in each.pieces)) for each in made)
    return [group for group in groups if len(group) > 1]
