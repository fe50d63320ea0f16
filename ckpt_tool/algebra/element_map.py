"""Element maps: the closed set of invertible changes of value that an equation may ask for.

    decoder.final_layernorm.weight : h = model.norm.weight : h * add(1)

says that Megatron's norm is Hugging Face's plus one (zero-centred against plain gamma). Each map has an exact inverse
as a formula; in floating point `x + 1 - 1` may round, which is why a rule without maps moves bits and one with maps is
named in the report. `add` changes values, not gradients: the plan applies it to the states that hold the parameter
itself (`model`, `master`, `ema`) and carries moments as they are.

A new map is one row of `_KINDS`. What it does not do: dequantise (one-way, elsewhere), or act on anything but a value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ckpt_tool.errors import UsageError, near_misses

Number = int | float


class _Kind(NamedTuple):
    act: Callable[[Any, Number], Any]
    inverse: Callable[[Number], Number]
    join: Callable[[Number, Number], Number]  # two in a row as one
    nothing: Number  # the argument that changes nothing


_KINDS = {"add": _Kind(operator.add, operator.neg, operator.add, 0)}
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(\s*(-?[0-9]+(?:\.[0-9]+)?)\s*\)\s*")


class ElementMap(NamedTuple):
    """`add(1)`: kind and argument."""

    kind: str
    by: Number

    def __call__(self, value: Any) -> Any:
        """The mapped value; any number or array."""
        return _KINDS[self.kind].act(value, self.by)

    def __str__(self) -> str:
        return f"{self.kind}({self.by})"


def element_map(text: str) -> ElementMap:
    """Parse `add(1)`. Raises UsageError (E0229)."""
    match = _CALL.fullmatch(text)
    if match is None or match[1] not in _KINDS:
        hint = near_misses(match[1], _KINDS) if match else ""
        raise UsageError(
            f"`{text.strip()}` is no element map",
            code="E0229",
            hint=hint or f"the maps are {', '.join(_KINDS)}(NUMBER)",
        )
    return ElementMap(match[1], float(match[2]) if "." in match[2] else int(match[2]))


def inverse(maps: Iterable[ElementMap]) -> tuple[ElementMap, ...]:
    """The maps that undo `maps`, last first."""
    return tuple(ElementMap(m.kind, _KINDS[m.kind].inverse(m.by)) for m in reversed(tuple(maps)))


def joined(*chains: Iterable[ElementMap]) -> tuple[ElementMap, ...]:
    """Chains one after the other, neighbours of a kind as one, those that change nothing left out."""
    out: list[ElementMap] = []
    for step in (m for chain in chains for m in chain):
        if out and out[-1].kind == step.kind:
            step = ElementMap(step.kind, _KINDS[step.kind].join(out.pop().by, step.by))
        if step.by != _KINDS[step.kind].nothing:
            out.append(step)
    return tuple(out)
