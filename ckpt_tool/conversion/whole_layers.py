"""Layers that `--remove-keys` takes away whole, and what the config says of them.

A config that counts more layers than there are makes a library fill the gap with random values, without a word:

    --remove-keys 'model.layers.3.*' of four layers     num_hidden_layers becomes 3, lists of one entry a layer too
    --remove-keys 'model.layers.1.*' of four layers     an error: the layers behind it would need other numbers
    the same without a config (DCP, torch, Megatron)    written, and a note says that the numbers have a gap

What it does not do: renumber layers, look at layers of which a part stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.sources.chosen import Chosen

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")  # what configs call the number of layers
LANGUAGE = "text_config"
_OF_TOWERS = re.compile(r"vis(ion|ual)|audio|image|speech")
_LAYER = re.compile(r"(.*?\.)([0-9]{1,9})\.")  # the stack that a name's layer belongs to, and its number


class Stack(NamedTuple):
    """A stack of layers of which whole ones are removed."""

    name: str  # what their names begin with: `model.layers.`
    kept: tuple[int, ...]
    removed: tuple[int, ...]

    @property
    def layers(self) -> int:
        """How many layers the source has."""
        return len(self.kept) + len(self.removed)


def removed_layers(chosen: Chosen) -> list[Stack]:
    """The stacks of which `--remove-keys` or `--keep-keys` removed whole layers of the model, and not all of them."""
    removed = _layers_in(tensor.key.name for tensor in chosen.removed if tensor.key.state == MODEL)
    if not removed:
        return []
    sources = {name: key for key, names in chosen.names.items() for name in names}
    kept = _layers_in(sources.get(name, name) for name in chosen.model)
    return [
        Stack(name, tuple(sorted(kept[name])), tuple(sorted(gone - kept[name])))
        for name, gone in removed.items()
        if kept.get(name) and gone - kept[name]
    ]


def notes_on_gaps(chosen: Chosen) -> list[str]:
    """Lines for the report about layers that are removed while later ones stay and keep their numbers. A format without
    a count of layers takes them, and whoever reads it counts from 0."""
    stacks = removed_layers(chosen)
    written = _layers_in(chosen.model).values() if stacks else ()
    if all(set(range(len(numbers))) == set(numbers) for numbers in written):  # --rename may have closed the gap
        return []

    notes: list[str] = []
    for stack in stacks:
        gap = next((number for number in stack.removed if number < stack.kept[-1]), None)
        if gap is None:
            continue
        later = next(number for number in stack.kept if number > gap)
        notes.append(
            f"the numbers of {stack.name}* have a gap: layer {_list_numbers(stack.removed)} is removed, and "
            f"{_list_numbers(stack.kept)} keep their numbers. A model built of {len(stack.kept)} layers does not find "
            f"them all; --rename '{stack.name}{later}.*={stack.name}{gap}.*' and so on closes the gap"
        )
    return notes


def without_layers(
    config: Mapping[str, Any], stacks: Iterable[Stack], *, lenient: bool
) -> tuple[Mapping[str, Any], list[str]]:
    """The config of what is left, and lines for the report.

    Raises UsageError E2973 where a layer is removed that others come after, unless `lenient`, which keeps the config.
    """
    notes: list[str] = []
    inner = config.get(LANGUAGE)
    if isinstance(inner, Mapping):  # of a model that sees or hears
        language = [stack for stack in stacks if not _OF_TOWERS.search(stack.name)]
        changed, notes = without_layers(inner, language, lenient=lenient)
        return {**config, LANGUAGE: changed}, notes

    for stack in stacks:
        key = next((key for key in COUNTS if config.get(key) == stack.layers), None)
        if key is None:
            continue
        remaining = len(stack.kept)
        if stack.kept != tuple(range(remaining)):
            _refuse_gap(stack, key, lenient=lenient)
            notes.append(f"{key} stays {stack.layers}: a library gives the layers that are not there random values")
            continue

        lists = {
            name: value[:remaining]
            for name, value in config.items()
            if isinstance(value, list) and len(value) == stack.layers
        }
        config = {**config, **lists, key: remaining}
        also = f", and so do lists of one entry per layer ({', '.join(lists)})" if lists else ""
        notes.append(f"{key} becomes {remaining}, as {stack.name}* are; it was {stack.layers}{also}")
    return config, notes


def _refuse_gap(stack: Stack, key: str, *, lenient: bool) -> None:
    if lenient:
        return
    raise UsageError(
        f"layer {_list_numbers(stack.removed)} of {stack.name}* would be gone while later ones stay, and config.json "
        f"says {key}: {stack.layers}, so that a library gives it random values",
        code="E2973",
        key=f"{stack.name}{stack.removed[0]}",
        hint="ckpt merge --config FILE with method passthrough picks layers by slices and numbers them again from 0 "
        "(ckpt help merging shows one); "
        "--lenient removes the tensors and keeps the config",
    )


def _list_numbers(numbers: Sequence[int]) -> str:
    """The first five numbers.

    >>> _list_numbers((0, 2)), _list_numbers(range(9))
    ('0, 2', '0, 1, 2, 3, 4, ...')
    """
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _layers_in(names: Iterable[str]) -> dict[str, set[int]]:
    """Stack of layers -> the layer numbers that occur in the names."""
    layers: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.match(name)
        if match is not None:
            layers.setdefault(match[1], set()).add(int(match[2]))
    return layers
