"""Native torch optimizer states: which parameter is number 7?

`optimizer.state_dict()` of plain torch numbers its parameters: `state[7]["exp_avg"]`, and the groups list numbers,
`param_groups[0]["params"] == [0, 1, ...]`. The names are gone, unless the groups carry `param_names` (torch >= 2.6).
What is left as evidence is order and shape: the numbers of a group follow the order in which the trainer walked the
model, and a moment has its parameter's shape. So the numbers are laid over the model's tensors, in order, each on one
of its own shape, tensors that share bytes with an earlier one (tied) counted once, others (buffers, frozen ones) free
to be skipped. If exactly one such alignment exists, it is the answer; if there are two, nothing is guessed.

    model: embed (33, 10), w1 (23, 10), scale (3,), head (33, 10)      moments: 0 (33, 10), 1 (23, 10), 2 (33, 10)
    one alignment: 0 = embed, 1 = w1, 2 = head

Source: torch 2.13 `optim/optimizer.py` (`state_dict`, `pack_group`: numbers count parameters in group order).
Cost: a table of (tensors x reachable positions), cut off at `STATE_LIMIT` cells, which then counts as "not unique".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.formats.state_dict.words import SAME_SHAPE
from ckpt_tool.storage.pickles.coded_states import CODES, QMAP

STATE_LIMIT = 400_000  # cells


class Candidate(NamedTuple):
    """A tensor of the model that a number may mean. name; shape in elements;"""

    name: str
    shape: tuple[int, ...]
    same: Any = None  # equal for tensors over the same bytes, None when that is unknown


class Aligned(NamedTuple):
    """names: number -> name. why: how it was found, or why it was not (then `names` is empty)."""

    names: dict[int, str]
    why: str


def align(
    groups: Sequence[Any], moments: Mapping[int, Mapping[str, tuple[int, ...]]], model: Sequence[Candidate]
) -> Aligned:
    """Find the parameter name for each number of an optimizer.

    Args:
        groups: `param_groups` as plain values.
        moments: number -> state name -> shape.
        model: the model's tensors in their own order.
    """
    numbers = numbers_of(groups)
    if numbers is None or not set(moments) <= {n for group in numbers for n in group}:
        return Aligned({}, "its param_groups do not list the numbers of its states")
    named = _by_param_names(groups, numbers)
    if named is not None:
        return Aligned(named, "by the param_names of its groups")
    shapes = {number: shape_of(states) for number, states in moments.items()}
    found = _unique([[shapes.get(number) for number in group] for group in numbers], _candidates(model))
    if isinstance(found, str):
        return Aligned({}, found)
    names = {number: found[g][i] for g, group in enumerate(numbers) for i, number in enumerate(group)}
    return Aligned(names, "by order and shape: no other assignment fits")


def numbers_of(groups: Sequence[Any]) -> list[list[int]] | None:
    """The numbers of each group; None when the groups do not number their parameters."""
    out: list[list[int]] = []
    for group in groups:
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, list | tuple) or not all(type(n) is int for n in params):
            return None
        out.append(list(params))
    flat = [n for group in out for n in group]
    return out if flat and len(set(flat)) == len(flat) else None


def _by_param_names(groups: Sequence[Any], numbers: list[list[int]]) -> dict[int, str] | None:
    names: dict[int, str] = {}
    for group, own in zip(groups, numbers, strict=True):
        listed = group.get("param_names")
        if not isinstance(listed, list | tuple) or len(listed) != len(own) or not all(type(n) is str for n in listed):
            return None
        names.update(zip(own, listed, strict=True))
    return names if len(set(names.values())) == len(names) else None


def shape_of(states: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of the parameter that has these states; None if no state has its parameter's shape."""
    for name in SAME_SHAPE:
        if name in states:
            return states[name]
        if f"{name}@{CODES}" in states:
            from ckpt_tool.formats.state_dict.coded import shape_of_codes

            return shape_of_codes(states[f"{name}@{CODES}"], states.get(f"{name}@{QMAP}"))
    shapes = {shape for name, shape in states.items() if name != "step" and shape}
    return shapes.pop() if len(shapes) == 1 else None


def _candidates(model: Sequence[Candidate]) -> list[Candidate]:
    from ckpt_tool.core.buffers import is_buffer

    seen = set()
    out = []
    for item in model:
        if item.same is not None:
            if item.same in seen:
                continue
            seen.add(item.same)
        if not is_buffer(item.name):
            out.append(item)
    return out


class _Cell(NamedTuple):
    """How a position was reached: count of ways (capped at 2), the group that took the tensor (-1: skipped)."""

    ways: int
    group: int
    before: tuple[int, ...]


def _unique(groups: list[list[tuple[int, ...] | None]], model: list[Candidate]) -> list[list[str]] | str:
    """The one way to deal the model's tensors, in order, to the groups; or why there is none or more than one."""
    need = sum(map(len, groups))
    if need > len(model):
        return f"it numbers {need} parameters, the model has {len(model)} tensors that may be meant"

    start = (0,) * len(groups)
    layers: list[dict[tuple[int, ...], _Cell]] = [{start: _Cell(1, -1, start)}]
    cells = 0

    for index, item in enumerate(model):
        left = len(model) - index - 1
        after: dict[tuple[int, ...], _Cell] = {}
        for at, cell in layers[-1].items():
            if need - sum(at) <= left:
                _add(after, at, cell.ways, -1, at)
            for g, group in enumerate(groups):
                if at[g] < len(group) and group[at[g]] in (None, item.shape):
                    _add(after, (*at[:g], at[g] + 1, *at[g + 1 :]), cell.ways, g, at)
        layers.append(after)
        cells += len(after)
        if cells > STATE_LIMIT:
            return "its groups interleave in too many ways to try"

    at = tuple(map(len, groups))
    end = layers[-1].get(at)
    if end is None:
        return "no assignment in order fits the shapes"
    if end.ways > 1:
        return "more than one assignment fits the shapes"

    names: list[list[str]] = [[] for _ in groups]
    for index in range(len(model), 0, -1):
        cell = layers[index][at]
        if cell.group >= 0:
            names[cell.group].append(model[index - 1].name)
        at = cell.before

    return [part[::-1] for part in names]


def _add(
    layer: dict[tuple[int, ...], _Cell], at: tuple[int, ...], ways: int, group: int, before: tuple[int, ...]
) -> None:
    known = layer.get(at)
    layer[at] = _Cell(ways, group, before) if known is None else known._replace(ways=2)
