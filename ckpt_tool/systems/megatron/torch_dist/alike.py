"""Tensors that are laid out alike: of one state, shape and dtype, with names that differ in two numbers alone, the
layer's and the expert's.

The one idea: what holds for one of them holds for all, so a layout asks once a `Class` what it would ask of every
tensor.

    decoder.layers.{0..47}.mlp.experts.local_experts.{0..127}.linear_fc1.weight (1536, 2048), BF16: one class of 6,144

A number is one that `str` would write, of at most nine digits: `layers.03` is another name. Cost: 2 us a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.systems.megatron import stored_names as names

_LAYER = re.compile(rf"({names.STACK})\.(\d{{1,9}})\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d{1,9})\.(.+)", re.DOTALL)
_NUMBER = re.compile(r"\.(0|[1-9][0-9]{0,8})(?=\.)")


class StackSpot(NamedTuple):
    """The place of a tensor among those that are alike but for the numbers in their keys."""

    template: str
    stack: str  # whose layer it is, the language model's or a tower's ("": in none)
    layer: int | None
    expert: int | None

    def placed(self, *, layer: bool, expert: bool = False) -> str:
        """The template with the numbers that are asked for, where there are any."""
        out = self.template
        if expert and self.expert is not None:
            out = out.replace(".experts.experts.", f".experts.experts.{self.expert}.", 1)
        return f"{self.stack}.{self.layer}.{out[len(self.stack) + 1 :]}" if layer and self.layer is not None else out


def spot_of(name: str) -> StackSpot:
    """The spot that a name tells."""
    layer = expert = None
    found = _LAYER.fullmatch(name)
    stack = ""
    template = name
    if found is not None and found[2] == str(int(found[2])):
        stack = found[1]
        layer = int(found[2])
        template = f"{found[1]}.{found[3]}"
    inner = _EXPERT.fullmatch(template)
    if inner is not None and inner[2] == str(int(inner[2])):
        expert = int(inner[2])
        template = f"{inner[1]}.experts.{inner[3]}"
    return StackSpot(template, stack, layer, expert)


class StackMember(NamedTuple):
    """Wanted tensor number `number`, and the layer and the expert that its name tells."""

    number: int
    layer: int | None
    expert: int | None


class Class(NamedTuple):
    """Tensors that are laid out alike, in the order of the wanted ones."""

    # name, spot: the first one's
    name: str
    spot: StackSpot
    state: str
    shape: tuple[int, ...]
    dtype: DType
    members: list[StackMember]


def classes(tensors: Iterable[tuple[int, WantedTensor]]) -> list[Class]:
    """The classes of tensors, given with their numbers, in the order of their first ones."""
    listed = list(tensors)
    read = dict(_read(dict.fromkeys([tensor.key.name for _, tensor in listed])))
    found: dict[tuple[object, ...], Class] = {}
    for number, tensor in listed:
        (name, state), shape, dtype, _ = tensor
        form, layer, expert = read[name]
        key = (form, state, shape, dtype)
        known = found.get(key)
        if known is None:
            known = found[key] = Class(name, spot_of(name), state, shape, dtype, [])
        known.members.append(StackMember(number, layer, expert))
    return list(found.values())


def _read(every: Iterable[str]) -> Iterator[tuple[str, tuple[int, int | None, int | None]]]:
    """(name, (number of its form, layer, expert)): names of one form differ in layers and experts alone."""
    holes: dict[tuple[str, ...], tuple[int, int]] = {}
    forms: dict[object, int] = {}
    for name in every:
        parts = _NUMBER.split(name)
        texts = tuple(parts[::2])
        numbers = parts[1::2]
        at = holes.get(texts)
        if at is None:
            at = holes[texts] = _holes(spot_of(name), texts)
        layer, expert = at
        rest: tuple[str, ...] = ()
        if len(numbers) > (layer >= 0) + (expert >= 0):
            rest = tuple([text for k, text in enumerate(numbers) if k not in at])
        form = forms.setdefault((texts, rest), len(forms))
        yield name, (form, int(numbers[layer]) if layer >= 0 else None, int(numbers[expert]) if expert >= 0 else None)


def _holes(spot: StackSpot, texts: tuple[str, ...]) -> tuple[int, int]:
    """Which of the numbers between `texts` are the layer's and the expert's of a name of that spot; -1: none. The texts
    decide that alone."""
    last = len(texts) - 2 - (texts[-1] == ".")  # a number with nothing behind it numbers nothing
    experts = [k for k, text in enumerate(texts[: last + 1]) if text.endswith(".experts.local_experts")]
    return -1 if spot.layer is None else 0, -1 if spot.expert is None else experts[-1]
