"""Table: the rules of one dialect, and which rule knows a name.

A table is text, a rule a line, in the language of `algebra.equation`: the dialect's tensors on the left, the hub's
(Hugging Face's unfused ones) on the right. Some things are left unsaid:

    model.norm.weight : h                                           both sides are alike
    model.layers.{i}.self_attn.o_proj.weight : h q = : q h          the hub's name is the same
    m.mlp.up_gate_proj.bias : ((1 + 1) f) = ..<gate|up>_proj.bias : f    it is beside: m.mlp.<gate|up>_proj.bias
    model.[layers.{i}|mtp_block.{n}].input_layernorm.weight : h     the rule once with each word, brackets alike in step
    visual.** = model.visual.**                                     a tower: what is below and has no rule, as it is
Two rules of one hub tensor are two spellings: both are read, the first is written. A name finds its rules by its form,
in which each number between dots is `%d`, so 92,000 names cost 0.2 s and a rule is only worked out for the layers and
experts that are there. What a dialect numbers anew (`Table.ahead`) has an index `{i - num_hidden_layers}`: the axis counts
as the hub does; `{2 * i + 1}` is every second number, `{0}` one that a name always has. What it does not do: know sizes or
configs (`families.base`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from sys import intern
from typing import Any, NamedTuple

from ckpt_tool.algebra.element_map import ElementMap, inverse, joined
from ckpt_tool.algebra.equation import Alias, Equation, rules
from ckpt_tool.algebra.expression import Expression, expression
from ckpt_tool.algebra.pattern import Pattern, pattern
from ckpt_tool.algebra.term import Name, Term
from ckpt_tool.core.buffers import is_derived
from ckpt_tool.errors import UsageError
from ckpt_tool.weight_schemes.weights import part_of

# a whole part between dots, as `%d` would print it, or the number of a shard (`embedding.shard_3.weight`), of MaxText's layer (`layers_3`)
# or of Gemma's (`transformer/layer_3/attn`)
_NUMBER = re.compile(r"(?:(?<![^.])|(?<=\.shard_)|(?<=layers_)|(?<=layer_))(0|[1-9][0-9]{0,17})(?![^./])")
_EACH = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_LAYER = re.compile(r"layers\.[^.]*\.")
_ROOT = re.compile(r"(?<![\w.])(?:model|transformer)\.")
_SUMMAND = re.compile(r"(?:^|([+-]) )(\w+)(?: \* (\w+))?(?: |$)")
_TOWER = re.compile(r"\s*([\w.]+\.)\*\*\s*=\s*([\w.]+\.)\*\*\s*")


class Spot(NamedTuple):
    """A rule that names tensors of a form: its number, the axes that the numbers of the name are, and the indices as
    the name has them where they are no plain axes: a number, sums of axes, of axes times a constant, and of constants."""

    rule: int
    axes: tuple[str, ...]
    shifted: tuple[Expression, ...] = ()

    def reader(self, config: Mapping[str, Any]) -> Callable[[tuple[int, ...]], tuple[int, ...] | None]:
        """What reads the axes' values off the numbers of a name; it gives None where they are not this rule's: another
        number than the only one that it knows, one below the first, one between. Of several axes in an index the one
        with the largest factor counts the most: `{o * b + j}` is o, j of `divmod(number, b)`. config: the sizes of other
        axes too.

        Raises UsageError (E0223) for what the config lacks.
        """
        if not self.shifted:
            return lambda numbers: numbers
        zero = dict.fromkeys(self.axes, 0)
        indices = []
        for index in self.shifted:
            first = int(index.value({**config, **zero}))
            factors = {
                axis: int(index.value({**config, **zero, axis: 1})) - first for axis in index.names & zero.keys()
            }
            indices.append((first, sorted(factors.items(), key=lambda each: -each[1])))

        def values(numbers: tuple[int, ...]) -> tuple[int, ...] | None:
            found: dict[str, int] = {}
            for number, (first, factors) in zip(numbers, indices, strict=True):
                rest = number - first
                for axis, factor in factors:
                    found[axis], rest = divmod(rest, factor) if factor > 0 else (0, rest)
                if rest or any(found[axis] < 0 for axis, _ in factors):
                    return None
            return tuple(found[axis] for axis in self.axes)

        return values

    def values(self, numbers: Iterable[tuple[int, ...]], config: Mapping[str, Any]) -> Iterable[tuple[int, ...]]:
        """The axes' values from the numbers of those names that are this rule's. Errors as `reader`."""
        if not self.shifted:
            return numbers
        return [row for row in map(self.reader(config), numbers) if row is not None]


class Tower(NamedTuple):
    """Where the tensors of a part lie that keep what follows, whatever their shapes: how their names begin."""

    left: str
    right: str


class Instances(NamedTuple):
    """Names of one form: the numbers in each, in order."""

    spots: tuple[Spot, ...]
    form: str
    values: list[tuple[int, ...]]


@dataclass(frozen=True)
class Table:
    """A dialect's rules, left the dialect, right the hub. See the module."""

    rules: tuple[Equation, ...]
    aliases: tuple[Alias, ...]
    towers: tuple[Tower, ...] = ()

    @cached_property
    def left(self) -> dict[str, tuple[Spot, ...]]:
        """{form of a name of the dialect: the rules that name it, in the table's order}."""
        return _spots(rule.left for rule in self.rules)

    @cached_property
    def right(self) -> dict[str, tuple[Spot, ...]]:
        """The same of hub names."""
        return _spots(rule.right for rule in self.rules)

    def knows(self, name: str) -> bool:
        """Is there a rule of a name of the dialect?"""
        return form_of(name)[0] in self.left

    def in_tower(self, name: str) -> str | None:
        """What the hub calls a tensor that no rule knows, None where it is in no tower.

        >>> table_of("visual.** = model.visual.**").in_tower("visual.merger.ln_q.weight")
        'model.visual.merger.ln_q.weight'
        """
        tower = self.tower_of(name)
        return tower.right + name.removeprefix(tower.left) if tower else None

    def tower_of(self, name: str) -> Tower | None:
        """The tower that a name is in, the innermost."""
        fitting = [tower for tower in self.towers if name.startswith(tower.left)]
        return max(fitting, key=lambda tower: len(tower.left), default=None)

    def names_without_rule(self, names: Iterable[str]) -> list[str]:
        """The names that neither a rule nor a tower knows, but for parts of quantised weights, which follow their
        weight, and for buffers that a loader makes from the config."""
        return [
            name
            for name in instances(self.left, names)[1]
            if part_of(name) is None and self.in_tower(name) is None and not is_derived(name)
        ]

    def from_tower(self, hub_name: str) -> str | None:
        """What the dialect calls such a tensor of the hub, None where it has none."""
        return Table((), (), tuple(Tower(right, left) for left, right in self.towers)).in_tower(hub_name)

    def beside(self, hub: Table) -> Table:
        """The rules of names that the hub does not have, then the hub's."""
        own = [rule for rule in self.rules if not any(term.name and term.name.form in hub.left for term in rule.left)]
        return Table((*own, *hub.rules), (), hub.towers)

    def under(self, root: str, instead: str = "") -> Table:
        """The same with `root` in place of `instead`, `model.` (or GPT-2's `transformer.`) where that is empty, in the
        dialect's names."""
        place = re.compile(rf"(?<![\w.]){re.escape(instead)}") if instead else _ROOT
        towers = tuple(tower._replace(left=place.sub(root, tower.left)) for tower in self.towers)
        named = tuple(_named(rule, lambda name: place.sub(root, name)) for rule in self.rules)
        return replace(self, rules=named, towers=towers)

    def over(self, other: Table) -> Table:
        """This table's rules, then those of `other` that name no tensor of this one."""
        kept = []
        for rule in other.rules:
            names = [term.name.form for term in rule.left if term.name]
            lost = [name for name in names if name not in self.left]
            if lost and len(lost) < len(names):
                raise UsageError(
                    f"a rule is replaced in part: {', '.join(lost)} has none left",
                    code="E1234",
                    place=f"in the rule `{rule.text}`",
                    hint="write `[a|b]`, which is two rules, for `<a|b>`",
                )
            if lost:
                kept.append(rule)
        own = {tower.right for tower in self.towers}
        towers = (*self.towers, *(tower for tower in other.towers if tower.right not in own))
        return Table((*self.rules, *kept), (*self.aliases, *other.aliases), towers)

    def apart(self) -> Table:
        """The same, and last what is fused in it under the hub's names, matrices turned: a second spelling."""
        more = []
        known = set(self.left)
        for rule in self.rules:
            if len(rule.left) == 1 < len(rule.right) and rule.condition is None:
                left = tuple(replace(term, pattern=_turned(term.pattern)) for term in rule.right)
                names = {term.name.form for term in left if term.name}
                if not names & known:
                    more.append(replace(rule, left=left, text=f"{rule.text} (apart)"))
                    known |= names
        return replace(self, rules=(*self.rules, *more))

    def within(self, level: str, condition: str, modules: Iterable[str]) -> Table:
        """The same, and first the rules of `layers.{i}.MODULE` as `layers.{i}.LEVEL.MODULE`, where the condition
        holds."""
        nested = []
        for rule in self.rules:
            names = [term.name for term in rule.left if term.name]
            if any(f"layers.%d.{module}." in name.form for module in modules for name in names):
                text = f"{rule.text} (in {level})"
                below = _named(rule, lambda name: _LAYER.sub(rf"\g<0>{level}.", name, count=1))
                nested.append(replace(below, condition=expression(condition), text=text))
        return replace(self, rules=(*nested, *self.rules))

    def ahead(self, condition: str) -> Table:
        """The same, where the layers for which the condition holds are those of multi-token prediction, numbered anew:
        `decoder.layers.{i}.X` is also `mtp.layers.{i - num_hidden_layers}.transformer_layer.X`, and `mtp.layers.{i}.X`
        has such a number. (Megatron-Core's names; megatron-core 0.16.1 `multi_token_prediction.py`.)"""
        made = []
        later = expression(condition)
        not_yet = expression(f"not ({condition})")
        for rule in self.rules:
            fronts = {".".join(term.name.text.split(".")[:2]) for term in rule.left if term.name}
            if "decoder.layers" in fronts:
                made.append(replace(rule, condition=not_yet))
            if fronts & {"decoder.layers", "mtp.layers"}:
                text = f"{rule.text} (ahead)"
                made.append(replace(rule, left=tuple(map(_ahead, rule.left)), condition=later, text=text))
            else:
                made.append(rule)
        return replace(self, rules=tuple(made))

    def short(self, condition: str, hub: Table) -> Table:
        """The same without the layers for which the condition holds: there every rule of the hub is one that drops."""
        gone = expression(condition)
        there = expression(f"not ({condition})")
        layered = [rule for rule in self.rules if "i" in rule.indices]
        made = [replace(rule, condition=there) if rule in layered else rule for rule in self.rules]
        for rule in hub.rules:
            if "i" in rule.indices and all(term.name for term in rule.right):
                nowhere = tuple(replace(term, name=None) for term in rule.left)
                made.append(replace(rule, left=nowhere, condition=gone, text=f"{rule.text} (left out)"))
        return replace(self, rules=tuple(made))

    def shifted(self, by: int) -> Table:
        """The same, where each norm's weight is the hub's and `by`."""
        made = []
        for rule in self.rules:
            norms = [term.name is not None and term.name.form.endswith("norm.weight") for term in rule.left]
            if any(norms):
                maps = joined(rule.left[0].maps, inverse(rule.right[0].maps), (ElementMap("add", -by),))
                left = tuple(replace(term, maps=maps) for term in rule.left)
                right = tuple(replace(term, maps=()) for term in rule.right)
                rule = replace(rule, left=left, right=right, text=f"{rule.text} (shifted)")
            made.append(rule)
        return replace(self, rules=tuple(made))


def table_of(text: str, kinds: Mapping[str, str] | None = None) -> Table:
    """Parse a table. kinds: words of its conditions, each for an expression of the layer's index and the config.

    >>> table_of("layers.{i}.sinks : a if windowed", {"windowed": "kinds[i] == 1"}).rules[0].condition.text
    '(kinds[i] == 1)'

    Raises UsageError (E0220-E0235, E1234) for a rule that can't be read.
    """
    return _parsed(_spelled(text, kinds or {}))


@lru_cache(maxsize=512)
def _parsed(text: str) -> Table:
    stated = list[str]()
    towers = list[Tower]()
    for line in _stated(text).splitlines():
        tower = _TOWER.fullmatch(line)
        towers += [Tower(tower[1], tower[2])] if tower else []
        stated += [] if tower else [line]
    found = rules("\n".join(stated))
    for rule in found:
        for term in (*rule.left, *rule.right) if isinstance(rule, Equation) else ():
            alone = isinstance(rule, Equation) and rule.left == (term,)
            if term.name and (not (alone or _numbered(term.name)) or _NUMBER.search(term.name.text)):
                raise UsageError(
                    f"`{term.name.text}`: the indices of a family's names are axes or numbers, in braces, between dots",
                    code="E1234",
                    place=f"in the rule `{rule.text}`",
                    hint="write `layers.{i}.w`, `experts.{e - x}.w` or `layers.{0}.w`, and conditions after `if`",
                )
        for side in (rule.left, rule.right) if isinstance(rule, Equation) else ():
            if len({frozenset(term.name.axes) for term in side if term.name}) > 1:
                raise UsageError(
                    "the names of one side have other indices",
                    code="E1234",
                    place=f"in the rule `{rule.text}`",
                    hint="write a rule for each",
                )
    equations = tuple(rule for rule in found if isinstance(rule, Equation))
    return Table(equations, tuple(rule for rule in found if isinstance(rule, Alias)), tuple(towers))


@lru_cache(
    maxsize=1 << 19
)  # a conversion looks at all names of a model several times, in order: fewer would all be lost
def form_of(name: str) -> tuple[str, tuple[int, ...]]:
    """`model.layers.3.w1` -> (`model.layers.%d.w1`, (3,))."""
    parts = _NUMBER.split(name.replace("%", "%%") if "%" in name else name)
    if len(parts) == 1:
        return name, ()
    return intern("%d".join(parts[::2])), tuple(map(int, parts[1::2]))  # one text for all names of a form


def one_of_each(names: Iterable[str]) -> list[str]:
    """One name of each form: enough to tell whose names they are, whatever the number of layers and experts."""
    seen: dict[str, str] = {}
    for name in names:
        seen.setdefault(form_of(name)[0], name)
    return list(seen.values())


def instances(index: Mapping[str, tuple[Spot, ...]], names: Iterable[str]) -> tuple[list[Instances], list[str]]:
    """Names by form, in order of first sight, and the names that no rule knows."""
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    unknown = []
    for name in names:
        form, numbers = form_of(name)
        if form in index:
            groups[form].append(numbers)
        else:
            unknown.append(name)
    return [Instances(index[form], form, values) for form, values in groups.items()], unknown


def _spelled(text: str, kinds: Mapping[str, str]) -> str:
    """The table with each word of `kinds` in its conditions spelt out."""
    if not kinds:
        return text
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, kinds))})\b")
    return re.sub(r"\sif\s[^#\n]*", lambda found: words.sub(lambda word: f"({kinds[word[0]]})", found[0]), text)


def _stated(text: str) -> str:
    """The table with each rule in full: both sides in words, a line for each choice of `[a|b]`."""
    lines: list[str] = []
    for line in re.sub(r"\n\s*(?==|if )", " ", re.sub(r"#.*", "", text)).splitlines():
        if line.strip() and "=" not in line.split(" if ")[0] and "~" not in line:
            side, *condition = line.strip().split(" if ")
            line = " if ".join([f"{side} = {side}", *condition])
        line = re.sub(r"^\s*(\S+)(\s*:[^=]*=\s*):", r"\1\2\1 :", line)
        lines += _each(re.sub(r"^\s*(\S+\.)([^.\s]+\.[^.\s]+)(\s*:[^=]*=\s*)\.\.", r"\1\2\3\1", line))
    return "\n".join(lines)


def _numbered(name: Name) -> bool:
    """Can every index be read back: a number, or a sum of axes, each once and with a factor at most, and constants?"""
    return all(index.text.isdigit() or _readable(index.text, name.axes) for index in name.indices)


def _readable(index: str, axes: Container[str]) -> bool:
    """Whether an index is such a sum.

    >>> [_readable(text, ("i", "o", "j")) for text in ("i", "2 * i + 1", "o * b + j", "e", "i * o", "i + j", "e - i")]
    [True, True, True, False, False, False, False]
    """
    summands = [each.groups() for each in _SUMMAND.finditer(index)]
    found = [(sign, [word for word in words if word in axes], words[1]) for sign, *words in summands]
    found = [each for each in found if each[1]]
    named = [axis for _, each, _ in found for axis in each]
    whole = "".join(each[0] for each in _SUMMAND.finditer(index)) == index
    once = len(set(named)) == len(named) == len(found) > 0
    return whole and once and all(sign != "-" for sign, *_ in found) and sum(not factor for *_, factor in found) < 2


def _each(line: str) -> list[str]:
    choice = _EACH.search(line)
    if choice is None:
        return [line]
    return [full for word in choice[1].split("|") for full in _each(line.replace(choice[0], word))]


def _spots(sides: Iterable[tuple[Term, ...]]) -> dict[str, tuple[Spot, ...]]:
    found: dict[str, list[Spot]] = defaultdict(list)
    for number, side in enumerate(sides):
        for term in side:
            if term.name:
                name = term.name
                found[name.form].append(Spot(number, name.axes, () if name.plain else name.indices))
    return {form: tuple(spots) for form, spots in found.items()}


def _named(rule: Equation, change: Callable[[str], str]) -> Equation:
    """The rule with its dialect's names changed."""
    left = tuple(
        replace(term, name=replace(term.name, text=change(term.name.text), form=change(term.name.form)))
        if term.name
        else term
        for term in rule.left
    )
    return replace(rule, left=left)


def _ahead(term: Term) -> Term:
    """A term of the decoder as one of MTP layer `i - num_hidden_layers`."""
    if term.name is None:
        return term
    number = expression("i - num_hidden_layers")
    indices = tuple(number if index.text == "i" else index for index in term.name.indices)
    form = term.name.form.replace("decoder.layers.%d.", "mtp.layers.%d.transformer_layer.", 1)
    text = term.name.text.replace("decoder.layers.{i}.", "mtp.layers.{i}.transformer_layer.", 1)
    text = text.replace("{i}", f"{{{number.text}}}", 1)
    return replace(term, name=replace(term.name, text=text, form=form, indices=indices))


def _turned(dims: Pattern) -> Pattern:
    """The pattern of the transposed tensor."""
    words = re.findall(r"[()]|[^()\s]+", dims.text)
    found: list[list[str]] = []
    depth = 0
    for word in words:
        if depth == 0:
            found.append([])
        depth += (word == "(") - (word == ")")
        found[-1].append(word)
    return pattern(" ".join(" ".join(dim) for dim in reversed(found)))
