"""The methods of merging: how many models each takes, whether one of them is the base, and its parameters.

Names and defaults are those of mergekit 0.1.5 (`merge_methods/`), with `-` in place of `_`. `weight` has no default in
mergekit; on the command line it is 1 if it is not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ckpt_tool.errors import UsageError, near_misses

Scope = Literal["shared", "model", "task"]  # one for the merge; one a model; one a model that is not the base
Base = Literal["none", "optional", "needed"]


class MethodParameter(NamedTuple):
    """One parameter of a merge method."""

    scope: Scope
    default: float | bool | None  # None if the parameter must be given
    kind: Literal["number", "flag"] = "number"
    low: float = float("-inf")  # the bounds of a number, both included unless `above`
    high: float = float("inf")  # the bounds of a number, both included unless `above`
    above: bool = False  # the lower bound itself is excluded
    optional: bool = False  # the parameter need not be given although it has no default


class Method(NamedTuple):
    """A merge method."""

    name: str
    base: Base
    parameters: Mapping[str, MethodParameter]
    least: int = 1  # models, the base counted
    most: int | None = None  # models, the base counted
    trim: str | None = None  # how task vectors are trimmed (`merging.task_vectors.Trim.kind`)
    consensus: bool = False

    @property
    def of_task_vectors(self) -> bool:
        """Does it merge differences from a base (`merging.task_vectors`)?"""
        return "lambda" in self.parameters

    @property
    def by_chance(self) -> bool:
        """Does it drop elements at random, so that --seed has an effect?"""
        return self.trim in ("chance", "ranks")


def _flag(default: bool) -> MethodParameter:
    return MethodParameter("shared", default, "flag")


def _make_task_vector_method(
    name: str, trim: str | None = None, *, consensus: bool = False, normalize: bool = False, rescale: bool = False
) -> Method:
    parameters = {
        "weight": MethodParameter("task", None),
        "density": MethodParameter("task", 1.0, low=0, high=1, above=True),
        "lambda": MethodParameter("shared", 1.0),
        "normalize": _flag(normalize),
        "rescale": _flag(rescale),
        "int8_mask": _flag(False),
    }
    if trim == "crumbs":
        parameters["gamma"] = MethodParameter("task", 0.01, low=0, high=1)
    if trim == "ranks":
        parameters["epsilon"] = MethodParameter("task", 0.15, low=0, high=0.5)
    return Method(name, "needed", parameters, 1, None, trim, consensus)


_ALL = (
    Method("linear", "none", {"weight": MethodParameter("model", None), "normalize": _flag(True)}),
    Method("slerp", "needed", {"t": MethodParameter("shared", None, low=0, high=1)}, 2, 2),
    Method(
        "nuslerp",
        "optional",
        {"weight": MethodParameter("task", None), "nuslerp_row_wise": _flag(False), "nuslerp_flatten": _flag(True)},
    ),
    _make_task_vector_method("task-arithmetic"),
    _make_task_vector_method("ties", "largest", consensus=True, normalize=True),
    _make_task_vector_method("dare-linear", "chance", rescale=True),
    _make_task_vector_method("dare-ties", "chance", consensus=True, rescale=True),
    _make_task_vector_method("della", "ranks", consensus=True, normalize=True, rescale=True),
    _make_task_vector_method("della-linear", "ranks", rescale=True),
    _make_task_vector_method("breadcrumbs", "crumbs"),
    _make_task_vector_method("breadcrumbs-ties", "crumbs", consensus=True),
    Method("model-stock", "needed", {"filter_wise": _flag(False)}, 3),
    Method("passthrough", "none", {"scale": MethodParameter("model", None, optional=True)}, 1, 1),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
# Methods of mergekit 0.1.5 that are not implemented here, for a better error message.
FOREIGN = ("multislerp", "nearswap", "ram", "ramplus_tl", "sce", "arcee_fusion", "karcher")


def method_of(name: str) -> Method:
    """The method of that name, spelled with `_` or `-`. Raises UsageError E1440 for an unknown one."""
    method = METHODS.get(name.replace("_", "-"))
    if method is None:
        foreign = name.replace("-", "_") in FOREIGN
        raise UsageError(
            f"this build does not merge by {name}" if foreign else f"no method {name!r}",
            code="E1440",
            hint=near_misses(name.replace("_", "-"), METHODS) or f"the methods are {', '.join(METHODS)}",
        )
    return method
