"""Finds plain numbers under parameter names in a model's state dict, which files of tensors cannot store.

    {"model": {"w": T0, "logit_scale": 2.5}, "epoch": 3}       -> ("model", "logit_scale"); epoch is the trainer's

A parameter that was saved with `.item()`, or as a NumPy scalar, is no tensor and becomes part of the extras: a target
that cannot store extras drops it, and a report with "extras: model" would not name the parameter.

Sources: torch 2.13 `nn/modules/module.py` (`get_extra_state`: any value may be in a state dict). Cost: a few set
operations a tensor of a nested state. What it does not do: distinguish a parameter from a counter of the model, or
find numbers in a model that is at the top of the state, where the report names each of them anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tool.core.tensor import MODEL, LogicalTensor, Path


def levels_of_model(tensors: Iterable[LogicalTensor]) -> set[Path]:
    """The paths of the dicts in which the model's tensors are stored, but for the top of the file."""
    levels: set[Path] = set()
    for tensor in tensors:
        path = tensor.path[:-1]
        while tensor.key.state == MODEL and path and path not in levels:
            levels.add(path)
            path = path[:-1]
    return levels


def numbers_of_model(value: Any, path: Path, levels: set[Path], *, is_inside: bool = False) -> tuple[list[Path], bool]:
    """(the paths of the plain numbers of the model in extras, whether there is anything else).

    Args:
        value: of the extras. path: where it is. levels: those of the model. is_inside: is it on one of them?

    >>> numbers_of_model({"scale": 2.5, "kind": "clip"}, ("model",), {("model",)})
    ([('model', 'scale')], True)
    """
    if isinstance(value, Mapping):
        numbers: list[Path] = []
        has_more = False
        for key, item in value.items():
            step = key if type(key) is int else str(key)
            inner, more = numbers_of_model(item, (*path, step), levels, is_inside=is_inside or path in levels)
            numbers += inner
            has_more = has_more or more
        return numbers, has_more
    if is_inside and type(value) in (int, float, complex):
        return [path], False
    return [], True
