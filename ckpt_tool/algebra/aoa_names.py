"""Names: a statement with placeholders and stars, once for every layer and expert that the checkpoint has.

    shapes: e.0.w, e.1.w, layers.0.a, layers.2.a
    layers.$LAYER_ID.a -> h.$LAYER_ID.b        layers.0.a -> h.0.b;  layers.2.a -> h.2.b
    layers.$LAYER_ID_OFFSET.a -> h.$LAYER_ID_OFFSET.b     layer 2 -> h.1 (the right side counts one lower)
    e.*.w -> stack, axis=0                     e.0.w, e.1.w -> stack, axis=0   (by number)

Ids are found among the names that the side to be read has: the source's, the destination's where a pattern names only
what is made. Several placeholders take every pair of ids that are found. Source: PaddlePaddle 3.3.1, `aoa/macros.py`
(`id`, `layer_id_offset_macro`, `star_macro`). Stricter than Paddle: a pattern without a match is an error, so are
unlike placeholders in one statement. Ids are those of all names of the side that is read, not of the first name only,
so a lacking partner shows. With `reverse` all of it works from the right side, stars included, where Paddle still looks
left. A `_` may stand against a pattern: each of its names is dropped, or has no source.

Cost: one look at each name, then at those of like form alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from ckpt_tool.algebra.aoa_faults import Faults
from ckpt_tool.algebra.aoa_statement import MAX_NAMES, NOTHING, PLACEHOLDERS, TRANSPOSED, Statement
from ckpt_tool.errors import UsageError

_STAR, _OFFSET = "*", "$LAYER_ID_OFFSET"
_HOLDER = re.compile("|".join(re.escape(word) for word in (*PLACEHOLDERS, _STAR)))
_DIGITS = re.compile("[0-9]+")
Ids = dict[str, int]  # placeholder -> number


class Forms:
    """Names by their form, which is the name with every number as `#`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self._by_form: dict[str, list[str]] = {}
        for name in self.names:
            self._by_form.setdefault(_DIGITS.sub("#", name), []).append(name)

    def ids(self, pattern: str) -> list[Ids]:
        """The numbers that stand for the placeholders (and the star) of `pattern` in each name that it fits."""
        groups: dict[str, str] = {}
        regex, at = "", 0
        for match in _HOLDER.finditer(pattern):
            known = match[0] in groups
            group = groups.setdefault(match[0], f"g{len(groups)}")
            regex += re.escape(pattern[at : match.start()]) + (
                f"(?P={group})" if known else f"(?P<{group}>[0-9]{{1,18}})"
            )
            at = match.end()
        fits = re.compile(regex + re.escape(pattern[at:])).fullmatch
        form = _DIGITS.sub("#", _HOLDER.sub("0", pattern))
        found = (fits(name) for name in self._by_form.get(form, ()))
        return [{holder: int(match[group]) for holder, group in groups.items()} for match in found if match]


def expand(
    statements: Iterable[Statement], source: Forms, wanted: Forms | None, faults: Faults, *, reverse: bool, skip: bool
) -> list[Statement]:
    """The statements without placeholders and stars, in order.

    Args:
        source, wanted: the names of the source, and those of the destination where they are known.
        skip: leave a statement out that no name of the source fits, as Paddle does.
    Faults: E1205 several names on both sides of a star, E1208 no match, E1209 unlike placeholders, E1210 a star or a
    number that can't be written out.
    """
    names = _Names(source, wanted, faults, reverse, skip)
    out: list[Statement] = []
    for statement in statements:
        try:
            out += [written for concrete in names.by_ids(statement) for written in names.by_stars(concrete)]
        except UsageError as e:
            faults.take(statement.number, e)
    return out


class _Names:
    def __init__(self, source: Forms, wanted: Forms | None, faults: Faults, reverse: bool, skip: bool) -> None:
        self.source, self.wanted, self.faults, self.reverse, self.skip = source, wanted, faults, reverse, skip

    def by_ids(self, statement: Statement) -> Iterator[Statement]:
        """Once for each id that `$LAYER_ID` and its like stand for."""
        names = [name for name in (*statement.left, *statement.right) if name != NOTHING]
        holders = {frozenset(holder for holder in _HOLDER.findall(name) if holder != _STAR) for name in names}
        if holders == {frozenset()}:
            yield statement
            return
        if len(holders) > 1:
            few, many = min(names, key=_holders), max(names, key=_holders)
            raise UsageError(
                f"`{few}` and `{many}` have unlike placeholders",
                code="E1209",
                hint="every name of a statement has the same ones: write the numbers of the others out",
            )
        found = self._ids(statement, sorted(holders.pop()))
        if prod(map(len, found.values())) > max(4 * len(self.source.names), MAX_NAMES):
            raise UsageError(f"the ids pair up {prod(map(len, found.values()))} times", code="E1210")
        for numbers in product(*found.values()):
            ids = dict(zip(found, numbers, strict=True))
            yield statement._replace(
                left=self._at(statement.left, ids, made=self.reverse),
                right=self._at(statement.right, ids, made=not self.reverse),
            )

    def _ids(self, statement: Statement, holders: Sequence[str]) -> dict[str, list[int]]:
        """The ids of each placeholder over all names of the side that is read; none where the statement is skipped."""
        read, made = (statement.right, statement.left) if self.reverse else (statement.left, statement.right)
        patterns, forms = (made, self.wanted) if read == (NOTHING,) else (read, self.source)
        if forms is None:
            raise UsageError(
                f"what `{patterns[0]}` stands for is not known",
                code="E1210",
                hint="write the numbers out: the names of the destination are not known here",
            )
        found: dict[str, set[int]] = {holder: set() for holder in holders}
        missing = []
        for pattern in patterns:
            ids = forms.ids(pattern.removesuffix(TRANSPOSED))
            for one in ids:
                for holder in holders:
                    found[holder].add(one[holder])
            if not ids:
                missing.append(pattern)
        if missing and not (self.skip and len(missing) == len(patterns)):
            raise self._no_match(missing[0], forms)
        return {holder: sorted(numbers) for holder, numbers in found.items()}

    def _no_match(self, pattern: str, forms: Forms) -> UsageError:
        bare = pattern.removesuffix(TRANSPOSED)
        where = "source" if forms is self.source else "destination"
        near = self.faults.near(_HOLDER.sub("0", bare), forms.names)
        return UsageError(
            f"no name of the {where} fits `{bare}`",
            code="E1208",
            hint=near or "leave the statement out, or --lenient, which skips those that fit nothing, as Paddle does",
        )

    def _at(self, names: Sequence[str], ids: Ids, *, made: bool) -> tuple[str, ...]:
        """The names at `ids`. The offset counts the right side one below the left, whichever is the one that is
        read."""
        shift = (1 if self.reverse else -1) if made else 0

        def number(match: re.Match[str]) -> str:
            if match[0] == _STAR:
                return _STAR
            value = ids[match[0]] + (shift if match[0] == _OFFSET else 0)
            if value < 0:
                raise UsageError(
                    f"layer {ids[match[0]]} has none below it",
                    code="E1210",
                    hint="drop or rename that layer first, by its number",
                )
            return str(value)

        return tuple(_HOLDER.sub(number, name) for name in names)

    def by_stars(self, statement: Statement) -> Iterator[Statement]:
        """With the stars written out, in numeric order."""
        if not any(_STAR in name for name in (*statement.left, *statement.right)):
            yield statement
            return
        left, right = (
            [name for pattern in side for name in self._written(pattern, read=(side is statement.left) != self.reverse)]
            for side in (statement.left, statement.right)
        )
        if NOTHING in (*left, *right):  # each of them is dropped, or has no source
            for name in [name for name in (*left, *right) if name != NOTHING]:
                pair = ((NOTHING,), (name,)) if NOTHING in left else ((name,), (NOTHING,))
                yield statement._replace(left=pair[0], right=pair[1])
        elif left and right:
            if len(left) > 1 and len(right) > 1:
                raise UsageError(f"{len(left)} names -> {len(right)} names: one side wants a single name", code="E1205")
            yield statement._replace(left=tuple(left), right=tuple(right))

    def _written(self, pattern: str, *, read: bool) -> list[str]:
        if _STAR not in pattern:
            return [pattern]
        forms, bare = self.source if read else self.wanted, pattern.removesuffix(TRANSPOSED)
        if forms is None:
            raise UsageError(
                f"what `{pattern}` stands for is not known",
                code="E1210",
                hint="write the names out, as NAME[START:END] or one by one: the names of the destination are "
                "not known here",
            )
        numbers = sorted(ids[_STAR] for ids in forms.ids(bare))
        if not numbers and not (self.skip and read):
            raise self._no_match(pattern, forms)
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"`{bare}` fits two names of one number", code="E1210", hint="name them one by one")
        suffix = TRANSPOSED if bare != pattern else ""
        return [bare.replace(_STAR, str(number)) + suffix for number in numbers]


def _holders(name: str) -> int:
    return len(_HOLDER.findall(name))
