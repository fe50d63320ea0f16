"""Groups tensors: the tensors of the models that are merged into each output tensor, with the parameter values there.

    layers [0, 2) of A, then [1, 3) of B:   B's model.layers.1.mlp.up_proj.weight  ->  model.layers.2.mlp.up_proj.weight

The layer of a tensor is the first number between dots in its name. Without slices every tensor keeps its name. With
slices, layers are renumbered; the embeddings are taken from the first slice, and the tensors after the layers (norm,
head) from the last, as in mergekit. In a vision or audio model only the layers of the language model are sliced; its
towers are taken from the first slice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tool.core.bounds import check_count
from ckpt_tool.merging.job import LayerSlice, LayersOfModel, MergeJob, ParameterPlace, Value, value_of
from ckpt_tool.plan.moves import Stored

_LAYER = re.compile(r"^(.*?(?:^|\.))(\d{1,9})\.")
_TOWER = re.compile(r"vision|visual|vit|audio|speech|image|tower")
_BEFORE = re.compile(r"embed|(?:^|\.)w[tp]e\.")
Tensors = Mapping[str, Stored]


@dataclass(frozen=True, slots=True)
class MergeGroup:
    """One output tensor, the tensors that are merged into it, and the parameters of the merge."""

    name: str
    slice_: LayerSlice
    rows: tuple[tuple[LayersOfModel, Stored], ...]  # the tensor of each part of the slice
    shared: Mapping[str, Value | None]  # parameters of the entire merge, by name
    own: Mapping[str, tuple[Value | None, ...]]  # parameters of single models, by name: a value for each part


def layer_of(name: str) -> tuple[str, int, str] | None:
    """The name of a layer's tensor in three parts, ("model.layers.", 3, "mlp.up_proj.weight"); None outside layers."""
    match = _LAYER.match(name)
    return (match[1], int(match[2]), name[match.end() :]) if match else None


class Grouping:
    """Builds the groups of a job, and collects errors in the tensors in `faults`, in the parameters in `wrong`.

    Args:
        models: model path -> tensors by name.
        names: the names of the output in order, used only if it is not sliced.
    """

    def __init__(self, job: MergeJob, models: Mapping[str, Tensors], names: Sequence[str]) -> None:
        self._job = job
        self._models = models
        self._names = names
        self.faults: dict[str, None] = {}  # dicts serve as ordered sets
        self.wrong: dict[str, None] = {}
        self.layers: list[tuple[str, int]] | None = None  # for each layer of a sliced output: (first model, its layer)

    def groups(self) -> list[MergeGroup]:
        """The groups in the order of the output's tensors, without those that have an error."""
        groups = self._group_slices() if self._job.sliced else self._whole()
        return [group for group in groups if group is not None]

    # -- whole models --------------------------------------------------------------------------------------------------

    def _whole(self) -> Iterator[MergeGroup | None]:
        (slice_,) = self._job.slices
        counts: dict[str, int] = {}
        for name in self._names:
            if layer := layer_of(name):
                counts[layer[0]] = max(counts.get(layer[0], 0), layer[1] + 1)
        for name in self._names:
            layer = layer_of(name)
            t = 0.0  # where the parameters' gradients are looked at: 0 at the first layer, 1 at the last
            if layer is not None:
                stack, number = layer[:2]
                t = number / (counts[stack] - 1) if counts[stack] > 1 else 1.0
            yield self._group(name, slice_, [name] * len(slice_.parts), t)

    # -- slices --------------------------------------------------------------------------------------------------------

    def _group_slices(self) -> Iterator[MergeGroup | None]:
        layers = (layer_of(name) for tensors in self._models.values() for name in tensors)
        stacks = {layer[0] for layer in layers if layer}
        of_language = [stack for stack in stacks if not _TOWER.search(stack)] if len(stacks) > 1 else list(stacks)
        if len(of_language) != 1:
            shown = ", ".join(sorted(stacks)[:4])
            self._fault(f"slices want one stack of a language model's layers; there are {len(stacks)} stacks: {shown}")
            return
        (stack,) = of_language
        lengths = {path: self._length(path, stack) for path in self._models}
        inside = {path: self._inside(path, stack) for path in self._models}
        first = self._job.slices[0]
        last = self._job.slices[-1]
        outside = list(
            dict.fromkeys(
                name
                for slice_ in (first, last)
                for part in slice_.parts
                for name in self._models[part.model]
                if not name.startswith(stack) or layer_of(name) is None
            )
        )
        own_prefix = stack.removesuffix("layers.").removesuffix("h.").removesuffix("layer.")
        with_towers = len(stacks) > 1

        def comes_first(name: str) -> bool:
            """Does a tensor outside the layers precede them in the output (embeddings, towers)?"""
            is_of_tower = with_towers and not name.startswith(own_prefix) and "lm_head" not in name
            return is_of_tower or _BEFORE.search(name) is not None

        for name in [each for each in outside if comes_first(each)]:
            yield self._group(name, first, [name] * len(first.parts), 0.0)
        origins: list[tuple[str, int]] = []
        for slice_ in self._job.slices:
            ranges = [part.layers or (0, lengths[part.model]) for part in slice_.parts]
            beyond = [
                (part, end) for part, (_, end) in zip(slice_.parts, ranges, strict=True) if end > lengths[part.model]
            ]
            for part, end in beyond:
                self._fault(f"layer_range ends at {end}, {part.model} has {lengths[part.model]} layers")
            count = ranges[0][1] - ranges[0][0]
            if any(end - start != count for start, end in ranges):
                self._fault(f"the models of a slice have ranges of different lengths: {ranges}")
                continue
            if beyond:  # the end of the range may be huge, so do not loop over it
                continue
            for at in range(count):
                t = at / (count - 1) if count > 1 else 1.0
                yield from self._layer(slice_, stack, inside, [start + at for start, _ in ranges], len(origins), t)
                origins.append((slice_.parts[0].model, ranges[0][0] + at))
        for name in [each for each in outside if not comes_first(each)]:
            yield self._group(name, last, [name] * len(last.parts), 0.0)
        self.layers = origins

    def _length(self, path: str, stack: str) -> int:
        layers = [layer_of(name) for name in self._models[path]]
        numbers = [layer[1] for layer in layers if layer is not None and layer[0] == stack]
        return check_count(max(numbers, default=-1) + 1, len(numbers), f"layers by the tensors' names of {path}")

    def _inside(self, path: str, stack: str) -> dict[int, list[str]]:
        """Layer number -> the names of its tensors after the number."""
        names_of: dict[int, list[str]] = {}
        for name in self._models[path]:
            layer = layer_of(name)
            if layer is not None and layer[0] == stack:
                names_of.setdefault(layer[1], []).append(layer[2])
        return names_of

    def _layer(
        self,
        slice_: LayerSlice,
        stack: str,
        inside: Mapping[str, Mapping[int, Sequence[str]]],
        inputs: Sequence[int],
        number: int,
        t: float,
    ) -> Iterator[MergeGroup | None]:
        """The groups of one output layer, in the order of the first model.

        Args:
            inside: `_inside` of each model.
            inputs: the layer number in each model.
            number: the layer number in the output.
        """
        rests: dict[str, None] = {}
        for part, index in zip(slice_.parts, inputs, strict=True):
            rests.update(dict.fromkeys(inside[part.model].get(index, ())))
        for tails in rests:
            yield self._group(f"{stack}{number}.{tails}", slice_, [f"{stack}{index}.{tails}" for index in inputs], t)

    # -- one tensor ----------------------------------------------------------------------------------------------------

    def _group(self, name: str, slice_: LayerSlice, inputs: Sequence[str], t: float) -> MergeGroup | None:
        """The group of one tensor; None, after recording an error, if a model lacks it or shapes differ."""
        rows = []
        sound = True
        for part, input_tensor in zip(slice_.parts, inputs, strict=True):
            row = self._models[part.model].get(input_tensor)
            if row is None:
                self._fault(f"{input_tensor}: not in {part.model}")
                sound = False
            else:
                rows.append((part, row))

        shapes = {row.tensor.shape: part.model for part, row in rows}
        if len(shapes) > 1:
            listed_shapes = ", ".join(f"{list(shape)} in {model}" for shape, model in shapes.items())
            self._fault(f"{name}: {listed_shapes}")
            sound = False

        if not sound:
            return None

        place = ParameterPlace(name, t)
        shared = dict[str, Value | None]()
        own_settings = dict[str, tuple[Value | None, ...]]()
        base = self._job.base_of(slice_)

        for key, parameter in self._job.method.parameters.items():
            if parameter.scope == "shared":
                shared[key] = self._value(slice_, None, key, place)
                continue
            own_settings[key] = tuple(
                None
                if parameter.scope == "task" and part.model == base
                else self._value(slice_, part, key, ParameterPlace(input_tensor, t))
                for part, input_tensor in zip(slice_.parts, inputs, strict=True)
            )

        return MergeGroup(name, slice_, tuple(rows), shared, own_settings)

    def _value(self, slice_: LayerSlice, part: LayersOfModel | None, key: str, place: ParameterPlace) -> Any:
        try:
            return value_of(self._job, slice_, part, key, place)
        except ValueError as e:
            self.wrong[str(e)] = None
            return None

    def _fault(self, text: str) -> None:
        self.faults[text] = None
