"""Term: a name and its pattern, one entry on one side of an equation.

    model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h

is three terms, each of which names one tensor for every `i`. An index in braces is an axis of the rule, or an
expression of axes and config keys (`{k + num_hidden_layers}`); a word alone in braces is always an axis. `_` in place
of a name is padding. What it does not do: match two sides (`algebra.equation`).
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.algebra.element_map import ElementMap, element_map, joined
from ckpt_tool.algebra.expression import Expression, expression
from ckpt_tool.algebra.pattern import Pattern, pattern
from ckpt_tool.algebra.piece import PAD
from ckpt_tool.errors import UsageError

Config = Mapping[str, Any]

_NAME = re.compile(r"[^\s:;=,*~<>{}|]+")
_INDEX = re.compile(r"\{([^{}]*)\}")
_CHOICE = re.compile(r"<([^<>]*)>")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Name:
    """A tensor name with indices."""

    text: str
    form: str  # `%d` for each of `indices`
    indices: tuple[Expression, ...]
    axes: tuple[str, ...]  # the rule's axes that occur in the indices
    plain: bool = field(init=False, compare=False)  # is every index an axis itself?

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.axes == tuple(index.text for index in self.indices))

    def at(self, values: Sequence[int], names: Config) -> str:
        """The name for these values of `axes`; `names` has the values of everything else in the indices."""
        if self.plain:
            return self.form % tuple(values)
        known = ChainMap(dict(zip(self.axes, values, strict=True)), names)  # type: ignore[arg-type]
        numbers = tuple(index.value(known) for index in self.indices)
        if not all(isinstance(number, int) for number in numbers):
            raise UsageError(f"`{self.text}`: an index is {numbers}, want whole numbers", code="E0224")
        return self.form % numbers


@dataclass(frozen=True, slots=True)
class Term:
    """One named pattern of a side; `name` None is padding."""

    name: Name | None
    pattern: Pattern
    maps: tuple[ElementMap, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in the name."""
        return self.name.axes if self.name else ()

    def __str__(self) -> str:
        return f"{self.name.text if self.name else PAD} : {self.pattern.text}"


def terms(text: str, axes: frozenset[str]) -> Iterator[Term]:
    """Parse `NAME : pattern, ... [* map]`; one term for each name. Raises UsageError: E0220, E0221, E0227-E0229."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not name:
        raise UsageError(f"want `NAME : pattern`, found `{text}`", code="E0221", hint="a scalar is `NAME :`")
    body, *calls = rest.split("*")
    patterns = [pattern(part.strip()) for part in body.split(",")]
    maps = joined(element_map(call) for call in calls)
    choices = _CHOICE.findall(name)
    if len(choices) > 1:
        raise UsageError(f"`{name}` has {len(choices)} choices `<a|b>`, a name has one", code="E0221")
    words = choices[0].split("|") if choices else [""]
    if len(patterns) == 1:
        patterns *= len(words)
    if len(patterns) != len(words):
        raise UsageError(f"`{name}` is {len(words)} names for {len(patterns)} patterns", code="E0228")
    for word, dims in zip(words, patterns, strict=True):
        full = _CHOICE.sub(lambda _, word=word: word.strip(), name)  # type: ignore[misc]
        yield Term(None if full == PAD else name_of(full, axes), dims, maps)


def name_of(text: str, axes: frozenset[str]) -> Name:
    """Parse a name with indices. Raises UsageError (E0221)."""
    bare = _INDEX.sub("0", text)
    if not _NAME.fullmatch(bare):
        raise UsageError(f"`{text}` is no tensor name", code="E0221", hint="dots and words, {i} and <a|b>, no spaces")
    indices = tuple(expression(index.strip()) for index in _INDEX.findall(text))
    requested = tuple(dict.fromkeys(name for index in indices for name in sorted(index.names & axes)))
    return Name(text, "%d".join(part.replace("%", "%%") for part in _INDEX.split(text)[::2]), indices, requested)


def axes_of(body: str) -> frozenset[str]:
    """The rule's axes: every word in a pattern, and every index that is a single word."""
    patterns = [part.partition(":")[2] for part in re.split("[;=]", body)]
    words = {word for text in patterns for word in _WORD.findall(text.split("*")[0])}
    return frozenset(words | {index.strip() for index in _INDEX.findall(body) if _WORD.fullmatch(index.strip())})
