"""Prepares inputs of a mapping that are not plain moves: changed values, rows of zeros, parts from several sources.

A mapping moves elements (`plan.mapping`). Three things that it may require are not moves:

    a number added to each element             `* add(1)` of a table: zero-centred norms
    rows that the source does not have         `_` of a table: a vocabulary of 100 rows in 112
    one tensor made of different sources       q_proj that an adapter changed, with an unchanged k_proj, in a fused QKV

Each becomes a computed tensor first (`run.recipes`), and the mapping moves that. Cost: none if the mapping requires
none of them, else a pass in fp32 over these tensors while they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from ckpt_tool.algebra.element_map import ElementMap
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import PAD, Side
from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, with_computed

_VALUES = (MODEL, MASTER, EMA)  # states that hold the parameter itself; gradients' moments don't change with it


def moves_alone(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    """(`chosen` with what has to be computed, the mapping as moves alone). by: what the mapping is called in messages.

    Raises UsageError: E1280 where one source goes into tensors with another change each, E0264 with --plan and
    --ray."""
    chosen, mapped = _changed(chosen, mapped, writing, by)
    chosen, mapped = _filled(chosen, mapped, writing, by)
    return _joined(chosen, mapped, writing), mapped


def _filled(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    """What is made of zeros in part: of rows of zeros behind those of a tensor that it is made of too."""
    if not any(piece.src.name == PAD for made in mapped.made for piece in made.pieces):
        return chosen, mapped
    from ckpt_tool.plan.mapping import parameter_shapes

    shapes = parameter_shapes(chosen.stored)
    zeros = dict[str, int]()
    out = list[Made]()
    filled = list[tuple[str, int, int]]()
    for made in mapped.made:
        empty = [piece for piece in made.pieces if piece.src.name == PAD and piece.numel]
        name = next((piece.src.name for piece in made.pieces if piece.src.name != PAD), made.like or None)
        if empty and name is not None:
            start = prod(shapes[name])
            pieces = [piece for piece in made.pieces if piece.src.name != PAD]
            for piece in empty:
                pieces.append(piece._replace(src=Side(name, start, contiguous_strides(piece.ext))))
                start += piece.numel
            count = sum(piece.numel for piece in empty)
            zeros[name] = max(count, zeros.get(name, 0))
            filled.append((made.name, count, prod(made.shape)))
            made = made._replace(pieces=tuple(pieces))
        out.append(made)
    if not filled:
        return chosen, mapped
    from ckpt_tool.run.recipes import Grown

    recipes = []
    dtypes = dict[TensorKey, DType]()
    for row in chosen.stored:
        key = row.tensor.key
        shape = row.tensor.shape
        if key.name in zeros and shape == shapes[key.name] and row.tensor.dtype.is_float:
            rows = ceil_div(zeros[key.name], max(prod(shape[1:]), 1))
            recipes.append(Grown(key, (shape[0] + rows, *shape[1:]), (chosen.input(row),), f"{rows} rows of zeros"))
            dtypes[key] = chosen.casts.get(key, row.tensor.dtype)
    lines = [f"{by}: {line}" for line in lines_alike(filled, "zeros")]
    shown = f"{chosen.sources[0].path} (zeros after its rows)"
    chosen = with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes, notes=lines)
    return chosen, mapped._replace(made=tuple(out))


def _changed(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    """Tensors whose values the mapping changes, computed; the mapping without these changes."""
    if not any(piece.maps for made in mapped.made for piece in made.pieces):
        return chosen, mapped
    wanted: dict[str, set[tuple[ElementMap, ...]]] = {}
    for made in mapped.made:
        for piece in made.pieces:
            wanted.setdefault(piece.src.name, set()).add(piece.maps)
    changes = {name: maps for name, maps in wanted.items() if maps != {()} and name != PAD}
    for name, maps in changes.items():
        if len(maps) > 1:
            raise UsageError(
                f"{by} changes the values of {name} in more than one way",
                code="E1280",
                key=name,
                hint="keep the source's names with --dialect keep",
            )
    from ckpt_tool.run.recipes import Changed

    recipes = []
    dtypes = dict[TensorKey, DType]()
    for row in chosen.stored:
        key = row.tensor.key
        tensor = row.tensor
        (steps,) = changes.get(key.name, ((),))
        if steps and key.state in _VALUES and tensor.dtype.is_float:
            what = ", ".join(map(str, steps))
            recipes.append(Changed(key, tensor.shape, (chosen.input(row),), what, steps))
            dtypes[key] = chosen.casts.get(key, tensor.dtype)
            if any(step.wide for step in steps) and dtypes[key].bits < 32:
                dtypes[key] = DTYPES["F32"]
        elif steps and key.state not in (*_VALUES, STEP, EXTRAS) and not all(step.moments for step in steps):
            raise UsageError(
                f"{by} changes the scale of {key.name}, and optimizer moments of one scale are wrong for the other",
                code="E1285",
                key=key.name,
                hint="leave the optimizer out with --drop optimizer, or keep the source's names with --dialect keep",
            )
    alike: dict[str, tuple[ElementMap, list[str]]] = {}
    for name, maps in changes.items():
        for step in next(iter(maps)):
            alike.setdefault(step.kind, (step, []))[1].append(name)
    lines = [f"{by}: {step.says(len(names))}, rounded once: {', '.join(names[:3])}" for step, names in alike.values()]
    shown = f"{chosen.sources[0].path} (values changed)"
    chosen = with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes, notes=lines)
    plain: list[Made] = []
    for made in mapped.made:
        plain.append(made._replace(pieces=tuple(piece._replace(maps=()) for piece in made.pieces)))
    return chosen, mapped._replace(made=tuple(plain))


def _joined(chosen: Chosen, mapped: Mapped, writing: Writing) -> Chosen:
    """What one tensor is made of, where several sources hold it, as computed tensors of one."""
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
            keys = [TensorKey(name, state) for name in group]
            held = [rows[key] for key in keys if key in rows]
            if len({row.source for row in held}) > 1 and all(row.tensor.dtype.is_float for row in held):
                apart.update((row.tensor.key, row) for row in held)
    if not apart:
        return chosen
    from ckpt_tool.run.recipes import Unchanged

    recipes = [Unchanged(key, row.tensor.shape, (chosen.input(row),), "") for key, row in apart.items()]
    dtypes = {key: chosen.casts.get(key, row.tensor.dtype) for key, row in apart.items()}
    shown = f"{chosen.sources[0].path} (joined)"
    return with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes)


def _groups(made: Iterable[Made]) -> list[list[str]]:
    """The sources of each made tensor that has several."""
    groups: list[list[str]] = []
    for each in made:
        sources = list(dict.fromkeys(piece.src.name for piece in each.pieces))
        if len(sources) > 1:
            groups.append(sources)
    return groups


def lines_alike(rows: Iterable[tuple[str, int, int]], what: str) -> Iterator[str]:
    """Lines about (tensor, so many of its elements, all), one for all layers that are alike.

    >>> list(lines_alike([("layers.0.A_log", 2, 6), ("layers.1.A_log", 2, 6)], "zeros"))
    ['2 of 6 elements of layers.0.A_log are zeros, and of 1 more like it']
    """
    from ckpt_tool.families.table import form_of

    alike: dict[tuple[str, int, int], list[str]] = {}
    for name, part, whole in rows:
        alike.setdefault((form_of(name)[0], part, whole), []).append(name)
    for (_, part, whole), names in alike.items():
        more = f", and of {len(names) - 1} more like it" if len(names) > 1 else ""
        yield f"{part} of {whole} elements of {names[0]} are {what}{more}"
