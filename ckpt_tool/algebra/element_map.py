"""Element maps: the invertible changes of values that an equation may contain, a closed set.

    decoder.final_layernorm.weight : h = model.norm.weight : h * add(1)
    decoder.layers_{i}.self_attention.query.kernel : h g d
        = model.layers.{i}.self_attn.q_proj.weight : (g d) h * over_root(d)

says that Megatron's norm is Hugging Face's plus one (zero-centred against plain gamma), and MaxText's query Hugging
Face's times fp32(1 / sqrt(d)), in fp32. An argument is a number, or an axis: its size. Each map has an exact inverse
as a formula; in floating point `x + 1 - 1` may round, which is why a rule without maps moves bits and one with maps is
named in the report. A map changes values, not gradients: the plan applies it to the states that hold the parameter
itself (`model`, `master`, `ema`). An optimizer's moments stay valid under `add`, and under no other map.

A new map is one row of `_KINDS`. What it does not do: dequantise (one-way, elsewhere), or act on anything but a value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from math import frexp, ldexp, sqrt
from typing import Any, NamedTuple

from ckpt_tool.errors import UsageError, near_misses

Number = int | float


class _MapKind(NamedTuple):
    """A kind of map, which has one argument."""

    act: Callable[[Any, Any], Any]  # (value, argument) -> the mapped value
    undone: Callable[[Any], tuple[str, Any]]  # argument -> (kind, argument) of the inverse map
    says: str  # a sentence for the report; {n} is the number of tensors
    moments: bool = False  # do an optimizer's moments stay valid?
    wide: bool = False  # are results for dtypes of less than 32 bits kept in fp32, not rounded back?


_SCALED = "{n} embeddings are multiplied by the root of their width, in fp32"
_UNSCALED = "{n} embeddings are divided by the root of their width, in fp32"


def _bf16_root(number: Number) -> float:
    """The square root in bf16, which has 8 bits of mantissa.

    >>> _bf16_root(2560)
    50.5
    """
    mantissa, exponent = frexp(sqrt(number))
    return ldexp(round(mantissa * 256), exponent - 8)


_KINDS = {
    "add": _MapKind(operator.add, lambda by: ("add", -by), "a number is added to {n} tensors", moments=True),
    "add_wide": _MapKind(
        operator.add, lambda by: ("add", -by), "a number is added to {n} tensors, kept in fp32", moments=True, wide=True
    ),
    "over_root": _MapKind(
        lambda value, by: value * (1 / sqrt(by)),  # NumPy rounds a float to its array's dtype first
        lambda by: ("times_root", by),
        "{n} tensors are divided by a square root, in fp32",
    ),
    "times_root": _MapKind(
        lambda value, by: value * sqrt(by),
        lambda by: ("over_root", by),
        "{n} tensors are multiplied by a square root, in fp32",
    ),
    # an embedding that has the root of its width in it, which a division undoes
    "embed_scale": _MapKind(lambda value, by: value * sqrt(by), lambda by: ("embed_unscale", by), _SCALED),
    "embed_unscale": _MapKind(lambda value, by: value / sqrt(by), lambda by: ("embed_scale", by), _UNSCALED),
    # the same, the root itself rounded to bf16
    "embed_scale_bf16": _MapKind(
        lambda value, by: value * _bf16_root(by), lambda by: ("embed_unscale_bf16", by), _SCALED
    ),
    "embed_unscale_bf16": _MapKind(
        lambda value, by: value / _bf16_root(by), lambda by: ("embed_scale_bf16", by), _UNSCALED
    ),
}
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(\s*(-?[0-9]+(?:\.[0-9]+)?|[A-Za-z_]\w*)\s*\)\s*")


class ElementMap(NamedTuple):
    """`add(1)`: kind and argument."""

    kind: str
    by: Number | str  # a number, or the axis whose size it is

    def __call__(self, value: Any) -> Any:
        """The mapped value; any number or array."""
        return _KINDS[self.kind].act(value, self.by)

    def __str__(self) -> str:
        return f"{self.kind}({self.by})"

    @property
    def undone(self) -> ElementMap:
        """The inverse map."""
        return ElementMap(*_KINDS[self.kind].undone(self.by))

    def says(self, n: int) -> str:
        """What happens to `n` tensors, in words."""
        return _KINDS[self.kind].says.format(n=n)

    @property
    def moments(self) -> bool:
        """Do an optimizer's moments stay valid under the map?"""
        return _KINDS[self.kind].moments

    @property
    def wide(self) -> bool:
        """Are results for dtypes of less than 32 bits kept in fp32?"""
        return _KINDS[self.kind].wide

    def at(self, size: Callable[[str], int]) -> ElementMap:
        """The map with the axis's size in place of the axis."""
        return ElementMap(self.kind, size(self.by)) if isinstance(self.by, str) else self


def element_map(text: str) -> ElementMap:
    """Parse `add(1)`. Raises UsageError (E0229)."""
    match = _CALL.fullmatch(text)
    if match is None or match[1] not in _KINDS:
        hint = near_misses(match[1], _KINDS) if match else ""
        raise UsageError(
            f"`{text.strip()}` is no element map",
            code="E0229",
            hint=hint or f"the maps are {', '.join(_KINDS)} of (NUMBER) or (AXIS)",
        )
    by = match[2]
    if by.isidentifier():
        return ElementMap(match[1], by)
    return ElementMap(match[1], float(by) if "." in by else int(by))


def inverse(maps: Iterable[ElementMap]) -> tuple[ElementMap, ...]:
    """The maps that undo `maps`, last first."""
    return tuple(each.undone for each in reversed(tuple(maps)))


def joined(*chains: Iterable[ElementMap]) -> tuple[ElementMap, ...]:
    """The chains one after the other, simplified: a map followed by its inverse is left out, and successive additions
    are one.

    >>> joined([ElementMap("over_root", 8)], [ElementMap("times_root", 8), ElementMap("add", 1), ElementMap("add", 2)])
    (ElementMap(kind='add', by=3),)
    """
    out: list[ElementMap] = []
    for step in (m for chain in chains for m in chain):
        if out and (out[-1].undone == step or step.undone == out[-1]):
            out.pop()
        elif out and out[-1].kind == step.kind == "add":
            out[-1] = ElementMap("add", operator.add(out[-1].by, step.by))
        elif step != ElementMap("add", 0):
            out.append(step)
    return tuple(out)
