"""Groups of tensors with the same layout: they have one state, shape and dtype, and their names differ only in the
numbers of layer and expert.

The one idea: whatever is decided for one of them holds for all, so a layout decides once for each `Class`, not for each
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
    """A tensor's name, split into a template and the numbers of layer and expert."""

    template: str
    stack: str  # whose layer it is, the language model's or a tower's ("": in none)
    layer: int | None
    expert: int | None

    def placed(self, *, layer: bool, expert: bool = False) -> str:
        """Return the template with the requested numbers put back, if the tensor has them."""
        out = self.template
        if expert and self.expert is not None:
            out = out.replace(".experts.experts.", f".experts.experts.{self.expert}.", 1)
        return f"{self.stack}.{self.layer}.{out[len(self.stack) + 1 :]}" if layer and self.layer is not None else out


def spot_of(name: str) -> StackSpot:
    """Return the template of a name, and its numbers of layer and expert."""
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
    """Wanted tensor number `number`, with the numbers of layer and expert in its name."""

    number: int
    layer: int | None
    expert: int | None


class Class(NamedTuple):
    """Tensors with the same layout, in the order of the wanted tensors."""

    name: str  # of the first one
    spot: StackSpot  # of the first one
    state: str
    shape: tuple[int, ...]
    dtype: DType
    members: list[StackMember]


def classes(tensors: Iterable[tuple[int, WantedTensor]]) -> list[Class]:
    """Return the classes of tensors (given with their numbers), in the order of their first members."""
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
    """Yield (name, (number of its form, layer, expert)); names of one form differ only in layer and expert."""
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
    """Return the positions of layer and expert among the numbers between `texts`, -1 if there is none.

    They depend only on the texts, so `spot` may be that of any name with the same texts.
    """
    last = len(texts) - 2 - (texts[-1] == ".")  # a number with nothing behind it numbers nothing
    experts = [k for k, text in enumerate(texts[: last + 1]) if text.endswith(".experts.local_experts")]
    return -1 if spot.layer is None else 0, -1 if spot.expert is None else experts[-1]
