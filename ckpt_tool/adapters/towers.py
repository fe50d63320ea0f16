"""Where a module of an adapter is in its base, when the two name the parts of a model in different ways.

    the adapter's module                         the base's
    model.visual.blocks.0.attn.qkv               visual.blocks.0.attn.qkv                  Qwen2-VL as published
    model.language_model.layers.0.mlp.up_proj    model.layers.0.mlp.up_proj                the same model
    lm_head                                      language_model.lm_head                    Gemma 3 as published
    visual.blocks.0.attn.qkv                     thinker.visual.blocks.0.attn.qkv          Qwen2.5-Omni

An adapter has the names of the modules in memory, a released base those of its authors' code, and transformers renames
the towers of a model each in its own way (5.23 `conversion_mapping.py`). All of that moves, adds or removes steps that
only wrap: `model`, `language_model`, `thinker`. So two modules are the same if they are equal without these steps, and
if the base has no second one that is equal too. Cost: one look at each name of the base.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

# Steps of a name that wrap a part of a model and do not say which part it is
_WRAPPING = frozenset(("model", "language_model", "text_model", "vision_model", "thinker", "transformer", "base_model"))


def without_wrapping(name: str) -> str:
    """The name without the steps in front of its first number that only wrap.

    >>> without_wrapping("model.language_model.layers.0.self_attn.q_proj")
    'layers.0.self_attn.q_proj'
    >>> without_wrapping("vision_tower.vision_model.encoder.layers.0.mlp.fc1")
    'vision_tower.encoder.layers.0.mlp.fc1'
    """
    steps = name.split(".")
    words = []
    for position, step in enumerate(steps):
        if step.isdigit():
            words += steps[position:]
            break
        if step not in _WRAPPING:
            words.append(step)
    return ".".join(words)


class Towers:
    """The modules of a base, to be found under other names. known: its modules and tensors."""

    def __init__(self, known: Iterable[str]) -> None:
        self._by_rest: defaultdict[str, list[str]] = defaultdict(list)
        for name in known:
            self._by_rest[without_wrapping(name)].append(name)

    def find(self, name: str) -> str | None:
        """The only module or tensor of the base that `name` may be, None where there are none or several."""
        candidates = self._by_rest.get(without_wrapping(name), [])
        return candidates[0] if len(candidates) == 1 else None


def changed_prefix(old: str, new: str) -> tuple[str, str]:
    """How two names of one module begin, up to where they are equal.

    >>> changed_prefix("model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv")
    ('model.', '')
    """
    old_words = old.split(".")
    new_words = new.split(".")
    while old_words and new_words and old_words[-1] == new_words[-1]:
        old_words.pop()
        new_words.pop()
    return "".join(f"{step}." for step in old_words), "".join(f"{step}." for step in new_words)


def describe_renaming(renamed: Collection[tuple[str, str]]) -> list[str]:
    """Lines for the report. renamed: (the adapter's module, the base's)."""
    prefixes = dict.fromkeys(changed_prefix(old_prefix, new_prefix) for old_prefix, new_prefix in renamed)
    return [f"the adapter's modules {old_prefix}* are {new_prefix}* of the base" for old_prefix, new_prefix in prefixes]
