"""A group of tensors and the parameters there, as the recipe that computes the merged tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

from ckpt_tool.commands.merging.groups import Group
from ckpt_tool.commands.merging.settings import Job
from ckpt_tool.core.tensor import TensorKey

if TYPE_CHECKING:
    from ckpt_tool.run.computed import Input, Recipe
    from ckpt_tool.run.merging.task_vectors import Trim

LEAST_TOTAL = 1e-6  # nuslerp: weights whose sum is smaller count as equal (mergekit 0.1.5 `nuslerp.py`)


def parameter_faults(job: Job, group: Group) -> list[str]:
    """What is wrong with a group's parameters taken together, one line each."""
    faults = []
    weights = _given(group.own.get("weight", ()))
    if group.shared.get("normalize") and not job.method.consensus and (total := _single_sum(weights)) in (0, inf):
        what = "0 in fp32" if total == 0 and sum(weights) != 0 else "0" if total == 0 else "more than fp32 has"
        faults.append(f"{group.name}: the weights sum to {what}, so they can't be normalized")
    for density, epsilon in zip(
        _given(group.own.get("density", ())), _given(group.own.get("epsilon", ())), strict=False
    ):
        if density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            faults.append(f"density {density:g} +- epsilon {epsilon:g} leaves (0, 1)")
    return faults


def moved(job: Job, group: Group) -> bool:
    """Is the tensor the first model's, as it lies?"""
    return job.method.name == "passthrough" and group.own["scale"][0] is None


def recipe_of(job: Job, group: Group, inputs: Sequence[Input]) -> Recipe:
    """What computes the group's tensor. inputs: of the group's rows, in their order."""
    from ckpt_tool.run.merging.linear import Linear
    from ckpt_tool.run.merging.model_stock import ModelStock
    from ckpt_tool.run.merging.sphere import NuSlerp, Slerp

    method, key = job.method, TensorKey(group.name)
    shape = group.rows[0][1].tensor.shape
    base = job.base_of(group.slice_)
    held = [part.model == base for part, _ in group.rows]
    first = [each for each, is_base in zip(inputs, held, strict=True) if is_base]
    rest = [each for each, is_base in zip(inputs, held, strict=True) if not is_base]
    text = f"{method.name} {sorted(group.shared.items())} {sorted(group.own.items())} {held} {job.seed}"
    match method.name:
        case "linear":
            return Linear(
                key, shape, tuple(inputs), text, tuple(_given(group.own["weight"])), bool(group.shared["normalize"])
            )
        case "passthrough":
            return Linear(key, shape, tuple(inputs), text, tuple(_given(group.own["scale"])), False)
        case "slerp":
            return Slerp(key, shape, (*first, *rest), text, float(group.shared["t"] or 0))
        case "nuslerp":
            along = (
                None
                if group.shared["nuslerp_flatten"] or len(shape) < 2
                else 0
                if group.shared["nuslerp_row_wise"]
                else -1
            )
            return NuSlerp(key, shape, (*rest, *first), text, _share(_given(group.own["weight"])), bool(first), along)
        case "model-stock":
            return ModelStock(key, shape, (*first, *rest), text, bool(group.shared["filter_wise"]))
    return _of_task_vectors(job, group, (*first, *rest), text)


def _of_task_vectors(job: Job, group: Group, inputs: tuple[Input, ...], text: str) -> Recipe:
    from ckpt_tool.run.merging.task_vectors import TaskVectors

    trims = tuple(_trim(job, group, number) for number in range(len(inputs) - 1))
    return TaskVectors(
        TensorKey(group.name), inputs[0].tensor.shape, inputs, text, tuple(_given(group.own["weight"])), trims,
        job.method.consensus, bool(group.shared["normalize"]), bool(group.shared["rescale"]),
        float(group.shared["lambda"] or 0),
    )  # fmt: skip


def _trim(job: Job, group: Group, number: int) -> Trim | None:
    """How model `number`, the base not counted, is trimmed."""
    from ckpt_tool.run.merging.masks import stream
    from ckpt_tool.run.merging.task_vectors import Trim

    kind: Any = job.method.trim
    if kind is None:
        return None
    density, gamma, epsilon = (_given(group.own.get(each, ())) for each in ("density", "gamma", "epsilon"))
    return Trim(
        kind, density[number], gamma[number] if gamma else 0.0, epsilon[number] if epsilon else 0.0,
        stream(job.seed, number, group.name),
    )  # fmt: skip


def _single_sum(weights: Sequence[float]) -> float:
    """The size of their sum as fp32 has it, inf beyond."""
    total = 0.0
    try:
        for weight in weights:
            (total,) = unpack("f", pack("f", total + unpack("f", pack("f", weight))[0]))
    except OverflowError:
        return inf
    return abs(total)


def _share(weights: Sequence[float]) -> float:
    """t of nuslerp: where between two models the weights point."""
    total = sum(weights)
    return 0.5 if abs(total) < LEAST_TOTAL else weights[1] / total


def _given(values: Sequence[float | bool | None]) -> list[float]:
    """The values of the models that have one: all, or all but the base."""
    return [float(value) for value in values if value is not None]
