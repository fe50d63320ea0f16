"""What a comparison comes to, by state and module: the lines that `ckpt diff` shows first, and `summary` of its JSON.

Names that are equal but for the numbers between their dots are one group:

    model.layers.0.mlp.down_proj.weight, ...31...  ->  model.layers.*.mlp.down_proj.weight

A group says how many of its tensors are equal, differ or are on one side alone, and how much those whose values differ
do so, all of them taken together as one vector. Groups come worst first: changed values by their relative norm, then
other shapes and dtypes, then tensors of one side, then what is equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.report.text import ranges

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")  # a part between dots that is a number
_STAR = re.compile(r"(?<![^.])\*(?![^.])")
_COUNTS = {
    "value": "changed",
    "shape": "other_shape",
    "dtype": "other_dtype",
    "missing_left": "only_right",
    "missing_right": "only_left",
}


@dataclass(slots=True)
class Group:
    """The tensors of one state whose names have one pattern."""

    state: str
    pattern: str
    # of those that differ in a way, the numbers that stand at each * of the pattern
    numbers: dict[str, list[set[int]]] = field(default_factory=dict)
    # how many tensors are equal, and how many differ in each way (`_COUNTS`)
    counts: dict[str, int] = field(default_factory=lambda: {"equal": 0, **dict.fromkeys(_COUNTS.values(), 0)})
    # the sums over the changed ones (`run.compare.Norms`)
    norms: Any = None
    max_abs: float | None = None
    max_ulp: int | None = None
    elements: int = 0

    def add(self, what: str, numbers: list[int]) -> None:
        """Count a tensor whose name has these numbers. what: `equal`, or how it differs."""
        self.counts[what] += 1
        seen = self.numbers.setdefault(what, [set() for _ in numbers])
        for known, number in zip(seen, numbers, strict=True):
            known.add(number)

    def severity(self) -> tuple[int, float]:
        """Where it stands among others: smaller is worse."""
        if self.counts["changed"]:
            relative = self.norms.relative() if self.norms is not None else None
            return 0, -inf if relative is None else -relative
        if self.counts["other_shape"] or self.counts["other_dtype"]:
            return 1, 0.0
        if self.counts["only_left"] or self.counts["only_right"]:
            return 2, 0.0
        return 3, 0.0

    def document(self) -> dict[str, Any]:
        """Its entry of `summary`."""
        relative = self.norms.relative() if self.norms is not None else None
        cosine = self.norms.cosine() if self.norms is not None else None
        return {
            "state": self.state,
            "pattern": self.pattern,
            "names": {what: self.names_of(what) for what in self.numbers if what != "equal"},
            "tensors": sum(self.counts.values()),
            **self.counts,
            "rel_l2": relative,
            "cosine": cosine,
            "max_abs": self.max_abs,
            "max_ulp": self.max_ulp,
            "elements": self.elements,
            "nonfinite": self.norms.nonfinite if self.norms is not None else 0,
        }

    def names_of(self, what: str) -> str:
        """The names that differ in one way, as the pattern with numbers: `model.layers.[0-31].mlp.down_proj.weight`."""
        parts = iter(sorted(found) for found in self.numbers[what])

        def fill(match: re.Match[str]) -> str:
            found = next(parts, None)
            if found is None:  # a * of the name itself
                return match[0]
            return str(found[0]) if len(found) == 1 else f"[{ranges(found)}]"

        return _STAR.sub(fill, self.pattern)


def group_differences(
    equal: Iterable[TensorKey], differences: Iterable[Mapping[str, Any]], norms_key: str
) -> list[dict[str, Any]]:
    """An entry for each group, worst first.

    equal: the tensors that are equal on both sides. differences: those of the document, each of which may have the sums
    of its pair under `norms_key`.
    """
    groups: dict[tuple[str, str], Group] = {}
    for key in equal:
        _count(groups, key.state, key.name, "equal")

    for difference in differences:
        group = _count(groups, difference["state"], difference["name"], _COUNTS[difference["kind"]])
        group.elements += difference.get("elements") or 0
        group.max_abs = _larger(group.max_abs, difference.get("max_abs"))
        group.max_ulp = _larger(group.max_ulp, difference.get("max_ulp"))
        norms = difference.get(norms_key)
        if norms is not None:
            group.norms = norms if group.norms is None else group.norms.plus(norms)

    ordered = sorted(groups.values(), key=Group.severity)  # stable: else in the order of the checkpoint
    return [group.document() for group in ordered]


def _count(groups: dict[tuple[str, str], Group], state: str, name: str, what: str) -> Group:
    """Count one tensor in its group, and give the group."""
    has_star = "*" in name.split(".")
    pattern = name if has_star else _NUMBER.sub("*", name)  # a name with a * of its own is its own pattern
    numbers = [] if has_star else [int(found) for found in _NUMBER.findall(name)]
    group = groups.setdefault((state, pattern), Group(state, pattern))
    group.add(what, numbers)
    return group


def _larger(one: Any, other: Any) -> Any:
    """The larger of two numbers, NaN above all; None says nothing."""
    if one is None or other is None:
        return one if other is None else other
    return one if isnan(one) or one >= other else other
