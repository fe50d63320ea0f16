"""Equation: one line that says how tensors under one naming are made of the same elements as tensors under another.

    decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h

Both directions, every shape and the checks follow from the line. The language, after the patterns of
`algebra.pattern` and the expressions of `algebra.expression`:

    rule      side = side [if CONDITION]         | NAME ~ NAME [if CONDITION]    (an alias: two names, one tensor)
    side      term ; term ; ...
    term      NAME : pattern, pattern, ... [* add(1)]
    NAME      dots and words, with {i} an index, {i + n} an index by an expression, <q|k|v> one name each
    _         in place of a name: elements that are made (zeros) or dropped; the only place where that happens

The k-th part of the left side is the k-th part of the right: parts are the summands of the patterns, term by term and
name by name. Two parts that correspond have the same axes, each once; an axis may appear in a pattern or as `{axis}` in
the name, which is how stacked tensors are written: `W : e h f = experts.{e}.w : f h`. If `<a|b>` has one pattern, it
holds for all names. A condition on an index (`if i >= first_k_dense_replace`) chooses among the tensors, any other one
keeps or drops the rule. An axis is a count, or the indices that `{axis}` takes (`range(3, 61)`); in a pattern its size
is the number of indices. A term that appears twice in one tensor (`qkv : ... = <q|k|k>_proj : ...`) has its elements in
both places; when it is read, the first place counts.

    >>> rule = equation("fc1 : ((1 + 1) f) h = <gate|up> : f h")
    >>> rule.shapes({"f": 4, "h": 2})
    ({'fc1': (8, 2)}, {'gate': (4, 2), 'up': (4, 2)})
    >>> rule.pieces({"f": 4, "h": 2})[1]
    Piece(ext=(4, 2), src=Side(name='fc1', offset=8, strides=(2, 1)), dst=Side(name='up', offset=0, strides=(2, 1)),
    maps=())

A rule is type-checked when it is read, so a table that parses can't lose an element. Element maps relate values:
`A : h = B : h * add(1)` says A = B + 1. Cost: patterns are worked out once a rule; each named tensor costs about 4 us.
What it does not do: find the sizes (`expression.extents`), say which rank holds what, or read a tensor.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.algebra.element_map import inverse, joined
from ckpt_tool.algebra.expression import Expression, expression
from ckpt_tool.algebra.pattern import Part, Sizes, indices_of, pattern, size_of
from ckpt_tool.algebra.piece import PAD, Piece, Side, apply
from ckpt_tool.algebra.term import Config, Name, Term, axes_of, name_of, terms
from ckpt_tool.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]


class IndexChoice(NamedTuple):
    """One choice of the indices in a name: their values, and the positions of these among all values of each index."""

    values: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """A type-checked rule, see the module. Pieces go from left to right; `swap` exchanges the sides."""

    left: tuple[Term, ...]
    right: tuple[Term, ...]
    condition: Expression | None
    text: str

    def swap(self) -> Equation:
        """The rule in the other direction."""
        return Equation(self.right, self.left, self.condition, self.text)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that needs a size, in the order of first occurrence (literals are their own size)."""
        both = (axis for term in (*self.left, *self.right) for axis in (*term.axes, *term.pattern.axes))
        return tuple(axis for axis in dict.fromkeys(both) if not axis.isdigit())

    @property
    def indices(self) -> frozenset[str]:
        """The axes that appear in a name."""
        return frozenset(axis for term in (*self.left, *self.right) for axis in term.axes)

    def holds(self, sizes: Sizes, config: Config | None = None) -> bool:
        """Does the rule apply at all? False if its condition fails for all indices; sizes are not needed then."""
        if self.condition is None or self.condition.names & self.indices:
            return True
        return bool(self.condition.value(ChainMap(_counts(sizes), config or {})))  # type: ignore[arg-type]

    def shapes(self, sizes: Sizes, config: Config | None = None) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """The tensors that the rule names under these sizes, and their shapes: (left, right). Padding has no name.

        Raises UsageError: E0223/E0224 (condition, index), E0230/E0231 (sizes), E0232 (two tensors of one name).
        """
        return self.left_shapes(sizes, config), self.swap().left_shapes(sizes, config)

    def left_shapes(self, sizes: Sizes, config: Config | None = None) -> dict[str, Shape]:
        """The left side of `shapes`."""
        out: dict[str, Shape] = {}
        if not self.holds(sizes, config):
            return out
        names = self._names(sizes, config)
        copies = _copies(self.left, self.right)
        for k, term in enumerate(self.left):
            if term.name and k not in copies:
                rows = self._rows(term.axes, sizes, names)
                new = dict.fromkeys(_named(term, term.axes, rows, names), term.pattern.shape(sizes))
                if len(new) != len(rows) or not out.keys().isdisjoint(new):
                    raise UsageError(f"`{term}` names a tensor twice", code="E0232", place=_place(self.text))
                out.update(new)
        return out

    def pieces(self, sizes: Sizes, config: Config | None = None) -> list[Piece]:
        """The pieces that map every element of the left side to its place on the right. Empty parts give none.

        There is one piece for each part and each choice of the indices in the two names. Its axes are the other axes of
        the part, in the left side's order, without those of extent 1. Errors as `shapes`.
        """
        if not self.holds(sizes, config):
            return []

        names = self._names(sizes, config)
        out: list[Piece] = []
        for (left, a), (right, b) in zip(_parts(self.left, sizes), _parts(self.right, sizes), strict=True):
            indices = tuple(dict.fromkeys((*left.axes, *right.axes)))
            axes = [(axis, size_of(axis, sizes)) for axis in a.strides if axis not in indices]
            ext = tuple(n for _, n in axes if n != 1)
            if 0 in ext:
                continue
            a_strides = tuple(a.strides[axis] for axis, n in axes if n != 1)
            b_strides = tuple(b.strides[axis] for axis, n in axes if n != 1)
            changes = joined(left.maps, inverse(right.maps)) if left.maps or right.maps else ()
            maps = tuple(each.at(lambda axis: size_of(axis, sizes)) for each in changes)
            rows = self._rows(indices, sizes, names)
            places = zip(
                _named(left, indices, rows, names),
                _offsets(a, indices, rows),
                _named(right, indices, rows, names),
                _offsets(b, indices, rows),
                strict=True,
            )
            out += [
                Piece(ext, Side(here, i, a_strides), Side(there, j, b_strides), maps) for here, i, there, j in places
            ]

        return out

    def apply(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], sizes: Sizes, config: Config | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """The right side's tensors from the left side's, in memory (`piece.apply`): for tests."""
        return apply(self.pieces(sizes, config), arrays, self.shapes(sizes, config)[1])

    def _names(self, sizes: Sizes, config: Config | None) -> Config:
        """The values that conditions and indices may use: extents, then the config. Raises if an axis has no size."""
        faults = []
        seen = {}
        for axis in self.axes:
            try:
                seen[axis] = size_of(axis, sizes)
            except UsageError as e:
                faults.append(e)
        if faults:
            raise _joined_fault(faults, self.text)
        return ChainMap(seen, _counts(sizes), config or {})  # type: ignore[arg-type]

    def _rows(self, indices: Sequence[str], sizes: Sizes, names: Config) -> list[IndexChoice]:
        """Every choice of `indices` under which the rule holds, the first slowest."""
        domains = [indices_of(axis, sizes) for axis in indices]
        rows = [
            IndexChoice(values, positions)
            for values, positions in zip(product(*domains), product(*(range(len(d)) for d in domains)), strict=True)
        ]
        holds = self.choice(indices, names)
        return rows if self.condition is None else [row for row in rows if holds(row.values)]

    def choice(self, indices: Sequence[str], names: Mapping[str, Any]) -> Callable[[Sequence[int]], bool]:
        """A function of values of `indices`: does the rule hold for them? `names` has the values of everything else in
        the condition, which is evaluated once for each distinct case."""
        condition = self.condition
        known = dict[tuple[int, ...], bool]()
        if condition is None:
            return lambda values: True
        asked = [k for k, axis in enumerate(indices) if axis in condition.names]

        def holds(values: Sequence[int]) -> bool:
            key = tuple([values[k] for k in asked])
            found = known.get(key)
            if found is None:
                here = dict(zip([indices[k] for k in asked], key, strict=True))
                found = known[key] = bool(condition.value(ChainMap(here, names)))  # type: ignore[arg-type]
            return found

        return holds


@dataclass(frozen=True, slots=True)
class Alias:
    """Two names of one tensor (tied embeddings). `name` is the other name of `of`: it need not be stored."""

    name: Name
    of: Name
    condition: Expression | None
    text: str

    def pairs(self, sizes: Sizes, config: Config | None = None) -> dict[str, str]:
        """{alias: name of the tensor}. Errors as `Equation.shapes`."""
        as_rule = Equation((Term(self.name, pattern("")),), (Term(self.of, pattern("")),), self.condition, self.text)
        if not as_rule.holds(sizes, config):
            return {}
        names = as_rule._names(sizes, config)
        rows = as_rule._rows(self.name.axes, sizes, names)
        there = [self.name.axes.index(axis) for axis in self.of.axes]
        return {self.name.at(row.values, names): self.of.at([row.values[k] for k in there], names) for row in rows}


def equation(text: str) -> Equation:
    """Parse and type-check one rule. Raises UsageError (E0220-E0235) that names the rule; all type faults at once."""
    rule = _rule(text)
    if isinstance(rule, Alias):
        raise UsageError("want an equation, found an alias", code="E0221", place=_place(text))
    return rule


def rules(text: str) -> tuple[Equation | Alias, ...]:
    """Parse a table: a rule a line, `#` comments, a line that starts with `=`, `;`, `,` or `if` goes on with the last.

    Raises UsageError with the faults of every rule.
    """
    found: list[Equation | Alias] = []
    faults = []
    for statement in _statements(text):
        try:
            found.append(_rule(statement))
        except UsageError as e:
            faults.append(e)
    if faults:
        first = faults[0]
        more = [*first.faults, *(f"{e.message}, {e.place}" for e in faults[1:])]
        raise UsageError(first.message, code=first.code, place=first.place, hint=first.hint, faults=more)
    return tuple(found)


# Parsing.


def _statements(text: str) -> list[str]:
    """The rules of a table, each on one line, without comments."""
    out: list[str] = []
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if out and line and (line[0] in "=;," or line.startswith("if ") or out[-1][-1] in "=;,:"):
            out[-1] += " " + line
        elif line:
            out.append(line)
    return out


@lru_cache(maxsize=4096)  # families share the most of their rules
def _rule(text: str) -> Equation | Alias:
    try:
        body, *conditions = re.split(r"\sif(?:\s|$)", " ".join(text.split()))
        if len(conditions) > 1:
            raise UsageError("a rule has one `if`: join conditions with `and`", code="E0221")
        condition = expression(conditions[0]) if conditions else None
        alias = "~" in body
        sides = body.split("~" if alias else "=")
        if len(sides) != 2:
            raise UsageError(f"want one `=` (or `~`) between two sides, found {len(sides) - 1}", code="E0221")
        axes = axes_of(body)
        if alias:
            name, of = (name_of(side.strip(), axes) for side in sides)
            if set(name.axes) != set(of.axes):
                raise UsageError(f"`{name.text}` and `{of.text}` have other indices", code="E0225")
            return Alias(name, of, condition, text)
        left, right = (tuple(term for part in side.split(";") for term in terms(part.strip(), axes)) for side in sides)
        faults = list(_type_faults(left, right, condition))
    except UsageError as e:
        faults = [e]
    if faults:
        raise _joined_fault(faults, text)
    return Equation(left, right, condition, text)


# Types: the two sides have the same elements.


def _type_faults(left: Sequence[Term], right: Sequence[Term], condition: Expression | None) -> Iterator[UsageError]:
    """Every reason why the two sides do not have the same elements."""
    a, b = ([(term, kind) for term in side for kind in term.pattern.kinds] for side in (left, right))
    if len(a) != len(b):
        yield UsageError(
            f"{len(a)} parts on the left, {len(b)} on the right",
            code="E0226",
            hint=f"left: {_told(a)}; right: {_told(b)}",
        )
        return

    named = {axis for term in (*left, *right) for axis in term.axes}
    for k, ((here, mine), (there, theirs)) in enumerate(zip(a, b, strict=True), 1):
        if here.name is None or there.name is None:
            if here.name is there.name:
                yield UsageError(f"part {k} is `{PAD}` on both sides", code="E0234")
            if here.maps or there.maps:
                yield UsageError(f"part {k} is padding and can't be mapped", code="E0234")
        for term, kind in ((here, mine), (there, theirs)):
            for axis in set(term.axes) & set(kind):
                yield UsageError(f"axis {axis!r} is in the name and in the pattern of `{term}`", code="E0227")
        # Padding has no name, so it takes the indices of the name on the other side.
        lent = {*here.axes, *there.axes} if here.name is None or there.name is None else set()
        ours = {*here.axes, *mine, *lent}
        its = {*there.axes, *theirs, *lent}
        if ours != its:
            alone = [
                f"{', '.join(sorted(x - y))} only on the {side}"
                for x, y, side in ((ours, its, "left"), (its, ours, "right"))
                if x - y
            ]
            yield UsageError(
                f"part {k} has other axes on its two sides: {'; '.join(alone)}",
                code="E0225",
                hint=f"left: `{here}`; right: `{there}`",
            )
        for axis in sorted(named & condition.names) if condition else ():
            if any(term.name and axis not in term.axes for term in (here, there)):
                yield UsageError(
                    f"the condition asks for index {axis!r}, which part {k} does not name on both sides",
                    code="E0235",
                    hint="a tensor that stacks an axis has all of its parts or none",
                )


def _told(parts: Sequence[tuple[Term, tuple[str, ...]]]) -> str:
    """Parts in words, by their axes."""
    return ", ".join(" ".join(kind) or "1" for _, kind in parts[:8]) + (", ..." if len(parts) > 8 else "")


def _place(text: str) -> str:
    """The rule in words, as the place of an error."""
    return f"in the rule `{' '.join(text.split())[:300]}`"


def _joined_fault(faults: Sequence[UsageError], text: str) -> UsageError:
    """One error for several faults of a rule."""
    first = faults[0]
    place = f"{first.place} {_place(text)}" if first.place else _place(text)
    more = [*first.faults, *(e.message for e in faults[1:])]
    return UsageError(first.message, code=first.code, place=place, hint=first.hint, faults=more)


def _copies(side: Sequence[Term], other: Sequence[Term]) -> set[int]:
    """The numbers of terms that repeat an earlier term, if both belong to one tensor of the other side."""
    if len(side) == len(set(map(str, side))):
        return set()
    places = [number for number, term in enumerate(other) for _ in term.pattern.kinds]
    met: list[set[int]] = []
    for term in side:
        met.append(set(places[: len(term.pattern.kinds)]))
        del places[: len(term.pattern.kinds)]
    return {k for k, term in enumerate(side) if any(side[j] == term and met[j] == met[k] for j in range(k))}


# Instances: a rule's tensors under given sizes.


def _counts(sizes: Sizes) -> dict[str, int]:
    """The sizes that are counts, not lists of indices."""
    return {axis: size_of(axis, sizes) for axis, size in sizes.items() if not isinstance(size, Sequence)}


def _parts(side: Sequence[Term], sizes: Sizes) -> list[tuple[Term, Part]]:
    """The parts of a side in order; those of the two sides correspond by number."""
    return [(term, part) for term in side for part in term.pattern.parts(sizes)]


def _named(term: Term, indices: Sequence[str], rows: Sequence[IndexChoice], names: Config) -> list[str]:
    """The term's tensor name for each choice of the indices."""
    if term.name is None:
        return [PAD] * len(rows)
    mine = [indices.index(axis) for axis in term.axes]
    if term.name.plain and mine == list(range(len(indices))):
        return [term.name.form % row.values for row in rows]
    values = [tuple(row.values[k] for k in mine) for row in rows]
    known = {value: term.name.at(value, names) for value in set(values)}
    return [known[value] for value in values]


def _offsets(part: Part, indices: Sequence[str], rows: Sequence[IndexChoice]) -> list[int]:
    """The offset of a part for each choice of the indices, some of which may be axes of the tensor on this side."""
    steps = [part.strides.get(axis, 0) for axis in indices]
    if not any(steps):
        return [part.offset] * len(rows)
    return [part.offset + sum(s * k for s, k in zip(steps, row.positions, strict=True)) for row in rows]
