"""Groups the differences of two checkpoints by state and module: the first lines of `ckpt diff`, `summary` in its JSON.

Names that differ only in the numbers between their dots are one group:

    model.layers.0.mlp.down_proj.weight, ...31...  ->  model.layers.*.mlp.down_proj.weight

A group has the number of tensors that are equal, that differ and that only one side has; by how much the changed values
differ, with all of them taken together as one vector; and the tensor that differs most. Groups are sorted worst first:
changed values by their relative norm, then other shapes and dtypes, then tensors of one side, then equal ones.

`measure_layers` groups the same tensors by layer instead: by the name up to its first number, `model.layers.3`.
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


AMOUNTS = ("rel_l2", "cosine", "max_abs", "max_ulp")  # by how much values differ: keys of a document


@dataclass(slots=True)
class Group:
    """The tensors of one state whose names match one pattern."""

    state: str
    pattern: str
    # kind of difference (`_COUNTS`, "equal") -> for each * of the pattern, the numbers in the tensors' names
    numbers: dict[str, list[set[int]]] = field(default_factory=dict)
    # how many tensors are equal, and how many differ in each way (`_COUNTS`)
    counts: dict[str, int] = field(default_factory=lambda: {"equal": 0, **dict.fromkeys(_COUNTS.values(), 0)})
    # the sums over the changed ones (`run.compare.Norms`)
    norms: Any = None
    max_abs: float | None = None
    max_ulp: int | None = None
    elements: int = 0
    # of the tensors of two dtypes: the dtypes, how many have equal values, and the entry of the one that differs most
    dtypes: dict[str, None] = field(default_factory=dict)
    equal_values: int = 0
    worst_retyped: Mapping[str, Any] | None = None
    # the entry of the tensor that differs most (`severity`)
    worst: Mapping[str, Any] | None = None

    def add(self, what: str, numbers: list[int]) -> None:
        """Count a tensor whose name has these numbers. what: `equal`, or how it differs."""
        self.counts[what] += 1
        number_sets = self.numbers.setdefault(what, [set() for _ in numbers])
        for known_numbers, number in zip(number_sets, numbers, strict=True):
            known_numbers.add(number)

    def severity(self) -> tuple[int, float]:
        """The sort key of the group among others: smaller is worse."""
        if self.counts["changed"]:
            relative = self.norms.relative() if self.norms is not None else None
            return 0, -inf if relative is None else -relative
        if self.counts["other_shape"] or self.counts["other_dtype"]:
            return 1, 0.0
        if self.counts["only_left"] or self.counts["only_right"]:
            return 2, 0.0
        return 3, 0.0

    def document(self) -> dict[str, Any]:
        """The group's entry in `summary` of the document."""
        relative = self.norms.relative() if self.norms is not None else None
        cosine = self.norms.cosine() if self.norms is not None else None
        return {
            "state": self.state,
            "pattern": self.pattern,
            "names": {kind: self.names_of(kind) for kind in self.numbers if kind != "equal"},
            "tensors": sum(self.counts.values()),
            **self.counts,
            "rel_l2": relative,
            "cosine": cosine,
            "max_abs": self.max_abs,
            "max_ulp": self.max_ulp,
            "elements": self.elements,
            "nonfinite": self.norms.nonfinite if self.norms is not None else 0,
            "worst": self.worst_tensor(),
            **self.retyped(),
        }

    def retyped(self) -> dict[str, Any]:
        """The fields of the entry for tensors of two dtypes, {} if there are none."""
        if not self.dtypes:
            return {}
        worst = self.worst_retyped
        return {
            "dtypes": list(self.dtypes),
            "equal_values": self.equal_values,
            "dtype_worst": None if worst is None else {key: worst.get(key) for key in ("name", *AMOUNTS[:3])},
        }

    def add_retyped(self, difference: Mapping[str, Any]) -> None:
        """Add the entry of a tensor whose dtype differs between the two sides."""
        self.dtypes.setdefault(f"{difference['left']} / {difference['right']}")
        self.equal_values += bool(difference.get("values_equal"))
        if "rel_l2" in difference and (
            self.worst_retyped is None or severity(difference) < severity(self.worst_retyped)
        ):
            self.worst_retyped = difference

    def worst_tensor(self) -> dict[str, Any] | None:
        """The name of the tensor whose values differ most, with the amounts; None if no values differ."""
        if self.worst is None:
            return None
        return {"name": self.worst["name"], **{key: self.worst.get(key) for key in AMOUNTS}}

    def names_of(self, what: str) -> str:
        """The names that differ in one way, as the pattern with numbers: `model.layers.[0-31].mlp.down_proj.weight`."""
        parts = iter(sorted(found) for found in self.numbers[what])

        def fill(match: re.Match[str]) -> str:
            """The numbers for one * of the pattern: `3`, or `[0-31]`."""
            part = next(parts, None)
            if part is None:  # a * of the name itself
                return match[0]
            return str(part[0]) if len(part) == 1 else f"[{ranges(part)}]"

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
        if difference["kind"] == "dtype":
            group.add_retyped(difference)
            continue
        group.elements += difference.get("elements") or 0
        group.max_abs = _larger(group.max_abs, difference.get("max_abs"))
        group.max_ulp = _larger(group.max_ulp, difference.get("max_ulp"))
        norms = difference.get(norms_key)
        if norms is not None:
            group.norms = norms if group.norms is None else group.norms.plus(norms)
        if difference["kind"] == "value" and (group.worst is None or severity(difference) < severity(group.worst)):
            group.worst = difference

    ordered = sorted(groups.values(), key=Group.severity)  # stable: else in the order of the checkpoint
    return [group.document() for group in ordered]


def measure_layers(differences: Iterable[Mapping[str, Any]], norms_key: str) -> list[dict[str, Any]]:
    """An entry for each layer of each state in which values differ, worst first. Names without a number are in none.

    The norms are those of the layer's changed tensors, taken together as one vector.
    """
    layers: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for difference in differences:
        layer = layer_of(difference["name"])
        if layer and difference["kind"] == "value":
            layers.setdefault((difference["state"], layer), []).append(difference)

    entries = []
    for (state, layer), changed in layers.items():
        norms = None
        max_abs = None
        for difference in changed:
            of_tensor = difference.get(norms_key)
            if of_tensor is not None:
                norms = of_tensor if norms is None else norms.plus(of_tensor)
            max_abs = _larger(max_abs, difference.get("max_abs"))
        entries.append(
            {
                "state": state,
                "layer": layer,
                "changed": len(changed),
                "rel_l2": None if norms is None else norms.relative(),
                "cosine": None if norms is None else norms.cosine(),
                "max_abs": max_abs,
            }
        )
    return sorted(entries, key=severity)


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the first number, `model.layers.3`; "" without a number."""
    number = _NUMBER.search(name)
    return name[: number.end()] if number else ""


def severity(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Where an entry with `rel_l2` and `max_abs` is listed among others, worst first: smaller is worse.

    Without a relative norm (the first side is all zeros, or its values are unknown) it comes first.
    """
    relative = entry.get("rel_l2")
    max_abs = entry.get("max_abs")
    by_norm = -inf if relative is None else -float(relative)
    by_distance = 0.0 if max_abs is None else -float(max_abs)
    return by_norm, -inf if isnan(by_distance) else by_distance


def _count(groups: dict[tuple[str, str], Group], state: str, name: str, what: str) -> Group:
    """Count one tensor in its group, and return the group."""
    pattern = name if _has_star(name) else _NUMBER.sub("*", name)  # a name with a * of its own is its own pattern
    numbers = numbers_of(name)
    group = groups.setdefault((state, pattern), Group(state, pattern))
    group.add(what, numbers)
    return group


def numbers_of(name: str) -> list[int]:
    """The numbers in a name, which distinguish a tensor from others of its group; [] if the name itself has a *."""
    return [] if _has_star(name) else [int(number) for number in _NUMBER.findall(name)]


def _has_star(name: str) -> bool:
    return "*" in name.split(".")


def _larger(one: Any, other: Any) -> Any:
    """The larger of two numbers, NaN above all; None counts as absent."""
    if one is None or other is None:
        return one if other is None else other
    return one if isnan(one) or one >= other else other
