"""Table: the rules of one dialect, and the lookup of the rule for a tensor's name.

A table is text, a rule a line, in the language of `algebra.equation`: the dialect's tensors on the left, the hub's
(Hugging Face's unfused ones) on the right. Some things may be left out:

    model.norm.weight : h                                           both sides are alike
    model.layers.{i}.self_attn.o_proj.weight : h q = : q h          the hub's name is the same
    m.mlp.up_gate_proj.bias : ((1 + 1) f) = ..<gate|up>_proj.bias : f    in the same module: m.mlp.<gate|up>_proj.bias
    model.[layers.{i}|mtp_block.{n}].input_layernorm.weight : h     the rule once with each word, brackets alike in step
    visual.** = model.visual.**                                     a tower: what is below and has no rule, as it is
Two rules for one hub tensor are two spellings: both are read, the first is written. The rules for a name are looked up
by its form, in which each number between dots is `%d`, so 92,000 names cost 0.2 s and a rule is only expanded for the
layers and experts that exist. If a dialect numbers layers differently (`Table.with_mtp_layers`), the name has an index
such as `{i - num_hidden_layers}`, in which the axis counts as the hub does; `{2 * i + 1}` is every second number, `{0}` a
constant number. What it does not do: know sizes or configs (`families.base`).
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
from ckpt_tool.weight_schemes.quantised_weights import part_of

# a whole part between dots, as `%d` would print it, or the number of a shard (`embedding.shard_3.weight`), of MaxText's layer (`layers_3`)
# or of Gemma's (`transformer/layer_3/attn`)
_NUMBER = re.compile(r"(?:(?<![^.])|(?<=\.shard_)|(?<=layers_)|(?<=layer_))(0|[1-9][0-9]{0,17})(?![^./])")
_EACH = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_LAYER = re.compile(r"layers\.[^.]*\.")
_ROOT = re.compile(r"(?<![\w.])(?:model|transformer)\.")
_SUMMAND = re.compile(r"(?:^|([+-]) )(\w+)(?: \* (\w+))?(?: |$)")
_TOWER = re.compile(r"\s*([\w.]+\.)\*\*\s*=\s*([\w.]+\.)\*\*\s*")


class Spot(NamedTuple):
    """A rule for the names of one form, and the meaning of the numbers in such a name."""

    rule: int  # its position in the table
    axes: tuple[str, ...]  # what the numbers of the name count: layers, experts
    # The index expressions of the name, if they are no plain axes: a number, or sums of axes, of axes times a
    # constant, and of constants. () if the numbers are the axes' values themselves.
    shifted: tuple[Expression, ...] = ()

    def reader(self, config: Mapping[str, Any]) -> Callable[[tuple[int, ...]], tuple[int, ...] | None]:
        """A function from the numbers in a name to the values of the axes.

        It returns None if the numbers do not match this rule: another number than its constant, one below the first, or
        one between two of them. If an index has several axes, the one with the largest factor is the most significant:
        for `{o * b + j}`, o and j are `divmod(number, b)`.

        Args:
            config: the config, and the sizes of other axes too.
        Raises UsageError (E0223) for what the config lacks.
        """
        if not self.shifted:
            return lambda numbers: numbers

        # Each index is linear in its axes: (its value where all are 0, [(axis, factor), largest factor first]).
        zero = dict.fromkeys(self.axes, 0)
        indices = []
        for index in self.shifted:
            first = int(index.value({**config, **zero}))
            factors = {}
            for axis in index.names & zero.keys():
                factors[axis] = int(index.value({**config, **zero, axis: 1})) - first
            indices.append((first, sorted(factors.items(), key=lambda item: -item[1])))

        def read(numbers: tuple[int, ...]) -> tuple[int, ...] | None:
            value_of: dict[str, int] = {}
            for number, (first, factors) in zip(numbers, indices, strict=True):
                remainder = number - first
                for axis, factor in factors:
                    value_of[axis], remainder = divmod(remainder, factor) if factor > 0 else (0, remainder)
                if remainder or any(value_of[axis] < 0 for axis, _ in factors):
                    return None
            return tuple(value_of[axis] for axis in self.axes)

        return read

    def values(self, numbers: Iterable[tuple[int, ...]], config: Mapping[str, Any]) -> Iterable[tuple[int, ...]]:
        """The axes' values for those of the names that match this rule. Raises as `reader`."""
        if not self.shifted:
            return numbers
        return [row for row in map(self.reader(config), numbers) if row is not None]


class Tower(NamedTuple):
    """A part of a model, such as a vision encoder, in which only the prefix of the names differs between dialects."""

    left: str  # in the dialect, with the dot at the end
    right: str  # in the hub


class Instances(NamedTuple):
    """The names of one form that occur in a checkpoint."""

    spots: tuple[Spot, ...]  # the rules that match the form
    form: str
    values: list[tuple[int, ...]]  # the numbers in each name, in the order of the names


@dataclass(frozen=True)
class Table:
    """The rules of a dialect: left the dialect's tensors, right the hub's (see the module's docstring)."""

    rules: tuple[Equation, ...]
    aliases: tuple[Alias, ...]
    towers: tuple[Tower, ...] = ()

    @cached_property
    def left(self) -> dict[str, tuple[Spot, ...]]:
        """{form of a name of the dialect: the rules that name it, in the table's order}."""
        return _index_by_form(rule.left for rule in self.rules)

    @cached_property
    def right(self) -> dict[str, tuple[Spot, ...]]:
        """{form of a hub name: the rules that name it, in the table's order}."""
        return _index_by_form(rule.right for rule in self.rules)

    def knows(self, name: str) -> bool:
        """Is there a rule for this name of the dialect?"""
        return form_of(name)[0] in self.left

    def in_tower(self, name: str) -> str | None:
        """The hub's name of a tensor without a rule, None if it is in no tower.

        >>> table_of("visual.** = model.visual.**").in_tower("visual.merger.ln_q.weight")
        'model.visual.merger.ln_q.weight'
        """
        tower = self.tower_of(name)
        return tower.right + name.removeprefix(tower.left) if tower else None

    def tower_of(self, name: str) -> Tower | None:
        """The innermost tower that contains the name, None if there is none."""
        fitting = [tower for tower in self.towers if name.startswith(tower.left)]
        return max(fitting, key=lambda tower: len(tower.left), default=None)

    def names_without_rule(self, names: Iterable[str]) -> list[str]:
        """The names that match neither a rule nor a tower. Parts of quantised weights, which follow their weight, and
        buffers that a loader computes from the config are left out."""
        return [
            name
            for name in instances(self.left, names)[1]
            if part_of(name) is None and self.in_tower(name) is None and not is_derived(name)
        ]

    def from_tower(self, hub_name: str) -> str | None:
        """The dialect's name of a hub tensor in a tower, None if the dialect has no such tower."""
        return Table((), (), tuple(Tower(right, left) for left, right in self.towers)).in_tower(hub_name)

    def extend_hub(self, hub: Table) -> Table:
        """A table of the rules for names that the hub does not have, followed by the hub's rules."""
        additional = []
        for rule in self.rules:
            if not any(term.name and term.name.form in hub.left for term in rule.left):
                additional.append(rule)
        return Table((*additional, *hub.rules), (), hub.towers)

    def with_root(self, root: str, instead: str = "") -> Table:
        """The table with `root` in place of `instead` in the dialect's names.

        An empty `instead` is `model.`, or GPT-2's `transformer.`.
        """
        prefix = re.compile(rf"(?<![\w.]){re.escape(instead)}") if instead else _ROOT
        towers = tuple(tower._replace(left=prefix.sub(root, tower.left)) for tower in self.towers)
        renamed = tuple(_rename_left(rule, lambda name: prefix.sub(root, name)) for rule in self.rules)
        return replace(self, rules=renamed, towers=towers)

    def override(self, base: Table) -> Table:
        """The table of these rules, followed by those of `base` for other tensors.

        Raises UsageError E1234 if a rule of `base` would be replaced in part.
        """
        kept = []
        for rule in base.rules:
            names = [term.name.form for term in rule.left if term.name]
            remaining = [name for name in names if name not in self.left]
            if remaining and len(remaining) < len(names):
                raise UsageError(
                    f"a rule is replaced in part: {', '.join(remaining)} has none left",
                    code="E1234",
                    place=f"in the rule `{rule.text}`",
                    hint="write `[a|b]`, which is two rules, for `<a|b>`",
                )
            if remaining:
                kept.append(rule)

        replaced_towers = {tower.right for tower in self.towers}
        towers = (*self.towers, *(tower for tower in base.towers if tower.right not in replaced_towers))
        return Table((*self.rules, *kept), (*self.aliases, *base.aliases), towers)

    def with_unfused_spelling(self) -> Table:
        """The table with a second spelling for fused tensors at its end: the hub's names, with matrices transposed."""
        unfused = []
        known_forms = set(self.left)
        for rule in self.rules:
            is_fused = len(rule.left) == 1 < len(rule.right)
            if not is_fused or rule.condition is not None:
                continue
            left = tuple(replace(term, pattern=_transpose(term.pattern)) for term in rule.right)
            forms = {term.name.form for term in left if term.name}
            if not forms & known_forms:
                unfused.append(replace(rule, left=left, text=f"{rule.text} (apart)"))
                known_forms |= forms
        return replace(self, rules=(*self.rules, *unfused))

    def with_nested_modules(self, level: str, condition: str, modules: Iterable[str]) -> Table:
        """The table, preceded by its rules for `layers.{i}.MODULE` as rules for `layers.{i}.LEVEL.MODULE`, which apply if
        the condition holds."""
        prefixes = [f"layers.%d.{module}." for module in modules]

        nested = []
        for rule in self.rules:
            forms = [term.name.form for term in rule.left if term.name]
            if any(prefix in form for prefix in prefixes for form in forms):
                renamed = _rename_left(rule, lambda name: _LAYER.sub(rf"\g<0>{level}.", name, count=1))
                nested.append(replace(renamed, condition=expression(condition), text=f"{rule.text} (in {level})"))
        return replace(self, rules=(*nested, *self.rules))

    def with_mtp_layers(self, condition: str) -> Table:
        """The table in which layers for which the condition holds are those of multi-token prediction, numbered from 0.

        `decoder.layers.{i}.X` is also `mtp.layers.{i - num_hidden_layers}.transformer_layer.X`, and `mtp.layers.{i}.X` has
        such a number. (Megatron-Core's names; megatron-core 0.16.1 `multi_token_prediction.py`.)
        """
        changed = []
        is_mtp = expression(condition)
        is_decoder = expression(f"not ({condition})")
        for rule in self.rules:
            fronts = {".".join(term.name.text.split(".")[:2]) for term in rule.left if term.name}
            if "decoder.layers" in fronts:
                changed.append(replace(rule, condition=is_decoder))
            if fronts & {"decoder.layers", "mtp.layers"}:
                left = tuple(map(_move_to_mtp, rule.left))
                changed.append(replace(rule, left=left, condition=is_mtp, text=f"{rule.text} (ahead)"))
            else:
                changed.append(rule)
        return replace(self, rules=tuple(changed))

    def without_layers(self, condition: str, hub: Table) -> Table:
        """The table without the layers for which the condition holds: for these it has rules that drop the hub's
        tensors."""
        is_left_out = expression(condition)
        is_present = expression(f"not ({condition})")

        changed = []
        for rule in self.rules:
            changed.append(replace(rule, condition=is_present) if "i" in rule.indices else rule)
        for rule in hub.rules:
            if "i" in rule.indices and all(term.name for term in rule.right):
                nameless = tuple(replace(term, name=None) for term in rule.left)
                changed.append(replace(rule, left=nameless, condition=is_left_out, text=f"{rule.text} (left out)"))
        return replace(self, rules=tuple(changed))

    def with_norm_offset(self, offset: int) -> Table:
        """The table in which each norm's weight is the hub's plus `offset`."""
        changed = []
        for rule in self.rules:
            if any(term.name is not None and term.name.form.endswith("norm.weight") for term in rule.left):
                # Changes of values that the rule already has are kept, and moved to the left side.
                maps = joined(rule.left[0].maps, inverse(rule.right[0].maps), (ElementMap("add", -offset),))
                left = tuple(replace(term, maps=maps) for term in rule.left)
                right = tuple(replace(term, maps=()) for term in rule.right)
                rule = replace(rule, left=left, right=right, text=f"{rule.text} (shifted)")
            changed.append(rule)
        return replace(self, rules=tuple(changed))


def table_of(text: str, kinds: Mapping[str, str] | None = None) -> Table:
    """Parse a table.

    Args:
        kinds: words in conditions, each with the expression of the layer's index and the config that replaces it.

    >>> table_of("layers.{i}.sinks : a if windowed", {"windowed": "kinds[i] == 1"}).rules[0].condition.text
    '(kinds[i] == 1)'

    Raises UsageError (E0220-E0235, E1234) for a rule that can't be read.
    """
    return _parse(_expand_kinds(text, kinds or {}))


@lru_cache(maxsize=512)
def _parse(text: str) -> Table:
    towers = []
    rule_lines = []
    for line in _expand_shorthand(text).splitlines():
        tower = _TOWER.fullmatch(line)
        if tower:
            towers.append(Tower(tower[1], tower[2]))
        else:
            rule_lines.append(line)

    equations = []
    aliases = []
    for rule in rules("\n".join(rule_lines)):
        if isinstance(rule, Alias):
            aliases.append(rule)
        elif isinstance(rule, Equation):
            _check_names(rule)
            equations.append(rule)
    return Table(tuple(equations), tuple(aliases), tuple(towers))


def _check_names(rule: Equation) -> None:
    """Raise UsageError E1234 for indices that can't be computed from the numbers in a name."""
    for term in (*rule.left, *rule.right):
        if term.name is None:
            continue
        is_alone = rule.left == (term,)
        if not (is_alone or _has_readable_indices(term.name)) or _NUMBER.search(term.name.text):
            raise UsageError(
                f"`{term.name.text}`: the indices of a family's names are axes or numbers, in braces, between dots",
                code="E1234",
                place=f"in the rule `{rule.text}`",
                hint="write `layers.{i}.w`, `experts.{e - x}.w` or `layers.{0}.w`, and conditions after `if`",
            )

    for side in (rule.left, rule.right):
        if len({frozenset(term.name.axes) for term in side if term.name}) > 1:
            raise UsageError(
                "the names of one side have other indices",
                code="E1234",
                place=f"in the rule `{rule.text}`",
                hint="write a rule for each",
            )


# A conversion iterates over all names of a model several times in the same order: an LRU cache with fewer entries than
# names would miss every time.
@lru_cache(maxsize=1 << 19)
def form_of(name: str) -> tuple[str, tuple[int, ...]]:
    """The form of a name and the numbers in it: `model.layers.3.w1` -> (`model.layers.%d.w1`, (3,))."""
    parts = _NUMBER.split(name.replace("%", "%%") if "%" in name else name)
    if len(parts) == 1:
        return name, ()
    return intern("%d".join(parts[::2])), tuple(map(int, parts[1::2]))  # interned, so all names share one string


def one_of_each(names: Iterable[str]) -> list[str]:
    """One name of each form, which is enough to identify a dialect, whatever the number of layers and experts."""
    first_of_form: dict[str, str] = {}
    for name in names:
        first_of_form.setdefault(form_of(name)[0], name)
    return list(first_of_form.values())


def instances(index: Mapping[str, tuple[Spot, ...]], names: Iterable[str]) -> tuple[list[Instances], list[str]]:
    """(the names grouped by form, in order of first occurrence; the names without a rule)."""
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    unknown = []
    for name in names:
        form, numbers = form_of(name)
        if form in index:
            groups[form].append(numbers)
        else:
            unknown.append(name)
    return [Instances(index[form], form, values) for form, values in groups.items()], unknown


def _expand_kinds(text: str, kinds: Mapping[str, str]) -> str:
    """The table's text with each word of `kinds` in conditions replaced by its expression."""
    if not kinds:
        return text
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, kinds))})\b")

    def expand(condition: re.Match[str]) -> str:
        return words.sub(lambda word: f"({kinds[word[0]]})", condition[0])

    return re.sub(r"\sif\s[^#\n]*", expand, text)


def _expand_shorthand(text: str) -> str:
    """The table's text without the abbreviations that the module's docstring lists: both sides in full, a line for each
    choice of `[a|b]`."""
    lines: list[str] = []
    without_comments = re.sub(r"#.*", "", text)
    one_rule_a_line = re.sub(r"\n\s*(?==|if )", " ", without_comments)
    for line in one_rule_a_line.splitlines():
        # `NAME : pattern`: both sides are alike.
        if line.strip() and "=" not in line.split(" if ")[0] and "~" not in line:
            side, *condition = line.strip().split(" if ")
            line = " if ".join([f"{side} = {side}", *condition])

        # `NAME : pattern = : pattern`: the hub's name is the same.
        line = re.sub(r"^\s*(\S+)(\s*:[^=]*=\s*):", r"\1\2\1 :", line)

        # `m.NAME : pattern = ..OTHER`: the hub's module is the same.
        line = re.sub(r"^\s*(\S+\.)([^.\s]+\.[^.\s]+)(\s*:[^=]*=\s*)\.\.", r"\1\2\3\1", line)
        lines += _expand_choices(line)
    return "\n".join(lines)


def _has_readable_indices(name: Name) -> bool:
    """Can every index be inverted? It must be a number, or a sum of constants and axes, each axis once and with at most
    one factor."""
    return all(index.text.isdigit() or _is_readable_sum(index.text, name.axes) for index in name.indices)


def _is_readable_sum(index: str, axes: Container[str]) -> bool:
    """Is an index a sum that can be inverted (`_has_readable_indices`)?

    >>> [_is_readable_sum(text, ("i", "o", "j")) for text in ("i", "2 * i + 1", "o * b + j", "e", "i * o", "i + j")]
    [True, True, True, False, False, False]
    >>> _is_readable_sum("e - i", ("i", "o", "j"))
    False
    """
    if "".join(summand[0] for summand in _SUMMAND.finditer(index)) != index:
        return False

    seen_axes = []
    without_factor = 0
    for sign, word, factor in (summand.groups() for summand in _SUMMAND.finditer(index)):
        summand_axes = [part for part in (word, factor) if part in axes]
        if not summand_axes:
            continue  # a constant
        if len(summand_axes) > 1 or sign == "-":
            return False
        seen_axes += summand_axes
        without_factor += not factor

    is_each_once = len(set(seen_axes)) == len(seen_axes) > 0
    return is_each_once and without_factor < 2


def _expand_choices(line: str) -> list[str]:
    """A line for each word of the `[a|b]` in it; brackets with the same words are replaced in step."""
    choice = _EACH.search(line)
    if choice is None:
        return [line]
    expanded = []
    for word in choice[1].split("|"):
        expanded += _expand_choices(line.replace(choice[0], word))
    return expanded


def _index_by_form(sides: Iterable[tuple[Term, ...]]) -> dict[str, tuple[Spot, ...]]:
    """{form of a name: the rules that name it, in order}."""
    spots_of: dict[str, list[Spot]] = defaultdict(list)
    for number, side in enumerate(sides):
        for term in side:
            if term.name:
                name = term.name
                spots_of[name.form].append(Spot(number, name.axes, () if name.plain else name.indices))
    return {form: tuple(spots) for form, spots in spots_of.items()}


def _rename_left(rule: Equation, change: Callable[[str], str]) -> Equation:
    """The rule with its dialect's names changed."""
    left = []
    for term in rule.left:
        if term.name:
            name = replace(term.name, text=change(term.name.text), form=change(term.name.form))
            term = replace(term, name=name)
        left.append(term)
    return replace(rule, left=tuple(left))


def _move_to_mtp(term: Term) -> Term:
    """A term of the decoder as one of MTP layer `i - num_hidden_layers`."""
    if term.name is None:
        return term
    number = expression("i - num_hidden_layers")
    indices = tuple(number if index.text == "i" else index for index in term.name.indices)
    form = term.name.form.replace("decoder.layers.%d.", "mtp.layers.%d.transformer_layer.", 1)
    text = term.name.text.replace("decoder.layers.{i}.", "mtp.layers.{i}.transformer_layer.", 1)
    text = text.replace("{i}", f"{{{number.text}}}", 1)
    return replace(term, name=replace(term.name, text=text, form=form, indices=indices))


def _transpose(dims: Pattern) -> Pattern:
    """The pattern of the transposed tensor."""
    # A dimension is a word or a group in parentheses, which may be nested.
    groups: list[list[str]] = []
    depth = 0
    for word in re.findall(r"[()]|[^()\s]+", dims.text):
        if depth == 0:
            groups.append([])
        depth += (word == "(") - (word == ")")
        groups[-1].append(word)
    return pattern(" ".join(" ".join(group) for group in reversed(groups)))
