"""Determines the size of each axis of a family in a checkpoint: from its config, else from the tensors' shapes.

    config    hidden_size = 32                                   h = 32
    shapes    down_proj.weight : h f, found [32, 48]             f = 48, as h is known

A shape determines an axis if it is the only unknown of a dim. Heads can't be determined from shapes (8 heads of 16 have
the size of 16 heads of 8), so a fused QKV needs a config. Shapes never override a config: if they contradict it,
`families.rewrite` reports that. Cost: one look at each rule. What it does not do: compare every shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_tool.algebra.expression import Extent, extent
from ckpt_tool.algebra.pattern import Pattern
from ckpt_tool.errors import InputError, UsageError

Shape = tuple[int, ...]
Config = Mapping[str, Any]


def compute_sizes(axes: Mapping[str, str], config: Config) -> tuple[dict[str, Extent], dict[str, str]]:
    """(sizes of the axes that follow from the config, for each other axis what is missing)."""
    sizes: dict[str, Extent] = {}
    reasons: dict[str, str] = {}
    names = dict(config)
    for axis, text in axes.items():
        try:
            sizes[axis] = extent(text, names)
        except UsageError as e:
            reasons[axis] = e.message
            continue
        if isinstance(sizes[axis], int):
            names[axis] = sizes[axis]
    return sizes, reasons


def infer_sizes(seen: Iterable[tuple[Pattern, Shape]], known: Mapping[str, Extent]) -> dict[str, Extent]:
    """`known`, extended by every axis that is the only unknown of a dim. A dim that no size fits is ignored.

    seen: the pattern of a tensor and its actual shape.
    """
    sizes = dict(known)
    dims = [
        (node, n, {axis for kind in node.kinds() for axis in kind if not axis.isdigit()})
        for pattern, shape in seen
        if len(pattern.dims) == len(shape)
        for node, n in zip(pattern.dims, shape, strict=True)
    ]
    while True:
        before = len(sizes)
        for node, n, axes in dims:
            unknown = axes - sizes.keys()
            if len(unknown) == 1:
                axis = unknown.pop()
                constant, first = (node.size({**sizes, axis: k}) for k in (0, 1))  # linear: an axis counts once
                step = first - constant
                if step > 0 and n >= constant and (n - constant) % step == 0:
                    sizes[axis] = (n - constant) // step
        if len(sizes) == before:
            return sizes


def check_known(
    needed: Mapping[str, str], sizes: Mapping[str, Extent], reasons: Mapping[str, str], family: str
) -> None:
    """Raise InputError (E1376) for axes of unknown size. needed: {axis: a tensor that needs it}."""
    faults = [
        f"{reasons.get(axis, f'axis {axis} has no size')} (needed by {name})"
        for axis, name in needed.items()
        if axis not in sizes
    ]
    if faults:
        raise InputError(
            f"the shapes alone don't show the sizes of this {family} model: {faults[0]}",
            code="E1376",
            faults=faults[1:],
            hint="give the model's config.json with --config FILE",
        )


def fits(pattern: Pattern, shape: Sequence[int], sizes: Mapping[str, Extent]) -> bool | None:
    """Can a tensor with this pattern have that shape? None if it depends on an axis of unknown size."""
    if len(pattern.dims) != len(shape):
        return False
    open_dim = False
    for node, n in zip(pattern.dims, shape, strict=True):
        axes = {axis for kind in node.kinds() for axis in kind if not axis.isdigit()}
        if axes - sizes.keys():
            open_dim = True
        elif node.size(sizes) != n:
            return False
    return None if open_dim else True


def shape_of(pattern: Pattern, sizes: Mapping[str, Extent]) -> tuple[int | None, ...]:
    """The shape of a tensor with this pattern, None for each dim that has an axis of unknown size."""
    return tuple(
        None
        if {axis for kind in node.kinds() for axis in kind if not axis.isdigit()} - sizes.keys()
        else node.size(sizes)
        for node in pattern.dims
    )
